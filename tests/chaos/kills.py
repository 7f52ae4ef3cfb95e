"""Kills a service with -9 at random moments under concurrent switches, starts it again, holds its ledger to its word.

Eight writers set and clear switches, each with an idempotency key and a reason of its own, and note what was
acknowledged. What was under way when the service died is sent again, with the same key, to the next one. After every
start: each acknowledged switch is in the history once, under the number that was told; none is there twice; what is in
force is what the history says. The file is checked by SQLite every few kills, as the kill left it.

The services are forked from one process that has everything imported, so that a thousand take minutes; the
time to start is that of real ones, `python -m guard.cli serve`, every `REAL_EVERY` kills.

    python -m tests.chaos.kills --kills 1000 --seed 1
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from guard.history.ledger import FILE
from guard.settings import Settings

WRITERS = 8
REAL_EVERY = 50
CHECK_EVERY = 5
LONGEST_RUN = 0.4
"""Seconds after which a service dies at the latest."""


@dataclass
class Write:
    """One switch that a writer asked for."""

    key: str
    scope: str
    method: str
    body: dict[str, Any]
    revision: int = 0  # as told; 0: no answer


@dataclass
class Told:
    """What the writers know, and what was measured."""

    acknowledged: dict[str, Write] = field(default_factory=dict)  # by key, which also is its reason
    unknown: list[Write] = field(default_factory=list)
    sent: int = 0
    replayed: int = 0
    starts: list[float] = field(default_factory=list)
    real_starts: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def serve(state: str, pipe: Any) -> None:
    """A service in a forked process; tells its URL."""
    from guard.service.server import serve as run

    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)
    run(Settings(port=0, state_dir=Path(state), write_rate=0.0, read_rate=0.0), pipe.send)


@contextlib.contextmanager
def forked(context: Any, state: Path, told: Told) -> Iterator[tuple[str, int]]:
    """The URL and process id of a service that is killed at the end."""
    near, far = context.Pipe()
    began = time.monotonic()
    process = context.Process(target=serve, args=(str(state), far), daemon=True)
    process.start()
    try:
        if not near.poll(60):
            raise RuntimeError("the service did not start")
        url = near.recv()
        told.starts.append(time.monotonic() - began)
        yield url, process.pid
    finally:
        process.kill()
        process.join()
        near.close()
        far.close()


async def real_start(state: Path) -> float:
    """Seconds from the start of `kvguard serve` to the line that says where it listens."""
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "guard.cli", "serve", "--port", "0", "--state-dir", str(state),
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr
    try:
        while line := await process.stderr.readline():
            if json.loads(line).get("event") == "listening":
                return time.monotonic() - began
        raise RuntimeError("kvguard serve did not start")
    finally:
        process.kill()
        await process.communicate()


async def write(client: httpx2.AsyncClient, one: Write, told: Told) -> None:
    """Sends a switch and notes what became of it."""
    headers = {"Idempotency-Key": one.key}
    if one.method == "PUT":
        answer = await client.put(f"/v1/offload/{one.scope}", json=one.body, headers=headers)
    else:
        answer = await client.delete(f"/v1/offload/{one.scope}", params={"reason": one.key}, headers=headers)
    if answer.status_code == 404 and one.method == "DELETE":
        return  # nothing was in force: nothing was done
    if answer.status_code != 200:
        told.problems.append(f"{one}: {answer.status_code} {answer.text[:200]}")
        return
    told.replayed += "idempotent-replayed" in answer.headers
    one.revision = int(answer.headers["etag"].strip('"'))
    told.acknowledged[one.key] = one


async def writer(client: httpx2.AsyncClient, number: int, rng: random.Random, told: Told) -> None:
    """Switches its scopes, and one that all share, until the service is gone."""
    while True:
        told.sent += 1
        key = f"w{number}-{told.sent}"
        scope = rng.choice((f"engine:w{number}/0", f"engine:w{number}/1", "fleet"))
        body = {"mode": rng.choice(("on", "off", "observe")), "stores": rng.random() < 0.5, "reason": key}
        one = Write(key, scope, "DELETE" if rng.random() < 0.2 else "PUT", body)
        try:
            await write(client, one, told)
        except (httpx2.HTTPError, OSError):
            told.unknown.append(one)
            return


async def retry(client: httpx2.AsyncClient, told: Told) -> None:
    """Sends again what got no answer."""
    waiting, told.unknown = told.unknown, []
    for one in waiting:
        await write(client, one, told)


async def check(client: httpx2.AsyncClient, told: Told) -> int:
    """Holds history and switches in force against what was told; returns the length of the history."""
    entries: list[dict[str, Any]] = []
    before: int | None = None
    while True:
        params = {"limit": 1000, **({"before": before} if before else {})}
        page = (await client.get("/v1/offload/history", params=params)).json()
        entries += page["switches"]
        before = page["next_before"]
        if before is None:
            break
    by_reason: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        by_reason.setdefault(entry["reason"], []).append(entry)
    told.problems += [f"{key} is there {len(found)} times" for key, found in by_reason.items() if len(found) > 1]
    for key, one in told.acknowledged.items():
        found = by_reason.get(key)
        if not found:
            told.problems.append(f"{key} was acknowledged and is lost")
        elif one.method == "PUT" and (found[0]["id"], found[0]["scope"]) != (one.revision, one.scope):
            told.problems.append(f"{key} has number {found[0]['id']}, told was {one.revision}")
    last: dict[str, dict[str, Any]] = {}
    for entry in reversed(entries):
        last[entry["scope"]] = entry
    wanted = {scope: entry["reason"] for scope, entry in last.items() if entry["action"] == "set"}
    data = (await client.get("/v1/offload")).json()
    holds = {item["scope"]: item["reason"] for item in data["overrides"]}
    if holds != wanted:
        told.problems.append(f"in force {holds}, by the history {wanted}")
    return len(entries)


def sound(state: Path) -> str:
    """What SQLite says of the file as the kill left it; looked at in a copy."""
    with tempfile.TemporaryDirectory() as copy:
        for file in state.glob(f"{FILE}*"):
            shutil.copy(file, copy)
        db = sqlite3.connect(Path(copy) / FILE)
        try:
            return str(db.execute("PRAGMA integrity_check").fetchone()[0])
        finally:
            db.close()


async def round_(url: str, pid: int, rng: random.Random, told: Told, *, full_check: bool) -> int:
    """One life of a service: checked, asked again, switched, killed."""
    async with httpx2.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        await retry(client, told)
        entries = await check(client, told) if full_check else 0
        tasks = [asyncio.create_task(writer(client, number, rng, told)) for number in range(WRITERS)]
        await asyncio.sleep(rng.uniform(0.0, LONGEST_RUN))
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*tasks)
        return entries


def run(kills: int, seed: int, state: Path) -> Told:
    """Kills so many services, one after the other; the answer's `problems` are empty when all went well."""
    rng = random.Random(seed)
    told = Told()
    context = multiprocessing.get_context("fork")
    import guard.service.server  # noqa: F401  before the forks

    for number in range(1, kills + 2):
        with forked(context, state, told) as (url, pid):
            asyncio.run(round_(url, pid, rng, told, full_check=number % CHECK_EVERY == 0 or number == kills + 1))
        if number % CHECK_EVERY == 0 and (word := sound(state)) != "ok":
            told.problems.append(f"after kill {number}: {word}")
        if number % REAL_EVERY == 0:
            told.real_starts.append(asyncio.run(real_start(state)))
        if told.problems:
            break
    return told


def main() -> int:
    """Prints what happened; 1 when a word was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        began = time.monotonic()
        told = run(options.kills, options.seed, Path(place))
        size = (Path(place) / FILE).stat().st_size
    print(f"{options.kills} kills with -9, seed {options.seed}, {time.monotonic() - began:.0f} s, {WRITERS} writers")
    print(f"  switches sent {told.sent}, acknowledged {len(told.acknowledged)}, without an answer and sent again:")
    print(f"  {told.replayed} of them had been done; ledger {size / 1024:.0f} KiB at the end")
    for name, starts in (("forked", told.starts), ("kvguard serve", told.real_starts)):
        if starts:
            longest = f"longest {max(starts):.2f} s (goal <= 2)"
            print(f"  start, {name}: median {statistics.median(starts):.2f} s, {longest}, n {len(starts)}")
    print("\n".join(told.problems[:20]) or "  no acknowledged switch lost, none twice, the ledger sound: met")
    return int(bool(told.problems))


if __name__ == "__main__":
    sys.exit(main())
