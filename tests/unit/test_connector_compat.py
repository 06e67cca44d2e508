"""The connector against upstream's signatures, without vLLM: on records of releases, and on fakes made from those."""

from __future__ import annotations

import ast
import enum
import importlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pdctl_connector import compat, version

import pdctl

DATA = Path(__file__).parent / "data"
CONNECTOR_FOLDER = Path(compat.__file__).parents[1]
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
METADATA = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata"
# Modules of the connector that import vLLM: all others work, and are tested, without it.
ON_VLLM = ("cache_groups", "connector", "scheduler", "worker")


def recorded(line: str) -> dict[str, Any]:
    return json.loads((DATA / f"upstream_signatures_{line}.json").read_text())


def problems_in(record: dict[str, Any]) -> list[str]:
    """What `compat` would complain about, judged by a record alone."""
    found = []
    for upstream in compat.RELIED_ON:
        has = record["classes"].get(upstream.name)
        if has is None or has["module"] != upstream.module:
            found.append(f"{upstream.name} is not in the record: make it again (scripts/record_upstream_signatures.py)")
            continue
        for methods, exact in ((upstream.called, False), (upstream.overridden, True)):
            for name, wanted in methods.items():
                method = has["methods"].get(name)
                problem = (
                    "is gone"
                    if method is None
                    else compat.parameter_problem(
                        tuple(method["parameters"].split()), frozenset(method["required"].split()), wanted, exact=exact
                    )
                )
                found += [f"{upstream.name}.{name} {problem}"] if problem else []
        found += [f"{upstream.name}.{name} is gone" for name in set(upstream.attributes) - set(has["attributes"])]
        found += [
            f"{upstream.name}.{name} is {has['constants'].get(name)!r}"
            for name, value in upstream.constants.items()
            if has["constants"].get(name) != value
        ]
    return found


@pytest.mark.parametrize("line", compat.SUPPORTED_VERSIONS)
def test_every_member_relied_on_is_in_this_release(line: str) -> None:
    record = recorded(line)
    assert compat.release_line(record["vllm"]) == line
    assert problems_in(record) == []
    assert record["nixl_connector_version"] in compat.KNOWN_NIXL_CONNECTOR_VERSIONS


def test_judging_a_record_finds_each_kind_of_change() -> None:
    record = recorded("0.33")
    worker = record["classes"]["NixlPushConnectorWorker"]
    worker["methods"]["_nixl_handshake"]["parameters"] = "host port"
    worker["methods"]["_xfer_blocks"] = None
    worker["attributes"].remove("_handshake_lock")
    worker["constants"]["_TRANSFER_MODE"] = "pull"
    del record["classes"]["BlockPool"]
    found = " | ".join(problems_in(record))
    for word in ("_nixl_handshake takes (host, port)", "_xfer_blocks is gone", "_handshake_lock is gone"):
        assert word in found
    assert "_TRANSFER_MODE is 'pull'" in found
    assert "BlockPool is not in the record" in found


# --- what our classes use of upstream's is what is listed -------------------------------------------------------------


class Used(ast.NodeVisitor):
    """Names that a module uses of an upstream class: of ``self`` and ``super()`` in the class that builds on it, of
    ``worker`` and the like in its helpers, and of upstream's base class by its name."""

    def __init__(self, receivers: tuple[str, ...], base: str) -> None:
        self.receivers, self.base = receivers, base
        self.used: set[str] = set()
        self.of_base: set[str] = set()
        self.ours: set[str] = set()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = ast.unparse(node.value)
        if owner in self.receivers:
            (self.ours if isinstance(node.ctx, ast.Store) else self.used).add(node.attr)
        elif owner == self.base:
            self.of_base.add(node.attr)
        self.generic_visit(node)


OVERWRITTEN = {"nixl_wrapper", "_handshake_initiation_executor"}
"""Attributes of upstream's that ours puts something else in: they must be there before."""


def names_of(module: str, cls: str, receivers: tuple[str, ...], base: str) -> Used:
    tree = ast.parse((CONNECTOR_FOLDER / "pdctl_connector" / f"{module}.py").read_text())
    (body,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls]
    used = Used(("self", "super()"), base)
    used.visit(body)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node is not body:
            helper = Used(receivers, base)
            helper.visit(node)
            used.used |= helper.used
    used.ours -= OVERWRITTEN
    for node in body.body:
        if isinstance(node, ast.FunctionDef):
            used.ours.add(node.name)
        elif isinstance(node, ast.Assign):
            used.ours |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.AnnAssign):
            used.ours.add(ast.unparse(node.target))
    return used


def listed(upstream: compat.UpstreamClass) -> set[str]:
    return {*upstream.called, *upstream.overridden, *upstream.attributes, *upstream.constants}


