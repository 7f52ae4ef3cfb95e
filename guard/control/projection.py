"""From fitted cells to the coefficients of a directive, and to the projected TTFT of both roads. Pure.

The gate in the hook and the numbers on the screen come from the same `guard.costs.Costs`.
"""

import math
from collections.abc import Mapping
from typing import Final

from guard.control.shapes import ALL, Coefficients, Evidence, Projection, Read
from guard.costs import ClassCost, Comparison, Costs, Traffic
from guard.estimate.shapes import FEW, Cell
from guard.slo.objective import Objective

HOLD: Final = 0.1
"""Coefficients that moved by less than this ratio are not sent anew: hooks are not woken for noise."""

_PART: Final = 0.1
"""Part of a usual read below which a cost per byte is not looked at for its own sake: one that is 0 but for noise moves
by more than any ratio of itself."""

_DIGITS: Final = 4
_LEAST_SPREAD: Final = 0.5
_LOOKUPS: Final = 20
"""Fewer lookups than this do not tell how often one of a class hits; the pool stands for it, or nobody."""


def coefficients(evidence: Evidence, pace: float = 1.0) -> Coefficients | None:
    """The coefficients at the RTT of now; None while a model is missing. `pace` scales what a read takes."""
    cell = evidence.cells.get(ALL)
    if cell is None or cell.prefill is None or cell.fetch is None or cell.reference_matched <= 0.0:
        return None
    if min(cell.fetch.n, cell.fetch.n if cell.lookup is None else cell.lookup.n) < FEW:
        return None  # the estimator knows no part by size yet: a large read would look slow
    rtt = rtt_of(evidence, cell)
    fetch, lookup, prefill = cell.fetch, cell.lookup, cell.prefill
    numbers = {"bytes_per_token": cell.bytes_per_token}
    shared = fetch.seconds_per_inflight_byte * evidence.sharing_bytes
    numbers["seconds"] = (fetch.t0 + fetch.kappa * rtt + shared) * pace
    numbers["per_byte"] = (fetch.seconds_per_byte + fetch.kappa_per_byte * rtt) * pace
    numbers["per_inflight_byte"] = fetch.seconds_per_inflight_byte * pace
    if lookup is not None:
        numbers["lookup_seconds"] = (lookup.t0 + lookup.kappa * rtt) * pace
        numbers["lookup_per_byte"] = (lookup.seconds_per_byte + lookup.kappa_per_byte * rtt) * pace
        numbers["lookup_per_local_byte"] = numbers["lookup_per_byte"] if lookup.sends_local else 0.0
    spread = cell.read_spread
    if spread is None:
        spread = max(fetch.spread, lookup.spread if lookup is not None else 0.0)
    numbers["spread"] = spread
    # The interval of a mean of so many logs, as if they spread by a half: what is not measured well is not acted upon.
    numbers["doubt"] = math.exp(2.0 * max(spread, _LEAST_SPREAD) / max(min(fetch.n, prefill.n), 1) ** 0.5)
    objective = evidence.objective
    sla = {} if objective is None else {"ttft_seconds": objective.ttft_seconds, "percentile": objective.percentile}
    return Coefficients(
        fetch=_rounded(numbers),
        prefill=_rounded(
            {"a": prefill.a, "b": prefill.b, "d": prefill.d, "load": prefill.load_per_running, "spread": prefill.spread}
        ),
        classes={
            name: _rounded(_class(each, evidence.class_objectives.get(name)))
            for name, each in _with_objectives(evidence, cell)
            if each.lookup is not None and each.lookup.expected_tokens > 0.0 and each.lookup.n >= _LOOKUPS
        },
        sla=sla,
    )


def rtt_of(evidence: Evidence, cell: Cell) -> float:
    """The RTT to reckon with: measured now, else the latest the requests saw, else their floor; 0: never measured."""
    return next((each for each in (evidence.rtt, cell.rtt_now, cell.rtt_floor) if each is not None), 0.0)


