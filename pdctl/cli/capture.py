"""``pdctl capture``."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdctl.cli.options import cluster_file, complete_instance, find_instance, load_plan

if TYPE_CHECKING:
    from pdctl.hosts.base import Host
    from pdctl.hosts.fleet import Fleet
    from pdctl.plan import ClusterPlan, InstancePlan
    from pdctl.watch.capture import Archive
    from pdctl.watch.snapshot import Snapshot

_LOG_LINES = 3000
_HTTP_S = 5.0
_LOOK_S = 60.0
_HOST_S = 120.0
_INTERVAL_S = 1.0


@click.command("capture", short_help="Keep the evidence of a stall.")
@click.argument("name", shell_complete=complete_instance)
@cluster_file
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="The archive (.tar.gz) to write.")
def command(name: str, file: Path, output: Path | None) -> None:
    """Collect what is known of instance NAME and of the instances that it exchanges transfers with, in an archive.

    In it: transfers as both sides know them, open alerts, telemetry and metrics of the ranks, ends of logs, states of
    processes and threads, Python stacks where py-spy is installed and allowed, versions, and the plan. Secrets are
    masked; names, addresses and keys of transfers are not. Nothing is changed or paused.

    Exit code: 0 written (index.json in it says what is missing), 3 written, but a host could not be reached.
    """
    from pdctl.hosts.fleet import Fleet
    from pdctl.lifecycle.log_lines import redact
    from pdctl.watch.capture import Archive

    plan = load_plan(file)
    find_instance(plan, name)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    root = f"pdctl-capture-{plan.spec.cluster}-{name}-{stamp}"
    path = output or Path(f"{root}.tar.gz")
    archive = Archive(root, redact=_masking(plan, redact))
    with Fleet(plan.spec) as fleet:
        unreached = _collect(plan, fleet, name, archive)
    archive.write(path)
    for part, why in archive.missing.items():
        click.echo(f"missing: {part}: {why}", err=True)
    click.echo(f"{path} ({path.stat().st_size / 2**20:.1f} MiB, {len(archive.names)} parts)")
    raise click.exceptions.Exit(3 if unreached else 0)


def _masking(plan: ClusterPlan, redact: Callable[[str], str]) -> Callable[[str], str]:
    """What looks like a secret, and the very values of the plan's secrets, as far as they are known here."""
    values = {value for instance in plan.instances for value in instance.secret_env.values() if len(value) >= 4}
    known = sorted(values, key=len, reverse=True)

    def mask(text: str) -> str:
        for value in known:
            text = text.replace(value, "***")
        return redact(text)

    return mask


def _collect(plan: ClusterPlan, fleet: Fleet, name: str, archive: Archive) -> bool:
    """Fill the archive. Returns whether a host could not be reached."""
    from pdctl.errors import HostError, PdctlError
    from pdctl.watch.capture import peers_of

    archive.add_json("plan.json", plan.to_json())
    snapshot = _look(plan, fleet, name, archive)
    own = next(instance for instance in plan.instances if instance.name == name)
    by_host: dict[str, list[InstancePlan]] = {}
    for instance in (own, *peers_of(plan, snapshot, name)):
        by_host.setdefault(instance.host, []).append(instance)

    def ask(host: Host) -> list[tuple[str, str, bool]]:
        parts: list[tuple[str, str, bool]] = []
        for instance in by_host[host.name]:
            parts += _instance_parts(plan, fleet, host, instance, snapshot)
        return parts

    unreached = False
    for host, result in fleet.map(ask, by_host, timeout_s=_HOST_S).items():
        if isinstance(result, PdctlError):
            unreached = unreached or isinstance(result, HostError)
            for instance in by_host[host]:
                archive.lacks(instance.name, result.message)
            continue
        for part, text, had in result:
            if had:
                archive.add(part, text)
            else:
                archive.lacks(part, text)
    return unreached


