"""Three answers about a backend and class: is it harmful, what makes TTFT slow, and has TTFT a knee in RTT.

Cause compares the slowest quarter of blocks with the fastest by what moved: waits outside the read (`queue`), the part
of the read that goes with RTT (`rtt`), with what is in flight (`bandwidth`). Where TTFT moved by less than 10 % the
cause is what the read consists of now.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from guard.estimate.blocks import Ints
from guard.estimate.curve import Curve, t_squared
from guard.estimate.linear import mean, middle
from guard.estimate.prefill import Prefill
from guard.estimate.remote import Cost
from guard.estimate.samples import Array, Samples
from guard.estimate.shapes import Cause, Figure, Shape, State, Verdict

NOISE: Final = 0.05
"""Two identical runs differ by so much: less than this share of TTFT harms nobody."""

MOVED: Final = 0.10
_MOST: Final = 0.5
_FEWEST: Final = 5


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the verdict rests on; `net` is the cost of choosing remote now with its interval, seconds."""

    rows: Samples
    hit_rows: Samples
    of: Ints
    rtt: Array
    remote: Array
    trust: Array
    blocks: int
    curve: Curve | None
    varies: bool
    rest: float
    prefill: Prefill | None
    lookup: Cost
    fetch: Cost
    flight: float
    now: float
    recent: float
    net: tuple[float, float, float] | None
    computed: float


def judge(evidence: Evidence, departure: Figure, knee: Figure) -> Verdict:
    """The verdict and its words."""
    state, why = _state(evidence, departure)
    cause, because = _cause(evidence)
    shape: Shape
    if knee.value is not None:
        shape = "knee"
    else:
        shape = "no-knee" if knee.reason.startswith("no-knee") else "insufficient-data"
    words = [why, because, knee.reason if knee.value is None else f"knee at {knee.value * 1e3:.3g} ms"]
    total = _end_to_end(evidence)
    if evidence.recent != 1.0:
        words.insert(1, f"the last reads take {evidence.recent:.2g} times what earlier ones tell")
    if total:
        words.insert(1, total)
    return Verdict(state=state, cause=cause, shape=shape, reason="; ".join(word for word in words if word))


def _state(evidence: Evidence, departure: Figure) -> tuple[State, str]:
    read = middle(evidence.remote) if evidence.remote.size else 0.0
    ttft = evidence.rest + read
    if evidence.net is not None and evidence.net[1] > 0.0 and evidence.net[0] > NOISE * ttft:
        return "harmful", f"choosing remote costs {_time(evidence.net[0])} more than recomputing"
    measured = departure.source == "measured" and departure.value is not None
    if measured and departure.value is not None and evidence.now > departure.value:
        return "departed", (
            f"RTT {evidence.now * 1e3:.3g} ms is above the departure point of {departure.value * 1e3:.3g} ms"
        )
    if evidence.net is None:
        if measured or departure.value is None:
            return "ok", "TTFT is at its baseline; what a hit saves is not known"
        return (
            "insufficient-data",
            "no request of this size was computed in full, so that nothing says what a hit saves",
        )
    if evidence.net[2] < 0.0:
        return "ok", f"choosing remote saves {_time(-evidence.net[0])}"
    return "ok", f"choosing remote makes no difference that can be told ({_time(evidence.net[0])})"


