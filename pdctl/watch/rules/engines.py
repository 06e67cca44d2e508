"""Rules on hosts, instances and writer threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pdctl.watch.alerts import Severity, Symptom
from pdctl.watch.rules.codes import CODES
from pdctl.watch.rules.evidence import Evidence, count, listed, seconds, without_name
from pdctl.watch.snapshot import InstanceView, RankView
from pdctl.watch.wording import plain

_GONE = ("exited", "zombie", "absent")
_TEXT = 200
_SILENT_POLLS = 6


def host_unreachable(evidence: Evidence) -> Iterator[Symptom]:
    """E003: a host does not answer any more."""
    for host in evidence.now.hosts:
        if not host.error or evidence.fresh(host.age_s):
            continue
        there = [one for one in evidence.now.instances if one.host == host.name]
        ages = [age for one in there for age in (one.process_age_s, one.age_s, *(rank.age_s for rank in one.ranks))]
        if any(evidence.fresh(age) for age in ages):
            # It answers; only its own figures cannot be read.
            continue
        names = tuple(one.name for one in there)
        since = "it has not answered yet" if host.age_s is None else f"its last answer is {seconds(host.age_s)} old"
        yield CODES["E003"].symptom(
            host.name,
            f"{host.name} cannot be reached ({without_name(host.error, host.name)}); {since}. On it: "
            f"{listed(names) or 'nothing'}",
            f"ssh {host.name}; if that hangs, look at the host's console and network. Run pdctl doctor --only SSH,NET",
            instances=names,
            host=host.name,
        )


def engine_down(evidence: Evidence) -> Iterator[Symptom]:
    """E001: an instance has ended, or its health check fails; with what its log says."""
    unreachable = {host.name for host in evidence.now.hosts if host.error}
    for instance in evidence.now.instances:
        gone = instance.process in _GONE
        if instance.host in unreachable and not (gone and evidence.fresh(instance.process_age_s)):
            # Nobody knows; if it stays so, it is E003.
            continue
        ill = instance.healthy is False or (instance.healthy is None and bool(instance.health_error))
        if not gone and not ill:
            continue
        restart = f"pdctl restart {instance.name}"
        severity = Severity.CRITICAL
        if gone:
            what = {
                "exited": "its process has ended",
                "zombie": "its process is a zombie: it has ended, and its parent has not noticed",
                "absent": "it is not started",
            }[str(instance.process)]
            step = f"pdctl logs {instance.name}, then {restart}"
            if instance.process == "absent":
                step = "pdctl up starts what does not run"
        elif instance.process == "stopped":
            what = f"its process is stopped by a signal (SIGSTOP) or a debugger{_pid(instance.pid)}"
            step = f"On {instance.host}: kill -CONT {instance.pid or 'PID'}; who stopped it?"
        else:
            what = f"its health check fails: {without_name(instance.health_error, instance.name) or 'no reason given'}"
            if instance.stopped:
                what += f"; stopped by a signal: {plain(listed(instance.stopped))}"
            step = f"pdctl logs {instance.name}; if it does not recover, {restart}"
            if instance.ranks and all(rank.age_s is None for rank in instance.ranks):
                severity = Severity.WARNING
                what += "; none of its ranks has answered yet, so it may still be starting"
                step = f"pdctl logs {instance.name} shows how far it has come"
        diagnosis = f". Its log: {plain(instance.diagnosis, 400)}" if instance.diagnosis else ""
        yield CODES["E001"].symptom(
            instance.name,
            f"{instance.name} is down: {what}{diagnosis}",
            step,
            instances=(instance.name,),
            host=instance.host,
            severity=severity,
        )


def restarted(evidence: Evidence) -> Iterator[Symptom]:
    """E002: a new process or engine since the last snapshot."""
    if len(evidence.history) < 2:
        return
    former_snapshot = evidence.history[-2]
    for instance in evidence.now.instances:
        former = former_snapshot.instance(instance.name)
        if former is None or not _is_new(former, instance):
            continue
        pids = f" (process {former.pid} -> {instance.pid})" if former.pid and former.pid != instance.pid else ""
        yield CODES["E002"].symptom(
            instance.name,
            f"{instance.name} has restarted{pids}; transfers that were in flight with the former one are lost",
            f"If nobody meant to: pdctl logs {instance.name} (the former log is kept) says why it ended",
            instances=(instance.name,),
            host=instance.host,
        )


def _is_new(former: InstanceView, present: InstanceView) -> bool:
    if present.restarts > former.restarts:
        return True
    if present.process != "running":
        return False
    if former.pid is not None and present.pid is not None and former.pid != present.pid:
        return True
    engines = {rank.rank: rank.engine_id for rank in former.ranks if rank.engine_id}
    return any(rank.engine_id and engines.get(rank.rank, rank.engine_id) != rank.engine_id for rank in present.ranks)


def metrics_silent(evidence: Evidence) -> Iterator[Symptom]:
    """E004: the engine is healthy, and its metrics, or what a rank tells besides its health, cannot be read."""
    yield from _by_rank(evidence, "E004", _partly_silent)
    for instance in evidence.now.instances:
        if not instance.error or not instance.healthy or evidence.fresh(instance.age_s):
            continue
        since = "never read" if instance.age_s is None else f"{seconds(instance.age_s)} old"
        yield CODES["E004"].symptom(
            instance.name,
            f"{instance.name} answers its health check, but its metrics are {since}: "
            f"{without_name(instance.error, instance.name)}",
            f"Requests go on; what is shown of them is old. curl {instance.url}/metrics",
            instances=(instance.name,),
            host=instance.host,
        )


def _partly_silent(evidence: Evidence, instance: InstanceView, rank: RankView) -> tuple[str, str] | None:
    if not rank.error or not evidence.fresh(rank.age_s):
        return None
    former = [snapshot.instance(instance.name) for snapshot in evidence.history[-_SILENT_POLLS:]]
    same = [one for view in former if view is not None for one in view.ranks if one.rank == rank.rank]
    # A busy rank may miss some polls.
    if len(same) < _SILENT_POLLS or not all(one.error for one in same):
        return None
    return (
        f"telemetry tells its health, but not all else ({without_name(rank.error, f'{instance.name} rank {rank.rank}')}"
        f"), for {_SILENT_POLLS} polls: its transfers are not judged",
        f"pdctl logs {instance.name}; is {instance.host} out of CPU?",
    )


def watch_degraded(evidence: Evidence) -> Iterator[Symptom]:
    """E005: the watch does not see all, or is late."""
    now, limit = evidence.now, 2 * evidence.settings.interval_s
    reasons = []
    # Transfers that do not fit into the picture are the youngest, and miss nothing. A rank's list that is cut does.
    cut = {f"{one.name} rank {rank.rank}": rank.unlisted for one in now.instances for rank in one.ranks}
    if any(cut.values()):
        names = listed(name for name, unlisted in cut.items() if unlisted)
        reasons.append(f"{count(sum(cut.values()), 'transfer')} in flight were not listed by {names}")
    if now.poll_s > limit:
        reasons.append(f"a poll took {seconds(now.poll_s)}, expected under {seconds(limit)}")
    if reasons:
        yield CODES["E005"].symptom(
            "watch",
            "pdctl watch does not see everything in time: " + "; ".join(reasons),
            "Watch with a longer --interval, or from a machine nearer to the cluster",
        )


def writer_dead(evidence: Evidence) -> Iterator[Symptom]:
    """W001: the process lives, its writer thread does not."""
    yield from _by_rank(evidence, "W001", _dead)


def _dead(evidence: Evidence, instance: InstanceView, rank: RankView) -> tuple[str, str] | None:
    if rank.writer != "dead" or not evidence.fresh(rank.age_s):
        return None
    error = f": {plain(rank.last_error, _TEXT)}" if rank.last_error else ""
    return (
        f"writer thread is dead while the process{_pid(rank.pid)} lives{error}",
        f"It does not come back by itself, and no transfer moves: pdctl restart {instance.name}; its log has the "
        "traceback",
    )


def writer_stuck(evidence: Evidence) -> Iterator[Symptom]:
    """W002: no beat; the operation it is in and since when."""
    yield from _by_rank(evidence, "W002", _stuck)


def _stuck(evidence: Evidence, instance: InstanceView, rank: RankView) -> tuple[str, str] | None:
    age, limit = rank.heartbeat_age_s, evidence.settings.stuck_s
    if rank.writer == "dead" or not evidence.fresh(rank.age_s) or age is None or age < limit:
        return None
    if rank.operation:
        since = seconds(age if rank.operation_age_s is None else rank.operation_age_s)
        return (
            f"writer thread is stuck in nixl.{plain(rank.operation, 60)} for {since}; no beat for {seconds(age)}, "
            f"expected every 500 ms",
            f"NIXL waits for the network or a peer. On {instance.host}: py-spy dump --pid {rank.pid or 'PID'}; then "
            f"pdctl restart {instance.name}",
        )
    return (
        f"writer thread has not beaten for {seconds(age)} outside of NIXL, expected every 500 ms",
        f"Is {instance.host} out of CPU? On it: py-spy dump --pid {rank.pid or 'PID'}",
    )


def rank_silent(evidence: Evidence) -> Iterator[Symptom]:
    """W003: telemetry does not answer; with the state of the process."""
    yield from _by_rank(evidence, "W003", _silent)


def _silent(evidence: Evidence, instance: InstanceView, rank: RankView) -> tuple[str, str] | None:
    # An error of one poll is nothing; a reading that is old without one, for whatever reason, is.
    if evidence.fresh(rank.age_s) or (rank.age_s is None and not rank.error):
        return None
    if rank.age_s is None and instance.healthy is not True:
        # Not there yet: its health check says so.
        return None
    since = "has never answered" if rank.age_s is None else f"has not answered for {seconds(rank.age_s)}"
    error = f" ({without_name(rank.error, f'{instance.name} rank {rank.rank}')})" if rank.error else ""
    # A rank is a child of the main process: one may be stopped while the other runs.
    process, pid, whose = (
        (rank.process, rank.pid, "its") if rank.process else (instance.process, instance.pid, "the instance's main")
    )
    state = {
        "running": f"{whose} process{_pid(pid)} is running",
        "stopped": f"{whose} process{_pid(pid)} is stopped by a signal (SIGSTOP) or a debugger",
        "zombie": f"{whose} process{_pid(pid)} is a zombie: it has ended, and its parent has not noticed",
        "exited": f"{whose} process{_pid(pid)} is gone",
        "absent": "it is not started",
    }.get(process or "", "the state of its process is not known")
    step = {
        "running": f"On {instance.host}: ps -o stat= -p {rank.pid or 'PID'} (T: stopped), then py-spy dump --pid "
        f"{rank.pid or 'PID'}; is the telemetry port closed or taken? pdctl logs {instance.name}",
        "stopped": f"On {instance.host}: kill -CONT {pid or 'PID'}; who stopped it?",
        "absent": "pdctl up starts what does not run",
    }.get(process or "", f"pdctl logs {instance.name}, then pdctl restart {instance.name}")
    if instance.stopped and process != "stopped":
        state += f"; stopped by a signal: {plain(listed(instance.stopped))}"
        step = f"On {instance.host}: kill -CONT the stopped process; who stopped it?"
    return f"telemetry {since}{error}; {state}", step


def writer_errors(evidence: Evidence) -> Iterator[Symptom]:
    """W004: the writer survives exceptions."""
    yield from _by_rank(evidence, "W004", _errors)


def _errors(evidence: Evidence, instance: InstanceView, rank: RankView) -> tuple[str, str] | None:
    grown = evidence.growth(instance, rank, lambda one: one.errors)
    if not grown:
        return None
    return (
        f"writer thread survived {count(grown, 'exception')} within {seconds(evidence.window_s)}, the last: "
        f"{plain(rank.last_error, _TEXT) or 'not told'}",
        f"pdctl logs {instance.name} has each kind once with its traceback; transfers of that moment may have failed",
    )


def _by_rank(
    evidence: Evidence, code: str, judge: Callable[[Evidence, InstanceView, RankView], tuple[str, str] | None]
) -> Iterator[Symptom]:
    """One symptom for each rank, or one for the instance if all its ranks have it."""
    for instance in evidence.now.instances:
        found = [(rank, told) for rank in instance.ranks if (told := judge(evidence, instance, rank)) is not None]
        if found and len(found) == len(instance.ranks):
            rank, (what, step) = found[0]
            who = instance.name if len(found) == 1 else f"{instance.name}: all {len(found)} ranks; rank {rank.rank}"
            found, subjects = found[:1], [(instance.name, who)]
        else:
            subjects = [(f"{instance.name}/rank {rank.rank}", f"{instance.name} rank {rank.rank}") for rank, _ in found]
        for (subject, who), (_, (what, step)) in zip(subjects, found, strict=True):
            yield CODES[code].symptom(subject, f"{who}: {what}", step, instances=(instance.name,), host=instance.host)


def _pid(pid: int | None) -> str:
    return f" {pid}" if pid is not None else ""
