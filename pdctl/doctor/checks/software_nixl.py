"""NIXL on the hosts: installed, free of known faults, the same on both sides, its plugins loaded. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdctl.doctor.checks.software_common import (
    NIXL_NAMES,
    WITH_VLLM,
    compare,
    each_python,
    nixl_version,
    pip_install,
    versions_of,
)
from pdctl.doctor.checks.versions import at_least, numbers
from pdctl.doctor.context import Context
from pdctl.doctor.facts import InterpreterFacts, NixlFacts
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped
from pdctl.doctor.package_versions import WANTED_NIXL, release_line
from pdctl.doctor.pythons import PlannedPython
from pdctl.doctor.role_options import backends

_EFA_LIBFABRIC = "/opt/amazon/efa/"
_EFA_NIXL_GUIDE = "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nixl.html"
_CONNECTOR_GUIDE = "https://docs.vllm.ai/en/latest/features/nixl_connector_usage/"

# What brings a library that NIXL's wheel does not contain.
_LIBRARY_FROM = {
    "libfabric.so": "the EFA installer (`/opt/amazon/efa`), inside the container image too",
    "libefa.so": "the EFA installer (or the package libefa1 / rdma-core)",
    "libibverbs.so": "rdma-core (package libibverbs1)",
    "librdmacm.so": "rdma-core (package librdmacm1)",
    "libmlx5.so": "rdma-core (package ibverbs-providers)",
    "libhwloc.so": "hwloc (package libhwloc15 on Debian and Ubuntu, hwloc-libs on Amazon Linux)",
    "libcuda.so": "the NVIDIA driver (in a container: start it with `--gpus all`)",
    "libcudart.so": "the CUDA runtime of that major version; nixl-cu12 and nixl-cu13 must fit the CUDA of torch",
    "libnuma.so": "numactl (package libnuma1)",
}


# --- SW005, SW006, SW007: NIXL


def _nixl_installed(context: Context) -> Iterator[Result]:
    def judge(python: PlannedPython, facts: InterpreterFacts) -> Iterator[Result]:
        version = nixl_version(facts)
        error = facts.nixl.error if facts.nixl is not None else ""
        # Plugins that were loaded prove that NIXL works, whatever else was reported.
        if facts.nixl is not None and (facts.nixl.plugins or not error) and version:
            yield passed(python.host, message="NIXL is installed and can be imported", evidence=f"NIXL {version}")
        elif not version:
            yield failed(
                python.host,
                message=f"NIXL is not installed in the Python {python.python} of {python.where}",
                evidence=error or f"none of {', '.join(NIXL_NAMES)} among its packages",
                fix=f"install NIXL {WANTED_NIXL} or newer there: without it no KV cache can be transferred",
                commands=pip_install(python, f"nixl>={WANTED_NIXL}"),
            )
        elif facts.nixl is None:
            reason = context.facts[python.host].missing.get("nixl", "importing NIXL was not tried")
            yield skipped(python.host, message=f"not checked: {reason}", evidence=f"NIXL {version}")
        else:
            yield failed(
                python.host,
                message="NIXL is installed but cannot be imported",
                evidence=error,
                fix=(
                    "run `python -c 'import nixl._api'` with that Python on the host; a missing library has to be "
                    "installed, a CUDA version that does not fit asks for nixl-cu12 or nixl-cu13 as torch has it"
                ),
            )

    yield from each_python(context, WITH_VLLM, judge)


def _nixl_version_fits(context: Context) -> Iterator[Result]:
    libfabric = "LIBFABRIC" in backends(context.spec)

    def judge(python: PlannedPython, facts: InterpreterFacts) -> Iterator[Result]:
        version = nixl_version(facts)
        found = numbers(version)
        fix = f"install NIXL {WANTED_NIXL} or newer, the same on every host"
        if found is None:
            yield skipped(python.host, message="not checked: the version of NIXL is not known")
        elif libfabric and found[0] < 1:
            yield failed(
                python.host,
                message=f"NIXL {version} is too old for EFA, which needs 1.0.0 or newer",
                fix=fix,
                severity=Severity.ERROR,
            )
        elif libfabric and (*found, 0)[:3] in ((1, 3, 0), (1, 3, 1)):
            yield failed(
                python.host,
                message=f"NIXL {version} never completes small WRITEs over LIBFABRIC, without any error",
                fix=fix,
                severity=Severity.ERROR,
            )
        elif not at_least(version, WANTED_NIXL):
            yield failed(
                python.host,
                message=f"NIXL {version} is older than {WANTED_NIXL}, the oldest that push mode is tested with here",
                fix=fix,
            )
        else:
            yield passed(python.host, message=f"NIXL {version} is {WANTED_NIXL} or newer")

    yield from each_python(context, WITH_VLLM, judge)


def _same_nixl(context: Context) -> Iterator[Result]:
    versions = versions_of(context, "NIXL", nixl_version)
    libfabric = "LIBFABRIC" in backends(context.spec)

    def judge(version: str, reference: str) -> tuple[Severity, str]:
        if not libfabric:
            return Severity.WARNING, "such a mix is not tested by anybody"
        severity = Severity.WARNING if release_line(version) == release_line(reference) else Severity.ERROR
        return severity, "one side may not read the other's connection data"

    yield from compare(versions, judge, what="NIXL", fix="install the same NIXL on every host of prefill and decode")


# --- SW008, SW009: NIXL's plugins


def _plugin_loads(context: Context) -> Iterator[Result]:
    wanted = backends(context.spec)

    def judge(python: PlannedPython, facts: InterpreterFacts) -> Iterator[Result]:
        nixl = facts.nixl
        if nixl is None or not (nixl.plugins or nixl.failed or nixl.missing_libraries):
            reason = "NIXL does not work here (SW005)" if nixl is not None and nixl.error else "no plugin was tried"
            reason = context.facts[python.host].missing.get("nixl", reason)
            yield skipped(python.host, message=f"not checked: {reason}")
            return
        for backend in wanted:
            yield from _judge_plugin(context, python.host, nixl, backend)

    yield from each_python(context, WITH_VLLM, judge)


def _judge_plugin(context: Context, host: str, nixl: NixlFacts, backend: str) -> Iterator[Result]:
    missing = _missing_libraries(nixl, backend)
    if backend not in nixl.plugins:
        reason = nixl.failed.get(backend, "")
        libraries = f": it misses {', '.join(missing)}" if missing else ""
        yield failed(
            host,
            message=f"NIXL's plugin {backend}, which fabric {context.spec.fabric} needs, cannot be loaded{libraries}",
            evidence=reason or f"plugins that load: {', '.join(nixl.plugins) or 'none'}",
            fix=_library_fix(missing)
            or f"reinstall NIXL {WANTED_NIXL} or newer; NIXL_PLUGIN_DIR, if set, must name its folder of plugins",
        )
        return
    if backend == "UCX" and context.spec.fabric in ("infiniband", "roce"):
        rdma = sorted({name for file, names in nixl.missing_libraries.items() if "uct_ib" in file for name in names})
        if rdma:
            yield failed(
                host,
                message=f"UCX cannot use RDMA devices here: its module for them misses {', '.join(rdma)}",
                fix=_library_fix(rdma),
            )
            return
    yield passed(host, message=f"NIXL's plugin {backend} loads", evidence=f"plugins: {', '.join(nixl.plugins)}")


def _missing_libraries(nixl: NixlFacts, backend: str) -> list[str]:
    """Libraries that a plugin's file misses. Its name is in the file's: ``libplugin_LIBFABRIC.so``."""
    files = [file for file in nixl.missing_libraries if file.rpartition("/")[2] in (backend, f"libplugin_{backend}.so")]
    return sorted({name for file in files for name in nixl.missing_libraries[file]})


def _library_fix(libraries: Iterable[str]) -> str:
    parts = []
    for library in libraries:
        source = next((text for name, text in _LIBRARY_FROM.items() if library.startswith(name)), "")
        parts.append(f"{library} comes with {source}" if source else f"install what brings {library}")
    return "; ".join(parts)


def _efa_libfabric(context: Context) -> Iterator[Result]:
    if context.spec.fabric != "efa" or "LIBFABRIC" not in backends(context.spec):
        return

    def judge(python: PlannedPython, facts: InterpreterFacts) -> Iterator[Result]:
        path = facts.nixl.libfabric_path if facts.nixl is not None else ""
        if not path:
            yield skipped(python.host, message="not checked: which libfabric NIXL would load is not known (see SW008)")
        elif path.startswith(_EFA_LIBFABRIC):
            yield passed(python.host, message="NIXL loads the libfabric of the EFA installer", evidence=path)
        else:
            yield failed(
                python.host,
                message=f"NIXL loads another libfabric than that of the EFA installer ({_EFA_LIBFABRIC})",
                evidence=f"libfabric.so.1 => {path}",
                fix=(
                    "put /opt/amazon/efa/lib (or lib64) first in LD_LIBRARY_PATH under `env`, or remove the other "
                    "libfabric; an old one from the distribution knows neither RDMA WRITE nor GPU memory"
                ),
            )

    yield from each_python(context, WITH_VLLM, judge)


NIXL_CHECKS: tuple[Check, ...] = (
    Check(
        id="SW005",
        title="NIXL is installed",
        severity=Severity.ERROR,
        what="NIXL is among the packages of each Python of prefill and decode, and can be imported.",
        why="vLLM's NIXL connectors end the start with `NIXL is not available`.",
        fix=f"Install NIXL {WANTED_NIXL} or newer in that Python.",
        run=_nixl_installed,
        sources=(_CONNECTOR_GUIDE,),
        blocking=True,
    ),
    Check(
        id="SW006",
        title="A NIXL without known faults",
        severity=Severity.WARNING,
        what=(
            f"NIXL is {WANTED_NIXL} or newer. With the plugin LIBFABRIC (EFA), versions before 1.0.0 are an error, and "
            "so are 1.3.0 and 1.3.1, in which small WRITEs never complete."
        ),
        why="Transfers hang without an error, or fail in ways that newer versions do not know.",
        fix=f"Install NIXL {WANTED_NIXL} or newer, the same on every host.",
        run=_nixl_version_fits,
        sources=(
            "https://github.com/ai-dynamo/nixl/issues/1862",
            "https://github.com/vllm-project/vllm/issues/27055",
            _EFA_NIXL_GUIDE,
        ),
    ),
    Check(
        id="SW007",
        title="The same NIXL on prefill and decode",
        severity=Severity.WARNING,
        what=(
            "The version of NIXL is the same on every host of prefill and decode. With LIBFABRIC (EFA) another major "
            "or minor version is an error, else a warning."
        ),
        why=(
            "Both sides exchange connection data in a form of their version: deserialising it fails "
            "(NIXL_ERR_BACKEND), or writes are emulated."
        ),
        fix="Install the same version everywhere.",
        run=_same_nixl,
        sources=(
            "https://github.com/ai-dynamo/nixl/issues/1161",
            "https://github.com/ofiwg/libfabric/pull/10657",
        ),
    ),
    Check(
        id="SW008",
        title="The NIXL plugin of this fabric loads",
        severity=Severity.ERROR,
        what=(
            "The plugins for the backends of the cluster (LIBFABRIC on efa, else UCX, or `transfer.extra.backends`) "
            "are loaded for real in a process of their own; libraries that the loader does not find are named. NIXL's "
            "wheel has neither libfabric nor hwloc nor CUDA. On infiniband and roce UCX's module for RDMA counts too."
        ),
        why=(
            "NIXL logs `Skipping backend registration ... due to the missing plugin` and goes on without it: the "
            "instance then has no way to transfer, or UCX takes TCP."
        ),
        fix="Install the libraries that are missing, in the container image if vLLM runs in one.",
        run=_plugin_loads,
        sources=("https://github.com/vllm-project/vllm/issues/55635", _EFA_NIXL_GUIDE),
        blocking=True,
    ),
    Check(
        id="SW009",
        title="NIXL loads the libfabric of the EFA installer",
        severity=Severity.WARNING,
        what="On efa: the libfabric.so.1 that NIXL's plugin would load lies under /opt/amazon/efa.",
        why=(
            "A distribution's libfabric may lack EFA, RDMA WRITE or GPU memory; a mix of two makes transfers fail "
            "silently or hang at warm-up."
        ),
        fix="Put /opt/amazon/efa/lib first in LD_LIBRARY_PATH, or remove the other one.",
        run=_efa_libfabric,
        sources=(
            "https://github.com/ai-dynamo/dynamo/pull/13005",
            "https://github.com/ai-dynamo/dynamo/issues/12105",
        ),
    ),
)
