"""Engines that read one backend share its link: permits for reads in flight, split fairly. Pure.

Two budgets, of which the smaller holds:

- **Slow start.** While the link has not shown how much it carries, only so many reads may be in flight over all engines
  as would still pay if they ran at once (`headroom`), and one more for every read that paid since; when `PROVED` per
  engine did, the link is known and this budget is gone. When all reads of a round were slow and did not pay, what was
  gained is halved; when a part of them was, by that part of it. A round is as many reads as may be in flight, one per
  engine at most: as in TCP a budget is cut once by what was in flight under it, and the same share of losses weighs the
  same however many reads a step sees. Every `IDLE_SECONDS` without a read halve it, too; half of it is left when most
  engines had to stop. So a first burst of many engines, of which each sees its own reads only, is bounded without a
  word from anybody.
- **Limit.** What slows every engine is the link and shrinks the budget; what slows one engine is that engine's own (its
  state is its own, too). So it goes by the median over engines, and acts only where several of them read. It leaves
  each engine one read, and all together as many as still pay.

Where there are fewer permits than engines they go to those that read, then round among those that would.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Final

from guard.control.limit import TOLERANCE, baseline_after, fair_split, limit_after
from guard.control.projection import saved_seconds
from guard.control.shapes import Read
from guard.costs import Costs

PROVED: Final = 4
"""Reads that paid, per engine, after which the link is known."""

IDLE_SECONDS: Final = 60.0
TURN_SECONDS: Final = 2.0
"""How long an engine keeps a permit that it does not use while others have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Memory of one backend's pool: the limit (None: none needed) and its baseline; reads that paid, and the last.

    `round` is how many reads of the present round paid, and how many lost.
    """

    limit: float | None = None
    baseline: float | None = None
    paid: float = 0.0
    read_at: float | None = None
    round: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One engine, `stopped` while in bypass; `wants` where some of its requests could read.

    Of its reads that ended since the last step: mean time over what is projected for their size on an idle link (None:
    there were none), how many paid, how many were slow and did not.
    """

    inflight: int = 0
    time: float | None = None
    paid: int = 0
    lost: int = 0
    stopped: bool = False
    wants: bool = False


def member(
    reads: Sequence[Read], costs: Costs | None, inflight: int, *, stopped: bool = False, wants: bool = False,
    waiting: float = 0.0,
) -> Member:  # fmt: skip
    """One engine by its reads since the last step. Without a model every read that ended well counts as one that paid.

    Args:
        reads: those that ended since the last step.
        costs: the coefficients that the engine is told.
        inflight: its reads in flight.
        stopped: it is in bypass.
        wants: some of its requests could read.
        waiting: requests that wait for its GPU: what a read saves, it saves each of them.
    """
    if not reads:
        return Member(inflight=inflight, stopped=stopped, wants=wants)
    good = [read for read in reads if read.ok and read.seconds > 0.0]
    if costs is None:
        return Member(inflight=inflight, paid=len(good), stopped=stopped, wants=wants)
    times = [(read, read.seconds / expected) for read in good if (expected := costs.read_seconds(read.bytes)) > 0.0]
    saved = [saved_seconds(read, costs, waiting) for read, _ in times]
    paid = sum(read.seconds <= each for (read, _), each in zip(times, saved, strict=True))  # a wait proves nothing
    lost = sum(  # a try is judged by the engine that made it: it may be slow for reasons of its own
        time > TOLERANCE and read.least > each and not read.tagged
        for (read, time), each in zip(times, saved, strict=True)
    )
    mean = fmean(time for _, time in times) if times else None
    return Member(inflight=inflight, time=mean, paid=paid, lost=lost, stopped=stopped, wants=wants)


def shared(
    pool: Pool, members: Mapping[str, Member], headroom: float | None, now: float
) -> tuple[Pool, dict[str, int]]:
    """The pool after one step, and each engine's part of the budget (empty: no budget).

    Args:
        pool: what was before.
        members: the engines by name.
        headroom: reads at once that would still pay (`projection.headroom`); None: not known, no slow start.
        now: seconds.
    """
    pool = _slow_start(pool, members, headroom, now)
    total = sum(each.inflight for each in members.values())
    times = [each.time for each in members.values() if each.time is not None]
    if len(times) >= 2:
        actual = median(times)
        baseline = baseline_after(pool.baseline, actual, total)
        pool = replace(pool, limit=limit_after(pool.limit, baseline, actual, total), baseline=baseline)
    if len(members) < 2:
        return pool, {}
    budget = None if pool.limit is None else max(pool.limit, len(members), headroom or 0.0)
    if headroom is not None and pool.paid < PROVED * len(members):
        window = headroom + pool.paid
        if window < len(members):
            return pool, _in_turn(max(int(window), 1), members, now)
        budget = window if budget is None else min(budget, window)
    if budget is None:
        return pool, {}
    parts = fair_split(int(budget), {name: each.inflight for name, each in members.items()})
    return pool, {name: 1 << (part.bit_length() - 1) for name, part in parts.items()}  # hooks are not woken for less


def _slow_start(pool: Pool, members: Mapping[str, Member], headroom: float | None, now: float) -> Pool:
    paid, lost = (sum(getattr(each, name) for each in members.values()) for name in ("paid", "lost"))
    most = PROVED * len(members)
    gained, round_paid, round_lost = pool.paid + paid, pool.round[0] + paid, pool.round[1] + lost
    if round_paid + round_lost >= min((headroom or 1.0) + pool.paid, len(members)):
        gained *= 1.0 - 0.5 * round_lost / max(round_paid + round_lost, 1)
        round_paid = round_lost = 0
    gained = min(gained, 2.0 * most)
    ended = paid or lost or any(each.time is not None for each in members.values())
    read_at = now if ended or pool.read_at is None else pool.read_at
    if 2 * sum(each.stopped for each in members.values()) > len(members):
        gained = min(gained, most / 2.0)
    if now - read_at > IDLE_SECONDS:
        gained, read_at = gained / 2.0, now
    return replace(pool, paid=gained, read_at=read_at, round=(round_paid, round_lost))


def _in_turn(permits: int, members: Mapping[str, Member], now: float) -> dict[str, int]:
    names = list(members)
    first = int(now // TURN_SECONDS) * permits

    def place(at: int) -> tuple[bool, bool, bool, int]:
        each = members[names[at]]  # who wants nothing keeps its place, so that nobody is woken
        return not each.inflight, each.stopped, not each.wants, (at - first) % len(names) if each.wants else at

    chosen = set(sorted(range(len(names)), key=place)[:permits])
    return {name: int(at in chosen) for at, name in enumerate(names)}