def _look(plan: ClusterPlan, fleet: Fleet, name: str, archive: Archive) -> Snapshot:
    """Two polls, what they show of the instance and its peers, and the alerts of the whole cluster."""
    from dataclasses import replace

    from pdctl.watch.book import Watchdog
    from pdctl.watch.capture import about, peers_of
    from pdctl.watch.poller import Poller
    from pdctl.watch.recording import snapshot_to_json
    from pdctl.watch.settings import settings_from_spec

    watchdog = Watchdog(replace(settings_from_spec(plan.spec).for_one_look(), close_ticks=1))
    with Poller(plan, fleet, interval_s=_INTERVAL_S) as poller:
        watchdog.look(poller.poll())
        time.sleep(_INTERVAL_S)
        snapshot = poller.poll()
    alerts, _ = watchdog.look(snapshot)
    names = {name, *(peer.name for peer in peers_of(plan, snapshot, name))}
    archive.add_json("alerts.json", [alert.to_json() for alert in alerts])
    archive.add_json("snapshot.json", snapshot_to_json(about(snapshot, names, name)))
    return snapshot


def _instance_parts(
    plan: ClusterPlan, fleet: Fleet, host: Host, instance: InstancePlan, snapshot: Snapshot
) -> list[tuple[str, str, bool]]:
    """Name, text, and whether the text is the part or why there is none."""
    from pdctl.errors import NodeError
    from pdctl.lifecycle.nodes import HttpRequest, Nodes
    from pdctl.watch.capture import LOOK_SCRIPT, PACKAGES

    nodes = Nodes(plan, fleet)
    parts: list[tuple[str, str, bool]] = []
    try:
        log = nodes.log(instance.host, instance.name, lines=_LOG_LINES, offset=None, inode=None, wait_s=0)
        parts.append((f"{instance.name}/log.txt", log.text, True))
    except NodeError as error:
        parts.append((f"{instance.name}/log.txt", error.message, False))
    urls = _urls(plan, instance)
    requests = [HttpRequest("GET", url, timeout_s=_HTTP_S) for url in urls.values()]
    for part, answer in zip(urls, nodes.http(instance.host, requests, parallel=True), strict=True):
        why = answer.error or f"status {answer.status}"
        parts.append((f"{instance.name}/{part}", answer.body if answer.ok else why, answer.ok))
    seen = snapshot.instance(instance.name)
    pids = [] if seen is None else [seen.pid, *(rank.pid for rank in seen.ranks)]
    words = [str(pid) for pid in dict.fromkeys(pids) if pid is not None and pid > 1]
    argv = ["sh", "-c", LOOK_SCRIPT, "pdctl", instance.argv[0], ",".join(PACKAGES), *words]
    looked = host.run(argv, timeout_s=_LOOK_S)
    text = (looked.stdout + looked.stderr).decode(errors="replace")
    return [*parts, (f"{instance.name}/processes.txt", text, True)]


def _urls(plan: ClusterPlan, instance: InstancePlan) -> dict[str, str]:
    """What to read over HTTP, by the name that it gets: the same places that the watch reads."""
    from pdctl.watch.poll_request import host_request

    entries = host_request(plan, instance.host, interval_s=_INTERVAL_S)["instances"]
    entry = next(one for one in entries if one["name"] == instance.name)
    urls = {"metrics.txt": f"http://{_bracketed(entry['metrics_address'])}:{entry['metrics_port']}/metrics"}
    for rank in entry["ranks"]:
        base = f"http://{_bracketed(rank['address'])}:{rank['port']}"
        folder = f"rank-{rank['rank']}"
        urls[f"{folder}/healthz.json"] = f"{base}/healthz"
        urls[f"{folder}/inflight.json"] = f"{base}/transfers?state=inflight&limit=1000"
        urls[f"{folder}/recent.json"] = f"{base}/transfers?state=recent&limit=1000"
        urls[f"{folder}/metrics.txt"] = f"{base}/metrics"
    return urls


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
