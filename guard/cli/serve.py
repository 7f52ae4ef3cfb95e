"""`kvguard serve` and `kvguard config`: runs the service, and shows what it would run with."""

from pathlib import Path
from typing import Annotated

import typer

from guard.cli.errors import FAILED, USAGE, fail
from guard.cli.options import Json

Config = Annotated[Path | None, typer.Option("--config", help="TOML file.", show_default=False)]


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].", show_default=False)] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one [8420].", show_default=False)] = None,
    state_dir: Annotated[  # text: an empty one is refused, as a path it would be the working directory
        str | None, typer.Option(metavar="PATH", help="Directory of the ledger.", show_default=False)
    ] = None,
    config: Config = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.", show_default=False)] = None,
) -> None:
    """Run the service until SIGTERM or Ctrl-C; SIGHUP reads the tokens again.

    Every setting is also a key of the TOML file and a variable KVGUARD_SERVE_*; `kvguard config` shows all of them.
    Loopback by default; any other address needs tokens. The console is at the same address.

        kvguard serve --state-dir /var/lib/kvguard
        kvguard serve --host 0.0.0.0 --config /etc/kvguard.toml
    """
    from guard.errors import ConfigError, LedgerError
    from guard.service.server import serve as run
    from guard.settings import load

    try:
        loaded = load({"host": host, "port": port, "state_dir": state_dir, "log_level": log_level}, config)
        run(loaded.settings)
    except ConfigError as error:
        fail(str(error), "kvguard config --help explains where settings come from", code=USAGE)
    except LedgerError as error:
        fail(str(error), "give another directory with --state-dir", code=FAILED)


def config(config: Config = None, as_json: Json = False) -> None:
    """Show the settings of `kvguard serve` as they are in force here, and where each comes from.

    A flag beats the environment (KVGUARD_SERVE_*), that beats the file (TOML), that the default. Secrets are files:
    only their paths are shown. SIGHUP reads tokens_file again; everything else needs a restart.
    """
    from guard.cli.show import console, dump, table
    from guard.errors import ConfigError
    from guard.settings import load

    try:
        rows = load({}, config).rows()
    except ConfigError as error:
        fail(str(error), code=USAGE)
    if as_json:
        dump({row["key"]: {"value": row["value"], "source": row["source"]} for row in rows})
    else:
        columns = ("key", "value", "source", "what it is")
        console().print(table(columns, [(row["key"], row["value"], row["source"], row["description"]) for row in rows]))
