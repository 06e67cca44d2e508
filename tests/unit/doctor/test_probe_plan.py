"""Which pairs are probed, and what each side is asked to be."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pdctl.doctor.facts import HostFacts, ModelFacts
from pdctl.doctor.probe_plan import BATCH_BYTES, block_shape, choose_pairs, side_request
from pdctl.spec import parse
from tests.support.plans import as_yaml, changed, planned

QWEN3_32B = {
    "model_type": "qwen3",
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
    "torch_dtype": "bfloat16",
}


def names(letter: str, count: int) -> list[str]:
    return [f"{letter}{number}" for number in range(count)]


class TestPairs:
    @given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 90))
    def test_all_pairs_once_and_the_first_ones_take_every_host(self, prefill: int, decode: int, limit: int) -> None:
        writers, targets = names("p", prefill), names("d", decode)
        choice = choose_pairs(writers, targets, [*writers, *targets], limit)
        assert len(choice.probed) == min(limit, prefill * decode)
        assert {*choice.probed, *choice.left_out} == {(writer, target) for writer in writers for target in targets}
        assert len({*choice.probed, *choice.left_out}) == len(choice.probed) + len(choice.left_out)
        if limit >= max(prefill, decode):
            assert {host for pair in choice.probed for host in pair} == {*writers, *targets}

    @given(st.integers(1, 9))
    def test_neighbours_can_be_probed_side_by_side(self, count: int) -> None:
        writers, targets = names("p", count), names("d", count)
        pairs = choose_pairs(writers, targets, [*writers, *targets], count * count).probed
        for start in range(0, count * count, count):
            assert len({host for pair in pairs[start : start + count] for host in pair}) == 2 * count

    def test_without_a_limit_every_host_takes_part(self) -> None:
        choice = choose_pairs(names("p", 2), names("d", 3), [*names("p", 2), *names("d", 3)], None)
        assert choice.probed == (("p0", "d0"), ("p1", "d1"), ("p0", "d2"))
        assert len(choice.left_out) == 3

    def test_few_pairs_are_all_probed(self) -> None:
        choice = choose_pairs(names("p", 2), names("d", 2), [*names("p", 2), *names("d", 2)], None)
        assert (len(choice.probed), choice.left_out) == (4, ())

    def test_hosts_that_were_not_reached_are_in_no_pair(self) -> None:
        choice = choose_pairs(["p0", "p1", "p1"], ["d0", "d1"], ["p1", "d0"], None)
        assert (choice.probed, choice.left_out) == ((("p1", "d0"),), ())
        assert choose_pairs(["p0"], ["d0"], [], None).probed == ()

    def test_one_host_for_both(self) -> None:
        assert choose_pairs(["local"], ["local"], ["local"], None).probed == (("local", "local"),)


class TestBlocks:
    def shape(self, config: dict[str, Any] | None, role: str = "prefill", **sections: Any):
        spec = parse(as_yaml(changed(**sections)), file="cluster.yaml", environ={})
        facts = HostFacts("p1", model=ModelFacts(found="cache", config=config)) if config is not None else None
        return block_shape(spec, role, facts)

    def test_a_block_of_one_rank(self) -> None:
        shape = self.shape(QWEN3_32B)
        assert (shape.layers, shape.piece_bytes, shape.known) == (64, 16 * 8 * 128 * 2 * 2, True)
        assert shape.block_bytes == 64 * 65536

    def test_options_change_it(self) -> None:
        vllm_args = {"block-size": 32, "kv-cache-dtype": "fp8"}
        shape = self.shape(QWEN3_32B, prefill={"tensor_parallel": 4, "vllm_args": vllm_args})
        assert shape.piece_bytes == 32 * 2 * 128 * 2
        assert self.shape(QWEN3_32B, prefill={"vllm_args": {"dtype": "float32"}}).piece_bytes == 2 * 65536

    def test_cpus_have_larger_blocks(self) -> None:
        assert self.shape(QWEN3_32B, accelerator="cpu").piece_bytes == 128 * 8 * 128 * 2 * 2

    def test_an_unknown_model_is_taken_for_a_common_one(self) -> None:
        for config in (None, {}, {"num_hidden_layers": "many"}, {**QWEN3_32B, "num_key_value_heads": None, "n": []}):
            shape = self.shape(config)
            assert shape.block_bytes > 0
            assert shape.piece_bytes % 8 == 0
        assert not self.shape(None).known


class TestRequests:
    def request(self, role: str = "prefill", **sections: Any) -> dict[str, Any]:
        plan = planned(changed(**sections))
        instance = plan.prefill[0] if role == "prefill" else plan.decode[0]
        shape = block_shape(plan.spec, "prefill", None)
        return side_request(plan, instance, "other", shape, seed=7, lifetime_s=50)

    def test_as_the_instance_would_be(self) -> None:
        sections = {"env": {"UCX_NET_DEVICES": "eth1"}, "python": "~/venv/bin/python"}
        request = self.request(fabric="infiniband", **sections)
        assert request["role"] == "writer"
        assert request["python"] == "@HOME@/venv/bin/python"
        assert request["env"]["UCX_NET_DEVICES"] == "eth1"
        assert request["env"]["UCX_TLS"] == "^tcp"
        assert (request["backends"], request["threads"], request["progress_thread"]) == (["UCX"], 4, True)
        assert request["batch_bytes"] == BATCH_BYTES
        other = self.request("decode", fabric="infiniband", **sections)
        assert (other["role"], other["seed"]) == ("target", request["seed"])
        assert other["agent"] != request["agent"]

    def test_efa_and_tcp(self) -> None:
        request = self.request(fabric="efa")
        assert request["backends"] == ["LIBFABRIC"]
        assert request["env"]["FI_PROVIDER"] == "efa"
        assert self.request(fabric="tcp")["progress_thread"] is False

    def test_options_of_the_user_win(self) -> None:
        extra = {"backends": ["UCX", "LIBFABRIC"], "num_threads": 2, "pdctl": {"progress_thread": True}}
        request = self.request(fabric="tcp", transfer={"extra": extra})
        assert request["backends"] == ["UCX", "LIBFABRIC"]
        assert (request["threads"], request["progress_thread"]) == (2, True)
        assert self.request(transfer={"mode": "pull"})["progress_thread"] is True

    def test_no_step_may_take_longer_than_all(self) -> None:
        assert max(self.request()["limits"].values()) == 50

    def test_secrets_are_not_sent(self) -> None:
        assert "TOKEN" not in self.request(env={"TOKEN": {"from_env": "TEST_TOKEN"}})["env"]
