"""Settings of `kvguard serve`: flag beats environment (`KVGUARD_SERVE_*`) beats file (TOML) beats default.

Secrets are files, never values. Only `KVGUARD_SERVE_*` is read: Kubernetes makes up `KVGUARD_PORT` and its like for a
Service of that name. SIGHUP reloads the content of `tokens_file`; everything else needs a restart.
"""

import os
import re
import ssl
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from guard.errors import ConfigError
from guard.probe.config import ProbeSettings, targets
from guard.semconv import DEFAULT_PORT
from guard.slo.objective import parse as parse_objectives

ENV_PREFIX: Final = "KVGUARD_SERVE_"

Source = Literal["default", "file", "environment", "flag"]
_MIB: Final = 1 << 20
_USER: Final = re.compile(r"(?<=://)[^/?#]*@")
_BEFORE_AT: Final = re.compile(r"(^[a-z]+:/+)?.*@")
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


def default_state_dir(env: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_STATE_HOME/kvguard`, by default `~/.local/state/kvguard`."""
    base = env.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "kvguard"


class Settings(BaseSettings):
    """The settings, read once at start and frozen. Sizes in bytes, times in seconds."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on; other than loopback needs tokens.")
    port: int = Field(DEFAULT_PORT, ge=0, le=65535, description="TCP port; 0 takes a free one.")
    state_dir: Path = Field(default_factory=default_state_dir, description="Directory of the ledger.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe line logged.")
    tokens_file: Path | None = Field(None, description="Bearer tokens, a line each: NAME SCOPE[,SCOPE] TOKEN.")
    allowed_hosts: tuple[str, ...] = Field(
        (), description="Names, beside loopback, under which it may be called without tokens (a tunnel); no ports."
    )
    tls_cert_file: Path | None = Field(None, description="PEM certificate chain; with it the service speaks https.")
    tls_key_file: Path | None = Field(None, description="PEM private key of tls_cert_file.")
    require_reason: Literal["never", "fleet", "always"] = Field(
        "never", description="Whether a switch is refused that gives no reason: for the scope fleet, or any."
    )
    max_body_bytes: int = Field(16 * _MIB, ge=1024, le=1 << 30, description="Largest request body as sent.")
    max_decoded_bytes: int = Field(64 * _MIB, ge=1024, le=1 << 31, description="Largest body after decompression.")
    max_header_bytes: int = Field(32 * 1024, ge=1024, le=_MIB, description="Most bytes of URL and headers together.")
    max_inflight_bytes: int = Field(
        128 * _MIB, ge=1024, description="Trace bodies held at once; above it the answer is 503 with Retry-After."
    )
    body_timeout_seconds: float = Field(30.0, gt=0, le=600, description="Longest time a client may take for a body.")
    header_timeout_seconds: float = Field(10.0, gt=0, le=600, description="Longest time for a request's headers.")
    max_connections: int = Field(
        16_384, ge=16, le=1_000_000, description="Open connections; beyond it the oldest idle one is closed."
    )
    max_event_streams: int = Field(64, ge=1, le=10_000, description="Clients of GET /v1/events at once.")
    read_rate: float = Field(100.0, ge=0, description="Reads a second for each client, 5 s of it at once; 0: no limit.")
    write_rate: float = Field(20.0, ge=0, description="Switches a second for each client, as read_rate.")
    ingest_rate: float = Field(0.0, ge=0, description="Polls and span bodies a second for each client, as read_rate.")
    default_mode: Literal["auto", "observe", "on"] = Field(
        "auto", description="What holds where no switch is set; observe only tells what auto would do."
    )
    window_requests: int = Field(20_000, ge=100, le=5_000_000, description="Joined requests kept in memory.")
    window_seconds: float = Field(600.0, ge=10, le=86_400, description="How long a joined request stays there.")
    join_hold_seconds: float = Field(10.0, ge=0, le=600, description="How long a request waits for late spans.")
    max_engines: int = Field(10_000, ge=1, le=100_000, description="Engines kept in the registry.")
    engine_retention_seconds: float = Field(
        3600.0, ge=60, description="A silent engine is forgotten after this; one that says goodbye at once."
    )
    history_dir: Path | None = Field(None, description="Directory of joined requests as Parquet; none: not kept.")
    history_days: float = Field(14.0, gt=0, le=3660, description="Days of requests kept there.")
    history_max_bytes: int = Field(10 << 30, ge=1 << 20, description="Most bytes kept there; the oldest go first.")
    history_rotate_seconds: float = Field(60.0, ge=1, le=86_400, description="How often a file of them is written.")
    objectives: tuple[dict[str, Any], ...] = Field(
        (), description="Promises: tables of model, class, ttft_seconds, percentile, tpot_seconds."
    )
    forward_endpoint: str | None = Field(None, description="OTLP/HTTP URL (…/v1/traces) that traces are copied to.")
    forward_headers_file: Path | None = Field(None, description="Headers for it, a line each: NAME: VALUE.")
    forward_ratio: float = Field(1.0, ge=0, le=1, description="Share of traces forwarded, chosen by trace id.")
    forward_queue_bytes: int = Field(32 * _MIB, ge=1024, description="Bodies waiting to be forwarded; then drops.")
    probes: tuple[ProbeSettings, ...] = Field((), description="Tables [[probes]]: what round trips are measured to.")
    probe_packets_per_second: float = Field(20.0, gt=0, le=10_000, description="Most packets of a probe's target.")
    probe_cpu_share: float = Field(0.001, gt=0, le=1, description="Most of one core that a probe's target may cost.")

    @field_validator("state_dir", "history_dir", mode="before")
    @classmethod
    def _is_named(cls, value: object) -> object:
        if value == "":  # as a path that would be the working directory, which nobody asked for
            raise ValueError("names no directory")
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _are_host_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not _is_host_name(name):
                raise ValueError(f"{name!r} would match no request: {_written_right(name)}")
        return value

    @field_validator("objectives")
    @classmethod
    def _are_objectives(cls, value: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        parse_objectives(value)
        return value

    @field_validator("forward_endpoint")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None:
            parts = urlsplit(value)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError("not a URL that starts with http:// or https://")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` hands in: it merges the sources itself, to tell where each value came from."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        return is_loopback(self.host)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings and where each of them came from."""

    settings: Settings
    sources: Mapping[str, Source]

    def rows(self) -> list[dict[str, Any]]:
        """One row per key for `kvguard config`: key, value, source, description.

        Secrets live in files of which only the path is a setting; a password inside a URL is masked.
        """
        data = self.settings.model_dump(mode="json")
        return [
            {
                "key": key,
                "value": _masked(data[key]),
                "source": self.sources[key],
                "description": Settings.model_fields[key].description or "",
            }
            for key in data
        ]


def load(flags: Mapping[str, Any] | None = None, config_file: Path | None = None) -> Loaded:
    """Reads the settings; `flags` that are None count as not given, `KVGUARD_SERVE_CONFIG` stands in for the file.

    Raises:
        ConfigError: a key is unknown or its value cannot be used; names the key and where it was found.
    """
    path = config_file or (Path(text) if (text := os.environ.get(f"{ENV_PREFIX}CONFIG")) else None)
    layers: dict[Source, dict[str, Any]] = {
        "file": _read_file(path) if path else {},
        "environment": _read_environment(),
        "flag": {key: value for key, value in (flags or {}).items() if value is not None},
    }
    merged: dict[str, Any] = {}
    sources: dict[str, Source] = dict.fromkeys(Settings.model_fields, "default")
    for source, layer in layers.items():
        merged.update(layer)
        sources.update(dict.fromkeys(layer, source))
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else "settings"
        raise ConfigError(_name(first["loc"]), _problem(first, key, sources.get(key, "default"), path)) from None
    _check_files(settings)
    targets(settings.probes, settings.probe_packets_per_second)
    return Loaded(settings, sources)


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_host_name(name: str) -> bool:
    """Whether a request's `Host`, without its port and brackets, can be `name`."""
    try:
        return str(ip_address(name)) == name.lower()
    except ValueError:
        return _HOST_NAME.fullmatch(name) is not None


def _written_right(entry: str) -> str:
    """What to write in the place of an entry that is no host name."""
    if "*" in entry:
        return "there are no patterns, so name each host"
    try:
        name = str(ip_address(entry.strip("[] ")))
    except ValueError:
        try:
            name = urlsplit(entry if "//" in entry else f"//{entry}").hostname or ""
            name = name.strip(" .").encode("idna").decode()  # as browsers send it
        except ValueError:
            name = ""
    if not _is_host_name(name):
        return "write a name such as 'kvguard.internal', or an address"
    return f"write {name!r}, which holds for every port"


def _read_environment() -> dict[str, Any]:
    try:
        return EnvSettingsSource(Settings)()
    except SettingsError as error:
        key = next((key for key in Settings.model_fields if f'"{key}"' in str(error)), "settings")
        raise ConfigError(
            key, f"not JSON (environment variable {ENV_PREFIX}{key.upper()}): {error.__cause__}"
        ) from None


def _name(location: tuple[int | str, ...]) -> str:
    """A key inside tables as people write it: `probes[2].count`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)[1:] or "settings"


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = tomllib.load(file)
    except OSError as error:
        raise ConfigError("config", f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", f"{path}: not TOML: {error}") from None
    unknown = sorted(set(data) - set(Settings.model_fields))
    if unknown:
        raise ConfigError(unknown[0], f"unknown key in {path}; known are {', '.join(Settings.model_fields)}")
    return data


def _problem(error: Any, key: str, source: Source, path: Path | None) -> str:
    where = {
        "environment": f"environment variable {ENV_PREFIX}{key.upper()}",
        "file": f"file {path}",
        "flag": f"--{key.replace('_', '-')}",
        "default": "default",
    }[source]
    message = str(error["msg"]).removeprefix("Value error, ")
    hint = ""
    if source == "environment" and str(error["input"]).startswith("tcp://"):
        hint = "; Kubernetes sets this for a Service named kvguard-serve: use enableServiceLinks: false"
    return f"{message}, got {_refused(error['input'])!r} ({where}){hint}"


def _check_files(settings: Settings) -> None:
    for key in ("tokens_file", "tls_cert_file", "tls_key_file", "forward_headers_file"):
        path: Path | None = getattr(settings, key)
        if path is None:
            continue
        try:
            with path.open("rb"):
                pass
        except OSError as error:
            raise ConfigError(key, f"{path}: {error.strerror or error}") from None
    if (settings.tls_cert_file is None) != (settings.tls_key_file is None):
        missing = "tls_key_file" if settings.tls_key_file is None else "tls_cert_file"
        raise ConfigError(missing, "tls_cert_file and tls_key_file go together")
    if settings.tls_cert_file and settings.tls_key_file:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file, password=lambda: "")
        except OSError as error:  # of which ssl.SSLError is one
            files = f"{settings.tls_cert_file} and {settings.tls_key_file}"
            raise ConfigError("tls_cert_file", f"{files} are no certificate and its unencrypted key: {error}") from None
    if not settings.loopback and settings.tokens_file is None:
        raise ConfigError(
            "tokens_file", f"needed because host {settings.host!r} is not loopback: others could switch offload"
        )


def _masked(value: Any) -> Any:
    return _USER.sub("***@", value) if isinstance(value, str) else value


def _refused(value: Any) -> Any:
    """A value for an error text: one that is no URL may hold a password where a URL would not."""
    return _BEFORE_AT.sub(r"\1***@", value) if isinstance(value, str) else value
