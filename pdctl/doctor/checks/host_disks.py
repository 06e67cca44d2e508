"""HOST005 and 006: room on the file systems that matter. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from pdctl.doctor.checks.per_host import all_hosts, each_host
from pdctl.doctor.checks.wording import GIB, MIB, size
from pdctl.doctor.context import Context
from pdctl.doctor.facts import DiskFacts, HostFacts
from pdctl.doctor.findings import Check, Result, Severity, failed, passed, skipped

HOME_LEAST = 200 * MIB
HOME_WANTED = 5 * GIB


def _home(context: Context, facts: HostFacts, disks: tuple[DiskFacts, ...]) -> Iterable[Result]:
    del context
    disk = next((one for one in disks if one.purpose == "home"), None)
    if disk is None:
        yield skipped(facts.host, message="not checked: the home folder's file system was not reported")
        return
    seen = f"{disk.path}: {size(disk.free_bytes)} of {size(disk.total_bytes)} free"
    if not disk.writable:
        yield failed(
            facts.host,
            message="the home folder is not writable",
            evidence=seen,
            fix="pdctl keeps state and logs in ~/.pdctl: give the login a home that it owns and that is not read-only",
        )
    elif disk.free_bytes < HOME_WANTED:
        low = disk.free_bytes < HOME_LEAST
        yield failed(
            facts.host,
            severity=Severity.ERROR if low else Severity.WARNING,
            message=f"{'hardly any' if low else 'little'} room where state and logs go: {size(HOME_WANTED)} are wanted",
            evidence=seen,
            fix="free space there: old logs and caches are the usual culprits (`du -xh ~ | sort -h | tail`)",
        )
    else:
        yield passed(facts.host, message="room for state and logs", evidence=seen)


def _weights_room(context: Context, facts: HostFacts, disks: tuple[DiskFacts, ...]) -> Iterable[Result]:
    host, model = facts.host, facts.model
    if context.spec.model.startswith("/"):
        return
    if model is None:
        yield skipped(host, message=f"not checked: {facts.why_missing('model')}")
        return
    if model.found == "folder" or (model.found == "cache" and model.weights_complete):
        yield passed(host, message="the weights are there", evidence=model.path)
        return
    disk = next((one for one in disks if one.purpose == "hf_cache"), None)
    disk = disk or next((one for one in disks if one.purpose == "home"), None)
    others = [other.model.weights_bytes for other in context.facts.values() if other.model is not None]
    wanted = max((one for one in (model.weights_bytes, *others) if one is not None), default=None)
    if disk is None:
        yield skipped(host, message="not checked: the file system of the Hugging Face cache was not reported")
    elif not disk.writable:
        yield failed(
            host,
            message="the weights are not there yet, and the Hugging Face cache is not writable",
            evidence=disk.path,
            fix="set HF_HOME in `env` to a folder that the login may write, or copy the model and give its path",
        )
    elif wanted is None:
        yield skipped(
            host,
            message="the weights are not there yet, and their size is not known",
            evidence=f"{disk.path}: {size(disk.free_bytes)} free",
            fix=f"`pdctl up` downloads them; or do it before: `hf download {context.spec.model}`",
        )
    elif disk.free_bytes < wanted:
        yield failed(
            host,
            message=f"no room for the weights: {size(wanted)} are wanted",
            evidence=f"{disk.path}: {size(disk.free_bytes)} free",
            fix="set HF_HOME in `env` to a larger disk (local NVMe), or free space",
        )
    else:
        yield passed(host, message="room for the weights", evidence=f"{disk.path}: {size(disk.free_bytes)} free")


CHECKS: tuple[Check, ...] = (
    Check(
        id="HOST005",
        title="Room for state and logs",
        severity=Severity.ERROR,
        what=f"The file system of the login's home: must be writable; below {size(HOME_LEAST)} free is an error, below "
        f"{size(HOME_WANTED)} a warning.",
        why="pdctl keeps state and logs in ~/.pdctl; a full disk stops the launch, or the log just when it is needed.",
        fix="Free space, or give the login a larger home.",
        run=each_host("disks", _home, hosts=all_hosts),
        blocking=True,
    ),
    Check(
        id="HOST006",
        title="Room for the model's weights",
        severity=Severity.ERROR,
        what="Where the weights are not on the host yet: whether the Hugging Face cache is writable and has room for "
        "them (their size as another host has them).",
        why="vLLM downloads for minutes and then ends with `No space left on device`.",
        fix="Set HF_HOME in `env` to a large local disk, or copy the model there and give its path as `model`.",
        run=each_host("disks", _weights_room),
        sources=("https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables",),
    ),
)
