"""Is offload right for this deployment: stay local, go remote, or measure first.

The rules are the published selection criteria of one vendor (NOTICE): remote where RTT is controlled, concurrency
moderate and contexts are long; local above 200 us of RTT, at very low concurrency with interactive traffic, under a
strict SLA; measure first where the set-up differs. Their thresholds are priors: each gives way to what was measured.
"""

from dataclasses import dataclass
from math import inf
from typing import Any, Final, Literal

from guard.estimate.shapes import Figure

Advice = Literal["remote", "local", "measure"]

LOW_CONCURRENCY: Final = 2
MODERATE_CONCURRENCY: Final = 32
LONG_CONTEXT: Final = 8192
"""Priors: the report gained at 8 and 16 concurrent sessions with prompts of 29,800 tokens, and not at 32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known and what is asked. Times in seconds; None: not known, not asked."""

    rtt: float | None
    departure: Figure
    break_even: Figure
    net_cost: Figure
    remote_ttft: float | None = None  # projected for the prompt at `rtt`
    recompute_ttft: float | None = None
    sla: float | None = None
    concurrency: int | None = None
    prompt_tokens: int | None = None
    least_tokens: Figure | None = None
    own_class: bool = True  # figures are of this prompt length and concurrency, not of a pool


def advise(situation: Situation) -> dict[str, Any]:
    """The advice and every rule that spoke, with its threshold and the source of that."""
    rules = [rule for rule in (_sla(situation), _even(situation), _departs(situation), _size(situation)) if rule]
    rules += [rule for rule in (_crowd(situation), _class(situation)) if rule]
    measured = [rule for rule in rules if rule["source"] != "prior"]
    # What was measured decides; priors only say what to expect until something is.
    if any(rule["speaks_for"] == "local" for rule in measured):
        advice: Advice = "local"
    elif any(rule["speaks_for"] == "measure" for rule in rules) or not measured:
        advice = "measure"
    else:
        advice = "remote"
    expected = next((rule["speaks_for"] for rule in rules if rule["source"] == "prior"), None)
    return {"advice": advice, "expected_by_priors": expected if advice == "measure" else None, "rules": rules}


def _sla(now: Situation) -> dict[str, Any] | None:
    if now.sla is None or now.remote_ttft is None:
        return None
    meets = now.remote_ttft <= now.sla
    other = now.recompute_ttft is not None and now.recompute_ttft <= now.sla
    told = f"remote is projected at {_ms(now.remote_ttft)} against the bound of {_ms(now.sla)}"
    if meets:
        return _rule("sla", "remote", now.sla, "projected", told)
    return _rule("sla", "local", now.sla, "projected", told + ("; recomputing meets it" if other else ""))


def _even(now: Situation) -> dict[str, Any] | None:
    net = now.net_cost
    if net.value is not None and net.low is not None and net.high is not None:
        if net.low > 0.0:
            return _rule("break-even", "local", now.break_even.value, net.source,
                         f"choosing remote costs {_ms(net.value)} a request at the RTT of the traffic")  # fmt: skip
        if net.high < 0.0 and now.break_even.value is None:
            return _rule("break-even", "remote", None, net.source, f"choosing remote saves {_ms(-net.value)} a request")
    point = now.break_even
    if point.value is None or now.rtt is None:
        return None
    if point.source == "prior":
        side = "local" if now.rtt > point.value else "remote"
        return _rule("break-even", side, point.value, "prior", "the published break-even: not measured here")
    low, high = point.low or 0.0, inf if point.high is None else point.high
    told = f"RTT {_ms(now.rtt)}, break-even {_ms(point.value)} ({_ms(low)} to {'open' if high == inf else _ms(high)})"
    if now.rtt > high:
        return _rule("break-even", "local", point.value, point.source, told)
    if now.rtt < low:
        return _rule("break-even", "remote", point.value, point.source, told)
    return _rule("break-even", "measure", point.value, point.source, told + ": too close to tell")


def _departs(now: Situation) -> dict[str, Any] | None:
    point = now.departure
    if point.value is None or now.rtt is None:
        return None
    told = f"RTT {_ms(now.rtt)}, TTFT departs at {_ms(point.value)}"
    if point.source == "prior":
        side = "local" if now.rtt > point.value else "remote"
        return _rule("departure", side, point.value, "prior", told + ": published, not measured here")
    if now.rtt <= point.value:
        return _rule("departure", "remote", point.value, point.source, told)
    # Departed and not past break-even: a loss against a near tier, still a gain against recomputing.
    return _rule("departure", "either", point.value, point.source, told + "; up to break-even it still pays")


def _size(now: Situation) -> dict[str, Any] | None:
    if now.prompt_tokens is None:
        return None
    least = now.least_tokens
    if least is not None and least.value is not None:
        side = "remote" if now.prompt_tokens > least.value else "local"
        return _rule(
            "context", side, least.value, least.source, f"a read pays from {least.value:.0f} matched tokens on"
        )
    side = "remote" if now.prompt_tokens >= LONG_CONTEXT else "local"
    return _rule("context", side, LONG_CONTEXT, "prior", "the published gain is of long contexts recovered cold")


def _crowd(now: Situation) -> dict[str, Any] | None:
    if now.concurrency is None or (now.own_class and now.net_cost.value is not None):
        return None
    side = "remote" if LOW_CONCURRENCY < now.concurrency <= MODERATE_CONCURRENCY else "local"
    return _rule("concurrency", side, None, "prior", "published gains are of moderate concurrency (8 to 16)")


def _class(now: Situation) -> dict[str, Any] | None:
    if now.own_class:
        return None
    return _rule(
        "class", "measure", None, "measured", "no figures of this prompt length and concurrency: pooled ones stand in"
    )


def _rule(name: str, speaks_for: str, threshold: float | None, source: str, text: str) -> dict[str, Any]:
    return {"rule": name, "speaks_for": speaks_for, "threshold": threshold, "source": source, "text": text}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
