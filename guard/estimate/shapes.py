"""What estimation tells the controller, the API and the simulator. Times in seconds, sizes in bytes or tokens.

Formulas: design section 4. Everything here is a value; who fits it is `guard.estimate`, who acts on it `guard.control`.
"""

from dataclasses import dataclass, field
from typing import Final, Literal

Source = Literal["measured", "projected", "prior"]
State = Literal["ok", "departed", "harmful", "insufficient-data"]
Cause = Literal["rtt", "bandwidth", "queue", "fixed-cost", "mixed", "unknown"]
Shape = Literal["knee", "no-knee", "insufficient-data"]

POOL: Final = "all"
"""Class of the pooled cell of a model and backend."""

FEW: Final = 30
"""Fewer reads than this carry a constant only, no coefficient."""

PRIOR_DEPARTURE_RTT: Final = 200e-6
PRIOR_BREAK_EVEN_RTT: Final = 500e-6
"""Published by one report for one system (NOTICE); they stand only until the deployment's own data replace them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One estimate as it is shown: value with its 95 % interval, sample size and source; `reason` says why not.

    `value` is None where there is none (`reason` says why, e.g. "none in range", "constant RTT"); an open end of the
    interval is None too.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    source: Source = "measured"
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchModel:
    """f = t0 + K*RTT + B/W + wait for what is in flight; `spread` is the sd of log(actual / projected).

    K = kappa + kappa_per_byte * B serial round trips: most backends need some per chunk.
    """

    t0: float
    kappa: float = 0.0
    kappa_per_byte: float = 0.0
    seconds_per_byte: float = 0.0
    seconds_per_inflight_byte: float = 0.0
    spread: float = 0.0
    n: int = 0

    def seconds(self, rtt: float, size: float, inflight_bytes: float = 0.0) -> float:
        """Projected median time of a fetch of `size` bytes."""
        trips = self.kappa + self.kappa_per_byte * size
        return self.t0 + trips * rtt + self.seconds_per_byte * size + self.seconds_per_inflight_byte * inflight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillModel:
    """p = (a + b*c + d*c*(n - c/2)) * (1 + load_per_running*running); c of n tokens are computed."""

    a: float
    b: float
    d: float = 0.0
    load_per_running: float = 0.0
    spread: float = 0.0
    n: int = 0

    def seconds(self, prompt_tokens: float, computed_tokens: float, running: float = 0.0) -> float:
        """Projected median time of a prefill."""
        c = computed_tokens
        alone = self.a + self.b * c + self.d * c * (prompt_tokens - c / 2.0)
        return alone * (1.0 + self.load_per_running * running)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupModel:
    """u = t0 + K*RTT + seconds_per_byte * bytes, K = kappa + kappa_per_byte * bytes.

    `bytes` are those matched, and where the lookup `sends_local` (LMCacheMP reads the store here, without regard to
    what vLLM holds itself) those of the local match, too.

    Hit probability and expected tokens of a hit are among those looked up. Of a prompt
    of n tokens that hits, vLLM and the store hold `held_tokens + held_per_token * (n - held_prompt)` together: a
    conversation lacks its last turn (slope 1), a shared prefix is as long in every prompt (slope 0). 0: not known.
    """

    t0: float
    kappa: float = 0.0
    kappa_per_byte: float = 0.0
    seconds_per_byte: float = 0.0
    hit_probability: float = 0.0
    expected_tokens: float = 0.0
    held_tokens: float = 0.0
    held_prompt: float = 0.0
    held_per_token: float = 0.0
    sends_local: bool = False
    spread: float = 0.0
    n: int = 0

    def seconds(self, rtt: float, size: float = 0.0) -> float:
        """Projected median time of a lookup for which `size` bytes are sent."""
        return self.t0 + (self.kappa + self.kappa_per_byte * size) * rtt + self.seconds_per_byte * size


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Three answers and the words that explain them to a person."""

    state: State = "insufficient-data"
    cause: Cause = "unknown"
    shape: Shape = "insufficient-data"
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """All that is known of one backend x class; `class_` is "all" for the pooled one that thin classes fall back to.

    `pooled` says that the models are those of the pool. `rtt_*` are the idle RTT seen: its lowest decile (the floor),
    now, and its range. `reference_*` state the request for which departure and break-even hold: the means over the
    hits of the class. `rest` is what its TTFT takes besides lookup and fetch, `saved` the prefill that the hit saves,
    `remote_now` lookup and fetch of it now, `lookup_cost` a lookup now that finds nothing, `net_cost` what choosing
    remote costs on average now (below 0: it pays), `least_tokens` the tokens from which a read pays now. `read_spread`
    is the noise of log(lookup + fetch) of its hits: that of `lookup` has the misses in it, which wait for a step of the
    engine rather than for the store.
    """

    model: str
    backend: str
    class_: str
    n: int = 0
    pooled: bool = False
    fetch: FetchModel | None = None
    prefill: PrefillModel | None = None
    lookup: LookupModel | None = None
    bytes_per_token: float = 0.0
    rtt_floor: float | None = None
    rtt_now: float | None = None
    rtt_low: float | None = None
    rtt_high: float | None = None
    reference_tokens: float = 0.0
    reference_matched: float = 0.0
    reference_local: float = 0.0
    rest: float | None = None
    read_spread: float | None = None
    saved: Figure = field(default_factory=lambda: Figure(value=None, reason="insufficient data"))
    remote_now: Figure = field(default_factory=lambda: Figure(value=None, reason="insufficient data"))
    lookup_cost: Figure = field(default_factory=lambda: Figure(value=None, reason="insufficient data"))
    net_cost: Figure = field(default_factory=lambda: Figure(value=None, reason="insufficient data"))
    least_tokens: Figure = field(default_factory=lambda: Figure(value=None, reason="insufficient data"))
    departure: Figure = field(default_factory=lambda: Figure(value=PRIOR_DEPARTURE_RTT, source="prior"))
    break_even: Figure = field(default_factory=lambda: Figure(value=PRIOR_BREAK_EVEN_RTT, source="prior"))
    knee: Figure = field(default_factory=lambda: Figure(value=None, reason="insufficient data"))
    seconds_per_token: Figure = field(default_factory=lambda: Figure(value=None, reason="insufficient data"))
    serial_round_trips: Figure = field(default_factory=lambda: Figure(value=None, reason="insufficient data"))
    verdict: Verdict = field(default_factory=Verdict)
