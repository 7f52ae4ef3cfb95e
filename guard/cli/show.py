"""Tables for people, JSON for machines."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

STYLES = {
    "off": "red",
    "bypass": "red",
    "observe": "yellow",
    "silent": "red",
    "pending": "yellow",
    "acknowledged": "green",
}


def dump(data: Any) -> None:
    """Prints `data` as JSON."""
    sys.stdout.write(json.dumps(data, indent=2) + "\n")


def console() -> Console:
    """The terminal; wide enough for whole names where it is none."""
    plain = not sys.stdout.isatty()
    return Console(width=200 if plain else None, highlight=False, soft_wrap=plain)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str = "") -> Table:
    """A table; columns whose name ends in `>` are aligned to the right."""
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in columns:
        made.add_column(name.removesuffix(">"), justify="right" if name.endswith(">") else "left", no_wrap=True)
    for row in rows:
        made.add_row(*(_cell(value) for value in row))
    return made


def fitting(
    out: Console, columns: Sequence[str], rows: Sequence[Sequence[Any]], optional: Sequence[str], *, title: str = ""
) -> Table:
    """As `table`, without as many of the `optional` columns as do not fit into the terminal; the last one wraps."""
    kept = list(columns)
    for name in (*optional, ""):
        at = [columns.index(one) for one in kept]
        made = table(kept, [[row[index] for index in at] for row in rows], title=title)
        if name == "" or Measurement.get(out, out.options.update(max_width=10_000), made).maximum <= out.width:
            break
        kept.remove(name)
    made.columns[-1].no_wrap = False
    return made


def seconds(value: float | None) -> str:
    """A duration with three digits: `1.23 s`, `45.6 ms`, `789 us`; `-` for none."""
    if value is None:
        return "-"
    if value == 0.0:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= size or unit == "us":
            scaled = value / size
            digits = 0 if abs(scaled) >= 100 else 1 if abs(scaled) >= 10 else 2
            return f"{scaled:.{digits}f} {unit}"
    return ""


def ratio(value: float | None) -> str:
    """A share in percent."""
    return "-" if value is None else f"{value:.0%}"


def left(value: float | None) -> str:
    """Time that is left, in its largest unit."""
    if value is None:
        return "no end"
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} s"


def at(text: str | None) -> str:
    """An RFC 3339 time without its fraction."""
    return "-" if not text else text[:19].replace("T", " ") + "Z"


def _cell(value: Any) -> str:
    text = "-" if value is None or value == "" else str(value)
    if not text.isprintable():  # ids come from clients: none of them may steer a terminal
        text = "".join(sign if sign.isprintable() or sign == "\n" else "\N{REPLACEMENT CHARACTER}" for sign in text)
    text = text.replace("[", "\\[")
    return f"[{STYLES[text]}]{text}[/]" if text in STYLES else text
