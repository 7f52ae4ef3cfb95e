"""What the guarded connectors of one process share: settings, ring, exporter, directives, failsafe, request table.

It is made by the first connector, on vLLM's own thread at start-up; threads start then, never at registration.
"""

import contextlib
import json
import os
import socket
import sys
import threading
from typing import Any, Final

from guard import __version__, semconv
from guard.connectors import Capability
from guard.hook.backends import place_of
from guard.hook.config import HookConfig
from guard.hook.directives import GOODBYE_SECONDS, Directives
from guard.hook.ending import crash
from guard.hook.engine_metrics import Tally
from guard.hook.envelope import boot_id
from guard.hook.exporter import Exporter
from guard.hook.failsafe import Failsafe, logger
from guard.hook.recorder import Recorder
from guard.hook.records import Scope
from guard.hook.requests import Backend
from guard.hook.table import RequestTable
from guard.hook.worker import Contexts
from guard.wire import Directive

DEFAULT_PORT: Final = 8000
_WILDCARDS: Final = ("", "0.0.0.0", "::", "*")  # noqa: S104  compared, not bound


class Runtime:
    """The shared parts of one process."""

    def __init__(self, config: HookConfig, vllm_config: Any) -> None:
        self.config = config
        self.pid = os.getpid()
        instance = config.instance or instance_of(sys.argv)
        self.engine_id = f"{instance}/{_data_rank(vllm_config)}"
        self.failsafe = Failsafe()
        self.recorder = Recorder(config.ring)
        randomized = os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0").lower() not in ("1", "true")
        self.scope = Scope(
            engine_id=self.engine_id,
            model=_model(vllm_config),
            request_ids=config.request_ids,
            strip_suffix=randomized,
            salt=self.engine_id.encode()[:64],
        )
        self.tally = (
            Tally(lambda: self._exporter.dropped, lambda: self.failsafe.errors, self._age)
            if config.vllm_metrics
            else None
        )
        self.table = RequestTable(self.recorder, self.scope, trace_parent=config.trace_parent, tally=self.tally)
        self.contexts = Contexts()
        self.boot = boot_id()
        self.rank = int(getattr(vllm_config.parallel_config, "rank", 0) or 0)
        self._backends: list[str] = []
        self._directives: Directives | None = None
        self._users = 0
        self._told_reads = ""
        self._exporter = Exporter(
            config,
            self.recorder,
            {
                semconv.SERVICE_NAME: "vllm",
                semconv.SERVICE_INSTANCE_ID: instance,
                semconv.SERVICE_VERSION: __version__,
                semconv.HOST_NAME: socket.gethostname(),
                semconv.PROCESS_PID: self.pid,
                semconv.ENGINE_ID: self.engine_id,
            },
            failsafe=self.failsafe,
            live=self._live,
        )
        self._exporter.start()

    def _live(self) -> str:
        with contextlib.suppress(RuntimeError):  # a read began or ended while we looked: what was told a moment ago
            self._told_reads = reads_in_flight(self.table)
        return self._told_reads

    def _age(self) -> float | None:
        return self._directives.age() if self._directives is not None else None

    def current(self, backend: str) -> Directive | None:
        """The directive in force for a backend; None: behave as without kvguard."""
        directives = self._directives
        return directives.current(backend) if directives is not None else None

    def join(self, backend: Backend, *, scheduler: bool) -> int:
        """One more guarded connector of this process; returns its number. Scheduler connectors are given directives."""
        self._users += 1
        if scheduler and backend.label not in self._backends:
            self._backends.append(backend.label)
            if self._directives is not None:  # a further child of a MultiConnector: one poller asks for all
                self._directives.stop(0.0)
            self._directives = Directives(
                self.config, self.engine_id, tuple(self._backends), self.scope.model, failsafe=self.failsafe
            )
            self._directives.start()
        return self._users

    def leave(self) -> None:
        """A guarded connector shut down; the last one ends the threads, within about a second.

        An engine that is made in this process afterwards gets a runtime of its own.
        """
        global _runtime  # noqa: PLW0603
        self._users -= 1
        if self._users <= 0:
            with _lock:
                if _runtime is self:
                    _runtime = None
            if self._directives is not None:
                self._directives.stop(GOODBYE_SECONDS, leaving=True, error=crash())
            self._exporter.stop(1.0)


