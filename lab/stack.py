"""A running stack: starts the pieces in order, hands out handles to each, and stops all of it whatever happens.

client ── HTTP ── vLLM (API server, engine core, worker) ── ZMQ ── LMCache server ─┐
                    │  hook ── OTLP, directives ── kvguard serve                    │ RESP
                    └─────── (in-process LMCache) ─────────────────────────────────┤
                                                  [command proxy] ── injector ── Redis
"""

import json
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

from lab import netns, servers
from lab.client import Client
from lab.config import StackConfig
from lab.env import LabEnv
from lab.errors import LabError
from lab.injector.control import Injector
from lab.processes import Process, free_port, janitor, wait_until
from lab.redis import Redis
from lab.service import Service
from lab.transfer import kv_transfer

NEAR, FAR = "198.18.77.1", "198.18.77.2"
"""Ends of the slow wire, from the block for benchmarks (RFC 2544); they exist in the lab's namespaces only."""


class Stack:
    """Context manager over one `StackConfig`. Handles are None where the configuration leaves the piece out.

    Attributes:
        vllm, lmcache, redis_process, service_process, rotel: the processes, for signals and logs.
        client: streams completions from vLLM. service: kvguard's HTTP API. redis: counts.
        injector: the link to the store. commands: the proxy that delays and counts single Redis commands.
        run_dir: logs and sockets; removed at the end unless `keep_logs`, or when something failed.
    """

    def __init__(
        self,
        config: StackConfig,
        env: LabEnv,
        *,
        run_dir: Path | None = None,
        keep_logs: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.config, self.env, self._say = config, env, say
        self.run_dir = run_dir or Path(tempfile.mkdtemp(prefix="kvlab-"))
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._remove = run_dir is None and not keep_logs
        self._exit = ExitStack()
        self._processes: list[Process] = []
        self.vllm: Process
        self.lmcache: Process | None = None
        self.redis_process: Process | None = None
        self.service_process: Process | None = None
        self.rotel: Process | None = None
        self.client: Client
        self.service: Service | None = None
        self.redis: Redis | None = None
        self.injector: Injector | None = None
        self.commands: Injector | None = None
        self._lmcache_http = 0

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._remove = False  # the logs are needed now
            self._exit.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._exit.close()
        if self._remove and kind is None:
            shutil.rmtree(self.run_dir, ignore_errors=True)

    def _run(self, process: Process) -> Process:
        self._say(f"starting {process.name}")
        self._exit.enter_context(process)
        self._processes.append(process)
        return process

    def _start(self) -> None:
        self._exit.enter_context(janitor(self.run_dir))
        config, run_dir = self.config, self.run_dir
        store = self._start_store() if config.uses_store else ("", 0)
        service_url = self._start_service(store) if config.service else None
        otlp_env, grpc = self._start_otlp(service_url)
        transfer, engine_env = kv_transfer(config, run_dir, store, self._start_lmcache(store, grpc))
        port = free_port()
        engine_env |= otlp_env | self._hook_env(port, service_url)
        self.vllm = self._run(
            servers.vllm_server(self.env, self._with_otlp(otlp_env), run_dir, port, transfer, engine_env)
        )
        self.client = Client(port)

    def _start_store(self) -> tuple[str, int]:
        """Redis and the road to it; returns the address that LMCache is given."""
        kind = self.config.injector
        if kind == "auto":
            kind = "tun" if netns.inside() else "proxy"
        address, far = ("127.0.0.1", free_port()), None
        if kind == "tun":
            if not netns.inside():
                raise LabError("injector tun needs the lab's namespace: start through `python -m lab`")
            tun = self._run(servers.tundelay(self.env, self.run_dir, NEAR, FAR, self.config.mtu))
            pid, thread = tun.tail().split()[1:3]
            far = Path(f"/proc/{pid}/task/{thread}/ns/net")
            address = (FAR, 6379)
            self.injector = Injector(self.run_dir / "tundelay.sock")
        self.redis_process = self._run(servers.redis_server(self.run_dir, *address, netns=far))
        self.redis = Redis(self.run_dir / "redis.sock")
        if kind == "proxy":
            address, self.injector = self._start_proxy("link", address)
        if self.config.command_proxy:
            address, self.commands = self._start_proxy("commands", address)
        return address

    def _start_proxy(self, name: str, target: tuple[str, int]) -> tuple[tuple[str, int], Injector]:
        port = free_port()
        self._run(servers.redis_proxy(self.run_dir, name, port, target))
        return ("127.0.0.1", port), Injector(self.run_dir / f"{name}.sock")

    def _start_service(self, store: tuple[str, int]) -> str:
        port, env = free_port(), dict(self.config.service_env)
        if self.config.probe:
            target = {"target": f"{store[0]}:{store[1]}", "prober": "resp", "backend": self.config.backend}
            env["KVGUARD_SERVE_PROBES"] = json.dumps([target])
        self.service_process = self._run(servers.kvguard_service(self.run_dir, port, env))
        self.service = Service(f"http://127.0.0.1:{port}")
        return self.service.url

    def _start_otlp(self, service_url: str | None) -> tuple[dict[str, str], str | None]:
        """Variables that send vLLM's own spans on their way, and the gRPC address for LMCache's."""
        if self.config.otlp is None:
            return {}, None
        if service_url is None:
            raise LabError(f"otlp={self.config.otlp!r} needs the service")
        if self.config.otlp == "service":
            return {
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{service_url}/v1/traces",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            }, None
        grpc, http = free_port(), free_port()
        self.rotel = self._run(servers.rotel_collector(self.env, self.run_dir, grpc, http, service_url))
        endpoint = f"http://127.0.0.1:{grpc}"
        return {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true"}, endpoint

    def _with_otlp(self, otlp_env: dict[str, str]) -> StackConfig:
        if not otlp_env:
            return self.config
        flags = ("--otlp-traces-endpoint", otlp_env["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
        return replace(self.config, vllm_args=(*self.config.vllm_args, *flags))

    def _start_lmcache(self, store: tuple[str, int], grpc: str | None) -> int:
        """LMCache's server where there is one; returns its port."""
        if not self.config.uses_server:
            return 0
        ports = {name: free_port() for name in ("zmq", "http", "metrics")}
        self._lmcache_http = ports["http"]
        self.lmcache = self._run(servers.lmcache_server(self.env, self.config, self.run_dir, store, ports, grpc))
        return ports["zmq"]

    def _hook_env(self, port: int, service_url: str | None) -> dict[str, str]:
        if not self.config.hook:
            return {"KVGUARD_HOOK": "off"}
        endpoint = service_url or f"http://127.0.0.1:{free_port()}"
        return {"KVGUARD_ENDPOINT": endpoint, "KVGUARD_INSTANCE": f"127.0.0.1:{port}", **self.config.hook_env}

    # -- What tests do between requests --------------------------------------------------------------------------------
    @property
    def alive(self) -> bool:
        """Whether every process of the stack runs."""
        return all(process.alive for process in self._processes)

    def calm(self) -> None:
        """Undoes what a test may have left: delays, limits, switches, running stores, caches other than the store's."""
        for injector in filter(None, (self.injector, self.commands)):
            state = injector.rtt(0)
            injector.bandwidth(0)
            for key in state:
                if key == "loss_ppm":
                    injector.loss(0)
                elif key.startswith("delay."):
                    injector.delay(key.removeprefix("delay."), 0)
        if self.service is not None:
            for override in self.service.get("/v1/offload")["overrides"]:
                self.service.clear(override["scope"])
        self.drain()

    # -- What tests do with the caches ---------------------------------------------------------------------------------
    def lmcache_status(self) -> dict:
        """LMCache server's own account of its parts."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._lmcache_http}/status", timeout=10) as answer:
            return json.load(answer)

    def settle_stores(self, timeout: float = 20.0) -> None:
        """Waits until LMCache has written all that it has to write: no key is new for 0.3 s and none is under way."""
        seen, since = -1, time.monotonic()

        def quiet() -> bool:
            nonlocal seen, since
            keys = self.redis.counts()["SET"]
            if keys != seen:
                seen, since = keys, time.monotonic()
            return time.monotonic() - since > 0.3 and not self._stores_pending()

        wait_until(quiet, timeout, "LMCache to finish its stores")

    def _stores_pending(self) -> bool:
        if self.lmcache is None:
            return False
        storage = self.lmcache_status()["storage_manager"]
        store = storage["store_controller"]
        return bool(store["pending_keys_count"] or store["in_flight_task_count"])

    def drain(self) -> None:
        """Leaves KV in the remote store only: waits for stores, empties vLLM's prefix cache and LMCache's L1."""
        if self.config.uses_store:
            self.settle_stores()
        self.client.reset_prefix_cache()
        if self.lmcache is not None:
            self.clear_l1()

    def clear_l1(self) -> None:
        """Empties LMCache server's memory tier and waits until it says so."""
        url = f"http://127.0.0.1:{self._lmcache_http}/cache/clear"
        body = json.dumps({"tier": "l1"}).encode()

        def empty() -> bool:
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=10).close()
            return self.lmcache_status()["storage_manager"]["l1_manager"]["total_object_count"] == 0

        wait_until(empty, 10.0, "LMCache's L1 to be empty")
