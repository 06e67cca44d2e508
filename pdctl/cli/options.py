"""Options that several commands share, and the way from them to a plan."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from pdctl.plan import ClusterPlan, InstancePlan
    from pdctl.spec import ClusterSpec

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_FILE = "cluster.yaml"


def cluster_file(function: F) -> F:
    """``-f/--file``: the cluster file."""
    return _file_option("-f", "--file")(function)


def cluster_file_long(function: F) -> F:
    """``--file`` alone, for ``logs``, whose ``-f`` means follow, as everywhere."""
    return _file_option("--file")(function)


def _file_option(*names: str) -> Callable[[F], F]:
    return click.option(
        *names,
        "file",
        type=click.Path(path_type=Path),
        default=DEFAULT_FILE,
        show_default=True,
        envvar="PDCTL_FILE",
        help="The cluster file (also from the environment variable PDCTL_FILE).",
    )


def json_output(function: F) -> F:
    """``--json``: the machine form on stdout."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")(function)


def load_plan(file: Path, *, require_secrets: bool = False) -> ClusterPlan:
    """Read the cluster file and plan it.

    Args:
        file: the cluster file.
        require_secrets: whether every secret must be in this environment. Only what starts instances needs them.

    Raises:
        ClusterFileError: the file, or the plan that follows from it, is wrong.
        UsageError: there is no such file.
    """
    from pdctl.spec import load

    return plan_spec(load(file, os.environ), require_secrets=require_secrets)


def plan_spec(spec: ClusterSpec, *, require_secrets: bool) -> ClusterPlan:
    """Plan a cluster file that was read; see :func:`load_plan`.

    Raises:
        ClusterFileError: there can be no plan.
    """
    from pdctl.connector_package import connector_digest, connector_files
    from pdctl.plan import make_plan

    return make_plan(
        spec,
        environ=os.environ,
        connector_digest=connector_digest(connector_files()),
        require_secrets=require_secrets,
    )


def find_instance(plan: ClusterPlan, name: str) -> InstancePlan:
    """The instance of that name.

    Raises:
        click.BadParameter: there is none; the message lists what there is.
    """
    import difflib

    names = [instance.name for instance in plan.instances]
    for instance in plan.instances:
        if instance.name == name:
            return instance
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise click.BadParameter(f"no instance {name!r} in this cluster (it has: {', '.join(names)}){hint}")


def complete_instance(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Shell completion of instance names; silent when there is no usable cluster file."""
    del param
    from pdctl.errors import PdctlError

    try:
        plan = load_plan(Path(ctx.params.get("file") or os.environ.get("PDCTL_FILE") or DEFAULT_FILE))
    except PdctlError:
        return []
    return [instance.name for instance in plan.instances if instance.name.startswith(incomplete)]


def file_words(file: Path) -> str:
    """`` -f FILE`` to put behind a command that is suggested, or nothing when the file is the default one."""
    return "" if str(file) == DEFAULT_FILE else f" -f {shlex.quote(str(file))}"


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout, keys in the order given."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2)
    click.echo(text)