_lock: Final = threading.Lock()
_runtime: Runtime | None = None


def runtime_for(vllm_config: Any) -> Runtime | None:
    """The runtime of this process, made at first use; None when the hook is switched off."""
    global _runtime  # noqa: PLW0603  one per process by its nature
    with _lock:
        if _runtime is None or _runtime.pid != os.getpid():
            config = HookConfig.from_env(os.environ)
            if config is None:
                return None
            _runtime = Runtime(config, vllm_config)
        return _runtime


def reads_in_flight(table: RequestTable) -> str:
    """What is in flight, as `semconv.HOOK_READS` tells it; empty when nothing is. For the exporter's thread.

    Raises:
        RuntimeError: the engine's thread changed it meanwhile.
    """
    now = table.clock()
    told = {
        label: [pace.inflight, pace.inflight_bytes, round(pace.oldest_age(now), 3)]
        for label, pace in list(table.paces.items())
        if pace.inflight
    }
    return json.dumps(told) if told else ""


def instance_of(argv: list[str]) -> str:
    """The host:port of vLLM from its command line, which child processes inherit; host name and 8000 by default."""
    host = _option(argv, "--host")
    port = _option(argv, "--port")
    if host in _WILDCARDS:
        host = socket.gethostname()
    number = int(port) if port.isascii() and port.isdigit() else DEFAULT_PORT
    return f"[{host}]:{number}" if ":" in host else f"{host}:{number}"


def backend_of(capability: Capability, connector: Any, vllm_config: Any, kv_cache_config: Any) -> Backend:
    """The backend that a connector reads, with the geometry of the KV cache."""
    place = place_of(capability, connector, vllm_config)
    parallel = vllm_config.parallel_config
    try:
        rank_bytes = sum(
            group.kv_cache_spec.page_size_bytes * len(group.layer_names) // group.kv_cache_spec.block_size
            for group in kv_cache_config.kv_cache_groups
        )
    except (AttributeError, TypeError, ZeroDivisionError):
        rank_bytes = 0  # geometry of another shape: no bytes are told
    # Every rank of a tensor-parallel group holds its heads of its stage's layers; under MLA all hold the same.
    shards = 1 if getattr(getattr(vllm_config, "model_config", None), "use_mla", False) is True else (
        int(getattr(parallel, "tensor_parallel_size", 1) or 1)
    )  # fmt: skip
    return Backend(
        label=place.label,
        capability=capability,
        address=place.address,
        port=place.port,
        block_tokens=int(vllm_config.cache_config.block_size or 16),
        rank_bytes=rank_bytes,
        ranks=shards * int(getattr(parallel, "pipeline_parallel_size", 1) or 1),
    )


def announce(runtime: Runtime, backend: Backend, connector: str, policy: str) -> None:
    """Says once, at start-up, what is guarded and what it can do."""
    capability = backend.capability
    can = [
        f"skip={'yes' if capability.skip else 'no'}",
        f"decline={'yes' if capability.decline else 'no'}",
        f"stop stores={'yes' if capability.stop_stores else 'no'}",
        f"load={capability.load}",
    ]
    logger.info(
        "kvguard %s: guards %s as backend %s of engine %s (%s; %s)",
        __version__,
        connector,
        backend.label,
        runtime.engine_id,
        ", ".join(can),
        f"run on {capability.run}" if capability.run else "not run, read from source",
    )
    if policy and policy != "recompute" and not capability.handoff:
        logger.warning(
            "kvguard: kv_load_failure_policy is %r: a failed KV load fails the request and may end the engine. "
            'Set "kv_load_failure_policy": "recompute" in --kv-transfer-config.',
            policy,
        )


def _option(argv: list[str], name: str) -> str:
    found = ""
    for index, word in enumerate(argv):
        if word == name and index + 1 < len(argv):
            found = argv[index + 1]
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def _data_rank(vllm_config: Any) -> int:
    parallel = vllm_config.parallel_config
    for name in ("data_parallel_index", "data_parallel_rank"):
        value = getattr(parallel, name, None)
        if isinstance(value, int):
            return value
    return 0


def _model(vllm_config: Any) -> str:
    model = vllm_config.model_config
    served = getattr(model, "served_model_name", None)
    if isinstance(served, list | tuple):
        served = served[0] if served else None
    return str(served or model.model)
