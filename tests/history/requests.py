"""Made-up histories in which the answers are known."""

import numpy as np
import polars as pl

from guard.classes import class_of
from guard.correlate.frame import SCHEMA

DAY_NS = 86_400 * 10**9
FIRST_DAY = 20_000  # 2024-10-04


def history(rows: int, seed: int, *, day: int = FIRST_DAY, slower: float = 1.0) -> pl.DataFrame:
    """A day of requests of two classes, half of them remote hits. `slower` multiplies TTFT of long remote hits.

    prefill = 10 us a token; a hit of half the prompt waits 20 ms and 1 us a token for its KV. So a hit of m tokens is
    worth m * 9 us - 20 ms: a loss below 2222 tokens.
    """
    rng = np.random.default_rng(seed)
    prompt = np.where(rng.random(rows) < 0.5, 2000, 12_000) + rng.integers(0, 40, rows)
    remote = rng.random(rows) < 0.5
    loaded = np.where(remote, prompt // 2, 0)
    computed = prompt - loaded
    noise = rng.lognormal(0.0, 0.1, rows)
    prefill = computed * 10e-6 * noise
    wait = np.where(remote, 0.020 + loaded * 1e-6, 0.0)
    ttft = prefill + wait
    ttft = np.where(remote & (prompt > 5000), ttft * slower, ttft)
    none = [None] * rows
    columns = {
        "internal_id": [f"r{n}" for n in range(rows)], "request_id": [f"r{n}" for n in range(rows)],
        "trace_id": ["0" * 32] * rows, "engine_id": ["h:8000/0"] * rows, "model": ["m"] * rows,
        "backend": ["a/b"] * rows, "decision": np.where(remote, "remote", "none"), "reason": [""] * rows,
        "class": [class_of(int(n), 2) for n in prompt],
        "arrival_ns": day * DAY_NS + np.sort(rng.integers(0, DAY_NS, rows)), "prompt_tokens": prompt,
        "tokens_loaded": loaded, "tokens_matched": loaded, "tokens_computed": computed, "running": [2] * rows,
        "ttft": ttft, "prefill": prefill, "exposed_wait": wait, "miss_latency": wait, "fetch": wait,
    }  # fmt: skip
    zero = {name: [0] * rows for name in ("tokens_local", "waiting", "failed", "attempts")}
    flags = {name: [False] * rows for name in ("aborted", "handoff", "simulated")}
    filled = columns | zero | flags
    return pl.DataFrame({name: filled.get(name, none) for name in SCHEMA}, schema=SCHEMA)
