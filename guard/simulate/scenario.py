"""What a simulation is given: engines, connector, store, link and its changes, workload, objective; read from TOML.

Sizes are tokens and bytes, times seconds or text such as `200us`. Unknown keys are errors that name the key.
"""

import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from guard.connectors import TABLE, Capability
from guard.errors import ConfigError
from guard.simulate.units import seconds

Seconds = Annotated[float, BeforeValidator(seconds)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]

KINDS: Final = {entry.kind: entry for entry in TABLE if entry.skip and not entry.handoff}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=False)


class Engines(_Part):
    """One kind of engine, `count` of them: a step takes base + tokens + attention + decoding sequences.

    step = step_seconds + token_seconds*c + attention_seconds*c*(position + c/2) + decode_seconds*decoding
    The defaults are about an 8B model on one current accelerator; they are those of no machine in particular.
    """

    count: Count = 4
    max_batched_tokens: Count = 8192
    max_seqs: Count = 256
    kv_tokens: Count = 500_000
    local_tokens: Count = 200_000
    step_seconds: Seconds = 0.008
    token_seconds: Seconds = 4e-5
    attention_seconds: Seconds = 2e-9
    decode_seconds: Seconds = 1.5e-4
    intake_seconds: Seconds = 0.002
    noise: Share = 0.03


class Connector(_Part):
    """How KV is looked up and read: serial round trips per chunk, and how many operations an engine has under way."""

    kind: str = "lmcache-mp"
    chunk_tokens: Count = 256
    bytes_per_token: Count = 131_072
    lookup_trips: Annotated[float, Field(ge=0.0)] = 1.0
    fetch_trips: Annotated[float, Field(ge=0.0)] = 1.0
    readers: Count = 4
    lookup_seconds: Seconds = 0.001
    fetch_seconds: Seconds = 0.002
    timeout: Seconds = 60.0
    failures: Share = 0.0

    @model_validator(mode="after")
    def _known(self) -> "Connector":
        if self.kind not in KINDS:
            raise ValueError(f"kind: {self.kind!r} is not one of {', '.join(sorted(KINDS))}")
        return self

    @property
    def capability(self) -> Capability:
        """What this kind of connector tolerates."""
        return KINDS[self.kind]


class Store(_Part):
    """The remote store: how many tokens it holds, least recently used out."""

    tokens: Count = 50_000_000


class Change(_Part):
    """A change of the link from `at` on, `for` so long (no end: for good), again `every` so often; `engines`: on some.

    `bandwidth` is a factor; `loss` is the share of round trips that are lost, 1 lets nothing through; `hang`: reads
    that are under way or begin then never end (a dead worker). `ramp` is the time over which RTT moves to its value.
    """

    at: Seconds
    for_: Seconds = Field(default=float("inf"), alias="for")
    every: Seconds | None = None
    ramp: Seconds = 0.0
    rtt: Seconds | None = None
    bandwidth: Positive | None = None
    loss: Share = 0.0
    hang: bool = False
    engines: tuple[Annotated[int, Field(ge=0)], ...] = ()
    say: str = ""

    @model_validator(mode="after")
    def _sensible(self) -> "Change":
        if self.every is not None and self.every < self.for_:
            raise ValueError("every: must be at least as long as for")
        if self.rtt is None and self.bandwidth is None and not self.loss and not self.hang:
            raise ValueError("changes nothing: give rtt, bandwidth, loss or hang")
        return self


class LinkSpec(_Part):
    """The link that all engines share: idle RTT, bandwidth both ways in Gbit/s, and what happens to it."""

    rtt: Seconds = 0.0002
    gbit: Positive = 100.0
    jitter: Share = 0.05
    change: tuple[Change, ...] = ()


class Conversations(_Part):
    """Users who come back: each turn repeats all that was said before; turns go to a random engine."""

    kind: Literal["conversations"] = "conversations"
    rate: Positive = 4.0
    users: Count = 80
    first_tokens: Count = 2000
    turn_tokens: Count = 300
    output_tokens: Count = 60
    longest: Count = 8192
    fresh: Share = 0.1


