"""What a request is projected to cost on either road, from a directive's coefficients. Standard library only, pure.

The service sends coefficients, the gate puts one request's numbers in: about a microsecond. Formulas of design
section 4: u = lookup, f = fetch, p = prefill; each is the median of a lognormal whose `spread` gives mean and tail.

    recompute = w + p(n - l)                                    w = prefill work already queued on this engine
    remote    = max(u + f, w) + p(n - l - m)                    the read runs while the queue moves (asynchronous)
    remote    = w + u + f + p(n - l - m)                        synchronous: the engine stands still meanwhile

Both resources have a price, since whoever uses one delays those who come after; by Little's law the number that waits
now is the number that will be delayed:

    price of computing c tokens  = waiting * p(c)
    price of reading B bytes     = in flight * B / W            and of a synchronous read: everybody's time

A road that meets the objective's bound at its percentile beats one that does not; else the cheaper one by the mean.
Models of few samples are believed against reading only beyond their `doubt`.
"""

import math
import sys
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, Final, NamedTuple

from guard.errors import WireError

_FETCH: Final = (
    "seconds", "per_byte", "per_inflight_byte", "spread", "lookup_seconds", "lookup_per_byte", "lookup_per_local_byte",
    "bytes_per_token",
)  # fmt: skip
_PREFILL: Final = ("a", "b", "d", "load", "spread")
_CLASS: Final = ("hit", "tokens", "held", "held_prompt", "held_per_token")
_SPREAD_LIMIT: Final = 3.0
_LARGEST: Final = sys.float_info.max  # JSON's integers have no end


class Traffic(NamedTuple):
    """What is going on when a request asks. `slowdown` and `overdue` are what the hook saw itself (`guard.pace`)."""

    inflight: int = 0
    inflight_bytes: int = 0
    running: int = 0
    waiting: float = 0.0  # requests without their first token, this one not counted
    backlog_tokens: int = 0  # tokens that those still have to compute
    elapsed: float = 0.0  # since this request's arrival
    slowdown: float = 1.0  # reads take so many times what is projected
    overdue: float = 0.0  # a read in flight is so many times older than projected; 0: none is late


IDLE: Final = Traffic()


class Comparison(NamedTuple):
    """Both roads of one request: own mean and tail TTFT in seconds, and the mean with the price that others pay."""

    remote: float
    remote_tail: float
    remote_price: float
    recompute: float
    recompute_tail: float
    recompute_price: float
    bound: float
    doubt: float = 1.0

    @property
    def verdict(self) -> str:
        """Why remote loses: `sla` or `projected`; empty when it is the better road."""
        return _verdict(
            self.remote_tail, self.remote_price, self.recompute_tail, self.recompute_price, self.bound, self.doubt
        )


def _verdict(tail: float, price: float, other_tail: float, other_price: float, bound: float, doubt: float) -> str:
    """Remote is refused only where it loses by more than the models' `doubt` (a ratio of 1 or more)."""
    if other_tail <= bound < tail:
        return "sla" if tail > bound * doubt else ""
    if tail <= bound < other_tail:
        return ""
    return "projected" if price > other_price * doubt else ""


class ClassCost(NamedTuple):
    """What is expected of a class: probability of a hit among lookups, tokens of a hit, bound on TTFT.

    Of a prompt of n tokens that hits, vLLM and the store hold held + per_token*(n - prompt) together; 0: not known.
    """

    hit: float
    tokens: float
    bound: float
    held: float = 0.0
    prompt: float = 0.0
    per_token: float = 0.0


_Roads = tuple[float, float, float, float, float, float]