def _cause(evidence: Evidence) -> tuple[Cause, str]:
    rows = evidence.hit_rows
    if len(rows) < _FEWEST:
        return "unknown", f"cause unknown: {len(rows)} reads"
    queue = rows["before"] + rows["slot"] + rows["resume"]
    load = evidence.prefill.model.load_per_running * rows["running"] if evidence.prefill is not None else 0.0
    queue = queue + rows["prefill"] * load / (1.0 + load)
    flight = np.fmax(rows["inflight"] - 1.0, 0.0)  # NaN: alone
    count = np.bincount(evidence.of, evidence.trust, evidence.blocks)
    used = count > 0.0
    weight = count[used]

    def per_block(values: Array) -> Array:
        result: Array = np.bincount(evidence.of, evidence.trust * values, evidence.blocks)[used] / weight
        return result

    crowd = evidence.fetch.flight * (flight - evidence.flight)
    waits, reads, rtt, crowded = per_block(queue), per_block(evidence.remote), per_block(evidence.rtt), per_block(crowd)
    total = waits + reads + crowded
    order = np.argsort(total)
    quarter = max(order.size // 4, 1)
    slow, fast = order[-quarter:], order[:quarter]

    def moved(values: Array) -> float:
        return mean(values[slow], weight[slow]) - mean(values[fast], weight[fast])

    base = evidence.rest + mean(total[fast], weight[fast])
    if moved(total) < MOVED * base or order.size < 2:
        return _composition(evidence, mean(waits, weight))
    slope = 0.0
    if evidence.curve is not None:
        error = evidence.curve.slope_error * t_squared(evidence.curve.freedom) ** 0.5
        slope = float(evidence.curve.line.beta[0]) if float(evidence.curve.line.beta[0]) > error else 0.0
    by_rtt = max(slope * moved(rtt), 0.0)
    if evidence.curve is not None and slope > 0.0 and by_rtt > 0.0:
        by_rtt = max(moved(reads), by_rtt) if evidence.curve.p_value < 0.05 else by_rtt
    shares: dict[Cause, float] = {
        "queue": max(moved(waits), 0.0),
        "rtt": by_rtt,
        "bandwidth": max(moved(crowded), 0.0),
        "unknown": max(moved(reads) - by_rtt, 0.0),
    }
    return _largest(shares, "of what slow requests take more")


def _composition(evidence: Evidence, waits: float) -> tuple[Cause, str]:
    lookup, fetch = evidence.lookup, evidence.fetch
    if not evidence.varies:
        shares: dict[Cause, float] = {
            "queue": waits,
            "bandwidth": fetch.flight * evidence.flight,
            "unknown": lookup.t0 + lookup.size_cost + fetch.t0 + fetch.size_cost,
        }
        cause, why = _largest(shares, "of the time besides prefill")
        if cause == "unknown":
            why = "lookup and fetch make most of it; at constant RTT round trips and bandwidth cannot be told apart"
        return cause, why
    trips = lookup.trips + lookup.trips_size + fetch.trips + fetch.trips_size
    shares = {
        "queue": waits,
        "rtt": trips * evidence.now,
        "bandwidth": lookup.size_cost + fetch.size_cost + fetch.flight * evidence.flight,
        "fixed-cost": lookup.t0 + fetch.t0,
    }
    return _largest(shares, "of the time besides prefill")


def _largest(shares: dict[Cause, float], of: str) -> tuple[Cause, str]:
    total = sum(shares.values())
    if not total > 0.0:
        return "unknown", "nothing takes any time"
    cause = max(shares, key=lambda name: shares[name])
    share = shares[cause] / total
    if share < _MOST:
        named = ", ".join(f"{name} {value / total:.0%}" for name, value in shares.items() if value > 0.0)
        return "mixed", f"mixed: {named} {of}"
    return cause, f"{cause} is {share:.0%} {of}"


def _end_to_end(evidence: Evidence) -> str:
    """Words where reads shorten TTFT but whole requests take longer than recomputed ones."""
    rows = evidence.rows
    known = (rows["e2e"] > 0.0) & (rows["e2e"] < np.inf)
    if not known.any():
        return ""
    loaded = rows["loaded"] > 0.0
    other = known & ~loaded & (rows["computed"] >= 0.5 * evidence.computed)
    own = known & loaded
    a, b = np.log(rows["e2e"][own]), np.log(rows["e2e"][other])
    if a.size < _FEWEST or b.size < _FEWEST:
        return ""
    difference = float(a.mean() - b.mean())
    error = math.sqrt(float(a.var(ddof=1)) / a.size + float(b.var(ddof=1)) / b.size)
    ttft = float(np.median(rows["ttft"][own])), float(np.median(rows["ttft"][other]))
    if difference - 2.0 * error <= math.log1p(NOISE) or ttft[0] >= ttft[1]:
        return ""
    return (
        f"TTFT falls from {_time(ttft[1])} to {_time(ttft[0])}, but whole requests take"
        f" {math.exp(difference):.2f} times as long as recomputed ones: look at TPOT before you call it a gain"
    )


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
