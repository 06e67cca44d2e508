"""The script of facts: its parsers, against recorded samples and against nonsense."""

from __future__ import annotations

import ast
import json
import os
import socket
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdctl.node import facts

SAMPLES = Path(__file__).with_name("samples")
SOURCE = Path(facts.__file__).read_text()


def sample(name: str) -> str:
    return (SAMPLES / name).read_text()


def make_tree(root: Path, *names: str) -> Path:
    """A fake /sys of samples with lines `/path:content` or `/path -> target`."""
    for name in names:
        for line in sample(name).splitlines():
            path, arrow, target = line.partition(" -> ")
            if arrow:
                file = root / path.lstrip("/")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.symlink_to(target)
                continue
            # A path of /sys/class/infiniband has no colon.
            path, _, content = line.partition(":")
            file = root / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content + "\n")
    return root


def put(root: Path, path: str, content: str = "") -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)


@pytest.mark.parametrize("source", [SOURCE, facts.INTERPRETER_PROBE], ids=["script", "interpreter probe"])
def test_source_is_python_3_8_and_imports_only_the_standard_library(source: str) -> None:
    imported = set()
    for node in ast.walk(ast.parse(source, feature_version=(3, 8))):
        if isinstance(node, ast.Import):
            imported.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported <= set(sys.stdlib_module_names)
    # It looks its module up in sys.modules, where a script that is run from text is not.
    assert "dataclasses" not in imported


def test_no_annotation_is_evaluated_by_python_3_8() -> None:
    # `dict[str, int]` and `int | None` are not known to it: fine in annotations, which are never evaluated here.
    assert "from __future__ import annotations" in SOURCE
    tree = ast.parse(SOURCE)
    aliases = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript)]
    assert not aliases


def test_every_part_of_the_contract_is_collected() -> None:
    from pdctl.doctor.facts import _all_parts

    assert set(facts.PARTS) == set(_all_parts())


# ---------------------------------------------------------------------------------------------- the operating system


def test_limits() -> None:
    assert facts.parse_limits(sample("proc-self-limits-bad.txt")) == {
        "memlock_soft_bytes": 8388608,
        "memlock_hard_bytes": 8388608,
        "nofile_soft": 1024,
        "nofile_hard": 1048576,
    }
    unlimited = sample("proc-self-limits-bad.txt").replace("8388608 ", "unlimited ")
    assert facts.parse_limits(unlimited)["memlock_hard_bytes"] is None
    with pytest.raises(ValueError, match="Max locked memory"):
        facts.parse_limits("Max open files 1 1 files")


@pytest.mark.parametrize(
    ("name", "total", "free", "size"),
    [
        ("512M-arm", 4, 4, 512 << 20),
        ("efa-config", 21121, 21009, 2 << 20),
        ("exhausted", 5128, 0, 2 << 20),
        ("none", 0, 0, 2 << 20),
    ],
)
def test_memory_and_huge_pages(name: str, total: int, free: int, size: int) -> None:
    memory = facts.parse_meminfo(sample(f"meminfo-hugepages-{name}.txt"))
    assert memory == {
        "total_bytes": 2113411888 * 1024,
        "available_bytes": 2072841200 * 1024,
        "hugepages_total": total,
        "hugepages_free": free,
        "hugepage_bytes": size,
    }


def test_no_memory_without_its_line() -> None:
    with pytest.raises(ValueError, match="MemTotal"):
        facts.parse_meminfo("MemFree: 1 kB\n")


def test_the_tightest_memory_limit_counts(tmp_path: Path) -> None:
    put(tmp_path, "sys/fs/cgroup/a/b/memory.max", "max\n")
    put(tmp_path, "sys/fs/cgroup/a/memory.max", "8000\n")
    put(tmp_path, "sys/fs/cgroup/memory/x/memory.limit_in_bytes", "9223372036854771712\n")
    assert facts.memory_limit(str(tmp_path), "0::/a/b\n") == 8000
    assert facts.memory_limit(str(tmp_path), "4:memory:/x\n0::/\n") is None
    put(tmp_path, "sys/fs/cgroup/memory/x/memory.limit_in_bytes", "7000\n")
    assert facts.memory_limit(str(tmp_path), "4:cpu,memory:/x\n0::/a\n") == 7000
    assert facts.memory_limit(str(tmp_path), "0::/../../a\n") is None


