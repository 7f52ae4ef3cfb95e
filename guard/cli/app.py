"""The commands of `kvguard`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from guard import __version__
from guard.cli import offload
from guard.cli.errors import FAILED, USAGE, fail
from guard.cli.options import DEFAULT_ENDPOINT, CaFile, Endpoint, Json, TokenFile

app = typer.Typer(
    help="Sees, explains and guards remote KV-cache offloading in vLLM.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(offload.app, name="offload")

Config = Annotated[Path | None, typer.Option("--config", help="TOML file.", show_default=False)]


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].", show_default=False)] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one [8420].", show_default=False)] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Directory of the ledger.", show_default=False)] = None,
    config: Config = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.", show_default=False)] = None,
) -> None:
    """Run the service until SIGTERM or Ctrl-C. Every key is also KVGUARD_SERVE_*; see: kvguard config."""
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


@app.command()
def status(
    endpoint: Endpoint = DEFAULT_ENDPOINT, token_file: TokenFile = None, ca_file: CaFile = None, as_json: Json = False
) -> None:
    """Show the switches in force and what every engine does."""
    from guard.cli import status as view
    from guard.cli.client import Client

    with Client(endpoint, token_file, ca_file) as client:
        view.show(client, as_json=as_json)


@app.command()
def explain(
    request: Annotated[str, typer.Argument(help="Request id, vLLM's internal id, or trace id.")],
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Explain one request: where its time to first token went, and why."""
    from guard.cli import explain as view
    from guard.cli.client import Client

    with Client(endpoint, token_file, ca_file) as client:
        view.show(client, request, as_json=as_json)


@app.command()
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


@app.command()
def demo(
    port: Annotated[int, typer.Option(help="Port of the service; 0 takes a free one.")] = 0,
    duration: Annotated[float | None, typer.Option(help="Stop after so many seconds.", show_default=False)] = None,
) -> None:
    """Run the service with simulated traffic and watch it, without vLLM."""
    from guard.cli import demo as view

    view.run(port, duration)


@app.command()
def version(as_json: Json = False) -> None:
    """Show the version."""
    if as_json:
        import platform

        from guard.cli.show import dump
        from guard.semconv import SCHEMA

        facts: dict[str, Any] = {"version": __version__, "schema": SCHEMA, "python": platform.python_version()}
        dump(facts)
    else:
        typer.echo(f"kvguard {__version__}")