SIDES = [
    ("worker", "PdPushWorker", ("worker", "self._worker"), "NixlBaseConnectorWorker", compat.WORKER),
    ("scheduler", "PdPushScheduler", (), "NixlBaseConnectorScheduler", compat.SCHEDULER),
    ("connector", "PdPushConnector", (), "NixlBaseConnector", compat.CONNECTOR),
]


@pytest.mark.parametrize(("module", "cls", "receivers", "base", "upstream"), SIDES, ids=[side[0] for side in SIDES])
def test_every_upstream_name_that_is_used_is_listed(
    module: str, cls: str, receivers: tuple[str, ...], base: str, upstream: compat.UpstreamClass
) -> None:
    used = names_of(module, cls, receivers, base)
    assert used.used - used.ours - listed(upstream) == set()
    of_base = {name for entry in compat.RELIED_ON if entry.name == base for name in listed(entry)}
    assert used.of_base - of_base == set()


@pytest.mark.parametrize(("module", "cls", "receivers", "base", "upstream"), SIDES, ids=[side[0] for side in SIDES])
def test_no_name_is_listed_that_nothing_uses(
    module: str, cls: str, receivers: tuple[str, ...], base: str, upstream: compat.UpstreamClass
) -> None:
    used = names_of(module, cls, receivers, base)
    assert (
        set(upstream.attributes) - used.used - used.ours - OVERWRITTEN - {"kv_transfer_config", "kv_cache_config"}
        == set()
    )
    assert set(upstream.called) - used.used - {"bind_kv_cache_manager"} == set()


@pytest.mark.parametrize("line", compat.SUPPORTED_VERSIONS)
@pytest.mark.parametrize(("module", "cls", "receivers", "base", "upstream"), SIDES, ids=[side[0] for side in SIDES])
def test_what_overrides_a_recorded_method_is_listed_as_overriding(
    module: str, cls: str, receivers: tuple[str, ...], base: str, upstream: compat.UpstreamClass, line: str
) -> None:
    ours = names_of(module, cls, receivers, base).ours
    theirs = {name for name, method in recorded(line)["classes"][upstream.name]["methods"].items() if method}
    assert (ours & theirs) - set(upstream.overridden) == set()


