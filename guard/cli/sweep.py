"""`kvguard sweep`: what it can be asked; `sweep_run` does it."""

from pathlib import Path
from typing import Annotated

import typer

from guard.cli.errors import FAILED, USAGE, fail
from guard.cli.options import DEFAULT_ENDPOINT, CaFile, Endpoint, Json, TokenFile


def sweep(
    engine: Annotated[str, typer.Option(help="URL of the vLLM server to measure.")] = "http://127.0.0.1:8000",
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    rtts: Annotated[str, typer.Option(help="Round-trip times to add: 0,200us,1ms,10ms.")] = "0,1ms,2ms,5ms,10ms,20ms",
    concurrency: Annotated[str, typer.Option(help="Clients that ask at the same time.")] = "1,4,8",
    injector: Annotated[
        str,
        typer.Option(
            help="What adds it: proxy:LISTEN_HOST:PORT=STORE_HOST:PORT, netem:DEVICE, or command:PROGRAM ... {us}; "
            "none measures one tier, 0."
        ),
    ] = "none",
    probe: Annotated[
        str, typer.Option(help="Measures RTT meanwhile: PROBER=TARGET, such as resp=10.0.0.5:6379.", show_default=False)
    ] = "",
    reset: Annotated[
        list[str] | None,
        typer.Option(
            help="URL to POST to so that local tiers forget; a JSON body may follow a space. May be repeated.",
            show_default="ENGINE/reset_prefix_cache",
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompts.")] = 2000,
    output_tokens: Annotated[int, typer.Option(help="Length of the answers.")] = 4,
    requests: Annotated[int, typer.Option(help="Requests per cell.")] = 8,
    repeats: Annotated[int, typer.Option(help="Blocks in which every tier comes once.")] = 2,
    local: Annotated[bool, typer.Option(help="Measure the engine's own cache too.")] = True,
    seed: Annotated[int, typer.Option(help="The same seed gives the same prompts and order.")] = 0,
    scope: Annotated[str, typer.Option(help="What is switched: fleet or engine:ID.")] = "fleet",
    out: Annotated[Path, typer.Option(help="Directory of results and report; a sweep cut off goes on there.")] = Path(
        "kvguard-sweep"
    ),
    api_key_file: Annotated[Path | None, typer.Option(help="File with vLLM's API key.", show_default=False)] = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Measure where remote offload stops paying: latency tiers x concurrency, against recomputing, on a live engine.

    Needs vLLM with the hook, kvguard, an injector in front of the store, and an engine that nobody else uses. Reads are
    switched off and on for its time. Interrupted or done, the round-trip time and the switch are put back.
    """
    from guard.cli import sweep_run
    from guard.cli.client import read_token, trusted
    from guard.errors import ConfigError, SweepError
    from guard.sweep.plan import Plan, parse_rtt

    try:
        plan = Plan(
            rtts=tuple(parse_rtt(text) for text in rtts.split(",")),
            concurrencies=tuple(int(text) if text.isdecimal() else 0 for text in concurrency.split(",")),
            requests=requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens, repeats=repeats, local=local,
            seed=seed,
        )  # fmt: skip
        curves = sweep_run.run(
            plan, engine_url=engine.rstrip("/"), service_url=endpoint.partition(",")[0].rstrip("/"),
            token=read_token(token_file) if token_file else "", verify=trusted(ca_file),
            api_key=read_token(api_key_file) if api_key_file else "",
            scope=scope, injector_text=injector, probe=probe,
            resets=tuple((url, body) for url, _, body in (text.partition(" ") for text in reset or ())), out=out,
        )  # fmt: skip
    except ConfigError as error:
        fail(str(error), "see: kvguard sweep --help", code=USAGE)
    except SweepError as error:
        fail(str(error), f"what was measured is kept in {out}; the same command goes on there", code=FAILED)
    except KeyboardInterrupt:
        fail("interrupted; the road and the switch are put back", f"the same command goes on in {out}", code=FAILED)
    sweep_run.show(out, curves, as_json=as_json)
