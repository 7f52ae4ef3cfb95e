"""The report of a sweep: one HTML file with everything in it, and the same as JSON."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any, Final

from guard.errors import SweepError
from guard.estimate.shapes import Figure
from guard.sweep.analysis import DEPARTURE_GAIN, Curve, three_digits

HTML: Final = "report.html"
JSON: Final = "report.json"
_COLORS: Final = {"remote": "#0b6bcb", "recompute": "#c4501b", "local": "#3a7d44"}
_CURVES_TEXT: Final = """<h2>TTFT across latency tiers</h2><p class=note>Medians with 95 % intervals (bootstrap over
requests), all measured by the client. Shaded: where a remote hit is slower than recomputing.</p>"""
_METHOD_TEXT: Final = f"""<h2>How it was measured</h2><p>Every tier adds round-trip time in front of the store; in each,
the same prompts go over both roads in turn: read from the remote tier, and computed anew with reads switched off.
kvguard's hook tells of each request which road it really took; others are not counted (strays). Tiers come in random
order, in blocks. TTFT is the client's; RTT is measured idle while the tier stands, or else what was added. Departure is
{DEPARTURE_GAIN:.0%} above the fastest tier. Every figure is measured; none is projected.</p>"""
_STYLE: Final = """
:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0}th,td{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #8884}
th:first-child,td:first-child{text-align:left}caption{text-align:left;font-weight:600;padding:.3rem 0}
figure{margin:1rem 0;background:#fff;padding:.5rem;border-radius:.4rem}svg{max-width:100%;height:auto}
.lead{font-size:1.05rem}.note{color:#888}td.loses{background:#c4501b33}td.pays{background:#3a7d4426}
"""


def write(directory: Path, curves: Sequence[Curve], facts: Mapping[str, Any]) -> Path:
    """Writes both files; returns the HTML's path.

    Raises:
        SweepError: matplotlib is not installed.
    """
    body = {**facts, "source": "measured", "curves": [asdict(curve) for curve in curves]}
    (directory / JSON).write_text(json.dumps(body, indent=2) + "\n", "utf-8")
    path = directory / HTML
    path.write_text(_page(curves, facts), "utf-8")
    return path


def require_plots() -> None:
    """Says early that plots cannot be drawn.

    Raises:
        SweepError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SweepError("plots need matplotlib: pip install 'kvguard[report]'") from error


def _page(curves: Sequence[Curve], facts: Mapping[str, Any]) -> str:
    plan = facts["plan"]
    head = (
        f"{escape(str(facts['model']))} on {escape(str(facts['machine']))}, {escape(str(facts['date']))};"
        f" {plan['prompt_tokens']} prompt tokens, {plan['requests']} requests a cell, {plan['repeats']} blocks"
    )
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width,initial-scale=1'>",
        f"<title>kvguard sweep: {escape(str(facts['model']))}</title><style>{_STYLE}</style>",
        f"<h1>Where remote KV offloading stops paying here</h1><p class=note>{head}</p>",
        *(f"<p class=lead>{escape(curve.words)}</p>" for curve in curves),
        _answers(curves),
        _CURVES_TEXT,
        *(_curve(curve) for curve in curves),
        _METHOD_TEXT,
        f"<details><summary>All facts</summary><pre>{escape(json.dumps(facts, indent=2))}</pre></details>",
    ]
    return "\n".join(parts) + "\n"


def _answers(curves: Sequence[Curve]) -> str:
    rows = [
        (
            str(curve.concurrency), _time(curve.recompute), _time(curve.local),
            _time(curve.tiers[0].remote) if curve.tiers else "-", _time(curve.departure), _time(curve.break_even),
            _plain(curve.round_trips), "-" if curve.reported_round_trips is None else f"{curve.reported_round_trips:g}",
        )
        for curve in curves
    ]  # fmt: skip
    heads = (
        "concurrency", "recompute", "local", "remote, fastest tier", "departs at RTT", "stops paying at RTT",
        "round trips in a row", "as counted",
    )  # fmt: skip
    return _table("The answers", heads, [[(cell, "") for cell in row] for row in rows])


def _curve(curve: Curve) -> str:
    rows = []
    for tier in curve.tiers:
        pays = "" if None in (tier.remote.value, curve.recompute.value) else (
            "loses" if (tier.remote.value or 0.0) > (curve.recompute.value or 0.0) else "pays"
        )  # fmt: skip
        rows.append(
            [
                (f"{tier.added * 1e3:g} ms", ""), (f"{three_digits(tier.rtt * 1e3)} ms", ""),
                (_time(tier.remote), pays),
                (_time(tier.recompute), ""), (_time(tier.local), ""), (str(tier.remote.n), ""), (str(tier.strays), ""),
            ]
        )  # fmt: skip
    heads = ("RTT added", "RTT seen", "remote", "recompute", "local", "n", "strays")
    return f"<figure>{_plot(curve)}</figure>" + _table(f"Concurrency {curve.concurrency}", heads, rows)


def _table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[tuple[str, str]]]) -> str:
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td class='{kind}'>{escape(text)}</td>" for text, kind in row) + "</tr>" for row in rows
    )
    return f"<table><caption>{escape(caption)}</caption><tr>{head}</tr>{body}</table>"


def _plot(curve: Curve) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure as Plot

    with mpl.rc_context({"svg.hashsalt": "kvguard", "svg.fonttype": "none", "font.size": 9}):
        plot = Plot(figsize=(8.0, 3.4), layout="constrained")
        axes = plot.add_subplot()
        rtts = [tier.rtt * 1e3 for tier in curve.tiers]
        for road in ("remote", "recompute", "local"):
            known = [(x, f) for x, tier in zip(rtts, curve.tiers, strict=True) if (f := getattr(tier, road)).value]
            if not known:
                continue
            low = [((f.value - f.low) if f.low else 0.0) * 1e3 for _, f in known]
            high = [((f.high - f.value) if f.high else 0.0) * 1e3 for _, f in known]
            axes.errorbar(
                [x for x, _ in known], [f.value * 1e3 for _, f in known], yerr=[low, high], marker="o", ms=4, capsize=2,
                color=_COLORS[road], label=road,
            )  # fmt: skip
        for name, figure, style in (("departs", curve.departure, ":"), ("stops paying", curve.break_even, "--")):
            if figure.value is None:
                continue
            axes.axvline(
                figure.value * 1e3,
                color="#555",
                ls=style,
                lw=1,
                label=f"{name} at {three_digits(figure.value * 1e3)} ms",
            )
            axes.axvspan((figure.low or 0.0) * 1e3, (figure.high or max(rtts) / 1e3) * 1e3, color="#555", alpha=0.08)
        axes.set(xlabel="RTT to the store, ms", ylabel="TTFT, ms", title=f"concurrency {curve.concurrency}")
        axes.set_ylim(bottom=0.0)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
        out = io.StringIO()
        plot.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _time(figure: Figure) -> str:
    if figure.value is None:
        return figure.reason or "-"
    text = three_digits(figure.value * 1e3)
    if figure.low is not None or figure.high is not None:
        low = "" if figure.low is None else three_digits(figure.low * 1e3)
        high = "beyond" if figure.high is None else three_digits(figure.high * 1e3)
        text += f" [{low}, {high}]"
    return text + " ms"


def _plain(figure: Figure) -> str:
    if figure.value is None or figure.low is None or figure.high is None:
        return figure.reason or "-"
    return f"{figure.value:.2f} [{figure.low:.2f}, {figure.high:.2f}]"
