"""One sentence for the console and `kvguard status`: is remote offloading helping or hurting, and why (pure)."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from guard import semconv
from guard.estimate.shapes import Cell

POOLED: Final = "all"
BYPASS: Final = "bypass"
_WORST_FIRST: Final = ("harmful", "departed", "ok", "insufficient-data")


class Row(NamedTuple):
    """What is asked of one engine and backend."""

    backend: str
    mode: str
    state: str
    silent: bool
    reason: str = ""


class Headline(NamedTuple):
    """`state` is a verdict's state, `guarded` (harmful, and stopped), `off`, `empty` or `silent`; the rest is words."""

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
    if not judged or judged[0].verdict.state == "insufficient-data":
        return Headline("insufficient-data", "Too early to say whether remote reads pay", _too_early(judged, requests))
    return _judge(judged, [row for row in live if row.backend == judged[0].backend])


def _judge(judged: Sequence[Cell], rows: Sequence[Row]) -> Headline:
    worst, others = judged[0], judged[1:]
    why = _why(worst)
    unknown = sum(cell.verdict.state == "insufficient-data" for cell in others)
    same = sum(cell.verdict.state == worst.verdict.state for cell in others)
    if better := len(others) - unknown - same:
        why += f" {better} other {'backend is' if better == 1 else 'backends are'} better."
    if worst.verdict.state == "harmful":
        acting = (semconv.MODE_AUTO, semconv.MODE_OFF)  # under observe the state is what auto would have done
        stopped = bool(rows) and all(row.state == BYPASS and row.mode in acting for row in rows)
        if stopped:
            return Headline("guarded", f"Reads from {worst.backend} would hurt, and are stopped", why)
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