@pytest.mark.parametrize(
    ("files", "environment", "kind"),
    [
        ({}, {}, None),
        ({".dockerenv": ""}, {}, "docker"),
        ({"run/.containerenv": ""}, {}, "podman"),
        ({"run/systemd/container": "lxc\n"}, {}, "lxc"),
        ({"proc/1/cgroup": "0::/kubepods/burstable/pod1\n", ".dockerenv": ""}, {}, "kubernetes"),
        ({"proc/1/cgroup": "3:cpu:/docker/abc\n"}, {}, "docker"),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({}, {"container": "systemd-nspawn\n\x1b"}, "systemd-nspawn??"),
    ],
)
def test_containers(tmp_path: Path, files: dict[str, str], environment: dict[str, str], kind: str | None) -> None:
    for path, content in files.items():
        put(tmp_path, path, content)
    assert facts.find_container(str(tmp_path), environment) == kind


def test_clock_state() -> None:
    def timex(status: int) -> bytes:
        return struct.pack("@Illlli", 0, 1, 2, 3, 4, status) + bytes(200)

    assert facts.parse_timex(timex(0x2001)) is True
    assert facts.parse_timex(timex(0x40)) is False
    assert facts.parse_timex(b"short") is None


def test_variables_that_matter_and_no_secret() -> None:
    chosen = facts.safe_variables(
        {
            "FI_PROVIDER": "efa",
            "UCX_TLS": "rc",
            "NIXL_LOG_LEVEL": "INFO",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "LD_LIBRARY_PATH": "/opt/amazon/efa/lib",
            "HF_HOME": "/data/hf",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1",
            "VLLM_API_KEY": "sesame",
            "NCCL_SECRET": "sesame",
            "HF_TOKEN": "sesame",
            "VLLM_password": "sesame",
            "VLLM_PROXY": "http://me:sesame@proxy:1/x",
            "AWS_SESSION_TOKEN": "sesame",
            "PATH": "/bin",
        }
    )
    assert set(chosen) == {
        "FI_PROVIDER",
        "UCX_TLS",
        "NIXL_LOG_LEVEL",
        "PYTORCH_CUDA_ALLOC_CONF",
        "LD_LIBRARY_PATH",
        "HF_HOME",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_PROXY",
    }
    assert chosen["VLLM_PROXY"] == "http://***@proxy:1/x"
    assert "sesame" not in str(chosen)


# --------------------------------------------------------------------------------------------------------- RDMA and EFA


def test_efa_devices(tmp_path: Path) -> None:
    root = make_tree(
        tmp_path, "sysfs-grep-efa.txt", "sysfs-driver-links.txt", "hw_counters-prefill-after-native-write.txt"
    )
    put(root, "sys/class/infiniband_verbs/uverbs0/ibdev", "rdmap86s0\n")
    put(root, "sys/class/infiniband_verbs/uverbs1/ibdev", "rdmap87s0\n")
    put(root, "sys/class/infiniband_verbs/abi_version", "6\n")
    put(root, "dev/infiniband/uverbs0")
    devices = {device["name"]: device for device in facts.read_rdma(str(root))["devices"]}
    first = devices["rdmap86s0"]
    assert (first["driver"], first["vendor"], first["device"], first["numa_node"]) == ("efa", "0x1d0f", "0xefa2", 0)
    assert first["peer_memory"] == "NVIDIA"
    assert (first["verbs_path"], first["verbs_open"], first["verbs_error"]) == ("/dev/infiniband/uverbs0", True, "")
    port = first["ports"][0]
    assert (port["number"], port["state"], port["phys_state"]) == (1, "ACTIVE", "LinkUp")
    assert (port["link_layer"], port["rate_gbps"]) == ("Unknown", 200.0)
    assert port["counters"]["rdma_write_bytes"] == 4294967296
    assert port["lid"] is None
    second = devices["rdmap87s0"]
    assert second["driver"] is None
    assert second["verbs_open"] is False
    assert "No such file" in second["verbs_error"]