class Costs:
    """Coefficients, checked and made ready for the hot path."""

    __slots__ = (
        "a", "ask", "b", "bound", "bounded", "bytes_per_token", "classes", "d", "default", "doubt", "fetch_mean",
        "fetch_tail", "hot", "load", "lookup_per_byte", "lookup_per_local_byte", "lookup_seconds", "only", "per_byte",
        "per_inflight_byte", "percentile", "prefill_mean", "prefill_ratio", "seconds",
    )  # fmt: skip

    def __init__(
        self,
        fetch: Mapping[str, Any],
        prefill: Mapping[str, Any],
        classes: Mapping[str, Any] | None = None,
        sla: Mapping[str, Any] | None = None,
    ) -> None:
        """Reads a directive's mappings; unknown keys are ignored.

        Raises:
            WireError: a coefficient is not a finite number of 0 or more, or the percentile is not below 1.
        """
        f = {key: _number("fetch", fetch, key) for key in _FETCH}
        p = {key: _number("prefill", prefill, key) for key in _PREFILL}
        sla = sla or {}
        self.seconds, self.per_byte, self.per_inflight_byte = f["seconds"], f["per_byte"], f["per_inflight_byte"]
        self.lookup_seconds, self.lookup_per_byte = f["lookup_seconds"], f["lookup_per_byte"]
        self.lookup_per_local_byte = f["lookup_per_local_byte"]  # a lookup that is sent what vLLM holds itself
        self.bytes_per_token = f["bytes_per_token"]
        self.doubt = max(1.0, _number("fetch", fetch, "doubt", 1.0))
        self.a, self.b, self.d, self.load = p["a"], p["b"], p["d"], p["load"]
        self.percentile = _number("sla", sla, "percentile", 0.95)
        if not 0.0 < self.percentile < 1.0:
            raise WireError("sla.percentile: not between 0 and 1")
        self.bound = _number("sla", sla, "ttft_seconds", math.inf)
        z = NormalDist().inv_cdf(self.percentile)
        spread = min(f["spread"], _SPREAD_LIMIT)
        self.fetch_mean, self.fetch_tail = math.exp(spread * spread / 2.0), math.exp(z * spread)
        spread = min(p["spread"], _SPREAD_LIMIT)
        self.prefill_mean = math.exp(spread * spread / 2.0)
        self.prefill_ratio = math.exp(z * spread) / self.prefill_mean  # tail over mean
        mean = self.prefill_mean
        self.hot = (  # one attribute instead of nine, for the gate
            self.a * mean, self.b * mean, self.d * mean, self.load, self.b, self.per_byte, self.fetch_mean,
            self.fetch_tail, self.prefill_ratio,
        )  # fmt: skip
        self.ask = (
            self.lookup_seconds, self.lookup_seconds + self.seconds, self.lookup_per_byte + self.per_byte,
            self.lookup_per_local_byte, self.per_inflight_byte, 1.0 - self.percentile,
        )  # fmt: skip
        self.classes = {name: self._class(name, value) for name, value in (classes or {}).items()}
        self.default = self.classes.get("all")
        self.only = self.default if len(self.classes) == 1 else None
        self.bounded = any(each.bound != self.bound for each in self.classes.values())

    @property
    def typical_tokens(self) -> float:
        """Tokens of a hit over all classes; 0 where that is not known."""
        return self.default.tokens if self.default is not None else 0.0

    def _class(self, name: str, value: Any) -> ClassCost:
        if not isinstance(value, Mapping):
            raise WireError(f"classes.{name}: not an object")
        hit, tokens, held, prompt, slope = (_number(f"classes.{name}", value, key) for key in _CLASS)
        bound = _number(f"classes.{name}", value, "ttft_seconds", self.bound)
        return ClassCost(min(hit, 1.0), tokens, bound, held, prompt, slope)

    def read_seconds(self, size: float, inflight_bytes: float = 0.0) -> float:
        """Median time of lookup and fetch of `size` bytes."""
        return self.lookup_seconds + self.lookup_per_byte * size + self.fetch_seconds(size, inflight_bytes)

    def lookup(self, size: float) -> float:
        """Median time of a lookup for which `size` bytes are sent."""
        return self.lookup_seconds + self.lookup_per_byte * size

    def fetch_seconds(self, size: float, inflight_bytes: float = 0.0) -> float:
        """Median time of a fetch of `size` bytes."""
        return self.seconds + self.per_byte * size + self.per_inflight_byte * inflight_bytes

    def load_seconds(self, size: float, inflight_bytes: float, *, moved: bool) -> float:
        """Median time after which a load of `size` bytes is late: its fetch, or if its lookup `moved` the data both."""
        read = self.fetch_seconds(size, inflight_bytes)
        return self.lookup(size) + read if moved else read

    def prefill(self, prompt: float, computed: float, running: int = 0) -> float:
        """Median time of a prefill of the last `computed` of `prompt` tokens."""
        c = computed
        return (self.a + self.b * c + self.d * c * (prompt - c / 2.0)) * (1.0 + self.load * running)

    def compare_load(
        self, prompt: int, local: int, matched: float, size: float, at: Traffic = IDLE, *, sync: bool = False,
        bound: float | None = None,
    ) -> Comparison:  # fmt: skip
        """Both roads when the match is known and the lookup is over."""
        roads = self._roads(prompt, local, matched, size, self.fetch_seconds(size, at.inflight_bytes), at, sync)
        return Comparison(*roads, self.bound if bound is None else bound, self.doubt)

    def compare_lookup(
        self, prompt: int, local: int | None, expected: ClassCost, token_bytes: float, at: Traffic = IDLE, *,
        sync: bool = False, blocks: bool = False,
    ) -> Comparison:  # fmt: skip
        """Both roads before the lookup: `expected` stands for the match, a miss pays the lookup for nothing.

        `local` None: what vLLM itself holds is not known yet; the tokens of a mean hit stand for the match then.
        `blocks`: the lookup holds up the scheduler, so everybody who waits pays for it.
        """
        roads = self._asked(prompt, local, expected, token_bytes, at, sync, blocks)
        return Comparison(*roads, expected.bound, self.doubt)

    def loses_load(
        self, prompt: int, local: int, matched: float, size: float, at: Traffic, sync: bool, bound: float
    ) -> str:
        """The verdict of `compare_load`, without the object around it: for the gate."""
        read = self.seconds + self.per_byte * size + self.per_inflight_byte * at[1]
        _, tail, price, _, other_tail, other_price = self._roads(prompt, local, matched, size, read, at, sync)
        if tail <= bound and price <= other_price:
            return ""  # the usual case, without another call
        return _verdict(tail, price, other_tail, other_price, bound, self.doubt)

    def loses_lookup(
        self, prompt: int, local: int | None, expected: ClassCost, token_bytes: float, at: Traffic, sync: bool,
        blocks: bool,
    ) -> str:  # fmt: skip
        """The verdict of `compare_lookup`, for the gate."""
        _, tail, price, _, other_tail, other_price = self._asked(prompt, local, expected, token_bytes, at, sync, blocks)
        bound = expected[2]
        if tail <= bound and price <= other_price:
            return ""
        return _verdict(tail, price, other_tail, other_price, bound, self.doubt)

    def _asked(
        self, prompt: int, local: int | None, expected: ClassCost, token_bytes: float, at: Traffic, sync: bool,
        blocks: bool,
    ) -> _Roads:  # fmt: skip
        hit, matched, _, held, pivot, slope = expected
        lookup, fixed, per_byte, per_local_byte, per_inflight_byte, seldom = self.ask
        if local is None:
            local = 0
        elif held:
            matched = held + slope * (prompt - pivot) - local
            if matched < 0.0:
                matched = 0.0
        most = prompt - local - 1
        if matched > most:
            matched = most if most > 0 else 0
        size = matched * token_bytes
        read = fixed + per_byte * size + per_inflight_byte * at[1]
        if per_local_byte:
            more = per_local_byte * local * token_bytes
            lookup += more
            read += more
        own, tail, price, other, other_tail, other_price = self._roads(prompt, local, matched, size, read, at, sync)
        if blocks:
            price += (at[2] + at[3]) * lookup
        miss = 1.0 - hit
        if hit <= seldom:  # a class that seldom hits is judged by its misses
            tail = other_tail + lookup
        return (
            hit * own + miss * (other + lookup), tail, hit * price + miss * (other_price + lookup),
            other, other_tail, other_price,
        )  # fmt: skip

    def _roads(
        self, prompt: int, local: int, matched: float, size: float, read: float, at: Traffic, sync: bool
    ) -> _Roads:
        """Remote and recompute, each as own mean, own tail, and mean with its price."""
        inflight, _, running, waiting, backlog, elapsed, slowdown, overdue = at
        a, b, d, load, alone, per_byte, fetch_mean, fetch_tail, ratio = self.hot
        c = prompt - local
        r = c - matched
        if r < 1.0:
            r = 1.0
        full = a + c * (b + d * (prompt - 0.5 * c))
        rest = a + r * (b + d * (prompt - 0.5 * r))
        if load and running:
            busy = 1.0 + load * running
            full *= busy
            rest *= busy
        read *= slowdown if slowdown > overdue else overdue  # a new read will hardly overtake the one that is stuck
        wait = backlog * alone
        mean, tail = read * fetch_mean, read * fetch_tail
        price = inflight * per_byte * size + waiting * rest
        if sync:
            price += (waiting + running) * mean
            mean += wait
            tail += wait
        else:
            if mean < wait:
                mean = wait
            if tail < wait:
                tail = wait
        own, other = mean + rest, wait + full
        return (
            own, elapsed + tail + rest * ratio, own + price,
            other, elapsed + wait + full * ratio, other + waiting * full,
        )  # fmt: skip


def _number(where: str, data: Mapping[str, Any], key: str, default: float = 0.0) -> float:
    value = data.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= _LARGEST:
        raise WireError(f"{where}.{key}: not a finite number of 0 or more")
    return float(value)
