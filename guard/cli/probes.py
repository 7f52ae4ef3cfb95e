"""`kvguard probe`: what is not the name of a command is a target (`kvguard probe redis://host`)."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

DEFAULT_COMMAND = "target"


class TargetOrCommand(TyperGroup):
    """A group whose unknown first word is handed, with all that follows, to the command `target`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the name of the default command in front where no command is named."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=TargetOrCommand, no_args_is_help=True, help="Measure the round-trip time to a target.")


@app.command()
def serve(
    rdma: Annotated[str, typer.Option(help="RDMA device whose memory may be read, e.g. mlx5_0.")],
    bind: Annotated[str, typer.Option(help="Address of the control port.")] = "0.0.0.0",  # noqa: S104 - for other hosts
    port: Annotated[int, typer.Option(min=0, max=65535, help="Control port; iWARP sessions use those behind.")] = 18515,
    sessions: Annotated[int, typer.Option(min=1, max=256, help="Probers served at a time, a process each.")] = 32,
    gid_index: Annotated[
        int | None, typer.Option(min=0, max=255, help="GID (RoCE) [RoCEv2 of the peer's family].", show_default=False)
    ] = None,
    interpreter: Annotated[
        str, typer.Option(help="Python that has pyverbs [this one, else /usr/bin/python3].", show_default=False)
    ] = "",
) -> None:
    """Be the passive target of RDMA probes until SIGTERM or Ctrl-C."""
    from guard.cli.rdma_target import serve as run

    run(rdma, bind, port, sessions, gid_index, interpreter)