def held(sent: Coefficients | None, wanted: Coefficients) -> Coefficients:
    """`sent` while `wanted` differs from it by noise only, else `wanted`."""
    if sent is None:
        return wanted
    pairs = [
        (sent.fetch, wanted.fetch), (sent.prefill, wanted.prefill), (sent.sla, wanted.sla),
        *((sent.classes.get(name, {}), value) for name, value in wanted.classes.items()),
    ]  # fmt: skip
    least = _least(sent)
    same = sent.classes.keys() == wanted.classes.keys() and all(_near(old, new, least) for old, new in pairs)
    return sent if same else wanted


def costs_of(wanted: Coefficients) -> Costs:
    """The coefficients, ready to compute with."""
    return Costs(wanted.fetch, wanted.prefill, wanted.classes, wanted.sla)


def project(evidence: Evidence, costs: Costs) -> Projection:
    """Both roads, for the reference request and over the mix of classes, each with its price for those who wait."""
    pooled = evidence.cells[ALL]
    if pooled.reference_tokens <= 0.0 or pooled.reference_matched <= 0.0:
        return Projection()
    at = Traffic(waiting=evidence.waiting)
    reference = _compare(costs, pooled, costs.bound, at)
    weights = {name: rate for name, rate in evidence.mix.items() if rate > 0.0} or {ALL: 1.0}
    total = sum(weights.values())
    best, losing, gain, attainable, sla = math.inf, 0.0, 0.0, 0.0, 0.0
    for name, rate in weights.items():
        cell = evidence.cells.get(name, pooled)
        expected = costs.classes.get(name)
        cell = cell if cell.reference_tokens > 0.0 and cell.reference_matched > 0.0 else pooled
        one = _compare(costs, cell, expected.bound if expected else costs.bound, at)
        best = min(best, one.remote_price / max(one.recompute_price, 1e-9))
        losing += rate * bool(one.verdict)
        gain += rate * (one.recompute - one.remote)
        attainable += rate * (min(one.remote_tail, one.recompute_tail) <= one.bound)
        sla += rate * (one.verdict == "sla")
    return Projection(
        remote=reference.remote, recompute=reference.recompute, remote_tail=reference.remote_tail,
        recompute_tail=reference.recompute_tail, best=best, losing_share=losing / total, gain=gain / total,
        attainable=attainable > 0.5 * total, sla=sla >= total,
    )  # fmt: skip


def min_tokens(evidence: Evidence, costs: Costs) -> int:
    """Fewest tokens whose read pays: fixed part of a read over what a token saves net of its bytes.

    A read of m tokens takes F + s*m and saves about b*m (m small against the prompt: d's part is that of its end) to
    its request and to each that waits. These count in steps of half a power of two: hooks are not woken for less.
    Half of it, rounded down to a power of two, at most a quarter of the reference: the gate compares the rest exactly.
    """
    cell = evidence.cells[ALL]
    fixed = costs.read_seconds(0.0)
    share = 2.0 ** (math.floor(2.0 * math.log2(1.0 + evidence.waiting)) / 2.0)
    saved = share * (costs.b + costs.d * cell.reference_tokens / 2.0)
    saved -= (costs.per_byte + costs.lookup_per_byte) * costs.bytes_per_token
    if saved <= 0.0:
        return 0
    tokens = int(min(fixed / saved / 2.0, cell.reference_matched / 4.0))
    return 1 << (tokens.bit_length() - 1) if tokens >= 64 else 0


def saved_seconds(read: Read, costs: Costs | None, waiting: float = 0.0) -> float:
    """What a request would have computed longer without its read; without a model: not known, so a lot.

    Each of the `waiting` has it, too (the price of computing, `guard.costs`).
    """
    if costs is None:
        return math.inf
    missing = read.prompt_tokens - read.local_tokens
    rest = max(missing - read.loaded_tokens, 1)
    full, part = (costs.prefill(read.prompt_tokens, computed, read.running) for computed in (missing, rest))
    return (1.0 + waiting) * (full - part)


