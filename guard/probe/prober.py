"""What a prober is, what it is told, and what it gives back. One file per prober; `registry.py` lists them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

from guard.errors import ConfigError

Option = str | int | float | bool

NO_OPTIONS: Final[Mapping[str, Option]] = {}
_Z95: Final = 1.959964


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One thing to probe, from the configuration. Times in seconds.

    `target` is the text that the operator wrote and the label of its metrics; `options` are the keys that only this
    prober knows. `backend` is the label of the remote tier that stands behind it, empty where none does. A name is
    resolved once per `resolve` seconds.
    """

    target: str
    prober: str
    backend: str = ""
    interval: float = 1.0
    count: int = 4
    timeout: float = 1.0
    resolve: float = 30.0
    options: Mapping[str, Option] = field(default_factory=lambda: NO_OPTIONS)

    @property
    def key(self) -> tuple[str, str]:
        """What tells targets apart: prober and target."""
        return (self.prober, self.target)

    def text(self, option: str, default: str = "") -> str:
        """A text option.

        Raises:
            ConfigError: it is of another type.
        """
        value = self.options.get(option, default)
        if not isinstance(value, str):
            raise ConfigError(option, f"not text: {value!r} (target {self.target})")
        return value

    def number(self, option: str, default: float, *, low: float, high: float) -> float:
        """A numeric option.

        Raises:
            ConfigError: it is of another type or out of range.
        """
        value = self.options.get(option, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ConfigError(option, f"not a number from {low:g} to {high:g}: {value!r} (target {self.target})")
        return float(value)

    def flag(self, option: str, default: bool = False) -> bool:
        """An option that is true or false.

        Raises:
            ConfigError: it is of another type.
        """
        value = self.options.get(option, default)
        if not isinstance(value, bool):
            raise ConfigError(option, f"not true or false: {value!r} (target {self.target})")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One round of probes: the RTTs of those that were answered, in order, seconds.

    `sent` counts all of them, so that the rest is lost. `problem` says of the last one that failed what happened and
    what to install or check. A round with `sent` 0 could not measure and says nothing about the target: no live
    connection to look at, no such library. `facts` is what else was seen, by a name with its unit.
    """

    rtts: tuple[float, ...] = ()
    sent: int = 0
    problem: str = ""
    facts: Mapping[str, float] = field(default_factory=dict)


class Prober(Protocol):
    """Measures the round trips to one target, over a connection that it holds open. Used by one thread at a time."""

    def probe(self, count: int, timeout: float) -> Sample:
        """Makes `count` measurements one after the other, each within `timeout` seconds; returns within their sum.

        What the network or the other side does is in the sample, never an exception; the next round starts afresh.
        """
        ...

    def close(self) -> None:
        """Lets go of what is held; may be called twice."""
        ...


class Kind(NamedTuple):
    """An entry of the registry.

    `make` makes the prober of a target and raises ConfigError where a key cannot be used; it does not touch the
    network. `options` are the keys that it reads, `packets` how many packets one probe puts on the link, both
    directions and the worst case.
    """

    make: Callable[[Target], Prober]
    options: frozenset[str] = frozenset()
    packets: Callable[[Target], int] = lambda _: 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Statistics of some probes. Times in seconds, None where nothing was answered.

    `p50_low` and `p50_high` are the 95 % interval of the median (order statistics), None below six values. `jitter` is
    the mean difference of neighbours (RFC 3393), `loss` the share without an answer, 0 to 1.
    """

    n: int
    sent: int
    p50: float | None = None
    p50_low: float | None = None
    p50_high: float | None = None
    p99: float | None = None
    minimum: float | None = None
    jitter: float | None = None
    loss: float | None = None


def summarize(samples: Sequence[Sample]) -> Summary:
    """The statistics of the probes of some rounds."""
    rtts = [rtt for sample in samples for rtt in sample.rtts]
    sent = sum(sample.sent for sample in samples)
    n = len(rtts)
    loss = max(0.0, 1.0 - n / sent) if sent else None
    if not n:
        return Summary(n=0, sent=sent, loss=loss)
    ordered = sorted(rtts)
    # The k-th smallest and largest of n bound the median with 95 %: k from the normal limit of the binomial.
    k = math.floor((n - _Z95 * math.sqrt(n)) / 2.0)
    return Summary(
        n=n,
        sent=sent,
        p50=quantile(ordered, 0.5),
        p50_low=ordered[k - 1] if k >= 1 else None,
        p50_high=ordered[n - k] if k >= 1 else None,
        p99=quantile(ordered, 0.99),
        minimum=ordered[0],
        jitter=sum(abs(b - a) for a, b in pairwise(rtts)) / (n - 1) if n > 1 else None,
        loss=loss,
    )


def quantile(ordered: Sequence[float], q: float) -> float:
    """Quantile of values in ascending order, interpolated between neighbours (Hyndman and Fan's type 7)."""
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
