"""Recorded arrivals as prompts: Mooncake JSONL, Azure CSV, kvguard's own history. Every line is checked."""

import csv
import json
import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import polars as pl

from guard.errors import ConfigError
from guard.simulate.job import Prompt

MOONCAKE_BLOCK: Final = 512
"""Tokens of a block in Mooncake's traces (FAST25-release/traces)."""

Arrival = tuple[float, Prompt]


def read(path: Path, chunk: int, limit: int | None, reuse: float, rng: random.Random) -> list[Arrival]:
    """The arrivals of a trace in the order of time, the first at 0 s.

    Args:
        path: `.jsonl` (Mooncake), `.csv` (Azure) or `.parquet` (kvguard; a directory of such files too).
        chunk: tokens per chunk of the connector; a Mooncake trace needs 512.
        limit: so many at most.
        reuse: share of requests whose prompt the remote store holds, for traces that do not tell (Azure).
        rng: who of them, where `reuse` is given.

    Raises:
        ConfigError: the file cannot be read or is of another shape.
    """
    readers = {".jsonl": _mooncake, ".csv": _azure, ".parquet": _history, "": _history}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ConfigError(
            "workload.path", f"{path.name}: not a trace; give .jsonl (Mooncake), .csv (Azure) or .parquet"
        )
    if reader is _mooncake and chunk != MOONCAKE_BLOCK:
        raise ConfigError("connector.chunk_tokens", f"a Mooncake trace has blocks of {MOONCAKE_BLOCK} tokens")
    found: list[Arrival] = []
    try:
        for at, prompt in reader(path):
            hits = (0, prompt.tokens) if reuse and rng.random() < reuse else prompt.hits
            found.append((at, Prompt(prompt.tokens, prompt.output, prompt.blocks, hits=hits)))
            if limit is not None and len(found) >= limit:
                break
    except OSError as error:
        raise ConfigError("workload.path", f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, pl.exceptions.PolarsError) as error:
        raise ConfigError("workload.path", f"{path.name}, request {len(found) + 1}: {error!r}") from error
    if not found:
        raise ConfigError("workload.path", f"{path.name}: holds no requests")
    found.sort(key=lambda each: each[0])
    first = found[0][0]
    return [(at - first, prompt) for at, prompt in found]


def _mooncake(path: Path) -> Iterator[Arrival]:
    with path.open(encoding="utf-8") as lines:
        for line in filter(str.strip, lines):
            row: dict[str, Any] = json.loads(line)
            tokens = int(row["input_length"])
            whole = tokens // MOONCAKE_BLOCK
            yield row["timestamp"] / 1000.0, _prompt(tokens, row["output_length"], tuple(row["hash_ids"][:whole]))


def _azure(path: Path) -> Iterator[Arrival]:
    with path.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            yield at, _prompt(int(row["ContextTokens"]), row["GeneratedTokens"])


def _history(path: Path) -> Iterator[Arrival]:
    columns = ("arrival_ns", "prompt_tokens", "output_tokens", "tokens_local", "tokens_matched")
    source = path / "**" / "*.parquet" if path.is_dir() else path
    frame = pl.scan_parquet(source).select(columns).sort("arrival_ns").collect()
    for at, tokens, output, local, matched in frame.iter_rows():
        if tokens:
            yield at / 1e9, _prompt(tokens, output or 1, hits=(local or 0, (local or 0) + (matched or 0)))


def _prompt(tokens: int, output: Any, blocks: tuple[int, ...] = (), hits: tuple[int, int] | None = None) -> Prompt:
    if tokens < 1:
        raise ValueError(f"a prompt of {tokens} tokens")
    return Prompt(tokens, max(1, int(output)), blocks, hits=hits)
