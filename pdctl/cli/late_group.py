"""A group of commands whose modules are imported when they run, so that ``--help`` is instant."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping

import click


class LateGroup(click.Group):
    """A group that knows its commands' names and one-line helps without importing them.

    Args:
        late: by name the module, or ``module:attribute`` if the command is not called ``command`` there, and the help.
    """

    def __init__(self, *args: object, late: Mapping[str, tuple[str, str]], **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._late = late

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the help."""
        del ctx
        return list(self._late)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command, or None if there is none of that name."""
        del ctx
        if cmd_name not in self._late:
            return None
        module, _, name = self._late[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name or "command")
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the words begin with; suggests the nearest if there is none."""
        name = args[0] if args else ""
        if name and name not in self._late and not name.startswith("-"):
            near = difflib.get_close_matches(name, self._late, n=1)
            raise click.UsageError(f"no command {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in the group's help."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._late.items()])
