"""The commands of `kvguard`."""

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from guard import __version__
from guard.cli import experiment, offload, probe, probes
from guard.cli.errors import USAGE, fail
from guard.cli.options import DEFAULT_ENDPOINT, CaFile, Endpoint, Json, TokenFile
from guard.cli.serve import config, serve
from guard.cli.sweep import sweep

_HELP: Final = """Sees, explains and guards remote KV-cache offloading in vLLM.

`kvguard serve` is the service; the hook inside vLLM sends to it (`KVGUARD_ENDPOINT`). The other commands ask that
service, or need nothing at all. `kvguard demo` shows everything without vLLM; the console is at the service's address.
"""
_EPILOG: Final = """**Exit status** 0 done, 1 it failed or something is wrong, 2 wrong usage or settings.

**Environment** `KVGUARD_ENDPOINT`, `KVGUARD_TOKEN_FILE`, `KVGUARD_CA_FILE` stand in for --endpoint, --token-file and
--ca-file; `KVGUARD_SERVE_*` are the settings of the service (`kvguard config`); `NO_COLOR` turns colours off.

**Output** Tables on standard output, `--json` for machines with the API's field names; what goes wrong, and logs, on
standard error. `kvguard completion bash` prints the shell's completion.
"""

app = typer.Typer(
    help=_HELP,
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    add_completion=False,  # it is a command of its own
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(offload.app, name="offload")
app.command("experiment")(experiment.experiment)
probes.app.command(probes.DEFAULT_COMMAND)(probe.measure)
app.add_typer(probes.app, name="probe")
app.command()(serve)


@app.command()
def status(
    endpoint: Endpoint = DEFAULT_ENDPOINT, token_file: TokenFile = None, ca_file: CaFile = None, as_json: Json = False
) -> None:
    """Is remote offloading helping or hurting, and why; the switches in force; what every engine does.

    One screen. The first line is the verdict that the console shows too; measured and projected figures say which they
    are. Exit status 1 when the service cannot be asked.

        kvguard status
        kvguard status --json | jq .headline
    """
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
    """Explain one request: where its time to first token went, what was decided, and why.

    Takes any of its ids; a request with several choices has an entry for each. Requests stay for the window of the
    service (`window_seconds`, 10 minutes).

        kvguard explain cmpl-7f3a9c
    """
    from guard.cli import explain as view
    from guard.cli.client import Client

    with Client(endpoint, token_file, ca_file) as client:
        view.show(client, request, as_json=as_json)


@app.command()
def inflection(
    model: Annotated[str | None, typer.Option(help="Only this model.", show_default=False)] = None,
    backend: Annotated[str | None, typer.Option(help="Only this backend.", show_default=False)] = None,
    class_: Annotated[str | None, typer.Option("--class", help="Only this class; all is the pool.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also classes that stand on the pool.")] = False,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Show at which RTT TTFT departs, where offload stops paying, and how sure that is.

    kvguard inflection --backend lmcache-mp/resp --all
    """
    from guard.cli import inflection as view
    from guard.cli.client import Client

    with Client(endpoint, token_file, ca_file) as client:
        view.show(client, model=model, backend=backend, class_=class_, everything=everything, as_json=as_json)


@app.command()
def advise(
    model: Annotated[str | None, typer.Option(help="Only this model.", show_default=False)] = None,
    backend: Annotated[str | None, typer.Option(help="Only this backend.", show_default=False)] = None,
    rtt_ms: Annotated[float | None, typer.Option(min=0.0, help="What if the RTT were so many ms.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Length of the prompts in question.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests that run at once on an engine.")] = None,
    sla_seconds: Annotated[float | None, typer.Option(min=0.0, help="Bound on TTFT.")] = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Say whether offload is right here: go remote, stay local, or measure first; and by which rules.

    kvguard advise --prompt-tokens 16000 --concurrency 8 --sla-seconds 2
    kvguard advise --rtt-ms 1.5
    """
    from guard.cli import advise as view
    from guard.cli.client import Client

    rtt = None if rtt_ms is None else rtt_ms / 1e3
    with Client(endpoint, token_file, ca_file) as client:
        view.show(
            client, model=model, backend=backend, rtt=rtt, prompt=prompt_tokens, concurrency=concurrency,
            sla=sla_seconds, as_json=as_json,
        )  # fmt: skip


@app.command()
def doctor(
    command: Annotated[
        list[str] | None, typer.Argument(help="vLLM's command line, after --.", show_default=False)
    ] = None,
    pid: Annotated[
        int | None,
        typer.Option(help="A running vLLM, by process id: its command line and environment.", show_default=False),
    ] = None,
    python: Annotated[str, typer.Option(help="vLLM's interpreter, where it is not this one.", show_default=False)] = "",
    engine: Annotated[
        str, typer.Option(help="URL of a running vLLM: asks /version and /metrics.", show_default=False)
    ] = "",
    endpoint: Annotated[str, typer.Option(help="URL of the service [KVGUARD_ENDPOINT].", show_default=False)] = "",
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    offline: Annotated[bool, typer.Option("--offline", help="Ask neither service nor engine.")] = False,
    as_json: Json = False,
) -> None:
    """Find what would keep the hook from working: packages, environment, vLLM's options, service, a running engine.

    Looks at the environment that it runs in, so run it where vLLM starts (it works there without kvguard's other
    dependencies), or point it at a vLLM with --pid. Exit status: 0 no problem, 1 a problem, 2 wrong usage.

        kvguard doctor -- vllm serve MODEL --kv-transfer-config '{"kv_connector": ...}'
        kvguard doctor --pid 4711 --engine http://127.0.0.1:8000
    """
    from guard.cli.doctor.report import run
    from guard.errors import ConfigError

    try:
        code = run(
            command or (), pid=pid, python=python, engine=engine, endpoint=endpoint, token_file=token_file,
            ca_file=ca_file, network=not offline, as_json=as_json,
        )  # fmt: skip
    except ConfigError as error:
        fail(str(error), code=USAGE)
    raise typer.Exit(code)


@app.command()
def analyze(
    place: Annotated[str, typer.Argument(help="history_dir of a service, a Parquet file, or a URL that polars reads.")],
    before: Annotated[
        str | None, typer.Option(help="Day to compare with, e.g. 2026-12-01 (UTC).", show_default=False)
    ] = None,
    after: Annotated[str | None, typer.Option(help="Day to look at [the last one].", show_default=False)] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many of the slowest requests.")] = 10,
    as_json: Json = False,
) -> None:
    """Ask the history of requests: what got slower between two days, the slowest, what hits were worth by length.

    Exit code 0: nothing got slower; 1: something did, or the history cannot be read; 2: wrong usage.
    """
    from guard.cli import analyze as view

    view.show(place, before, after, limit, as_json=as_json)


app.command()(config)


@app.command()
def demo(
    port: Annotated[int, typer.Option(help="Port of the service; 0 takes a free one.")] = 0,
    duration: Annotated[float | None, typer.Option(help="Stop after so many seconds.", show_default=False)] = None,
    engines: Annotated[
        int | None, typer.Option(min=1, max=64, help="Simulated engines [2].", show_default=False)
    ] = None,
    script: Annotated[
        str | None, typer.Option(help="Scenario (TOML), or one that comes with kvguard [demo].", show_default=False)
    ] = None,
    speed: Annotated[float, typer.Option(min=0.1, max=20.0, help="How much faster the script runs.")] = 1.0,
) -> None:
    """Run the service with simulated traffic and watch it, without vLLM.

    The script that comes with kvguard tells the story by itself in two minutes: a good link, it degrades, TTFT leaves
    its baseline, the guard throttles, the link heals.
    """
    from guard.cli import demo as view

    view.run(port, duration, engines=engines, script=script, speed=speed)


@app.command()
def simulate(
    scenario: Annotated[
        str | None, typer.Argument(help="Scenario file (TOML), or one that comes with kvguard.", show_default=False)
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Mooncake .jsonl, Azure .csv or kvguard's history.", show_default=False)
    ] = None,
    rtt: Annotated[str, typer.Option(help="Idle RTTs to try: 50us,200us,1ms,5ms.", show_default=False)] = "",
    policy: Annotated[str, typer.Option(help="Policies, comma-separated, or all.")] = "all",
    engines: Annotated[int | None, typer.Option(help="How many engines.", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all that is random.", show_default=False)] = None,
    sla: Annotated[str | None, typer.Option(help="TTFT that counts as good, e.g. 2s.", show_default=False)] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Picture to write; needs kvguard[report].", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate a workload under several policies: would remote KV pay here, and at which RTT no longer?"""
    from guard.cli import simulate as view

    view.run(scenario, trace, rtt, policy, engines, seed, sla, as_json=as_json, plot=plot)


app.command()(sweep)


@app.command()
def completion(shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="Which shell.")]) -> None:
    """Print the completion script of a shell.

    Put it where the shell looks for it; a new shell then completes commands, options and their values.

        kvguard completion bash > ~/.local/share/bash-completion/completions/kvguard
        kvguard completion zsh > "${fpath[1]}/_kvguard"
        kvguard completion fish > ~/.config/fish/completions/kvguard.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # not re-exported by name

    typer.echo(get_completion_script(prog_name="kvguard", complete_var="_KVGUARD_COMPLETE", shell=shell))


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
