"""`kvguard status`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from guard.cli.client import Client
from guard.cli.show import at, console, dump, fitting, left, ratio, seconds

ENGINE_COLUMNS = (
    "engine", "backend", "mode", "from", "state", "hook", "poll age>", "req/s>", "hits>", "TTFT p50>", "TTFT p95>",
    "miss p50>", "RTT p50>", "remote*>", "recompute*>", "why",
)  # fmt: skip


OPTIONAL = ("poll age>", "miss p50>", "req/s>", "from", "hits>", "RTT p50>", "TTFT p95>", "recompute*>", "remote*>",
            "TTFT p50>")  # fmt: skip
"""Columns that a narrow terminal goes without, the first ones first."""

HEADLINE_STYLES = {"ok": "green", "departed": "yellow", "harmful": "bold red", "guarded": "cyan", "silent": "bold red"}


def show(client: Client, *, as_json: bool) -> None:
    """Prints the verdict, the switches in force, and a row per engine and backend."""
    offload = client.get("/v1/offload")
    traffic = client.get("/v1/correlation", {"since_seconds": 60})
    drawn = client.get("/v1/picture")
    told, reasons = drawn["headline"], drawn["reasons"]
    if as_json:
        dump({"headline": told, **offload, "traffic": traffic["engines"]})
        return
    out = console()
    out.print(told["title"], style=HEADLINE_STYLES.get(told["state"], "bold"), markup=False)
    out.print(f"  {told['why']}", markup=False)
    simulated = "; SIMULATED traffic" if traffic["simulated"] else ""
    out.print(f"kvguard at {client.endpoint}; without a switch the mode is {offload['default_mode']}{simulated}")
    if offload["overrides"]:
        rows = [
            (item["scope"], item["mode"], "yes" if item["stores"] else "no", left(item["ttl_seconds"]),
             at(item["since"]), item["who"], item["reason"])
            for item in offload["overrides"]
        ]  # fmt: skip
        columns = ("scope", "mode", "stores", "time left", "since", "who", "why")
        out.print(fitting(out, columns, rows, ("stores", "since", "who"), title="Switches"))
    if offload["engines"]:
        rows = engine_rows(offload, traffic, reasons)
        title = "Engines, measured over the last 60 s; * TTFT projected on either road"
        out.print(fitting(out, ENGINE_COLUMNS, rows, OPTIONAL, title=title))
    else:
        out.print("No engine has polled yet. Set KVGUARD_ENDPOINT in vLLM's environment.")


def engine_rows(
    offload: dict[str, Any], traffic: dict[str, Any], reasons: Mapping[str, str] = MappingProxyType({})
) -> list[tuple[Any, ...]]:
    """The rows of the engine table: what is asked of each and why, in the words of `reasons`, and its traffic."""
    measured = {(row["engine_id"], row["backend"]): row for row in traffic["engines"]}
    rows = []
    for row in offload["engines"]:
        seen = measured.get((row["engine_id"], row["backend"]))
        hook = "silent" if row["silent"] else "acknowledged" if row["acknowledged"] else "pending"
        rows.append(
            (row["engine_id"], row["backend"], row["mode"], row["scope"] or "default", row["state"], hook,
             seconds(row["last_poll_age_seconds"]), *_traffic(seen), *_projected(row["projected"]),
             reasons.get(row["reason"], row["reason"]))
        )  # fmt: skip
    return rows


def _projected(projected: dict[str, Any] | None) -> tuple[str, str]:
    return ("-", "-") if projected is None else (seconds(projected["remote"]), seconds(projected["recompute"]))


def _traffic(seen: dict[str, Any] | None) -> tuple[str, ...]:
    if seen is None:
        return ("-",) * 6
    return (
        f"{seen['requests_per_second']:.1f}",
        ratio(seen["hit_share"]),
        seconds(seen["ttft"]["p50"]),
        seconds(seen["ttft"]["p95"]),
        seconds(seen["miss_latency"]["p50"]),
        seconds(seen["network_rtt"]["p50"]),
    )
