"""``pdctl completion``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from pdctl.cli.main import cli


@click.command("completion", short_help="Print the shell completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of a shell.

    \b
        bash:  pdctl completion bash > ~/.local/share/bash-completion/completions/pdctl
        zsh:   pdctl completion zsh > "${fpath[1]}/_pdctl"
        fish:  pdctl completion fish > ~/.config/fish/completions/pdctl.fish
    """
    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(cli, {}, "pdctl", "_PDCTL_COMPLETE").source())
