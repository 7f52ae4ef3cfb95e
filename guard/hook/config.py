"""The hook's settings, read once from vLLM's environment.

| variable | meaning | default |
|---|---|---|
| `KVGUARD_ENDPOINT` | URL of the kvguard service; several, comma-separated, are tried in turn | unset: hook off |
| `KVGUARD_HOOK` | `on` or `off` | `on` |
| `KVGUARD_TOKEN_FILE` | file with the bearer token (scope `ingest`); read again when it changes | no token |
| `KVGUARD_CA_FILE` | PEM file with the certificate authorities to trust for https | the system's |
| `KVGUARD_INSTANCE` | first part of the engine id | vLLM's own address, host:port |
| `KVGUARD_REQUEST_IDS` | `off` leaves request ids out of the spans | `on` |
| `KVGUARD_TRACE_PARENT` | `on` puts `kvguard.request` between the caller's span and vLLM's. Only when the service forwards its spans to where vLLM's go, else parents are missing there | `off` |
| `KVGUARD_RING` | records kept until they are exported, 64 to 1048576 | `8192` |
| `KVGUARD_VLLM_METRICS` | `on` puts the hook's counters into vLLM's own `/metrics` | `off` |

A value that cannot be used costs one log line which names the variable and what is used instead; it never raises.
Other variables that start with `KVGUARD_` are not looked at: Kubernetes makes some up for a Service of that name.
"""  # noqa: E501  a table row is one line

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from guard.hook.failsafe import logger

RING_DEFAULT: Final = 8192
_RING_RANGE: Final = (64, 1 << 20)
_INSTANCE_LIMIT: Final = 200
_ON: Final = ("on", "1", "true", "yes")
_OFF: Final = ("off", "0", "false", "no")


@dataclass(frozen=True, slots=True, kw_only=True)
class HookConfig:
    """Settings of the hook in one process. `instance` None: the connector derives it from vLLM's configuration."""

    endpoints: tuple[str, ...]
    token_file: Path | None = None
    ca_file: Path | None = None
    instance: str | None = None
    request_ids: bool = True
    trace_parent: bool = False
    ring: int = RING_DEFAULT
    vllm_metrics: bool = False

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "HookConfig | None":
        """The settings, or None when the hook is off: no usable `KVGUARD_ENDPOINT`, or `KVGUARD_HOOK=off`."""
        text = env.get("KVGUARD_ENDPOINT", "").strip()
        if not text or not _switch(env, "KVGUARD_HOOK", default=True):
            return None
        endpoints = _endpoints(text)
        if not endpoints:
            logger.warning("kvguard: KVGUARD_ENDPOINT holds no usable URL; the hook is off")
            return None
        return cls(
            endpoints=endpoints,
            token_file=_file(env, "KVGUARD_TOKEN_FILE"),
            ca_file=_file(env, "KVGUARD_CA_FILE"),
            instance=_instance(env),
            request_ids=_switch(env, "KVGUARD_REQUEST_IDS", default=True),
            trace_parent=_switch(env, "KVGUARD_TRACE_PARENT", default=False),
            ring=_ring(env),
            vllm_metrics=vllm_metrics(env),
        )


def vllm_metrics(env: Mapping[str, str]) -> bool:
    """Whether the hook's counters go into vLLM's own metrics. Asked for each class that is guarded."""
    return _switch(env, "KVGUARD_VLLM_METRICS", default=False)


def _endpoints(text: str) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for item in (part.strip() for part in text.split(",")):
        if not item:
            continue
        problem = _url_problem(item)
        if problem:
            logger.warning("kvguard: KVGUARD_ENDPOINT: one URL %s; it is left out", problem)
        else:
            found[item.rstrip("/")] = None
    return tuple(found)


def _url_problem(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises when it is not a number from 0 to 65535
    except ValueError as error:
        return f"cannot be read ({error})"
    if parts.scheme not in ("http", "https"):
        return "does not start with http:// or https://"
    if not parts.hostname:
        return "has no host"
    if parts.username is not None or parts.password is not None:
        return "holds a password (use KVGUARD_TOKEN_FILE)"
    if parts.query or parts.fragment or not url.isascii() or not url.isprintable() or " " in url:
        return "has a query, a fragment or characters that must be escaped"
    return ""


def _switch(env: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = env.get(name, "").strip().lower()
    if value in _ON:
        return True
    if value in _OFF:
        return False
    if value:
        logger.warning("kvguard: %s is neither on nor off; %s is used", name, "on" if default else "off")
    return default


def _file(env: Mapping[str, str], name: str) -> Path | None:
    value = env.get(name, "").strip()
    if not value:
        return None
    path = Path(value)
    try:
        with path.open("rb"):
            pass
    except (OSError, ValueError) as error:
        if name == "KVGUARD_CA_FILE":
            logger.warning("kvguard: %s cannot be read (%s); the system's authorities are used", name, error)
            return None
        # A secret may be mounted a moment later; it is looked for again before every request.
        logger.warning("kvguard: %s cannot be read (%s); no token is sent until it can", name, error)
    return path


def _instance(env: Mapping[str, str]) -> str | None:
    value = env.get("KVGUARD_INSTANCE", "").strip()
    if not value:
        return None
    if len(value) > _INSTANCE_LIMIT or not value.isprintable() or value.strip("/") != value:
        logger.warning("kvguard: KVGUARD_INSTANCE is too long or holds unusable characters; vLLM's address is used")
        return None
    return value


def _ring(env: Mapping[str, str]) -> int:
    value = env.get("KVGUARD_RING", "").strip()
    if not value:
        return RING_DEFAULT
    low, high = _RING_RANGE
    if value.isascii() and value.isdigit() and len(value) < 10 and low <= int(value) <= high:
        return int(value)
    logger.warning("kvguard: KVGUARD_RING is not a whole number from %d to %d; %d is used", low, high, RING_DEFAULT)
    return RING_DEFAULT
