"""The `[[probes]]` tables of the configuration: the only place where targets come from."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, field_validator

from guard.errors import ConfigError
from guard.probe.prober import Option, Target

MAX_TARGETS: Final = 256
COUNT: Final = 4
"""Probes of a round, where the budget of packets allows it: their least is the idle RTT."""

INTERVAL: Final[Mapping[str, float]] = {"tcpinfo": 5.0}
"""Seconds between rounds, else 1; a look at the kernel's table of connections costs more than a PING."""

Label = Annotated[str, Field(max_length=256, pattern=r"^[ -~]*$")]


class ProbeSettings(BaseModel):
    """One table. Other keys belong to the prober, which refuses those that it does not know."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    target: Annotated[Label, Field(min_length=1)]
    prober: str
    backend: Label = ""
    interval_seconds: Annotated[float | None, Field(ge=0.05, le=3600)] = None
    count: Annotated[int | None, Field(ge=1, le=1000)] = None
    timeout_seconds: Annotated[float, Field(gt=0, le=60)] = 1.0
    resolve_seconds: Annotated[float, Field(ge=1, le=86_400)] = 30.0

    @field_validator("*", mode="before")
    @classmethod
    def _is_not_a_table(cls, value: Any) -> Any:
        if isinstance(value, dict | list):
            raise ValueError("not a single value")  # noqa: TRY004 - pydantic wants this one
        return value

    @property
    def options(self) -> dict[str, Option]:
        """The keys of the prober."""
        return dict(self.model_extra or {})


def targets(probes: Sequence[ProbeSettings], packets_per_second: float) -> list[Target]:
    """The targets, checked as far as that is possible without touching the network.

    Raises:
        ConfigError: names the table and the key, e.g. `probes[2].password_file`.
    """
    from guard.probe.registry import make  # the probers' libraries are loaded only where something is probed

    if len(probes) > MAX_TARGETS:
        raise ConfigError("probes", f"{len(probes)} targets; at most {MAX_TARGETS}")
    made: dict[tuple[str, str], Target] = {}
    for index, probe in enumerate(probes):
        try:
            target = _target(probe, packets_per_second)
            make(target).close()
            if target.key in made:
                raise ConfigError("target", f"{target.target} is there already with prober {target.prober}")  # noqa: TRY301
        except ConfigError as error:
            raise ConfigError(f"probes[{index}].{error.key}", error.problem) from None
        made[target.key] = target
    return list(made.values())


def _target(probe: ProbeSettings, packets_per_second: float) -> Target:
    from guard.probe.registry import PROBERS

    interval = probe.interval_seconds or INTERVAL.get(probe.prober, 1.0)
    bare = Target(target=probe.target, prober=probe.prober, options=probe.options)
    kind = PROBERS.get(probe.prober)
    packets = kind.packets(bare) if kind else 0
    most = int(packets_per_second * interval / packets) if packets else COUNT
    count = probe.count or max(1, min(COUNT, most))
    if packets and count > most:
        key = "count" if probe.count and most else "interval_seconds"
        raise ConfigError(
            key,
            f"{count} probes of up to {packets} packets in {interval:g} s are more than probe_packets_per_second = "
            f"{packets_per_second:g} allows: at most {most} (target {probe.target})",
        )
    return Target(
        target=probe.target, prober=probe.prober, backend=probe.backend, interval=interval, count=count,
        timeout=probe.timeout_seconds, resolve=probe.resolve_seconds, options=probe.options,
    )  # fmt: skip
