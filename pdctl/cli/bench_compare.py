"""``pdctl bench compare``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdctl.cli.bench_options import MOST_ROUNDS, LoadWishes, load_options
from pdctl.cli.launch_output import boot_timeout
from pdctl.cli.options import cluster_file, file_words, json_output, load_plan
from pdctl.errors import HostUnreachable, PdctlError, UsageError

if TYPE_CHECKING:
    from pdctl.bench.results import Mode, Settings
    from pdctl.cli.bench_cluster import Relaunching
    from pdctl.cli.bench_output import Measured
    from pdctl.hosts.fleet import Fleet
    from pdctl.plan import ClusterPlan


@click.command("compare", short_help="Measure transfer modes side by side.")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="[RESULTS RESULTS]")
@cluster_file
@click.option(
    "--modes",
    metavar="LIST",
    help="pull, push (pdctl's connector), push-upstream (vLLM's own); each is compared with those named before it. "
    "Default: pull,push.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, MOST_ROUNDS),
    default=4,
    show_default=True,
    help="How often every mode has its turn: A B, B A, A B, ...",
)
@click.option("--yes", is_flag=True, help="Do not ask before the cluster is launched anew.")
@click.option("--allow-different", is_flag=True, help="Compare files although model, versions, flags or hosts differ.")
@load_options
@boot_timeout
@json_output
def command(
    files: tuple[Path, ...],
    file: Path,
    modes: str | None,
    rounds: int,
    yes: bool,
    allow_different: bool,
    timeout_s: float,
    as_json: bool,
    **options: Any,
) -> None:
    """Launch the cluster in each mode in turn, load it alike, and compare, with 95 % intervals of every ratio.

    The modes take turns (A B B A ...), so that what drifts meets all alike; a difference inside the noise is called
    that. The whole cluster is launched anew whenever the mode changes, so nobody else should use it meanwhile.
    Afterwards it is as before: running as the cluster file says, or down.

    With two RESULTS files nothing is launched: the second is compared with the first.
    """
    if files:
        from pdctl.cli.bench_files import compare_files

        raise click.exceptions.Exit(compare_files(files, allow_different=allow_different, as_json=as_json))
    from pdctl.bench.settings import parse_modes
    from pdctl.cli.bench_cluster import check_planned_lengths
    from pdctl.cli.bench_options import make_settings

    if allow_different:
        raise UsageError("--allow-different is for files that were measured", hint="give two results.json")
    wishes = LoadWishes(**options)
    plan = load_plan(file, require_secrets=True)
    settings = make_settings(wishes, parse_modes(modes or "pull,push"), rounds)
    check_planned_lengths(plan, settings)
    measured = _measure(plan, settings, wishes, timeout_s, yes=yes, as_json=as_json, file_option=file_words(file))
    raise click.exceptions.Exit(measured.show(as_json=as_json))


def _measure(
    plan: ClusterPlan,
    settings: Settings,
    wishes: LoadWishes,
    boot_timeout_s: float,
    *,
    yes: bool,
    as_json: bool,
    file_option: str,
) -> Measured:
    from pdctl.bench.schedule import turns
    from pdctl.cli.bench_cluster import Relaunching, environment, generator_instance
    from pdctl.cli.bench_options import results_folder
    from pdctl.cli.bench_output import measure, print_launch_failure
    from pdctl.cli.preflight import PreflightFailed, preflight, print_preflight_failure
    from pdctl.cli.progress import reporting
    from pdctl.hosts.fleet import Fleet

    with Fleet(plan.spec) as fleet:
        ran = _runs(plan, fleet, settings)
        launches = sum(turn.relaunch for turn in turns(settings.modes, settings.rounds)) + (1 if ran else 0)
        _ask(plan, launches, ran=ran, yes=yes)
        with reporting(quiet=as_json) as display:
            try:
                preflight(plan, fleet, display)
            except PreflightFailed as error:
                raise click.exceptions.Exit(
                    print_preflight_failure(plan, error.outcome, as_json=as_json, file_option=file_option)
                ) from None
            facts = environment(plan, fleet, generator_instance(plan, wishes.generator_host))
            folder = results_folder(wishes, plan)
            launcher = Relaunching(
                plan,
                fleet,
                settings,
                generator_host=wishes.generator_host,
                request_timeout_s=wishes.request_timeout_s,
                boot_timeout_s=boot_timeout_s,
            )
        measured: Measured | None = None
        left = ""
        try:
            with reporting(quiet=as_json) as display:
                launcher.display = display
                measured = measure("compare", plan, settings, facts, launcher, folder, display)
            # Bringing the cluster back moves the logs of what did not come up out of the way.
            print_launch_failure(plan, measured.outcome.error)
        finally:
            with reporting(quiet=as_json) as display:
                launcher.display = display
                doubtful = measured is None or not measured.outcome.results.complete
                left = _restore(plan, launcher, ran=ran, doubtful=doubtful, file_option=file_option)
            if left and measured is None:
                click.echo(f"warning: {left}", err=True)
        return replace(measured, left=left)


def _runs(plan: ClusterPlan, fleet: Fleet, settings: Settings) -> bool:
    """Whether the cluster runs now, or parts of it.

    Raises:
        HostUnreachable: a host cannot be asked.
        UsageError: it runs, and does not take prompts of such a length.
    """
    from pdctl.cli.bench_cluster import check_lengths
    from pdctl.lifecycle.nodes import Nodes
    from pdctl.lifecycle.status import status

    before = status(plan, fleet)
    for host, reason in before.unreachable.items():
        message = reason.removeprefix(f"{host}: ")
        raise HostUnreachable(host, message, hint="pdctl doctor says why; nothing was launched")
    if before.healthy:
        check_lengths(Nodes(plan, fleet), plan, settings)
    return any(one.state not in ("absent", "exited") for one in before.instances)


def _ask(plan: ClusterPlan, launches: int, *, ran: bool, yes: bool) -> None:
    """Make sure that the user wants this: a running cluster does not serve while it is launched anew."""
    if yes:
        return
    what = f"this launches the cluster {plan.spec.cluster} {launches} times"
    if not sys.stdin.isatty():
        raise UsageError(f"{what}, and nobody is there to be asked", hint="give --yes if that is wanted")
    running = "; it runs now, and whoever uses it will lose requests" if ran else ""
    click.confirm(f"{what}{running}. Go on?", abort=True, err=True)


def _restore(plan: ClusterPlan, launcher: Relaunching, *, ran: bool, doubtful: bool, file_option: str) -> str:
    """Leave the cluster as it was before.

    Args:
        plan: as the cluster file says.
        launcher: what has launched it in other modes.
        ran: whether it ran before.
        doubtful: whether something went wrong, so that it must be looked at even if it runs in the right mode.
        file_option: `` -f FILE`` for the commands that are suggested.

    Returns:
        how it was left, if that is not as it was before.
    """
    from pdctl.cli.bench_cluster import mode_of

    own: Mode = mode_of(plan)
    if not launcher.touched:
        return ""
    try:
        if not ran:
            launcher.display.step("taking the cluster down, as it was before")
            launcher.take_down()
        elif launcher.running != own or (doubtful and not launcher.healthy()):
            launcher.display.step(f"launching it as the cluster file says ({own})")
            launcher.launch(own)
    except KeyboardInterrupt:
        return (
            f"interrupted: the cluster was not brought back to how it was, and parts of it may run or be down: "
            f"pdctl status{file_option} shows it, pdctl down{file_option} and pdctl up{file_option} bring it back"
        )
    except PdctlError as error:
        return f"the cluster could not be brought back to how it was: {error.message} (pdctl status{file_option})"
    return ""