class Closed(_Part):
    """`concurrency` sessions of `turns` requests each, one at a time; `moved` of the turns go to another engine.

    A prompt has `prompt_tokens`, of which the share `unique` is new every time; the rest is the session's own.
    """

    kind: Literal["closed"]
    concurrency: Count
    prompt_tokens: Count
    turns: Count = 12
    unique: Share = 0.0
    output_tokens: Count = 100
    moved: Share = 0.1
    think: Seconds = 0.0


class Trace(_Part):
    """Recorded arrivals: Mooncake JSONL, Azure CSV, or kvguard's own history (Parquet)."""

    kind: Literal["trace"]
    path: Path
    pace: Positive = 1.0
    limit: Count | None = None
    reuse: Share = 0.0


Workload = Conversations | Closed | Trace


class Objective(_Part):
    """What counts as good: TTFT of at most `ttft`, at `percentile`; optionally time per output token."""

    ttft: Seconds = 2.0
    percentile: Annotated[float, Field(ge=0.5, lt=1.0)] = 0.95
    tpot: Seconds | None = None


class Scenario(_Part):
    """All that a simulation needs, apart from the policy."""

    title: str = "default"
    seconds: Seconds = 300.0
    warmup: Seconds = 0.0
    seed: int = 0
    patience: Seconds = 120.0
    abort: Share = 0.0
    deadline: Seconds = 0.5
    engine: Engines = Engines()
    connector: Connector = Connector()
    store: Store = Store()
    link: LinkSpec = LinkSpec()
    workload: Workload = Field(default=Conversations(), discriminator="kind")
    objective: Objective = Objective()

    @model_validator(mode="after")
    def _engines_exist(self) -> "Scenario":
        for number, change in enumerate(self.link.change):
            if any(engine >= self.engine.count for engine in change.engines):
                raise ValueError(f"link.change.{number}.engines: there are {self.engine.count} engines, from 0")
        return self


def scaled(workload: Workload, factor: float) -> Workload:
    """The same workload for `factor` times as many engines; a trace stays as it is."""
    if isinstance(workload, Conversations):
        users = max(1, round(workload.users * factor))
        return workload.model_copy(update={"rate": workload.rate * factor, "users": users})
    if isinstance(workload, Closed):
        return workload.model_copy(update={"concurrency": max(1, round(workload.concurrency * factor))})
    return workload


def parse(data: dict[str, Any]) -> Scenario:
    """A scenario from what a TOML file holds.

    Raises:
        ConfigError: a key is unknown or out of range; it names the first one.
    """
    workload = data.get("workload")
    if isinstance(workload, dict):
        workload.setdefault("kind", "conversations")
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "scenario"
        problem = "no such key" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
        raise ConfigError(key, problem) from error


def load(name: str) -> Scenario:
    """A scenario from a TOML file, or one of those that come with kvguard, by its name.

    Raises:
        ConfigError: there is no such file or scenario, it is no TOML, or a key is wrong.
    """
    path = Path(name)
    shipped = resources.files("guard.simulate") / "scenarios" / f"{name}.toml"
    try:
        text = path.read_text("utf-8") if path.suffix or not shipped.is_file() else shipped.read_text("utf-8")
        found = parse(tomllib.loads(text))
    except OSError as error:
        raise ConfigError(name, f"no such file or scenario; there are {', '.join(names())}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(name, f"not TOML: {error}") from error
    if isinstance(found.workload, Trace) and not found.workload.path.is_absolute() and path.suffix:
        beside = found.workload.model_copy(update={"path": path.parent / found.workload.path})
        found = found.model_copy(update={"workload": beside})
    return found


def names() -> list[str]:
    """The scenarios that come with kvguard."""
    folder = resources.files("guard.simulate") / "scenarios"
    return sorted(each.name.removesuffix(".toml") for each in folder.iterdir() if each.name.endswith(".toml"))