def test_roce_gids(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "sysfs-mlx5-gids.txt", "sysfs-driver-links.txt")
    folder = "sys/class/infiniband/mlx5_0"
    put(root, f"{folder}/ports/1/state", "1: DOWN\n")
    put(root, f"{folder}/ports/1/lid", "0x0\n")
    put(root, f"{folder}/ports/1/sm_lid", "0x2a\n")
    put(root, f"{folder}/ports/1/gids/4", "0000:0000:0000:0000:0000:0000:0000:0000\n")
    put(root, f"{folder}/device/net/ens6f0np0/dev_port", "0\n")
    device = next(one for one in facts.read_rdma(str(root))["devices"] if one["name"] == "mlx5_0")
    assert (device["driver"], device["verbs_path"], device["verbs_open"]) == ("mlx5_core", "", None)
    assert device["peer_memory"] is None
    port = device["ports"][0]
    assert (port["state"], port["lid"], port["sm_lid"], port["netdev"]) == ("DOWN", 0, 42, "ens6f0np0")
    assert [gid["index"] for gid in port["gids"]] == [0, 1, 2, 3]
    assert port["gids"][3] == {
        "index": 3,
        "gid": "0000:0000:0000:0000:0000:ffff:0a00:10d6",
        "type": "RoCE v2",
        "netdev": "ens6f0np0",
    }


def test_no_rdma_is_a_fact_and_no_sys_is_not(tmp_path: Path) -> None:
    with pytest.raises(facts.NotFound, match="/sys"):
        facts.read_rdma(str(tmp_path))
    (tmp_path / "sys/class").mkdir(parents=True)
    assert facts.read_rdma(str(tmp_path)) == {"devices": []}


def test_endless_sysfs_is_bounded(tmp_path: Path) -> None:
    port = "sys/class/infiniband/x/ports/1"
    for index in range(facts.MAX_GIDS + 20):
        put(tmp_path, f"{port}/gids/{index}", "fe80::1\n")
    for index in range(facts.MAX_COUNTERS + 20):
        put(tmp_path, f"{port}/hw_counters/c{index}", "1\n")
    put(tmp_path, f"{port}/hw_counters/big", "9" * 5000)
    put(tmp_path, f"{port}/rate", "x" * 100000)
    read = facts.read_rdma(str(tmp_path))["devices"][0]["ports"][0]
    assert len(read["gids"]) == facts.MAX_GIDS
    assert len(read["counters"]) <= facts.MAX_COUNTERS
    assert "big" not in read["counters"]
    assert read["rate_gbps"] is None


@pytest.mark.parametrize(
    ("name", "devices", "fabrics"),
    [
        ("efa-rdm-p5en-good", 16, ["efa-direct", "efa"]),
        ("efa-rdm-p5en-15-of-16", 15, ["efa-direct", "efa"]),
        ("efa-direct-rma-p5en-good", 16, ["efa-direct"]),
        ("efa-all-types-one-device", 1, ["efa-direct", "efa"]),
        ("efa-rdm-p4d-libfabric1", 4, None),
        ("tcp-only", 2, ["10.0.16.0/20", "127.0.0.0/8"]),
    ],
)
def test_fi_info(name: str, devices: int, fabrics: list[str] | None) -> None:
    domains, found = facts.parse_fi_info(sample(f"fi_info-{name}.txt"))
    assert len(domains) == devices
    assert not any(domain.endswith(("-rdm", "-dgrm")) for domain in domains)
    if fabrics is None:
        assert all(fabric.startswith("EFA-fe80::") for fabric in found)
    else:
        assert found == fabrics


