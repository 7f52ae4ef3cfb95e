"""Writes docs/metrics.md from guard/semconv.py and the hook's list: `python docs/metrics.py` (or `--check`)."""

import sys
from pathlib import Path

from guard import semconv
from guard.hook import engine_metrics

TARGET = Path(__file__).with_suffix(".md")

HEAD = """# Metrics

Written by `docs/metrics.py` from `guard/semconv.py` and `guard/hook/engine_metrics.py`; do not edit. Served at
`GET /metrics` of `kvguard serve`.

Durations are seconds, sizes are bytes. Every label is bounded: `model_name`, `engine_id` and `backend` by the
engines that poll, `class` by the fixed prompt-length and concurrency bands, `decision`, `reason`, `mode` and `outcome`
by fixed lists. Past a limit, new values are folded into `other`. Request ids are never labels.

| metric | type | labels | meaning |
|---|---|---|---|
"""


def render() -> str:
    """The whole page."""
    rows = []
    for metric in semconv.METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    fetch = ", ".join(f"{edge:g}" for edge in semconv.FETCH_BUCKETS)
    ttft = ", ".join(f"{edge:g}" for edge in semconv.TTFT_BUCKETS)
    engine = "\n".join(
        f"| `{engine_metrics.PREFIX}{family.name}{'_total' * (family.kind == 'counter')}` | {family.kind} | "
        f"{', '.join(f'`{label}`' for label in family.labels) or '-'} | {family.help} |"
        for family in engine_metrics.FAMILIES
    )
    tail = f"""
Buckets in seconds. `kvguard_ttft_seconds`: {ttft}.
All other histograms: {fetch}.

## In vLLM's own `/metrics`

Only where vLLM runs with `KVGUARD_VLLM_METRICS=on`. They come with vLLM's own labels, next to the connector's own
metrics, and count one engine from its start. vLLM sends them with its steps: while an engine is idle the age stands
still. Once the hook is out of the way after too many errors, all of them do.

| metric | type | labels | meaning |
|---|---|---|---|
{engine}
"""
    return HEAD + "\n".join(rows) + "\n" + tail


if __name__ == "__main__":
    text = render()
    if "--check" in sys.argv[1:]:
        sys.exit(TARGET.read_text() != text and "docs/metrics.md is stale: run `python docs/metrics.py`")
    TARGET.write_text(text)
