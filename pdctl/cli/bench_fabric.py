"""``pdctl bench fabric``."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
from click.core import ParameterSource

from pdctl.bench.fabric_plan import DEFAULT_BLOCK_SIZES, DEFAULT_DESCRIPTORS
from pdctl.cli.options import cluster_file, json_output, load_plan, print_json

if TYPE_CHECKING:
    from pdctl.bench.fabric import FabricPair, FabricPoint, FabricResults, HostVersions
    from pdctl.bench.fabric_plan import Shape
    from pdctl.bench.results import Results
    from pdctl.cli.progress import Display
    from pdctl.doctor.facts import HostFacts
    from pdctl.doctor.probe_plan import BlockShape, Pair
    from pdctl.doctor.probe_sweep import MeasuredPoint, SweepResult
    from pdctl.errors import PdctlError
    from pdctl.hosts.fleet import Fleet
    from pdctl.plan import ClusterPlan

_Value = TypeVar("_Value")

_FACTS_TIMEOUT_S = 15.0
_INTERRUPTED = 130
_INTERRUPTED_WORDS = "interrupted"
_LOG_LINES = 10


def _block_sizes(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int | None, ...]:
    from pdctl.bench.fabric_plan import parse_block_sizes

    return _parsed(parse_block_sizes, ctx, param, value)


def _descriptors(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    from pdctl.bench.fabric_plan import parse_descriptors

    return _parsed(parse_descriptors, ctx, param, value)


def _parsed(
    parse: Callable[[str], tuple[_Value, ...]], ctx: click.Context, param: click.Parameter, value: str
) -> tuple[_Value, ...]:
    try:
        return parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


@dataclass(frozen=True)
class _Wishes:
    """What the command line asks for."""

    pairs: int | None
    named: tuple[Pair, ...]
    block_sizes: tuple[int | None, ...]
    descriptors: tuple[int, ...]
    repeats: int
    timeout_s: float
    command: str


@click.command("fabric", short_help="Measure what the fabric between prefill and decode can do.")
@cluster_file
@click.option("--pairs", type=click.IntRange(1, 4096), help="Most pairs of prefill and decode hosts to measure.")
@click.option("--pair", "named", multiple=True, metavar="PREFILL:DECODE", help="Measure these two hosts (repeatable).")
@click.option(
    "--block-sizes",
    metavar="SIZES",
    default=DEFAULT_BLOCK_SIZES,
    show_default=True,
    callback=_block_sizes,
    help="Bytes of each descriptor (K, M: 1024, 1024 K); `model`: what one layer has of the model's KV block.",
)
@click.option(
    "--descriptors",
    metavar="NUMBERS",
    default=DEFAULT_DESCRIPTORS,
    show_default=True,
    callback=_descriptors,
    help="Descriptors of each WRITE. Nothing larger than 256 MiB is written.",
)
@click.option(
    "--repeats", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Most timed WRITEs of each point."
)
@click.option(
    "--results",
    "results_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A results.json of `pdctl bench`: say what share of the fabric its transfers reach.",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Also write the figures to FILE (JSON).")
@json_output
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(5, 3600), default=300, show_default=True, help="Seconds for a pair."
)
@click.pass_context
def command(
    ctx: click.Context,
    file: Path,
    pairs: int | None,
    named: tuple[str, ...],
    block_sizes: tuple[int | None, ...],
    descriptors: tuple[int, ...],
    repeats: int,
    results_file: Path | None,
    out: Path | None,
    as_json: bool,
    timeout_s: float,
) -> None:
    """Write over NIXL from prefill into decode's memory, in many sizes, and say what bandwidth and latency that gives.

    Every byte that arrives is verified. Works with or without the cluster running; beside a running one the figures
    share the fabric with it. Pairs are measured one after another. Ctrl-C keeps what was measured.

    \b
        pdctl bench fabric                                   the model's blocks and 16 KiB to 4 MiB
        pdctl bench fabric --pair p1:d3 --block-sizes 64K --descriptors 1,16,256
        pdctl bench fabric --results bench/results.json      what share of it do transfers reach?

    Exit codes: 0 all was measured, 1 a pair failed, 2 usage, 3 a host could not be reached, 130 interrupted.
    """
    from pdctl.bench.fabric import write_fabric
    from pdctl.bench.results import read_results
    from pdctl.cli.progress import reporting
    from pdctl.hosts.fleet import Fleet

    if pairs is not None and named:
        raise click.UsageError("--pairs and --pair exclude each other: name the pairs, or say how many")
    # What is wrong with files is said before minutes are spent.
    bench = None if results_file is None else read_results(results_file)
    if out is not None and not out.parent.is_dir():
        raise click.BadParameter(f"there is no folder {out.parent}", ctx, param_hint="--out")
    plan = load_plan(file)
    wishes = _Wishes(pairs, _named_pairs(plan, named), block_sizes, descriptors, repeats, timeout_s, _command_line(ctx))
    with Fleet(plan.spec) as fleet, reporting(quiet=False, keep_steps=False) as display:
        measured, code = _Run(fleet, plan, display, wishes).run()
    if out is not None:
        write_fabric(out, measured)
    _print(measured, bench, as_json=as_json)
    if out is not None:
        click.echo(f"wrote {out}", err=True)
    ctx.exit(code)


def _named_pairs(plan: ClusterPlan, named: Sequence[str]) -> tuple[Pair, ...]:
    from pdctl.errors import UsageError

    writers = list(dict.fromkeys(instance.host for instance in plan.prefill))
    targets = list(dict.fromkeys(instance.host for instance in plan.decode))
    found: list[Pair] = []
    for text in named:
        prefill, colon, decode = text.partition(":")
        if not colon:
            raise UsageError(f"--pair {text}: two hosts belong there", hint=f"for example {writers[0]}:{targets[0]}")
        for role, host, hosts in (("prefill", prefill, writers), ("decode", decode, targets)):
            if host not in hosts:
                raise UsageError(f"--pair {text}: no {role} host {host!r}", hint=f"{role} has {', '.join(hosts[:20])}")
        found.append((prefill, decode))
    return tuple(dict.fromkeys(found))


def _command_line(ctx: click.Context) -> str:
    """The command with the options that were given; none of them is a secret."""
    words = ["pdctl", "bench", "fabric"]
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = ctx.params[name]
        option = max(parameter.opts, key=len)
        if value is True:
            words.append(option)
        elif name in ("block_sizes", "descriptors"):
            words += [option, ",".join("model" if one is None else str(one) for one in value)]
        else:
            for one in value if isinstance(value, tuple) else (value,):
                words += [option, str(one)]
    return shlex.join(words)


class _Run:
    """One measurement of all pairs."""

    def __init__(self, fleet: Fleet, plan: ClusterPlan, display: Display, wishes: _Wishes) -> None:
        self._fleet = fleet
        self._plan = plan
        self._display = display
        self._wishes = wishes
        self._pairs: list[FabricPair] = []
        self._points: list[FabricPoint] = []
        self._code = 0
        self._why: list[str] = []

    def run(self) -> tuple[FabricResults, int]:
        """What was measured, and the exit code."""
        from pdctl import __version__
        from pdctl.bench.fabric import SCHEMA, FabricResults
        from pdctl.doctor.outcome import count

        created = time.time()
        spec = self._plan.spec
        facts = self._facts()
        pairs = self._choose(facts)
        beside = running_instances(self._plan, facts)
        if beside:
            self._display.note(
                f"the cluster is running ({count(beside, 'instance')}): figures share the fabric with it"
            )
        try:
            for number, pair in enumerate(pairs, 1):
                self._display.step(f"pair {number} of {len(pairs)}: {pair[0]} -> {pair[1]}")
                if self._measure(pair, facts):
                    break
        except KeyboardInterrupt:
            self._interrupted()
        hosts = dict.fromkeys(host for pair in pairs for host in pair)
        return FabricResults(
            schema=SCHEMA,
            kind="fabric",
            cluster=spec.cluster,
            model=spec.model,
            accelerator=spec.accelerator,
            fabric=spec.fabric,
            created_unix=created,
            ended_unix=time.time(),
            command=self._wishes.command,
            pdctl=__version__,
            repeats=self._wishes.repeats,
            hosts=tuple(host_versions(self._plan, host, facts) for host in hosts),
            pairs=tuple(self._pairs),
            points=tuple(self._points),
            beside_cluster=beside,
            complete=not self._why,
            incomplete_because="; ".join(dict.fromkeys(self._why)),
        ), self._code

    def _facts(self) -> dict[str, HostFacts]:
        from pdctl.doctor.collect import collect
        from pdctl.doctor.outcome import count

        self._display.step(f"collecting facts of {count(len(self._plan.hosts), 'host')}")
        facts, unreachable = collect(self._fleet, self._plan, timeout_s=_FACTS_TIMEOUT_S)
        of_pairs = {host for pair in self._wishes.named for host in pair} or {
            instance.host for instance in (*self._plan.prefill, *self._plan.decode)
        }
        for host, error in unreachable.items():
            if host in of_pairs:
                self._fail(error)
        return facts

    def _fail(self, error: PdctlError) -> None:
        self._code = max(self._code, error.exit_code)
        self._why.append(str(error))
        self._display.warning(f"{error}{f' (hint: {error.hint})' if error.hint else ''}")

    def _choose(self, facts: Mapping[str, HostFacts]) -> tuple[Pair, ...]:
        from pdctl.doctor.outcome import count
        from pdctl.doctor.probe_plan import choose_pairs

        if self._wishes.named:
            return tuple(pair for pair in self._wishes.named if set(pair) <= set(facts))
        plan = self._plan
        writers, targets = ([one.host for one in role] for role in (plan.prefill, plan.decode))
        choice = choose_pairs(writers, targets, facts, self._wishes.pairs)
        if choice.left_out:
            self._display.note(f"left out: {count(len(choice.left_out), 'other pair')} (--pairs, --pair)")
        return choice.probed

    def _measure(self, pair: Pair, facts: Mapping[str, HostFacts]) -> bool:
        """Measure one pair. Whether the user had enough of it."""
        from pdctl.bench.fabric_plan import make_shapes
        from pdctl.doctor.outcome import count
        from pdctl.doctor.probe_plan import block_shape
        from pdctl.doctor.probe_sweep import POINT_BYTES, SweepPoint, sweep
        from pdctl.errors import UsageError

        block = block_shape(self._plan.spec, "prefill", facts[pair[0]])
        if not block.known:
            block = block_shape(self._plan.spec, "decode", facts[pair[1]])
        try:
            shapes, too_large = make_shapes(
                self._wishes.block_sizes, self._wishes.descriptors, block.piece_bytes, POINT_BYTES
            )
        except ValueError as error:
            raise UsageError(str(error)) from None
        begin = time.monotonic()
        result = sweep(
            self._fleet,
            self._plan,
            pair,
            [SweepPoint(shape.block_bytes, shape.descriptors) for shape in shapes],
            repeats=self._wishes.repeats,
            timeout_s=self._wishes.timeout_s,
            listener=_Shown(self._display, pair, len(shapes)),
        )
        self._display.progress(
            f"{pair[0]} -> {pair[1]}",
            "ready" if result.ok else "failed",
            f"{len(result.points)} of {len(shapes)} points",
            time.monotonic() - begin,
        )
        self._points += [fabric_point(pair, measured) for measured in result.points]
        self._pairs.append(fabric_pair(result, block if None in self._wishes.block_sizes else None, too_large))
        if result.interrupted:
            self._interrupted()
        elif not result.ok:
            self._code = max(self._code, 3 if result.unreachable else 1)
            self._why.append(f"{pair[0]} -> {pair[1]} failed")
            for line in result.log.splitlines()[-_LOG_LINES:]:
                self._display.note(f"  {line}")
        elif result.left_out:
            self._why.append(f"{count(len(result.left_out), 'point')} of {pair[0]} -> {pair[1]} left out")
        return result.interrupted

    def _interrupted(self) -> None:
        self._code = _INTERRUPTED
        self._why.append(_INTERRUPTED_WORDS)


class _Shown:
    """Shows how the sweep of a pair goes on."""

    def __init__(self, display: Display, pair: Pair, points: int) -> None:
        self._display = display
        self._name = f"{pair[0]} -> {pair[1]}"
        self._points = points
        self._begin = time.monotonic()

    def stage(self, stage: str) -> None:
        """A step has begun that is no point."""
        self._display.progress(self._name, stage, "", time.monotonic() - self._begin)

    def point(self, number: int, measured: MeasuredPoint) -> None:
        """A point was measured."""
        from pdctl.bench.fabric import size_text, speed_text, time_text

        point = measured.point
        took = f"{time_text(measured.p50_s)}, {speed_text(point.size / measured.p50_s)}"
        text = f"{point.descriptors} x {size_text(point.block_bytes)}"
        detail = f"{number} of {self._points}: {took}"
        self._display.progress(self._name, text, detail, time.monotonic() - self._begin)


def fabric_point(pair: Pair, measured: MeasuredPoint) -> FabricPoint:
    """A point of the probe, as the bench keeps it."""
    from pdctl.bench.fabric import FabricPoint

    return FabricPoint(
        prefill=pair[0],
        decode=pair[1],
        block_bytes=measured.point.block_bytes,
        descriptors=measured.point.descriptors,
        writes=measured.writes,
        p50_s=measured.p50_s,
        p99_s=measured.p99_s,
        min_s=measured.min_s,
        transport=measured.transport,
    )


def fabric_pair(result: SweepResult, block: BlockShape | None, too_large: Sequence[Shape]) -> FabricPair:
    """What else the probe said of a pair, as the bench keeps it."""
    from pdctl.bench.fabric import FabricPair, LeftOut, ModelBlock
    from pdctl.doctor.probe_sweep import POINT_BYTES

    left_out = [LeftOut(point.block_bytes, point.descriptors, because) for point, because in result.left_out]
    because = f"more than {POINT_BYTES >> 20} MiB in one WRITE"
    last = result.points[-1] if result.points else None
    return FabricPair(
        prefill=result.pair[0],
        decode=result.pair[1],
        error=result.error,
        stage="interrupted" if result.interrupted else result.stage,
        unreachable=result.unreachable,
        backend=result.backend,
        memory=result.memory,
        transport=last.transport if last else "",
        transport_evidence=last.transport_evidence if last else "",
        notification_s=result.notification_s,
        model_block=None if block is None else ModelBlock(block.layers, block.piece_bytes, block.known),
        left_out=(*left_out, *(LeftOut(shape.block_bytes, shape.descriptors, because) for shape in too_large)),
        notes=result.notes,
    )


def running_instances(plan: ClusterPlan, facts: Mapping[str, HostFacts]) -> int | None:
    """How many instances of this cluster run on hosts that told their facts; None if none says anything of ports."""
    ports = [(name, port) for name, host in facts.items() for port in host.ports or ()]
    if not ports:
        return None
    ours = {(name, port.port) for name, port in ports if port.ours}
    instances = (*plan.prefill, *plan.decode)
    return sum(1 for one in instances if any((one.host, use.port) in ours for use in one.ports))


def host_versions(plan: ClusterPlan, host: str, facts: Mapping[str, HostFacts]) -> HostVersions:
    """Versions of what the plan's Python on a host has."""
    from pdctl.bench.fabric import HostVersions

    python = next(one.argv[0] for one in (*plan.prefill, *plan.decode) if one.host == host)
    interpreter = facts[host].interpreter(python) if host in facts else None
    return HostVersions(host) if interpreter is None else HostVersions(host, interpreter.versions)


def _print(measured: FabricResults, bench: Results | None, *, as_json: bool) -> None:
    from rich.text import Text

    from pdctl.bench.fabric import fabric_json
    from pdctl.bench.fabric_compare import against_transfers
    from pdctl.bench.fabric_lines import best_line
    from pdctl.cli.bench_fabric_tables import fabric_tables
    from pdctl.cli.console import OutputConsole

    compared = [] if bench is None else against_transfers(measured, bench)
    if as_json:
        print_json({**fabric_json(measured), **({} if bench is None else {"comparison": compared})})
        return
    console = OutputConsole(highlight=False)
    if not console.is_terminal:
        console = OutputConsole(highlight=False, width=120, no_color=True)
    for part in fabric_tables(measured):
        # Lines of text are left to the terminal, so that a copied one is whole.
        console.print(part, soft_wrap=isinstance(part, Text))
    for line in (best_line(measured), *compared):
        if line:
            console.print(line, markup=False, soft_wrap=True)
