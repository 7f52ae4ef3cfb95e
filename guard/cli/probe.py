"""`kvguard probe`: round-trip times to one target, from here, now."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from guard.cli.errors import FAILED, USAGE, fail
from guard.cli.options import Json

BARS = 40
BINS = 12


def measure(
    target: Annotated[
        str,
        typer.Argument(help="host:port, redis://…, rediss://…, http(s)://…, rdma://…, or the path of a file."),
    ],
    prober: Annotated[
        str | None,
        typer.Option(help="rdma, resp, http, tcp, path or tcpinfo [by the target].", show_default=False),
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=100_000, help="How many probes.")] = 20,
    interval: Annotated[float, typer.Option(min=0.0, max=60.0, help="Seconds between probes.")] = 0.1,
    timeout: Annotated[float, typer.Option(min=0.001, max=60.0, help="Seconds until a probe is lost.")] = 1.0,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="KEY=VALUE for the prober, as in [[probes]].", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Probe TARGET and show the distribution of its RTT; exit code 1 if nothing was measured."""
    from guard.cli.show import console, dump
    from guard.errors import ConfigError
    from guard.probe.prober import Sample, Target, summarize
    from guard.probe.registry import make

    chosen = prober or guess(target)
    samples: list[Sample] = []
    out = console()
    try:
        wanted = Target(target=target, prober=chosen, count=1, timeout=timeout, options=_options(option or ()))
        made = make(wanted)
    except ConfigError as error:
        fail(str(error), code=USAGE)
    try:
        if as_json or not out.is_terminal:
            _measure(made, samples, count, interval, timeout, lambda: None)
        else:
            from rich.live import Live

            with Live(console=out, refresh_per_second=4, transient=False) as live:
                _measure(made, samples, count, interval, timeout,
                         lambda: live.update(_view(wanted, samples, count)))  # fmt: skip
    except KeyboardInterrupt:
        pass  # what was measured until then is shown
    finally:
        made.close()
    if not as_json and not out.is_terminal:
        out.print(_view(wanted, samples, count))
    if as_json:
        summary = summarize(samples)
        dump({
            "target": target, "prober": chosen, "source": "measured",
            "rtt_seconds": {"n": summary.n, "p50": summary.p50, "p50_low": summary.p50_low,
                            "p50_high": summary.p50_high, "p99": summary.p99, "min": summary.minimum,
                            "jitter": summary.jitter},
            "sent": summary.sent, "loss_ratio": summary.loss,
            "facts": dict(samples[-1].facts) if samples else {}, "problem": _problem(samples),
        })  # fmt: skip
    if not any(sample.rtts for sample in samples):
        fail(f"{chosen} {target}: {_problem(samples) or 'no probe was made'}", code=FAILED)


def guess(target: str) -> str:
    """The prober for a target that names none."""
    scheme, separator, _ = target.partition("://")
    if separator:
        return {"redis": "resp", "rediss": "resp", "https": "http", "file": "path"}.get(scheme, scheme)
    if target.startswith("/"):
        return "path"
    return "resp" if target.endswith(":6379") else "tcp"


def histogram(rtts: Sequence[float]) -> list[tuple[float, float, int]]:
    """Bins (low, high, count) that grow by a constant factor from the least value to the greatest."""
    low, high = min(rtts), max(rtts)
    if low <= 0 or high <= low:
        return [(low, high, len(rtts))]
    step = (high / low) ** (1 / BINS)
    edges = [low * step**index for index in range(BINS)] + [high]
    counts = [0] * BINS
    for rtt in rtts:
        at = sum(rtt >= edge for edge in edges[1:-1])
        counts[at] += 1
    return [(edges[index], edges[index + 1], counts[index]) for index in range(BINS)]


def _measure(made: Any, samples: list[Any], count: int, interval: float, timeout: float, shown: Any) -> None:
    for index in range(count):
        if index:
            time.sleep(interval)
        samples.append(made.probe(1, timeout))
        shown()


def _view(target: Any, samples: list[Any], count: int) -> Any:
    from rich.console import Group
    from rich.text import Text

    from guard.cli.show import seconds, table
    from guard.probe.prober import summarize

    summary = summarize(samples)
    loss = "-" if summary.loss is None else f"{summary.loss:.1%}"
    median = seconds(summary.p50)
    if summary.p50_low is not None:
        median += f" ({seconds(summary.p50_low)} - {seconds(summary.p50_high)})"
    columns = ("n>", "min>", "p50 (95 %)>", "p99>", "jitter>", "loss>", "facts")
    facts = ", ".join(f"{name} {value:.6g}" for name, value in (samples[-1].facts if samples else {}).items())
    row = (summary.n, seconds(summary.minimum), median, seconds(summary.p99), seconds(summary.jitter), loss, facts)
    parts: list[Any] = [
        Text(f"{target.prober} {target.target}: RTT, measured; {len(samples)} of {count} rounds"), table(columns, [row])
    ]  # fmt: skip
    rtts = [rtt for sample in samples for rtt in sample.rtts]
    if len(rtts) > 1:
        bins = histogram(rtts)
        most = max(number for _, _, number in bins)
        lines = [f"{seconds(low):>8} {'█' * round(BARS * number / most)}{' ' if number else ''}{number or ''}"
                 for low, _, number in bins]  # fmt: skip
        parts.append(Text("\n".join(lines)))
    if problem := _problem(samples):
        parts.append(Text(f"last failure: {problem}", style="yellow"))
    return Group(*parts)


def _options(words: Sequence[str]) -> dict[str, str | int | float | bool]:
    from guard.errors import ConfigError

    found: dict[str, str | int | float | bool] = {}
    for word in words:
        key, separator, text = word.partition("=")
        if not separator:
            raise ConfigError("option", f"{word!r} is not KEY=VALUE")
        if text in ("true", "false"):
            found[key] = text == "true"
            continue
        try:
            found[key] = float(text) if "." in text or "e" in text else int(text)
        except ValueError:
            found[key] = text
    return found


def _problem(samples: Sequence[Any]) -> str:
    return next((sample.problem for sample in reversed(samples) if sample.problem), "")
