"""`kvguard offload`: switch remote KV reads and stores, live."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from guard.cli.errors import FAILED
from guard.cli.options import DEFAULT_ENDPOINT, CaFile, Endpoint, Json, TokenFile, duration

app = typer.Typer(help="Switch remote KV offloading: on, off, auto, observe; clear a switch; see who switched what.",
                  no_args_is_help=True)  # fmt: skip

Scope = Annotated[str, typer.Option(help="fleet, model:NAME, backend:NAME or engine:ID; the narrowest one holds.")]
Reason = Annotated[str, typer.Option(help="Why; it is kept in the history and shown to all.", show_default=False)]
Ttl = Annotated[str | None, typer.Option(help="The switch ends after it: 90s, 10m, 2h, 1d.", show_default=False)]
Wait = Annotated[float, typer.Option(min=0, max=60, help="Seconds to wait until every live engine has applied it.")]
Stores = Annotated[bool, typer.Option(help="Whether KV is still written to the remote tier.")]
Expiry = Annotated[
    Literal["keep", "open"] | None,
    typer.Option(help="What hooks do without kvguard [keep for off, else open].", show_default=False),
]

_HELP = {
    "on": "Read from the remote tier whatever it holds.",
    "off": "Stop reading from the remote tier.",
    "auto": "Let the controller decide.",
    "observe": "Read as `on`, and report what auto would have done.",
}


def _add(mode: str) -> None:
    @app.command(mode, help=_HELP[mode])
    def switch(
        scope: Scope = "fleet",
        reason: Reason = "",
        ttl: Ttl = None,
        stores: Stores = True,
        on_lease_expiry: Expiry = None,
        wait: Wait = 5.0,
        endpoint: Endpoint = DEFAULT_ENDPOINT,
        token_file: TokenFile = None,
        ca_file: CaFile = None,
        as_json: Json = False,
    ) -> None:
        body = {
            "mode": mode,
            "stores": stores,
            "ttl_seconds": duration(ttl) if ttl else None,
            "on_lease_expiry": on_lease_expiry,
            "reason": reason,
        }
        _change("PUT", scope, {"wait": wait}, body, wait, endpoint, token_file, ca_file, as_json)


for _mode in _HELP:
    _add(_mode)


@app.command()
def clear(
    scope: Scope = "fleet",
    reason: Reason = "",
    wait: Wait = 5.0,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Take a switch away: wider switches or the default hold again."""
    params = {"wait": wait, "reason": reason}
    _change("DELETE", scope, params, None, wait, endpoint, token_file, ca_file, as_json)


@app.command()
def history(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, newest first.")] = 20,
    scope: Annotated[str | None, typer.Option(help="Of this scope only.", show_default=False)] = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Show who switched what, when, why and from where, and what the controller did by itself."""
    from guard.cli.client import Client
    from guard.cli.show import at, console, dump, table

    params: dict[str, Any] = {"limit": limit, **({"scope": scope} if scope else {})}
    with Client(endpoint, token_file, ca_file) as client:
        data = client.get("/v1/offload/history", params)
    if as_json:
        dump(data)
        return
    stores = {True: "yes", False: "no", None: ""}
    rows = [
        (at(item["at"]), item["action"], item["scope"], item["mode"] or "", stores[item["stores"]],
         f"{item['who']} ({item['source']})" if item["source"] else item["who"], item["reason"])
        for item in data["switches"]
    ]  # fmt: skip
    console().print(table(("when", "what", "scope", "mode", "stores", "who", "why"), rows))


def _change(
    method: str,
    scope: str,
    params: dict[str, Any],
    body: Any,
    wait: float,
    endpoint: str,
    token_file: Path | None,
    ca_file: Path | None,
    as_json: bool,
) -> None:
    from guard.cli.client import Client, segment
    from guard.cli.show import dump

    with Client(endpoint, token_file, ca_file) as client:
        answer = client.call(method, f"/v1/offload/{segment(scope)}", params=params, body=body, wait=wait)
    if as_json:
        dump(answer)
    else:
        typer.echo(_sentence(answer))
    if answer["pending"] and wait > 0:
        raise typer.Exit(FAILED)


def _sentence(answer: dict[str, Any]) -> str:
    override = answer["override"]
    what = f"{answer['scope']}: {override['mode']}" if override else f"{answer['scope']}: cleared"
    done, late = len(answer["acknowledged"]), answer["pending"]
    if not answer["engines"]:
        return f"{what}; no live engine is in this scope now" + (": it holds for those that come" if override else "")
    text = f"{what}; {done} of {answer['engines']} live engines have applied it"
    if late:
        text += f"; not yet: {', '.join(late[:5])}{' ...' if len(late) > 5 else ''}"
    if answer["shadowed"]:
        text += f"; narrower switches hold for {answer['shadowed']} of their backends"
    return text
