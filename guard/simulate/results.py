"""What a simulation has to say: TTFT, TPOT, goodput, bytes, decisions, time in each state. All of it is simulated."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from guard.simulate.job import Job
from guard.simulate.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a simulation; times in seconds, `ttft` infinite when it was given up."""

    arrival: float
    engine: int
    ttft: float
    tpot: float | None
    decision: str
    reason: str
    waits: bool  # it was let through to the remote tier
    loaded: int
    matched: int
    read_start: float  # lookup or fetch began; 0: none
    aborted: bool


@dataclass(slots=True)
class Result:
    """The outcome of one policy on one scenario."""

    scenario: str
    policy: str
    seconds: float
    rows: list[Row]
    bytes: int
    ttft_bound: float
    tpot_bound: float | None
    states: Mapping[str, float] = field(default_factory=dict)
    changes: Sequence[tuple[float, int, str, str]] = ()
    wall_seconds: float = 0.0
    leaked: int = 0  # permits that count as in flight although all is over

    def ttft(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """TTFT of all requests that were not aborted on purpose; those given up count as infinite."""
        return np.array([row.ttft for row in self.rows if not row.aborted])

    def good(self) -> float:
        """Share of requests within the objective."""
        rows = [row for row in self.rows if not row.aborted]
        return sum(self._meets(row) for row in rows) / len(rows) if rows else 0.0

    def goodput(self) -> float:
        """Requests within the objective per second."""
        return sum(self._meets(row) for row in self.rows if not row.aborted) / self.seconds

    def _meets(self, row: Row) -> bool:
        late = self.tpot_bound is not None and row.tpot is not None and row.tpot > self.tpot_bound
        return row.ttft <= self.ttft_bound and not late

    def summary(self) -> dict[str, Any]:
        """The figures as they are shown, seconds and bytes; quantiles of TTFT are None where they were given up."""
        ttft = self.ttft()
        finite = ttft[np.isfinite(ttft)]
        tpot = [row.tpot for row in self.rows if row.tpot is not None]
        quantiles = np.quantile(ttft, (0.5, 0.95, 0.99), method="higher") if len(ttft) else [np.inf] * 3
        p50, p95, p99 = (float(q) if np.isfinite(q) else None for q in quantiles)
        return {
            "scenario": self.scenario,
            "policy": self.policy,
            "source": "simulated",
            "requests": len(self.rows),
            "unanswered": int(len(ttft) - len(finite)),
            "ttft_mean": float(finite.mean()) if len(finite) else None,
            "ttft_p50": p50,
            "ttft_p95": p95,
            "ttft_p99": p99,
            "tpot_mean": float(np.mean(tpot)) if tpot else None,
            "goodput": self.goodput(),
            "good": self.good(),
            "bytes": self.bytes,
            "decisions": dict(Counter(row.decision for row in self.rows)),
            "states": dict(self.states),
            "wall_seconds": self.wall_seconds,
        }


def row_of(job: Job, scenario: Scenario) -> Row:
    """A finished request as a row."""
    return Row(
        arrival=job.arrival,
        engine=job.engine,
        ttft=job.ttft,
        tpot=job.tpot,
        decision=decision_of(job)[0],
        reason=decision_of(job)[1],
        waits=job.skip is not None and job.skip.admitted,
        loaded=job.loaded,
        matched=job.matched,
        read_start=job.lookup_start,
        aborted=bool(job.aborted) and job.aborted - job.arrival < scenario.patience - 1e-6,
    )


def decision_of(job: Job) -> tuple[str, str]:
    """The road taken and why, as the hook tells them."""
    if job.skip is not None and not job.skip.admitted:
        return job.skip
    if job.load is not None and not job.load.admitted:
        return job.load
    if job.gave_up:
        return "decline", "deadline"
    if job.load is not None:
        return ("decline", "load-failed") if job.failed and not job.loaded else job.load
    return "none", "miss"


def regret(results: Sequence[Result]) -> dict[str, float]:
    """Mean TTFT of each policy over the better of `always` and `never`; infinite where requests were given up."""
    means = {each.policy: float(np.mean(each.ttft())) for each in results}
    fixed = [means[name] for name in ("always", "never") if name in means]
    better = min(fixed) if fixed else min(means.values())
    return {name: mean / better for name, mean in means.items()}