def test_fi_info_that_finds_nothing() -> None:
    said = sample("fi_info-nodata.stderr.txt").encode()
    answer = facts.provider_answer(facts.Ended(61, b"", said))
    assert answer == {"exit_code": 61, "domains": [], "fabrics": [], "error": "fi_getinfo: -61 (No data available)"}
    late = facts.provider_answer(facts.Late("fi_info did not end within 3.0 s"))
    assert late == {"exit_code": None, "error": "fi_info did not end within 3.0 s"}
    warned = sample("fi_info-loglevel-warn-device-unopenable.stderr.txt").encode()
    assert "ibv_open_device failed! errno: 1" in facts.provider_answer(facts.Ended(61, b"", warned))["error"]


def test_versions_of_libfabric_and_installer() -> None:
    assert facts.parse_libfabric_version(sample("fi_info-version-efa-installer.txt")) == "2.6.0amzn1.0"
    assert facts.parse_libfabric_version(sample("fi_info-version-ubuntu2204.txt")) == "1.11.0"
    assert facts.parse_libfabric_version("command not found") is None
    version, packages = facts.parse_installed_packages(sample("efa_installed_packages.txt"))
    assert version == "1.50.0"
    assert packages[0] == "efa-config_1.18_all"
    assert len(packages) == 8


# -------------------------------------------------------------------------------------------------------- accelerators


def test_gpus_with_header_and_units() -> None:
    gpus, driver = facts.parse_gpus(sample("nvidia-smi-query-gpu-h200.csv"))
    assert driver == "580.95.05"
    assert len(gpus) == 8
    assert gpus[0] == {
        "index": 0,
        "name": "NVIDIA H200",
        "uuid": "GPU-0abc0000-1d2e-3f4a-5b6c-7d8e9f0a1b2c",
        "pci": "00000000:59:00.0",
        "memory_bytes": 143771 << 20,
        "memory_used_bytes": 12044 << 20,
    }


def test_gpus_without_header_and_units() -> None:
    columns = ("index", "name", "pci.bus_id", "driver_version", "memory.total", "memory.used")
    gpus, driver = facts.parse_gpus(sample("nvidia-smi-query-gpu-a100-nounits.csv"), columns)
    assert (len(gpus), driver) == (8, "535.183.01")
    assert (gpus[7]["memory_bytes"], gpus[7]["memory_used_bytes"], gpus[7]["uuid"]) == (40960 << 20, 0, "")
    assert facts.parse_gpus("0, NVIDIA GB10, u, p, 580.1.2, [N/A], [N/A]")[0][0]["memory_bytes"] is None


@pytest.mark.parametrize("name", ["driver-mismatch", "no-driver"])
def test_nvidia_smi_that_fails_has_no_gpus(name: str) -> None:
    assert facts.parse_gpus(sample(f"nvidia-smi-{name}.stderr.txt")) == ([], None)


def test_nvidia_driver() -> None:
    text = sample("proc-driver-nvidia-version-open.txt")
    assert facts.parse_driver_version(text) == ("580.95.05", "open")
    text = sample("proc-driver-nvidia-version-proprietary.txt")
    assert facts.parse_driver_version(text) == ("535.183.01", "proprietary")
    assert facts.parse_driver_version("") == (None, None)


def test_units_of_systemd() -> None:
    assert facts.parse_unit("LoadState=loaded\nActiveState=active\n") == "active"
    assert facts.parse_unit("LoadState=not-found\nActiveState=inactive\n") is None


def test_neuron_devices() -> None:
    assert facts.parse_neuron_ls(sample("neuron-ls-trn1-2xlarge.json")) == [
        {"index": 0, "cores": 2, "memory_bytes": 34359738368, "processes": 0}
    ]
    devices = facts.parse_neuron_ls(sample("neuron-ls-trn2-48xlarge.json"))
    assert [device["index"] for device in devices] == list(range(16))
    assert {device["cores"] for device in devices} == {4}
    assert any(device["processes"] for device in facts.parse_neuron_ls(sample("neuron-ls-trn1-32xlarge-busy.json")))
    for text in ("", sample("neuron-ls-no-driver.stderr.txt"), "{}", "[" * 200000):
        with pytest.raises(ValueError):
            facts.parse_neuron_ls(text)


