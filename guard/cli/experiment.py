"""`kvguard experiment`: remote reads on and off in turn on live traffic, and the difference with its interval."""

import random
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from guard.cli.errors import USAGE, ChangedError, fail
from guard.cli.options import DEFAULT_ENDPOINT, CaFile, Endpoint, Json, TokenFile, duration
from guard.cli.show import console, dump, seconds, table
from guard.cli.signals import end_as_ctrl_c
from guard.control.switchback import Block, Effect, effect, order

if TYPE_CHECKING:  # its library is slow to load, and help needs none of it
    from guard.cli.client import Client

MARGIN = 60.0
"""Seconds that a switch outlives its block: if this command dies the switch ends by itself."""


def experiment(
    scope: Annotated[str, typer.Option(help="fleet, model:NAME, backend:NAME or engine:ID.")] = "fleet",
    pairs: Annotated[int, typer.Option(min=3, max=500, help="Pairs of blocks, one on and one off each.")] = 10,
    block: Annotated[str, typer.Option(help="Length of a block: 60s, 5m.")] = "60s",
    washout: Annotated[str, typer.Option(help="Start of each block that does not count.")] = "10s",
    seed: Annotated[int | None, typer.Option(help="Fixes the order of the blocks.", show_default=False)] = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    as_json: Json = False,
) -> None:
    """Compare remote reads on and off on live traffic by a switchback; Ctrl-C puts back what was in force.

    A switch of somebody else's ends it, and stands. Without a live engine in the scope it does not begin.

    Requests of the off blocks recompute: choose a scope that may. The answer is mean TTFT with reads over without,
    by what was asked for when a request arrived, with a 95 % interval over pairs of blocks.
    """
    length, wash = duration(block), duration(washout)
    if wash >= length:
        fail("--washout must be shorter than --block", code=USAGE)
    from guard.cli.client import Client

    end_as_ctrl_c()
    with Client(endpoint, token_file, ca_file) as client:
        before, began = _in_force(client, scope), time.monotonic()
        _need_engines(client, scope)
        blocks: list[Block] = []
        etag = before["etag"] if before else ""
        ours, reason = False, ""
        try:
            for number, (pair, arm) in enumerate(order(pairs, random.Random(seed))):  # noqa: S311
                reason = f"experiment, block {number + 1} of {2 * pairs}"
                answer = _switch(client, scope, arm, length + MARGIN, reason, etag)
                etag, ours = answer["override"]["etag"], True
                _check(answer)
                if not as_json:
                    typer.echo(f"block {number + 1} of {2 * pairs}: {arm} for {length:g} s", err=True)
                time.sleep(length)
                blocks.append(_measured(client, scope, pair, arm, length - wash))
        except KeyboardInterrupt:
            # What was measured so far is told. It may have come while a switch was under way.
            there = _in_force(client, scope)
            if there and there["reason"] == reason:
                etag, ours = there["etag"], True
        except ChangedError:
            ours = False
            typer.echo(f"stopped: somebody else has switched {scope}, which stands", err=True)
        finally:
            if ours:
                _put_back(client, scope, before, time.monotonic() - began, etag)
    _show(effect(blocks), blocks, scope, as_json=as_json)


def _in_force(client: "Client", scope: str) -> dict[str, Any] | None:
    overrides = client.get("/v1/offload")["overrides"]
    return next((item for item in overrides if item["scope"] == scope), None)


def _need_engines(client: "Client", scope: str) -> None:
    """Ends the command where nobody would follow the switches; nothing has been switched then."""
    kind, _, name = scope.partition(":")
    key = {"model": "model", "backend": "backend", "engine": "engine_id"}.get(kind)
    rows = client.get("/v1/offload")["engines"]
    if not any(not row["silent"] and (key is None or row[key] == name) for row in rows):
        fail(f"no live engine is in scope {scope}: there is nothing to compare", "which there are: kvguard status")


def _switch(client: "Client", scope: str, mode: str, ttl: float, reason: str, etag: str) -> Any:
    from guard.cli.client import segment

    body = {"mode": mode, "ttl_seconds": ttl, "reason": reason, "on_lease_expiry": "open"}
    return client.call("PUT", f"/v1/offload/{segment(scope)}", params={"wait": 5}, body=body, wait=5, etag=etag)


def _check(answer: Any) -> None:
    if answer["pending"]:
        fail(f"not applied by {', '.join(answer['pending'][:5])}", "see: kvguard status")
    if answer["shadowed"]:
        fail("a switch of a narrower scope holds for some engines", "clear it, or choose its scope")


def _put_back(client: "Client", scope: str, before: dict[str, Any] | None, elapsed: float, etag: str) -> None:
    from guard.cli.client import segment

    path = f"/v1/offload/{segment(scope)}"
    left = before["ttl_seconds"] - elapsed if before and before["ttl_seconds"] is not None else None
    try:
        if before is None or (left is not None and left <= 0.0):
            client.call("DELETE", path, params={"reason": "experiment over"}, etag=etag)
            return
        keys = ("mode", "stores", "on_lease_expiry", "reason")
        client.call("PUT", path, body={**{key: before[key] for key in keys}, "ttl_seconds": left}, etag=etag)
    except ChangedError:
        typer.echo(f"not put back: somebody else has switched {scope}, which stands", err=True)


def _measured(client: "Client", scope: str, pair: int, arm: str, span: float) -> Block:
    kind, _, name = scope.partition(":")
    params = {"since_seconds": span, **({kind: name} if name else {})}
    groups = client.get("/v1/correlation", params)["groups"]
    n = sum(group["n"] for group in groups)
    total = sum(group["n"] * group["ttft"]["mean"] for group in groups if group["n"])
    return Block(pair=pair, arm=arm, n=n, ttft=total / n if n else None)


def _show(found: Effect, blocks: list[Block], scope: str, *, as_json: bool) -> None:
    if as_json:
        dump(
            {
                "scope": scope, "verdict": found.verdict, "ratio": found.ratio, "low": found.low, "high": found.high,
                "pairs": found.pairs, "requests": found.requests, "reason": found.reason, "source": "measured",
                "blocks": [{"pair": one.pair, "arm": one.arm, "n": one.n, "ttft": one.ttft} for one in blocks],
            }
        )  # fmt: skip
        return
    out = console()
    rows = [(str(one.pair + 1), one.arm, str(one.n), seconds(one.ttft)) for one in blocks]
    out.print(table(("pair>", "reads", "requests>", "mean TTFT>"), rows, title=f"Switchback on {scope}"))
    if found.ratio is None:
        out.print(f"insufficient data: {found.reason}")
        return
    out.print(
        f"TTFT with remote reads is {found.ratio:.3f} x that without, 95 % interval {found.low:.3f} to {found.high:.3f}"
        f" ({found.pairs} pairs, {found.requests} requests, measured): remote reads: {found.verdict}"
    )
