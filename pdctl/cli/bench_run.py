"""``pdctl bench run``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pdctl.cli.bench_options import MOST_ROUNDS, LoadWishes, load_options
from pdctl.cli.options import cluster_file, json_output, load_plan


@click.command("run", short_help="Load the running cluster.")
@cluster_file
@click.option(
    "--rounds",
    type=click.IntRange(1, MOST_ROUNDS),
    default=4,
    show_default=True,
    help="How often all loads are measured in turn; the requests are spread over them.",
)
@load_options
@json_output
def command(file: Path, rounds: int, as_json: bool, **options: Any) -> None:
    """Load the running cluster through its router, and tell TTFT, TPOT, and where the time goes.

    The load is made by `vllm bench serve` of a node's own vLLM, with prompts that were never sent before. Launches and
    changes nothing. A sample of the answers is compared with what prefill alone answers: any difference makes the
    bench invalid. Ctrl-C keeps what was measured.
    """
    from pdctl.cli.bench_cluster import Standing, check_lengths, environment, generator_instance, mode_of
    from pdctl.cli.bench_options import make_settings, results_folder
    from pdctl.cli.bench_output import measure
    from pdctl.cli.progress import reporting
    from pdctl.hosts.fleet import Fleet
    from pdctl.lifecycle.nodes import Nodes

    wishes = LoadWishes(**options)
    plan = load_plan(file, require_secrets=True)
    settings = make_settings(wishes, (mode_of(plan),), rounds)
    host = generator_instance(plan, wishes.generator_host)
    with Fleet(plan.spec) as fleet, reporting(quiet=as_json) as display:
        display.step("looking at the cluster")
        check_lengths(Nodes(plan, fleet), plan, settings)
        facts = environment(plan, fleet, host)
        folder = results_folder(wishes, plan)
        launcher = Standing(plan, fleet, display, host, wishes.request_timeout_s)
        measured = measure("run", plan, settings, facts, launcher, folder, display)
    raise click.exceptions.Exit(measured.show(as_json=as_json))
