"""TTFT against RTT: where it departs, where offload stops paying, how sure that is."""

from dashboards.shapes import EVENTS, PER_BACKEND, PER_ENGINE, RECORDED, SERVICE, Dashboard, Panel, Query

_RATE = "[$__rate_interval]"
_POINT = f'kvguard_inflection_rtt_seconds{{{PER_BACKEND},kind="%s",bound="%s"}}'
_BY = "model_name, backend, class"


def point(kind: str, bound: str = "value") -> str:
    """Query of a point, the worst class of each backend."""
    return f"min by (backend) ({_POINT % (kind, bound)})"


def states(dimension: str, values: tuple[str, ...]) -> str:
    """One number per backend and class: the place of the answer in `values`."""
    parts = [
        f'max by ({_BY}) (kvguard_verdict{{{PER_BACKEND},dimension="{dimension}",value="{value}"}} == 1) * {number}'
        for number, value in enumerate(values)
    ]
    return " or ".join(parts)


_STATES = ("ok", "departed", "harmful", "insufficient-data")
_CAUSES = ("unknown", "queue", "rtt", "bandwidth", "fixed-cost")

_PICTURE = (
    Panel(
        title="RTT against departure and break-even", unit="s", width=16, height=10, log=True,
        description="kvguard_inflection_rtt_seconds, the class that comes first of each backend: idle RTT now, the points"
        " where TTFT departs from its baseline and where reading stops paying. The table below says whether a point is"
        " measured, projected or a prior.",
        queries=(
            Query(point("now"), "RTT now {{backend}}"),
            Query(point("departure"), "departure {{backend}}"),
            Query(point("break-even"), "break-even {{backend}}"),
        ),
    ),
    Panel(
        title="TTFT of hits against RTT", kind="xychart", unit="s", width=8, height=10,
        description="x: kvguard_rtt_idle_seconds, mean over targets. y: kvguard_ttft_seconds of remote reads, p50. One dot"
        " per step of the range shown.",
        queries=(
            Query(f"avg(kvguard_rtt_idle_seconds{{{SERVICE}}})", "RTT"),
            Query(
                "histogram_quantile(0.5, sum by (le) (rate(kvguard_ttft_seconds_bucket"
                f'{{{PER_ENGINE},decision="remote"}}{_RATE})))', "TTFT p50, remote",
            ),
        ),
    ),
    Panel(
        title="Interval of departure", unit="s", width=12, log=True,
        description="kvguard_inflection_rtt_seconds{kind=departure}: estimate and ends of its 95 % interval.",
        queries=tuple(Query(point("departure", bound), f"{{{{backend}}}} {bound}") for bound in ("low", "value", "high")),
    ),
    Panel(
        title="Interval of break-even", unit="s", width=12, log=True,
        description="kvguard_inflection_rtt_seconds{kind=break-even}: estimate and ends of its 95 % interval.",
        queries=tuple(Query(point("break-even", bound), f"{{{{backend}}}} {bound}") for bound in ("low", "value", "high")),
    ),
)  # fmt: skip

_CLASSES = (
    Panel(
        title="Verdict", kind="state-timeline", width=24, height=7, values=_STATES,
        description="kvguard_verdict{dimension=state} per backend and class.",
        queries=(Query(states("state", _STATES), "{{backend}} {{class}}"),),
    ),
    Panel(
        title="Cause", kind="state-timeline", width=12, height=7, values=_CAUSES,
        description="kvguard_verdict{dimension=cause}: what moves TTFT. Causes that are mixed are not drawn.",
        queries=(Query(states("cause", _CAUSES), "{{backend}} {{class}}"),),
    ),
    Panel(
        title="Answers", kind="table", width=12, height=7,
        description="kvguard_verdict: the answers that hold now: state, cause, shape.",
        queries=(Query(f"max by ({_BY}, dimension, value) (kvguard_verdict{{{PER_BACKEND}}} == 1)"),),
    ),
    Panel(
        title="TTFT of hits by class, p50", unit="s", width=12,
        description="model_name_backend_class_decision:kvguard_ttft_seconds:p50_rate5m of remote reads.",
        queries=(Query(
            f'model_name_backend_class_decision:kvguard_ttft_seconds:p50_rate5m{{{RECORDED},decision="remote"}}',
            "{{backend}} {{class}}",
        ),),
    ),
    Panel(
        title="Projected TTFT by class: remote and recompute", unit="s", width=12,
        description="kvguard_ttft_projected_seconds: the class's reference request at the objective's percentile. Where the"
        " lines cross is break-even.",
        queries=(Query(
            f"avg by (class, choice) (kvguard_ttft_projected_seconds{{{PER_ENGINE}}})", "{{class}} {{choice}}"
        ),),
    ),
    Panel(
        title="Points", kind="table", unit="s", width=16,
        description="kvguard_inflection_rtt_seconds: every point with its interval and source (measured, projected, prior).",
        queries=(Query(f"max by ({_BY}, kind, bound, source) (kvguard_inflection_rtt_seconds{{{PER_BACKEND}}})"),),
    ),
    Panel(
        title="Crossings", width=8,
        description="kvguard_events_total: crossings of departure and break-even, shifts of RTT, in 5 minutes.",
        queries=(Query(
            f'sum by (kind) (increase(kvguard_events_total{{{SERVICE},kind=~"rtt|departure|break-even"}}[5m]))', "{{kind}}"
        ),),
    ),
)  # fmt: skip

DASHBOARD = Dashboard(
    uid="kvguard-inflection", title="kvguard / Inflection",
    description="Where TTFT departs from its baseline, where offload stops paying, and how sure that is.",
    rows=(("Where are we?", _PICTURE), ("By class", _CLASSES)), notes=EVENTS,
)  # fmt: skip
