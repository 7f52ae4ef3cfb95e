"""`kvguard analyze --json` on 10 million recorded requests: seconds, peak memory, and whether it finds what is planted.

Two days of 5 million requests in 100 files; on the second day remote hits of one of four classes are 20 % slower.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

from guard.classes import CLASSES
from guard.correlate.frame import SCHEMA

ROWS = int(os.environ.get("KVGUARD_BENCH_ROWS", "10000000"))
GOAL_SECONDS, GOAL_BYTES = 10.0, 2 << 30
FILES = 100
_DAY_NS = 86_400 * 10**9
_PROMPTS = (1500, 3000, 6000, 12_000)
_SLOWED = 2


def main() -> int:
    """Prints time and memory; 1 when a goal is missed or the answer is wrong."""
    with tempfile.TemporaryDirectory() as place:
        size = _write(Path(place))
        print(f"analyze: {ROWS:,} requests in {FILES} files, {size / ROWS:.0f} bytes a request")
        command = [sys.executable, "-m", "guard.cli", "analyze", place, "--json"]
        began = time.perf_counter()
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak = used.ru_maxrss * 1024
    report = json.loads(done.stdout)
    slower = {(row["class"], row["decision"]) for row in report["regressions"] if row["verdict"] == "slower"}
    right = slower == {(_class(_SLOWED), "remote")} and sum(row["n"] for row in report["days"]) == ROWS
    met = seconds <= GOAL_SECONDS and peak <= GOAL_BYTES and right
    print(f"  {used.ru_utime + used.ru_stime:.1f} CPU-s, load average {os.getloadavg()[0]:.1f}")
    print(f"  {seconds:.1f} s (goal <= {GOAL_SECONDS:.0f}), peak {peak / 2**30:.2f} GiB (goal <= 2),", end=" ")
    print(f"planted regression {'found, no other' if right else f'NOT found: {sorted(slower)}'}:", end=" ")
    print("met" if met else "MISSED")
    return int(not met)


def _write(place: Path) -> int:
    rng = np.random.default_rng(1)
    for number in range(FILES):
        day = number * 2 // FILES
        _frame(rng, ROWS // FILES, day, number).write_parquet(place / f"{number:03}.parquet")
    return sum(file.stat().st_size for file in place.iterdir())


def _frame(rng: np.random.Generator, rows: int, day: int, number: int) -> pl.DataFrame:
    kind = rng.integers(0, len(_PROMPTS), rows)
    prompt = np.array(_PROMPTS)[kind] + rng.integers(0, 200, rows)
    remote = rng.random(rows) < 0.5
    loaded = np.where(remote, prompt // 2, 0)
    prefill = (prompt - loaded) * 2e-5 * rng.lognormal(0.0, 0.2, rows)
    wait = np.where(remote, rng.gamma(4.0, 0.005, rows), 0.0)
    slow = np.where(remote & (kind == _SLOWED) & (day == 1), 1.2, 1.0)
    ids = pl.Series(np.arange(rows) + number * rows).cast(pl.String())
    columns = {
        "internal_id": "cmpl-" + ids, "request_id": "cmpl-" + ids,
        "trace_id": pl.Series(rng.integers(0, 1 << 62, rows)).cast(pl.String()),
        "decision": pl.Series(np.where(remote, "remote", "none")),
        "class": pl.Series([_class(one) for one in range(len(_PROMPTS))]).gather(kind),
        "arrival_ns": 20_000 * _DAY_NS + day * _DAY_NS + rng.integers(0, _DAY_NS, rows),
        "prompt_tokens": prompt, "tokens_loaded": loaded, "tokens_matched": loaded, "tokens_computed": prompt - loaded,
        "running": rng.integers(0, 4, rows), "ttft": (prefill + wait) * slow, "prefill": prefill, "exposed_wait": wait,
        "miss_latency": wait, "fetch": wait, "queue": rng.exponential(0.01, rows), "rtt": rng.gamma(9.0, 3e-5, rows),
        "tokens_local": np.zeros(rows, dtype=np.int64),
    }  # fmt: skip
    constants = {
        "engine_id": f"10.0.0.{number % 8}:8000/0", "model": "llama-70b", "backend": "lmcache-mp/resp", "reason": "",
        "aborted": False, "handoff": False, "simulated": False,
    }  # fmt: skip
    frame = pl.DataFrame(columns).with_columns(**{name: pl.lit(value) for name, value in constants.items()})
    missing = {name: pl.lit(None, dtype=kind) for name, kind in SCHEMA.items() if name not in frame.columns}
    return frame.with_columns(**missing).select(SCHEMA.names()).cast(dict(SCHEMA))


def _class(kind: int) -> str:
    return CLASSES[4 * (kind + 2)]
