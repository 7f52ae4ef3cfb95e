"""The environment in which vLLM starts: is the hook on, will vLLM load it, where do spans go, is RDMA usable."""

import importlib.util
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from guard.cli.doctor.findings import Finding, note, ok, problem, warning
from guard.hook.config import HookConfig
from guard.hook.failsafe import logger
from guard.semconv import DEFAULT_PORT

PLUGIN: Final = "kvguard"
INFINIBAND: Final = Path("/sys/class/infiniband")


def check(env: Mapping[str, str], *, explicit: bool) -> Iterator[Finding]:
    """The hook's own variables, and vLLM's list of allowed plugins. `explicit`: the connector names the guard."""
    config, complaints = _config(env)
    for text in complaints:
        yield warning("hook settings", text.removeprefix("kvguard: "))
    if not env.get("KVGUARD_ENDPOINT", "").strip():
        yield problem("hook", "KVGUARD_ENDPOINT is not set: the hook stays off", "set it to the URL of kvguard serve")
    elif config is None:
        off = env.get("KVGUARD_HOOK", "").strip()
        yield problem("hook", f"the hook is off (KVGUARD_HOOK={off})" if off else "the hook is off: no usable endpoint")
    else:
        yield ok("hook", f"on, reports to {', '.join(config.endpoints)}")
        where = config.instance or "taken from vLLM's host and port"
        yield note("engine id", f"instance {where}", "" if config.instance else "in containers set KVGUARD_INSTANCE")
    yield from _plugins(env, explicit=explicit)


def _plugins(env: Mapping[str, str], *, explicit: bool) -> Iterator[Finding]:
    allowed = env.get("VLLM_PLUGINS")
    if allowed is None:
        return
    names = [name.strip() for name in allowed.split(",")]
    if PLUGIN in names:
        yield ok("VLLM_PLUGINS", f"lets {PLUGIN} through")
    elif explicit:
        yield note("VLLM_PLUGINS", f"drops {PLUGIN}; the connector is named explicitly, so the hook is on all the same")
    else:
        yield problem("VLLM_PLUGINS", f"{allowed!r} drops {PLUGIN}: vLLM will not load the hook", f"add {PLUGIN} to it")


def check_tracing(env: Mapping[str, str], traces_endpoint: str | None) -> Iterator[Finding]:
    """OTLP settings of vLLM's own spans, which join to kvguard's."""
    if not traces_endpoint:
        if env.get("KVGUARD_TRACE_PARENT", "").strip().lower() in ("on", "1", "true", "yes"):
            yield warning(
                "tracing",
                "KVGUARD_TRACE_PARENT is on, but vLLM gets no --otlp-traces-endpoint: it drops the caller's headers",
            )
        return
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        yield warning("tracing", "OTEL_SDK_DISABLED=true: vLLM sends no spans of its own; kvguard's hook does not mind")
    protocol = env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or env.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    ours = {_place(url) for url in env.get("KVGUARD_ENDPOINT", "").split(",") if url.strip()}
    if _place(traces_endpoint) in ours or _place(traces_endpoint).endswith(f":{DEFAULT_PORT}"):
        if protocol.startswith("http"):
            yield ok("tracing", f"vLLM's own spans go to kvguard ({protocol})")
        else:
            yield problem(
                "tracing",
                f"vLLM's own spans go to kvguard as {protocol}, which it does not speak",
                "set OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf and the endpoint to …/v1/traces",
            )
    else:
        yield note(
            "tracing", f"vLLM's own spans go to {traces_endpoint} ({protocol})",
            "copy them to kvguard over OTLP/HTTP to have vLLM's TTFT beside the hook's",
        )  # fmt: skip


def check_rdma(devices: Path = INFINIBAND) -> Iterator[Finding]:
    """RDMA devices of this machine, and whether the probe can use them."""
    names = sorted(path.name for path in devices.iterdir()) if devices.is_dir() else []
    if not names:
        return
    if importlib.util.find_spec("pyverbs") is None:
        yield warning(
            "rdma", f"{', '.join(names)} found, but this Python has no pyverbs: their round trips cannot be probed",
            "apt install python3-pyverbs ibverbs-providers, probe with /usr/bin/python3 (PyPI's does not build)",
        )  # fmt: skip
    else:
        yield ok("rdma", f"{', '.join(names)}, pyverbs is there")


class _Listener(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _config(env: Mapping[str, str]) -> tuple[HookConfig | None, list[str]]:
    """The hook's settings as the hook itself reads them, and what it would log."""
    listener = _Listener()
    before = logger.propagate
    logger.addHandler(listener)
    logger.propagate = False
    try:
        return HookConfig.from_env(env), listener.texts
    finally:
        logger.removeHandler(listener)
        logger.propagate = before


def _place(url: str) -> str:
    try:
        parts = urlsplit(url.strip() if "://" in url else f"//{url.strip()}")
        port = parts.port
    except ValueError:
        return ""
    return f"{parts.hostname}:{port}"
