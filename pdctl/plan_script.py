"""The launch script of an instance, from ``templates/launch.sh.j2``. Pure but for reading that template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template


def launch_script(*, cluster: str, instance: str, argv: Sequence[str]) -> str:
    """Write the script: it goes to its own folder, reads ``./env`` and becomes the server.

    The environment is not in it, so that it holds no secret. Its placeholders are those of ``argv``.
    """
    command = " ".join(quote(word) for word in argv)
    return _template().render(cluster=cluster, instance=instance, command=command)


def quote(word: str) -> str:
    """Quote a word for sh, always: what replaces a placeholder later may need quotes where the placeholder does not."""
    return "'" + word.replace("'", "'\"'\"'") + "'"


@cache
def _template() -> Template:
    # Autoescaping is for HTML; the command is quoted for sh.
    environment = Environment(
        loader=FileSystemLoader(_folder()),
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701
        keep_trailing_newline=True,
    )
    return environment.get_template("launch.sh.j2")


def _folder() -> Path:
    """Templates of the installed package, or of the source tree."""
    installed = Path(__file__).parent / "templates"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "templates"