# ------------------------------------------------------------------------------------------------------------- network

TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1 0000 100 0 0 10 0
   1: 0B004F0A:1F90 0C004F0A:D431 01 00000000:00000000 00:00000000 00000000  1000        0 4712 1 0000 20 4 0 10 -1
   2: nonsense
   3: 0100007F:10000 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4713 1 0000 100 0 0 10 0
"""
TCP6 = """  sl  local_address                         remote_address                        st
   0: 00000000000000000000000001000000:0016 00000000000000000000000000000000:0000 0A 00:00 00:00 00 0 0 99
"""


@pytest.mark.skipif(sys.byteorder != "little", reason="the samples were recorded on a little-endian machine")
def test_sockets() -> None:
    found = [(one.address, one.port, one.listening, one.user, one.inode) for one in facts.parse_sockets(TCP)]
    assert found == [("127.0.0.1", 8080, True, 1000, 4711), ("10.79.0.11", 8080, False, 1000, 4712)]
    assert [(one.address, one.port) for one in facts.parse_sockets(TCP6)] == [("::1", 22)]


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def message(kind: int, payload: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(payload), kind, 0, 1, 0) + payload + bytes(-len(payload) % 4)


def test_links_and_addresses() -> None:
    def link(index: int, name: str, mtu: int, flags: int) -> bytes:
        head = struct.pack("=BxHiII", 0, 1, index, flags, 0)
        return message(16, head + attribute(3, name.encode() + b"\0") + attribute(4, struct.pack("=I", mtu)))

    links = facts.parse_links(link(1, "lo", 65536, 0x49) + link(2, "ens5", 9001, 0x1) + message(3, b""))
    assert links == {1: {"name": "lo", "mtu": 65536, "up": True}, 2: {"name": "ens5", "mtu": 9001, "up": False}}

    address = struct.pack("=BBBBI", socket.AF_INET, 20, 0, 0, 2) + attribute(1, b"\x0a\0\x10\x0b")
    peer = (
        struct.pack("=BBBBI", socket.AF_INET, 32, 0, 0, 3) + attribute(1, b"\x01\1\1\1") + attribute(2, b"\x02\2\2\2")
    )
    found = facts.parse_addresses(message(20, address) + message(20, peer))
    assert found == {2: ["10.0.16.11/20"], 3: ["2.2.2.2/32"]}


def test_routes() -> None:
    head = struct.pack("=BBBBBBBBI", socket.AF_INET, 32, 0, 0, 254, 0, 0, 1, 0)
    route = head + attribute(4, struct.pack("=I", 2)) + attribute(7, b"\x0a\0\0\1")
    assert facts.parse_route(message(24, route)) == {"index": 2, "source": "10.0.0.1", "mtu": None}
    narrow = route + attribute(8, attribute(2, struct.pack("=I", 1400)))
    assert facts.parse_route(message(24, narrow))["mtu"] == 1400
    assert facts.parse_route(message(2, struct.pack("=i", -101))) == {"error": os.strerror(101)}
    assert "cannot be read" in facts.parse_route(b"")["error"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["/opt/venv/bin/python3", "-m", "vllm.entrypoints.openai.api_server", "--api-key", "sesame"],
         "python3 -m vllm.entrypoints.openai.api_server"),
        (["python", "-u", "/opt/venv/bin/vllm", "serve", "--token=sesame"], "python vllm"),
        (["python3", "-c", "password='sesame'"], "python3 -c"),
        (["/usr/sbin/mysqld", "--password=sesame"], "mysqld"),
        (["nginx: master process /usr/sbin/nginx -g sesame"], "nginx"),
        (["VLLM::EngineCore"], "VLLM::EngineCore"),
        ([""], ""),
        ([], ""),
    ],
)  # fmt: skip
def test_programs_are_named_without_their_arguments(argv: list[str], words: str) -> None:
    assert facts.program_words(argv) == words


def test_markers_and_sessions() -> None:
    environment = b"PATH=/bin\0PDCTL_MARKER=qwen3/decode-0/0123456789ab\0"
    assert facts.parse_marker(environment) == "qwen3/decode-0"
    assert facts.parse_marker(b"PATH=/bin\0") == ""
    stat = "4711 (a) b) S 1 4711 4700 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 98765 1 1"
    assert facts.parse_session(stat) == (4700, 98765)
    assert facts.parse_session("4711 (x) S 1") == (0, 0)


# ----------------------------------------------------------------------------------------------------------- NIXL, EC2


def test_ldd() -> None:
    found, missing = facts.parse_ldd(sample("ldd-libplugin-libfabric-missing.txt"))
    assert missing == ["libfabric.so.1", "libhwloc.so.15"]
    assert found["libcuda.so.1"] == "/lib/x86_64-linux-gnu/libcuda.so.1"


def steps(*lines: dict[str, object]) -> list[facts.Json]:
    text = "a noisy sitecustomize\n" + "".join(f"\nPDCTL-STEP {json.dumps(line)}\n" for line in lines)
    return facts.parse_steps(text + "PDCTL-STEP {cut")


PACKAGES = {"step": "packages", "version": "3.12.4", "packages": {"nixl": "1.5.1", "torch": "2.9.0"}}
NIXL = {"step": "nixl", "available": ["UCX", "LIBFABRIC"]}
BOTH = ["UCX", "LIBFABRIC"]


def test_nixl_that_works() -> None:
    judged = facts.judge_nixl(
        steps(
            PACKAGES,
            NIXL,
            {"step": "loading", "plugin": "UCX"},
            {"step": "loaded", "plugin": "UCX"},
            {"step": "loading", "plugin": "LIBFABRIC"},
            {"step": "failed", "plugin": "LIBFABRIC", "error": "libfabric.so.1: cannot open", "file": "/x.so"},
            {"step": "end", "libfabric": "/opt/amazon/efa/lib/libfabric.so.1"},
        ),
        BOTH,
        "",
    )
    assert judged == {
        "version": "1.5.1",
        "plugins": ["UCX"],
        "failed": {"LIBFABRIC": "libfabric.so.1: cannot open"},
        "missing_libraries": {},
        "libfabric_path": "/opt/amazon/efa/lib/libfabric.so.1",
        "error": "",
    }


def test_a_plugin_that_takes_the_process_with_it() -> None:
    judged = facts.judge_nixl(steps(PACKAGES, NIXL, {"step": "loading", "plugin": "UCX"}), BOTH, "was ended by SIGABRT")
    assert judged is not None
    assert judged["failed"]["UCX"] == "loading it ended the process: was ended by SIGABRT"
    assert judged["failed"]["LIBFABRIC"].startswith("not tried")
    assert judged["plugins"] == []


def test_nixl_that_takes_the_process_with_it() -> None:
    judged = facts.judge_nixl(steps(PACKAGES), BOTH, "was ended by SIGSEGV")
    assert judged is not None
    assert judged["error"] == "loading NIXL ended the process: was ended by SIGSEGV"
    assert facts.judge_nixl(steps(PACKAGES), BOTH, "") is None


class FakeMetadata:
    """The metadata service as the sample recorded it; counts requests."""

    def __init__(self) -> None:
        self.items = dict(line.split("=", 1) for line in sample("imds-dump-p5en.txt").splitlines())
        macs = {name.split("/")[3] for name in self.items if name.startswith("network/interfaces/macs/")}
        self.items["network/interfaces/macs/"] = "\n".join(f"{mac}/" for mac in macs)

    def get(self, item: str) -> str | None:
        return self.items.get(item)


def test_instance_metadata() -> None:
    service = FakeMetadata()
    read = facts.read_metadata(service.get)
    assert (read["instance_id"], read["instance_type"]) == ("i-0abc0000000000001", "p5en.48xlarge")
    assert (read["region"], read["zone"], read["zone_id"]) == ("us-east-2", "us-east-2b", "use2-az2")
    first = next(one for one in read["interfaces"] if one["interface_id"] == "eni-0abc0000000000100")
    assert first["security_groups"] == ["sg-0abc000000000efa1"]
    assert (first["device_number"], first["addresses"]) == (0, ["10.0.16.11"])
    service.items["network/interfaces/macs/02:aa:bb:cc:00:01/network-card"] = "3"
    again = facts.read_metadata(service.get)["interfaces"]
    assert next(one["network_card"] for one in again if one["mac"] == "02:aa:bb:cc:00:01") == 3


def test_macs_that_are_none_are_not_asked_about() -> None:
    service = FakeMetadata()
    service.items["network/interfaces/macs/"] = "../../iam/security-credentials/\n02:aa:bb:cc:00:01/\n"
    assert [one["mac"] for one in facts.read_metadata(service.get)["interfaces"]] == ["02:aa:bb:cc:00:01"]


# ------------------------------------------------------------------------------------------------------------ nonsense

PARSERS = (
    facts.parse_pairs,
    facts.memory_groups,
    facts.parse_fi_info,
    facts.parse_libfabric_version,
    facts.parse_installed_packages,
    facts.parse_gpus,
    facts.parse_driver_version,
    facts.parse_unit,
    facts.parse_sockets,
    facts.parse_ldd,
    facts.parse_session,
    facts.parse_steps,
    facts.parse_rate,
)
STRICT_PARSERS = (facts.parse_limits, facts.parse_meminfo, facts.parse_neuron_ls)
TEXTS = sorted(path.name for path in SAMPLES.iterdir() if path.suffix in (".txt", ".csv", ".json"))


@st.composite
def mangled(draw: st.DrawFn) -> str:
    """A sample with pieces cut out, doubled, or replaced by anything."""
    text = sample(draw(st.sampled_from(TEXTS)))
    for _ in range(draw(st.integers(0, 4))):
        begin = draw(st.integers(0, len(text)))
        end = draw(st.integers(begin, min(len(text), begin + 200)))
        middle = draw(st.one_of(st.just(text[begin:end] * 2), st.text(max_size=30), st.just("9" * 400)))
        text = text[:begin] + middle + text[end:]
    return text


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.text(), mangled()))
def test_no_text_is_too_strange(text: str) -> None:
    for parse in PARSERS:
        json.dumps(facts.clean(parse(text)) if parse is not facts.parse_sockets else str(parse(text)))
    for parse in STRICT_PARSERS:
        try:
            json.dumps(facts.clean(parse(text)))
        except ValueError as error:
            assert str(error)  # noqa: PT017


@settings(max_examples=100, deadline=None)
@given(st.binary(), st.integers(0, 65535))
def test_no_netlink_message_is_too_strange(noise: bytes, kind: int) -> None:
    for data in (
        noise,
        message(kind, noise),
        message(16, bytes(16) + noise),
        message(24, bytes([2]) + bytes(11) + noise),
    ):
        facts.parse_links(data)
        facts.parse_addresses(data)
        assert isinstance(facts.parse_route(data), dict)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(JSON)
def test_what_is_sent_is_always_plain(value: object) -> None:
    text = json.dumps(facts.clean(value), allow_nan=False)
    json.loads(text)
    text.encode()


def test_deep_and_long_values_are_cut() -> None:
    deep: object = 1
    for _ in range(5000):
        deep = [deep]
    assert json.loads(json.dumps(facts.clean(deep)))
    assert len(facts.clean("x" * 100000)) == 65536
    assert len(facts.clean(list(range(20000)))) == 10000
    assert facts.clean("\ud800\0") == "??"


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(["ports", "timeouts", "pythons", "environments", "peers"]), JSON))
def test_no_request_is_too_strange(request_fields: facts.Json) -> None:
    for entry in facts.planned_ports(request_fields):
        assert 0 < entry["port"] < 65536
    limits = facts.time_limits(request_fields)
    assert all(0 < limits[part] <= limits["total"] for part in facts.PARTS)
    facts.planned_environment(request_fields)