def headroom(cell: Cell | None, waiting: float = 0.0) -> float | None:
    """Reads of the reference size that may begin at once on one link and still pay, at least 1; None: not known.

    The last of k ends after the fixed part of a read and k times what the bytes of one take: round trips run side by
    side, bytes one after the other. That must not be more than what it saves, to its request and the `waiting`. At the
    least RTT seen: what a raised one costs is no matter of how many read.
    """
    if cell is None or cell.prefill is None or cell.fetch is None or cell.reference_matched <= 0.0:
        return None
    prompt, missing = cell.reference_tokens, cell.reference_tokens - cell.reference_local
    found = size = cell.reference_matched * cell.bytes_per_token
    rtt = cell.rtt_floor or 0.0
    read, moving = cell.fetch.seconds(rtt, size), cell.fetch.seconds_per_byte * size
    if cell.lookup is not None:
        if cell.lookup.sends_local:
            found += cell.reference_local * cell.bytes_per_token
        read += cell.lookup.seconds(rtt, found)
        moving += cell.lookup.seconds_per_byte * found
    if moving <= 0.0:
        return None
    rest = max(missing - cell.reference_matched, 1.0)
    saved = cell.prefill.seconds(prompt, missing) - cell.prefill.seconds(prompt, rest)
    return max(((1.0 + waiting) * saved - (read - moving)) / moving, 1.0)


def _compare(costs: Costs, cell: Cell, bound: float, at: Traffic) -> Comparison:
    prompt, matched = int(cell.reference_tokens), int(cell.reference_matched)
    size = matched * (cell.bytes_per_token or costs.bytes_per_token)
    sure = ClassCost(1.0, matched, bound)
    return costs.compare_lookup(max(prompt, 1), 0, sure, size / matched if matched else 0.0, at)


def _with_objectives(evidence: Evidence, pooled: Cell) -> list[tuple[str, Cell]]:
    named = dict(evidence.cells)
    for name in evidence.class_objectives:
        named.setdefault(name, pooled)
    return sorted(named.items())


def _class(cell: Cell, objective: Objective | None) -> dict[str, float]:
    lookup = cell.lookup
    found: dict[str, float] = {}
    if lookup is not None:
        found = {
            "hit": lookup.hit_probability, "tokens": lookup.expected_tokens, "held": lookup.held_tokens,
            "held_prompt": lookup.held_prompt, "held_per_token": lookup.held_per_token,
        }  # fmt: skip
    if objective is not None:
        found["ttft_seconds"] = objective.ttft_seconds
    return found


def _rounded(numbers: Mapping[str, float]) -> dict[str, float]:
    return {
        key: float(f"{value:.{_DIGITS}g}")
        for key, value in numbers.items()
        if math.isfinite(value) and value >= 0.0
    }  # fmt: skip


def _near(old: Mapping[str, float], new: Mapping[str, float], least: Mapping[str, float]) -> bool:
    if old.keys() != new.keys():
        return False
    return all(abs(new[key] - old[key]) <= HOLD * max(abs(old[key]), least.get(key, 1e-12)) for key in new)


def _least(sent: Coefficients) -> dict[str, float]:
    """What a change is compared with at the least, by coefficient: those that may well be 0."""
    least = {"held_per_token": 1.0}
    fetch, usual = sent.fetch, sent.classes.get(ALL, {})
    size = fetch.get("bytes_per_token", 0.0) * usual.get("tokens", 0.0)
    if size > 0.0:
        fixed = fetch.get("seconds", 0.0) + fetch.get("lookup_seconds", 0.0)
        read = fixed + (fetch.get("per_byte", 0.0) + fetch.get("lookup_per_byte", 0.0)) * size
        keys = ("per_byte", "lookup_per_byte", "lookup_per_local_byte")
        least.update(dict.fromkeys(keys, _PART * read / size))
    return least