def test_an_unlisted_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search itself: a name that is not listed does not slip through in any of the forms that are used."""
    source = (
        "class PdPushWorker(X):\n    def f(self):\n        self.a = self.b + super().c()\n        Base.d(self)\n"
        "class _Helper:\n    def g(self):\n        worker = self._worker\n        worker.e(self._worker.h)\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda self: source)
    used = names_of("worker", "PdPushWorker", ("worker", "self._worker"), "Base")
    assert used.used - used.ours == {"b", "c", "e", "h"}
    assert used.of_base == {"d"}


# --- the check itself, on a fake vllm package made from a record ------------------------------------------------------


def fake_class(name: str, record: dict[str, Any]) -> type:
    namespace: dict[str, Any] = {}
    body = []
    for method, signature in record["methods"].items():
        required = signature["required"].split()
        optional = [word for word in signature["parameters"].split() if word not in required]
        parameters = ", ".join(["self", *required, *(f"{word}=None" for word in optional)])
        lines = [f"self.{word} = None" for word in record["attributes"]] if method == "__init__" else []
        body.append(f"def {method}({parameters}):\n    " + "\n    ".join([*lines, "pass"]))
    exec("\n".join(body), namespace)
    methods = {key: value for key, value in namespace.items() if key in record["methods"]}
    return type(name, (), {**methods, **record["constants"]})


Vllm = Callable[..., dict[str, ModuleType]]


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    """Put a vllm made from a record in `sys.modules`; returns its modules by name."""

    def install(line: str = "0.33", *, says: str | None = None, wire: int | None = None) -> dict[str, ModuleType]:
        record = recorded(line)
        modules = {"vllm": ModuleType("vllm"), METADATA: ModuleType(METADATA)}
        modules["vllm"].__version__ = record["vllm"] if says is None else says
        modules[METADATA].NIXL_CONNECTOR_VERSION = record["nixl_connector_version"] if wire is None else wire
        for name, entry in record["classes"].items():
            module = modules.setdefault(entry["module"], ModuleType(entry["module"]))
            setattr(module, name, fake_class(name, entry))
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return modules

    return install


@pytest.mark.parametrize("line", compat.SUPPORTED_VERSIONS)
@pytest.mark.parametrize("suffix", ["", ".dev3+g1a2b3c4", "rc1", "+cpu", ".post1"])
def test_a_supported_vllm_passes_silently(
    fake_vllm: Vllm, caplog: pytest.LogCaptureFixture, line: str, suffix: str
) -> None:
    fake_vllm(line, says=f"{line}.1{suffix}")
    compat.check()
    assert not caplog.records


@pytest.mark.parametrize("says", ["0.30.0", "0.34.0", "0.3.3", "0.330.0", "1.32.0", "dev", ""])
def test_another_version_is_refused_with_what_to_install(fake_vllm: Vllm, says: str) -> None:
    fake_vllm("0.33", says=says)
    with pytest.raises(compat.UnsupportedVllm) as raised:
        compat.check()
    message = str(raised.value)
    assert "supports vLLM 0.32 and 0.33" in message
    assert f"found {says or 'no version number'}" in message
    assert "pip install 'vllm>=0.32,<0.34'" in message


def test_every_change_is_named_in_one_message(fake_vllm: Vllm) -> None:
    modules = fake_vllm("0.33")
    worker = modules[compat.WORKER.module].NixlPushConnectorWorker
    scheduler = modules[compat.SCHEDULER.module].NixlPushConnectorScheduler
    del worker._xfer_blocks_for_req
    worker._get_new_notifs = lambda self, limit=1: None
    worker._nixl_handshake = lambda self, host, port: None
    scheduler._TRANSFER_MODE = "pull"
    del modules["vllm.v1.core.block_pool"].BlockPool
    with pytest.raises(compat.UnsupportedVllm) as raised:
        compat.check()
    message = str(raised.value)
    assert "NixlPushConnectorWorker._xfer_blocks_for_req is gone" in message
    assert "NixlPushConnectorWorker._get_new_notifs takes (limit), expected ()" in message
    assert "NixlPushConnectorWorker._nixl_handshake takes (host, port)" in message
    assert "NixlPushConnectorScheduler._TRANSFER_MODE is 'pull', expected 'push'" in message
    assert "vllm.v1.core.block_pool.BlockPool is gone" in message
    assert "vLLM (0.33.0)" in message


def test_a_called_method_may_gain_a_parameter_with_a_default_but_no_other(fake_vllm: Vllm) -> None:
    worker = fake_vllm("0.33")[compat.WORKER.module].NixlPushConnectorWorker
    worker._cleanup_remote_engine = lambda self, engine_id, log_eviction=True, reason="": None
    compat.check()
    worker._cleanup_remote_engine = lambda self, engine_id, log_eviction, reason: None
    with pytest.raises(compat.UnsupportedVllm, match="_cleanup_remote_engine takes"):
        compat.check()


def test_an_unknown_wire_version_is_a_warning(fake_vllm: Vllm, caplog: pytest.LogCaptureFixture) -> None:
    fake_vllm("0.33", wire=16)
    compat.check()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "14 and 15" in caplog.text
    assert "16" in caplog.text


def test_missing_attributes_of_an_instance_are_named() -> None:
    whole = SimpleNamespace(**dict.fromkeys(compat.WORKER.attributes))
    compat.check_instance(whole, compat.WORKER)
    del whole.nixl_wrapper
    with pytest.raises(compat.UnsupportedVllm, match=r"NixlPushConnectorWorker\.nixl_wrapper is gone"):
        compat.check_instance(whole, compat.WORKER)


@pytest.mark.parametrize(
    ("says", "line"),
    [
        ("0.33.1.dev3+g1a2b3c4", "0.33"),
        ("v0.32.0", "0.32"),
        ("0.320", "0.320"),
        ("0.33", "0.33"),
        ("dev", ""),
        ("7", ""),
    ],
)
def test_release_line(says: str, line: str) -> None:
    assert compat.release_line(says) == line


# --- the connector class on the fake ----------------------------------------------------------------------------------


class Role(enum.Enum):
    SCHEDULER = enum.auto()
    WORKER = enum.auto()


def parallel(**sizes: int) -> SimpleNamespace:
    """A vLLM configuration, as far as the connector looks at it."""
    names = ("decode_context_parallel_size", "prefill_context_parallel_size")
    return SimpleNamespace(parallel_config=SimpleNamespace(**{**dict.fromkeys(names, 1), **sizes}))


@pytest.fixture
def connector_module(fake_vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`pdctl_connector.connector` on a fake vllm whose base does what upstream's does, with fakes of our two sides."""
    modules = fake_vllm("0.32")
    modules[BASE].KVConnectorRole = Role

    def construct(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.engine_id, self.kv_transfer_config, self.kv_cache_config = "engine-7", None, kv_cache_config

    modules[compat.CONNECTOR.module].NixlBaseConnector.__init__ = construct
    for name, cls, upstream in (
        ("scheduler", "PdPushScheduler", compat.SCHEDULER),
        ("worker", "PdPushWorker", compat.WORKER),
    ):
        side = ModuleType(f"pdctl_connector.{name}")
        attributes = upstream.attributes
        setattr(side, cls, lambda *_, attributes=attributes: SimpleNamespace(**dict.fromkeys(attributes)))
        monkeypatch.setitem(sys.modules, side.__name__, side)
    monkeypatch.delitem(sys.modules, "pdctl_connector.connector", raising=False)
    module = importlib.import_module("pdctl_connector.connector")
    # Registered with monkeypatch so that the module made on the fake does not outlive the test.
    monkeypatch.setitem(sys.modules, "pdctl_connector.connector", module)
    monkeypatch.delattr("pdctl_connector.connector", raising=False)
    return module


@pytest.mark.parametrize("role", Role)
def test_construction_writes_the_line_that_pdctl_looks_for(
    connector_module: ModuleType, caplog: pytest.LogCaptureFixture, role: Role
) -> None:
    caplog.set_level(logging.INFO, logger="vllm")
    connector = connector_module.PdPushConnector(parallel(), role, kv_cache_config=None)
    expected = f"PdPushConnector {version.__version__} (pdctl) role={role.name.lower()} engine=engine-7"
    assert expected in [record.getMessage() for record in caplog.records]
    assert (connector.connector_scheduler is None) == (role is Role.WORKER)
    assert (connector.connector_worker is None) == (role is Role.SCHEDULER)


@pytest.mark.parametrize(("role", "name"), [(Role.SCHEDULER, "_reqs_need_recv"), (Role.WORKER, "_remote_agents")])
def test_construction_refuses_an_upstream_object_that_lacks_an_attribute(
    connector_module: ModuleType, role: Role, name: str
) -> None:
    cls = "PdPushScheduler" if role is Role.SCHEDULER else "PdPushWorker"
    module = sys.modules[f"pdctl_connector.{role.name.lower()}"]
    construct = getattr(module, cls)

    def without(*args: Any) -> Any:
        side = construct(*args)
        delattr(side, name)
        return side

    setattr(module, cls, without)
    with pytest.raises(compat.UnsupportedVllm, match=f"{name} is gone"):
        connector_module.PdPushConnector(parallel(), role, kv_cache_config=None)


def test_a_name_that_one_of_our_sides_cannot_import_is_told_with_what_to_install(
    connector_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules["pdctl_connector.worker"], "PdPushWorker")
    with pytest.raises(compat.UnsupportedVllm, match=r"could not import .* supports vLLM 0\.32 and 0\.33"):
        connector_module.PdPushConnector(parallel(), Role.WORKER, kv_cache_config=None)


@pytest.mark.parametrize("size", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallel_is_refused(connector_module: ModuleType, size: str) -> None:
    with pytest.raises(ValueError, match=f"does not support {size} > 1"):
        connector_module.PdPushConnector(parallel(**{size: 2}), Role.SCHEDULER, kv_cache_config=None)


def test_vllm_is_checked_before_upstream_is_constructed(connector_module: ModuleType) -> None:
    def construct(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        raise AssertionError("constructed")

    connector_module.NixlBaseConnector.__init__ = construct
    sys.modules["vllm"].__version__ = "0.31.0"
    with pytest.raises(compat.UnsupportedVllm, match=r"found 0\.31\.0"):
        connector_module.PdPushConnector(parallel(), Role.SCHEDULER, kv_cache_config=None)


def test_routed_experts_are_refused(connector_module: ModuleType) -> None:
    config = SimpleNamespace(aux_output_config=SimpleNamespace(enable_return_routed_experts=True))
    with pytest.raises(ValueError, match="--enable-return-routed-experts"):
        connector_module.PdPushConnector(config, Role.SCHEDULER, kv_cache_config=None)


def test_sleep_mode_is_refused(connector_module: ModuleType) -> None:
    assert connector_module.PdPushConnector.supports_sleep_mode(kv_transfer_config=None) is False


def test_a_vllm_without_the_push_connector_is_refused_with_what_to_install(
    fake_vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm("0.32", says="0.20.0")
    monkeypatch.setitem(sys.modules, compat.CONNECTOR.module, ModuleType(compat.CONNECTOR.module))
    monkeypatch.delitem(sys.modules, "pdctl_connector.connector", raising=False)
    with pytest.raises(compat.UnsupportedVllm, match=r"from vLLM 0\.20\.0.*supports vLLM 0\.32 and 0\.33"):
        importlib.import_module("pdctl_connector.connector")


def test_importing_the_package_imports_neither_vllm_nor_nixl() -> None:
    names = sorted(path.stem for path in Path(compat.__file__).parent.glob("*.py"))
    names = [name for name in names if name not in ("__init__", *ON_VLLM)]
    code = (
        f"import sys, threading; import pdctl_connector; from pdctl_connector import {', '.join(names)}\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('vllm', 'nixl', 'torch', 'pdctl')])\n"
        "print(threading.active_count())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CONNECTOR_FOLDER, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["[]", "1"]


def test_the_connector_has_the_version_of_pdctl() -> None:
    assert version.__version__ == pdctl.__version__
