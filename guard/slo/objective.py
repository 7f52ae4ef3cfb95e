"""What an operator promises: TTFT at a percentile, per model and class. Pure values, checked when they are made."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from guard.classes import CLASSES

ANY: Final = "*"
"""Model or class of an objective that holds for all that have none of their own."""

_KEYS: Final = ("model", "class", "ttft_seconds", "percentile", "tpot_seconds")


class ObjectiveError(ValueError):
    """An objective cannot be used; the message begins with its key, e.g. `objectives[1].percentile`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """At least `percentile` of the requests have their first token within `ttft_seconds`; TPOT where it is given."""

    model: str = ANY
    class_: str = ANY
    ttft_seconds: float
    percentile: float = 0.95
    tpot_seconds: float | None = None

    @property
    def budget(self) -> float:
        """Share of requests that may miss."""
        return 1.0 - self.percentile

    def met(self, ttft: float, tpot: float | None = None) -> bool:
        """Whether one request kept what is promised; a TPOT that is not known does not count against it."""
        return ttft <= self.ttft_seconds and (self.tpot_seconds is None or tpot is None or tpot <= self.tpot_seconds)

    def to_json(self) -> dict[str, Any]:
        """The objective as the settings and the API write it."""
        return {
            "model": self.model,
            "class": self.class_,
            "ttft_seconds": self.ttft_seconds,
            "percentile": self.percentile,
            "tpot_seconds": self.tpot_seconds,
        }


class Objectives:
    """The objectives in force; the narrowest one holds: model and class, model, class, all."""

    def __init__(self, items: Iterable[Objective] = ()) -> None:
        """Takes the objectives.

        Raises:
            ObjectiveError: two of them contradict one another.
        """
        self.items = tuple(items)
        self._by_key: dict[tuple[str, str], Objective] = {}
        for number, item in enumerate(self.items):
            key = (item.model, item.class_)
            if key in self._by_key:
                where = f"model {item.model!r}, class {item.class_!r}"
                raise ObjectiveError(f"objectives[{number}]: a second objective for {where}; keep one of them")
            self._by_key[key] = item

    def find(self, model: str, class_: str = ANY) -> Objective | None:
        """The objective for requests of this model and class."""
        if not self._by_key:
            return None
        for key in ((model, class_), (model, ANY), (ANY, class_), (ANY, ANY)):
            if found := self._by_key.get(key):
                return found
        return None

    def for_model(self, model: str) -> tuple[Objective | None, dict[str, Objective]]:
        """The objective for all requests of a model, and those of the classes that have one of their own."""
        classes = {
            item.class_: found
            for item in self.items
            if item.class_ != ANY and item.model in (model, ANY) and (found := self.find(model, item.class_))
        }
        return self.find(model), classes


def parse(data: object) -> Objectives:
    """Reads a list of objects as in the settings and the API.

    Raises:
        ObjectiveError: names the entry and the key that cannot be used, and what would do.
    """
    if not isinstance(data, Sequence) or isinstance(data, str | bytes):
        raise ObjectiveError("objectives: not a list")
    return Objectives(_one(f"objectives[{number}]", item) for number, item in enumerate(data))


def _one(where: str, item: object) -> Objective:
    if not isinstance(item, Mapping):
        raise ObjectiveError(f"{where}: not a table")
    unknown = sorted(str(key) for key in set(item) - set(_KEYS))
    if unknown:
        raise ObjectiveError(f"{where}.{unknown[0]}: unknown key; known are {', '.join(_KEYS)}")
    class_ = _text(where, item, "class")
    if class_ not in (ANY, *CLASSES):
        raise ObjectiveError(f"{where}.class: {class_!r} is not a class, e.g. {CLASSES[8]!r}, or {ANY!r}")
    if item.get("ttft_seconds") is None:
        raise ObjectiveError(f"{where}.ttft_seconds: missing; the bound on TTFT in seconds")
    tpot = item.get("tpot_seconds")
    return Objective(
        model=_text(where, item, "model"),
        class_=class_,
        ttft_seconds=_number(where, "ttft_seconds", item["ttft_seconds"], 3600.0),
        percentile=_percentile(where, item.get("percentile", 0.95)),
        tpot_seconds=None if tpot is None else _number(where, "tpot_seconds", tpot, 60.0),
    )


def _text(where: str, item: Mapping[str, Any], key: str) -> str:
    value = item.get(key, ANY)
    if not isinstance(value, str) or not 0 < len(value) <= 256 or not value.isprintable():
        raise ObjectiveError(f"{where}.{key}: not a name of 1 to 256 printable characters, or {ANY!r}")
    return value


def _number(where: str, key: str, value: object, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= high:
        raise ObjectiveError(f"{where}.{key}: {value!r} is not a number above 0 and up to {high:g}")
    return float(value)


def _percentile(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ObjectiveError(f"{where}.percentile: {value!r} is not a number")
    if not 0.5 <= value < 1.0:
        hint = f"; write {value / 100:g} for {value:g} %" if 50 <= value < 100 else ""
        raise ObjectiveError(f"{where}.percentile: {value!r} is not from 0.5 to below 1{hint}")
    return float(value)
