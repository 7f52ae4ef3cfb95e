"""The road of the hook's counters to vLLM's API process: around the connector's own stats. Standard library only.

vLLM carries the stats of the connector from the EngineCore to the API process anyway. The EngineCore adds the workers'
stats and the scheduler's with `aggregate` and asserts that their classes fit, so both are wrapped alike (`Told`) and in
one place, the scheduler's process: `update_connector_output` is called before vLLM reads what the workers sent, and
workers go on as without us. The API process takes the wrapping off, gives the connector's part to the connector's own
metrics and adds ours. When the failsafe has tripped only counting stops, not wrapping: no step may mix the two.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from guard.hook.engine_metrics import OURS, THEIRS, PromMetrics, families_for, unwrapped
from guard.hook.failsafe import logger

NEEDED: Final = (
    "update_connector_output", "get_kv_connector_stats", "build_kv_connector_stats", "build_prom_metrics",
)  # fmt: skip
CONTAINER: Final = "MultiKVConnectorStats"


@dataclass(init=False, eq=False)
class Told:
    """A connector's stats (`inner`, may be missing) with what the hook tells: stands in for vLLM's KVConnectorStats.

    A data class with the one field that vLLM's has, so that vLLM's encoder sees no difference.
    """

    data: dict[str, Any]

    def __init__(self, told: dict[str, Any] | None, inner: Any) -> None:
        self._told = told
        self._inner = inner
        self._refresh()

    def _refresh(self) -> None:
        inner = self._inner
        plain = None if inner is None else inner.to_dict() if hasattr(inner, "to_dict") else inner.data
        self.data = {OURS: self._told, THEIRS: plain}

    def to_dict(self) -> dict[str, Any]:
        """What is sent."""
        return self.data

    def aggregate(self, other: Any) -> "Told":
        """Adds another one, or the connector's own kind."""
        told, inner = (other._told, other._inner) if type(other) is Told else (None, other)
        if inner is not None:
            self._inner = inner if self._inner is None else self._inner.aggregate(inner)
        self._told = _sum(self._told, told)
        self._refresh()
        return self

    def reduce(self) -> dict[str, Any]:
        """For vLLM's log: the connector's figures only."""
        reduced: dict[str, Any] = self._inner.reduce() if self._inner is not None else {}
        return reduced

    def reset(self) -> None:
        """Forgets what was observed."""
        self._told = None
        if self._inner is not None:
            self._inner.reset()
        self._refresh()

    def is_empty(self) -> bool:
        """Nothing to send."""
        return self._told is None and (self._inner is None or bool(self._inner.is_empty()))


def reporting(guard: Any) -> Any:
    """A guarded class that tells vLLM the hook's counters; the class itself where vLLM has no such way."""
    missing = [name for name in NEEDED if not hasattr(guard, name)]
    if missing:
        logger.warning("kvguard: no counters in vLLM's metrics: the connector has no %s", ", ".join(missing))
        return guard

    class Reporting(guard):  # type: ignore[misc]
        _kvguard_inner = guard._kvguard_inner
        _kvguard_mute = False

        def update_connector_output(self, connector_output: Any) -> None:
            super().update_connector_output(connector_output)
            if self._kvguard_mute:
                return
            try:
                _wrap(connector_output, type(self).__name__)
            except Exception as error:  # noqa: BLE001  what the workers sent stays as it is, so must the rest
                Reporting._kvguard_mute = True  # for a sibling of this class in a MultiConnector, too
                self._kvguard_failsafe.record("vllm_metrics", error)

        def get_kv_connector_stats(self) -> Any:
            inner = super().get_kv_connector_stats()
            if self._kvguard_role != "SCHEDULER" or self._kvguard_mute:
                return inner
            if inner is not None and inner.is_empty():
                inner = None  # vLLM would not send it
            told = _taken(self)
            return None if told is None and inner is None else Told(told, inner)

        @classmethod
        def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
            if data is None:
                return super().build_kv_connector_stats()
            _, payload = unwrapped(data)
            return Told(None, None if payload is None else super().build_kv_connector_stats(payload))

        @classmethod
        def build_prom_metrics(
            cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
        ) -> Any:
            inner = super().build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
            return PromMetrics(inner, families_for(metric_types, labelnames, per_engine_labelvalues))

    return Reporting


def _taken(connector: Any) -> dict[str, Any] | None:
    side = connector._kvguard_scheduler
    if side is None or side.table.tally is None or connector._kvguard_failsafe.tripped:
        return None
    try:
        told: dict[str, Any] | None = side.table.tally.take()
    except Exception as error:  # noqa: BLE001  the connector's own stats go on
        side.table.tally = None  # once: what is optional must not trip the failsafe
        connector._kvguard_failsafe.record("vllm_metrics", error)
        return None
    return told


def _wrap(output: Any, name: str) -> None:
    """Wraps the workers' stats of a step; of a MultiConnector's, the share of the child `name`."""
    stats = output.kv_connector_stats
    if type(stats).__name__ == CONTAINER:
        share = stats.data.get(name)
        if share is not None and type(share) is not Told:
            stats.data[name] = Told(None, share)
    elif stats is not None and type(stats) is not Told:
        output.kv_connector_stats = Told(None, stats)


def _sum(one: dict[str, Any] | None, other: dict[str, Any] | None) -> dict[str, Any] | None:
    if one is None or other is None:
        return other if one is None else one
    return {
        "decisions": dict(Counter(one["decisions"]) + Counter(other["decisions"])),
        "counts": dict(Counter(one["counts"]) + Counter(other["counts"])),
        "age": one["age"] if other["age"] is None else other["age"],
    }
