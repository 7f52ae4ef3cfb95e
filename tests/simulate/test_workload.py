import json
import os
import random
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from guard.correlate.frame import SCHEMA, frame
from guard.errors import ConfigError
from guard.simulate import traces
from guard.simulate.clock import Schedule
from guard.simulate.job import Job, Prompt
from guard.simulate.records import record_of
from guard.simulate.scenario import Scenario, parse
from guard.simulate.workload import make

PUBLIC = Path(os.environ.get("KVGUARD_TRACES", "/nonexistent"))


def arrivals(made: Scenario) -> list[tuple[float, Prompt]]:
    schedule, found = Schedule(), []
    make(made, random.Random(1)).begin(schedule, lambda now, prompt: found.append((now, prompt)))
    schedule.run_until(1e9)
    return found


def read(path: Path, chunk: int = 256, limit: int | None = None, reuse: float = 0.0) -> list[traces.Arrival]:
    return traces.read(path, chunk, limit, reuse, random.Random(1))


def test_conversations_arrive_at_their_rate_and_repeat_what_was_said():
    found = arrivals(parse({"seconds": 1000, "workload": {"rate": 5.0, "users": 10, "longest": 4000}}))
    assert len(found) == pytest.approx(5000, rel=0.05)
    last: dict[int, Prompt] = {}
    repeats = 0
    for _, prompt in found:
        assert 0 < prompt.tokens <= 4000
        assert len(prompt.blocks) == prompt.tokens // 256
        before = last.get(prompt.session)
        if before is not None:
            assert prompt.blocks[: len(before.blocks)] == before.blocks
            repeats += 1
        last[prompt.session] = prompt
    assert repeats > 2500
    assert len({block for prompt in last.values() for block in prompt.blocks}) == sum(
        len(prompt.blocks) for prompt in last.values()
    )


def test_a_closed_loop_sends_the_next_turn_after_the_answer():
    made = parse(
        {
            "engine": {"count": 2},
            "workload": {"kind": "closed", "concurrency": 4, "prompt_tokens": 1024, "turns": 3, "unique": 0.5},
        }
    )
    schedule, work = Schedule(), make(made, random.Random(1))
    under_way: list[Prompt] = []
    total = 0

    def send(now: float, prompt: Prompt) -> None:
        nonlocal total
        total += 1
        under_way.append(prompt)
        assert len(under_way) <= 4
        assert prompt.blocks[:2] in set(work.known())
        schedule.at(now + 1.0, lambda at: (under_way.remove(prompt), work.finished(at, Job(1, prompt, 0, now, 0.0))))

    work.begin(schedule, send)
    schedule.run_until(1e9)
    assert total == 12


def test_mooncake_traces_bring_their_blocks(tmp_path: Path):
    file = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 5000, "input_length": 1300, "output_length": 7, "hash_ids": [1, 2, 3]},
        {"timestamp": 2000, "input_length": 512, "output_length": 0, "hash_ids": [1]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n", "utf-8")
    assert read(file, 512) == [(0.0, Prompt(512, 1, (1,))), (3.0, Prompt(1300, 7, (1, 2)))]  # whole blocks only
    assert len(read(file, 512, limit=1)) == 1
    with pytest.raises(ConfigError, match="blocks of 512"):
        read(file, 256)


def test_azure_traces_have_no_hits_unless_some_are_asked_for(tmp_path: Path):
    file = tmp_path / "t.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:15:{second:02d}.6805900,{374 + second},44" for second in range(60)]
    file.write_text("\n".join(lines), "utf-8")
    found = read(file)
    assert found[0] == (0.0, Prompt(374, 44))
    assert found[59] == (59.0, Prompt(433, 44))
    asked = read(file, reuse=0.5)
    assert 15 < sum(prompt.hits == (0, prompt.tokens) for _, prompt in asked) < 45


def test_own_history_tells_its_hits(tmp_path: Path):
    job = Job(1, Prompt(1000, 5), 0, arrival=7.0, draw=0.0, local=256, matched=512, first=8.0)
    table = frame([record_of(job, parse({}), 8.0)])
    assert table.schema == SCHEMA
    table.write_parquet(tmp_path / "h.parquet")
    assert read(tmp_path / "h.parquet") == read(tmp_path) == [(0.0, Prompt(1000, 1, hits=(256, 768)))]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("t.jsonl", '{"timestamp": 1}', "request 1: KeyError"),
        ("t.jsonl", "nonsense", "request 1: JSONDecodeError"),
        ("t.jsonl", '{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}', "a prompt of 0 tokens"),
        ("t.jsonl", "", "holds no requests"),
        ("t.csv", "a,b\n1,2\n", "request 1: KeyError"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "request 1: ValueError"),
        ("t.parquet", "nonsense", "request 1"),
        ("t.txt", "", "not a trace"),
    ],
)
def test_a_broken_trace_says_where(tmp_path: Path, name: str, text: str, problem: str):
    file = tmp_path / name
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=problem) as caught:
        read(file, 512)
    assert caught.value.key == "workload.path"


def test_a_trace_that_is_not_there(tmp_path: Path):
    for name in ("t.jsonl", "t.csv", "t.parquet"):
        with pytest.raises(ConfigError, match=r"workload\.path"):
            read(tmp_path / name, 512)


def test_a_trace_is_replayed_faster_on_demand_and_cut_to_the_scenario(tmp_path: Path):
    pl.DataFrame(
        {
            "arrival_ns": [0, 10**9, 10**10],
            "prompt_tokens": [10, 20, 30],
            "output_tokens": [1, 1, 1],
            "tokens_local": [0, 0, 0],
            "tokens_matched": [0, 0, 0],
        }
    ).write_parquet(tmp_path / "h.parquet")
    spec: dict[str, Any] = {"kind": "trace", "path": tmp_path / "h.parquet", "pace": 2.0}
    found = arrivals(parse({"seconds": 3, "workload": spec}))
    assert [(at, prompt.tokens) for at, prompt in found] == [(0.0, 10), (0.5, 20)]


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="KVGUARD_TRACES does not name a directory with the public traces")
def test_the_public_traces_are_read_in_full():
    assert len(read(PUBLIC / "mooncake_conversation_trace.jsonl", 512)) == 12_031
    assert len(read(PUBLIC / "azure_llm_2023_conv.csv")) == 19_366
