"""One sentence for the console and `kvguard status`: is remote offloading helping or hurting, and why (pure)."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from guard import semconv
from guard.estimate.shapes import Cell

POOLED: Final = "all"
STOPPED: Final = ("bypass", "half-open")
REASONS: Final = {
    "failures": "reads failed one after another",
    "unreachable": "the store answers no probe",
    "stalled": "a read under way is far older than it should be",
    "sla": "reading was projected to miss the TTFT objective",
    "projected": "reading was projected to cost more than recomputing",
    "trickle": "the last trial read still lost",
    "try": "trial reads are under way",
    "healed": "the link has healed",
    "progress": "stalled reads have ended, trial reads are under way",
    "share": "reads failed lately, so a part of the traffic only reads",
    "inflight": "as many reads are under way as the link takes without a queue",
}
"""What the controller's reasons mean, for people."""

_WORST_FIRST: Final = ("harmful", "departed", "ok", "insufficient-data")


class Row(NamedTuple):
    """What is asked of one engine and backend."""

    backend: str
    mode: str
    state: str
    silent: bool
    reason: str = ""


class Headline(NamedTuple):
    """`state` is a verdict's state, `guarded` (reads are stopped), `off`, `empty` or `silent`; the rest is words."""

    state: str
    title: str
    why: str


def headline(rows: Sequence[Row], cells: Sequence[Cell], requests: int) -> Headline:
    """The sentence for `rows` and the pooled `cells`; `requests` is how many the window holds."""
    live = [row for row in rows if not row.silent]
    if not rows:
        return Headline("empty", "No engine yet", "Set KVGUARD_ENDPOINT where vLLM starts; `kvguard doctor` checks it.")
    if not live:
        return Headline(
            "silent", "No engine answers", f"All {len(rows)} have stopped asking for directives. Is vLLM up?"
        )
    if all(row.mode == semconv.MODE_OFF for row in live):
        reason = next((f" Reason given: {row.reason}" for row in live if row.reason), "")
        return Headline("off", "Remote reads are off", f"Switched off by hand for every live engine.{reason}")
    judged = sorted(
        (cell for cell in cells if cell.class_ == POOLED), key=lambda cell: _WORST_FIRST.index(cell.verdict.state)
    )
    if stopped := [row for row in live if row.mode == semconv.MODE_AUTO and row.state in STOPPED]:
        return _stopped(stopped, live, judged)
    if not judged or judged[0].verdict.state == "insufficient-data":
        return Headline("insufficient-data", "Too early to say whether remote reads pay", _too_early(judged, requests))
    return _judge(judged, [row for row in live if row.backend == judged[0].backend])


def _stopped(stopped: Sequence[Row], live: Sequence[Row], judged: Sequence[Cell]) -> Headline:
    """The guard has acted: where, why, and what the estimator says of that backend."""
    backend = stopped[0].backend
    mine = [row for row in stopped if row.backend == backend]
    all_of = sum(row.backend == backend for row in live)
    where = "" if len(mine) == all_of else f" on {len(mine)} of {all_of} engines"
    words = "; ".join(dict.fromkeys(REASONS.get(row.reason, row.reason) for row in mine if row.reason))
    why = f"{words[0].upper()}{words[1:]}. " if words else ""
    why += "Requests are recomputed; the guard tries again by itself."
    if others := len({row.backend for row in stopped}) - 1:
        why += f" {others} other {'backend is' if others == 1 else 'backends are'} stopped too."
    cell = next((cell for cell in judged if cell.backend == backend), None)
    if cell is not None and cell.verdict.state in ("harmful", "departed"):
        why += f" {_why(cell)}"
    return Headline("guarded", f"The guard has stopped reads from {backend}{where}", why)


def _judge(judged: Sequence[Cell], rows: Sequence[Row]) -> Headline:
    worst, others = judged[0], judged[1:]
    why = _why(worst)
    unknown = sum(cell.verdict.state == "insufficient-data" for cell in others)
    same = sum(cell.verdict.state == worst.verdict.state for cell in others)
    if better := len(others) - unknown - same:
        why += f" {better} other {'backend is' if better == 1 else 'backends are'} better."
    if worst.verdict.state == "harmful":
        if rows and all(row.mode in (semconv.MODE_ON, semconv.MODE_OBSERVE) for row in rows):
            why += f" The mode is {rows[0].mode}: nothing is throttled."
        return Headline("harmful", f"Reads from {worst.backend} cost more than recomputing", why)
    if worst.verdict.state == "departed":
        return Headline("departed", f"Reads from {worst.backend} still pay, but TTFT has departed from its best", why)
    return Headline("ok", "Remote reads pay off", why)


def _why(cell: Cell) -> str:
    if cell.verdict.reason:
        text = cell.verdict.reason[0].upper() + cell.verdict.reason[1:]
        return text if text.endswith(".") else f"{text}."
    cause = "" if cell.verdict.cause == "unknown" else f" Cause: {cell.verdict.cause}."
    return f"Verdict for {cell.backend}: {cell.verdict.state}, from {cell.n} requests.{cause}"


def _too_early(judged: Sequence[Cell], requests: int) -> str:
    reason = next((cell.verdict.reason for cell in judged if cell.verdict.reason), "")
    seen = f"{requests} {'request' if requests == 1 else 'requests'} seen"
    return f"{seen}: {reason}." if reason else f"{seen}. Until then departure and break-even are published priors."
