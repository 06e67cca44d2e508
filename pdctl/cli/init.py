"""``pdctl init``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from pdctl.cli.options import DEFAULT_FILE


def _presets() -> list[str]:
    from pdctl.presets import preset_names

    return preset_names()


@click.command("init", short_help="Write a commented cluster file.")
@click.option("--preset", default=None, help="Which preset to start from; --list shows them.")
@click.option("--list", "list_presets", is_flag=True, help="List the presets and end.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=DEFAULT_FILE, show_default=True, help="- for stdout."
)
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Fill in a value of the preset (model=...)."
)
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
def command(preset: str | None, list_presets: bool, output: Path, settings: tuple[str, ...], force: bool) -> None:
    """Write a commented cluster file from a preset, ready to be edited."""
    from pdctl.errors import UsageError
    from pdctl.presets import preset_text

    names = _presets()
    if list_presets:
        for name in names:
            click.echo(name)
        return
    if preset is None:
        raise click.UsageError(f"choose a preset with --preset: {', '.join(names)}")
    if preset not in names:
        raise click.BadParameter(f"no preset {preset!r}; there are: {', '.join(names)}", param_hint="--preset")
    values: dict[str, str] = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator or not key:
            raise click.BadParameter(f"{setting!r} is not KEY=VALUE", param_hint="--set")
        values[key] = value
    text = preset_text(preset, values)
    if str(output) == "-":
        click.echo(text, nl=False)
        return
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
    try:
        with os.fdopen(os.open(output, flags, 0o644), "w", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise UsageError(f"{output} exists", hint="--force overwrites it, -o names another file") from None
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from None
    click.echo(f"wrote {output} (preset {preset}). Edit it, then: pdctl up --dry-run -f {output}")
