"""The hook's own counters in vLLM's `/metrics`, where `KVGUARD_VLLM_METRICS=on` asks for them: counted and shown.

The EngineCore process counts (`Tally`), the API process shows (`PromMetrics`); `guard.hook.engine_stats` is the road
between them. What is sent is plain (numbers, strings, dictionaries), since vLLM encodes it with msgpack. Standard
library only: the classes of prometheus_client come from vLLM.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from guard.gate import Decision
from guard.hook.failsafe import logger

PREFIX: Final = "vllm:kvguard_"
OURS: Final = "kvguard"
THEIRS: Final = "inner"
AGE_SECONDS: Final = 1.0
"""The age of the directives is told so often, and with every count that changed."""


class Family(NamedTuple):
    """One metric: `name` without prefix, `kind` counter or gauge (vLLM's names of the classes, in lower case)."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


DECISIONS: Final = Family("decisions", "counter", ("decision", "reason"), "Requests by road taken and why.")
BEGUN: Final = Family("reads_begun", "counter", (), "Remote reads begun: blocks allocated for what matched.")
FAILED: Final = Family("reads_failed", "counter", (), "Remote reads that failed.")
DROPPED: Final = Family("records_dropped", "counter", (), "Records that kvguard's ring or a failed export lost.")
ERRORS: Final = Family("hook_errors", "counter", (), "Internal errors of kvguard's hook; vLLM was not disturbed.")
AGE: Final = Family("directive_age_seconds", "gauge", (), "Time since the kvguard service last confirmed directives.")
FAMILIES: Final = (DECISIONS, BEGUN, FAILED, DROPPED, ERRORS, AGE)


class Tally:
    """What the hook of an EngineCore process counted and has not told vLLM yet. For the engine's thread.

    `dropped` and `errors` answer running totals, `age` seconds or None where no directives were ever heard of.
    """

    def __init__(
        self,
        dropped: Callable[[], int],
        errors: Callable[[], int],
        age: Callable[[], float | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decisions: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._totals = {DROPPED.name: dropped, ERRORS.name: errors}
        self._told = dict.fromkeys(self._totals, 0)
        self._age = age
        self._clock = clock
        self._told_at = float("-inf")

    def decided(self, decision: Decision) -> None:
        """A request is told of: the road it took."""
        self._decisions[f"{decision.action} {decision.reason}"] += 1

    def begun(self) -> None:
        """A remote read began."""
        self._counts[BEGUN.name] += 1

    def failed(self) -> None:
        """A remote read failed."""
        self._counts[FAILED.name] += 1

    def take(self) -> dict[str, Any] | None:
        """What is new since the last call, in plain values; None: nothing."""
        for name, total in self._totals.items():
            now = total()
            if now > self._told[name]:
                self._counts[name] += now - self._told[name]
                self._told[name] = now
        moment = self._clock()
        if not self._decisions and not self._counts and moment - self._told_at < AGE_SECONDS:
            return None
        age = self._age()
        if not self._decisions and not self._counts and age is None:
            return None
        told = {"decisions": dict(self._decisions), "counts": dict(self._counts), "age": age}
        self._decisions.clear()
        self._counts.clear()
        self._told_at = moment
        return told


class Families:
    """Our metrics in vLLM's registry, with vLLM's own labels first."""

    def __init__(self, metric_types: Mapping[Any, Any], labelnames: list[str], engines: Mapping[int, Any]) -> None:
        kinds = {base.__name__.lower(): cls for base, cls in metric_types.items()}
        self._engines = engines
        self._metrics: dict[str, Any] = {}
        for family in FAMILIES:
            more = {"multiprocess_mode": "mostrecent"} if family.kind == "gauge" else {}
            self._metrics[family.name] = kinds[family.kind](
                name=PREFIX + family.name,
                documentation=family.help,
                labelnames=[*labelnames, *family.labels],
                **more,
            )
            if family.kind == "counter" and not family.labels:  # a series of 0 from the start
                for values in engines.values():
                    self._metrics[family.name].labels(*values)

    def observe(self, told: Mapping[str, Any], engine: int) -> None:
        """Adds what one engine told."""
        values = self._engines[engine]
        for road, count in told["decisions"].items():
            self._metrics[DECISIONS.name].labels(*values, *road.split(" ", 1)).inc(count)
        for name, count in told["counts"].items():
            self._metrics[name].labels(*values).inc(count)
        if told["age"] is not None:
            self._metrics[AGE.name].labels(*values).set(told["age"])


class PromMetrics:
    """Stands in for a connector's KVConnectorPromMetrics, `inner`, which may be missing as may ours."""

    def __init__(self, inner: Any, families: Families | None) -> None:
        self._inner = inner
        self._families = families

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Takes the wrapping off: ours to our metrics, the connector's to its own."""
        told, inner = unwrapped(transfer_stats_data)
        if told is not None and self._families is not None:
            try:
                self._families.observe(told, engine_idx)
            except Exception as error:  # noqa: BLE001  nothing of ours reaches the API server
                self._families = None
                logger.error("kvguard: no more counters in vLLM's metrics", exc_info=error)
        if inner is not None and self._inner is not None:
            self._inner.observe(inner, engine_idx)


_families: tuple[Any, Families | None] = (None, None)


def families_for(metric_types: Any, labelnames: list[str], engines: Any) -> Families | None:
    """Our metrics, one set for all connectors of a MultiConnector; None where they cannot be made, which is logged.

    The children get the very same `engines` of vLLM, and a name can be registered once only.
    """
    global _families  # noqa: PLW0603  as vLLM's registry, one per process
    if _families[0] is not engines:
        try:
            made = Families(metric_types, labelnames, engines)
        except Exception as error:  # noqa: BLE001  vLLM goes on without them
            logger.error("kvguard: no counters in vLLM's metrics", exc_info=error)
            made = None
        _families = (engines, made)
    return _families[1]


def unwrapped(data: Any) -> tuple[dict[str, Any] | None, Any]:
    """What the hook told and the connector's part; an engine whose hook tells nothing sends the latter as it is."""
    if isinstance(data, dict) and OURS in data:
        return data[OURS], data.get(THEIRS)
    return None, data
