"""What a process derives from vLLM's configuration: engine id, model, backend, geometry, start-up lines."""

import json
import logging
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from guard.connectors import EXAMPLE, LMCACHE, LMCACHE_MP, MOONCAKE_STORE, NIXL, OFFLOADING, UNKNOWN
from guard.hook import directives as polls
from guard.hook import runtime as module
from guard.hook.backends import place_of
from guard.hook.failsafe import LOGGER_NAME
from guard.hook.requests import Backend
from guard.hook.runtime import announce, backend_of, instance_of, runtime_for
from tests.hook.fakes_vllm import FakeConnector, vllm_config

HOST = socket.gethostname()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], f"{HOST}:8000"),
        (["vllm", "serve", "m", "--port", "8100"], f"{HOST}:8100"),
        (["--host=10.0.0.1", "--port=9"], "10.0.0.1:9"),
        (["--host", "0.0.0.0", "--port", "x"], f"{HOST}:8000"),
        (["--host", "fd00::1", "--port", "80"], "[fd00::1]:80"),
        (["--port"], f"{HOST}:8000"),
    ],
)
def test_the_instance_is_vllms_own_address(argv: list[str], expected: str) -> None:
    assert instance_of(argv) == expected


@pytest.mark.parametrize(
    ("capability", "extra", "expected"),
    [
        (LMCACHE_MP, {"lmcache.mp.host": "tcp://h1", "lmcache.mp.port": 5655}, ("lmcache-mp", "h1", 5655)),
        (LMCACHE_MP, {"kvguard.store": "resp"}, ("lmcache-mp/resp", "localhost", 5555)),
        (LMCACHE_MP, {"lmcache.mp.server_urls": "tcp://a:1, tcp://b:2"}, ("lmcache-mp", "a", 1)),
        (EXAMPLE, {}, ("example/file", "", 0)),
        (OFFLOADING, {"spec_name": "CPUOffloadingSpec"}, ("offloading/cpu", "", 0)),
        (NIXL, {"backends": ["UCX"]}, ("nixl/ucx", "", 0)),
        (UNKNOWN, {}, ("fakeconnector", "", 0)),
        (UNKNOWN, {"kvguard.store": "My Store!"}, ("fakeconnector/my-store", "", 0)),
        (LMCACHE_MP, {"lmcache.mp.port": "http://[bad"}, ("lmcache-mp", "", 0)),
    ],
)
def test_backends_are_named_after_kind_and_store(
    capability: Any, extra: dict[str, Any], expected: tuple[str, str, int]
) -> None:
    connector = FakeConnector(None, None, None)
    assert place_of(capability, connector, vllm_config(extra=extra)) == expected


def test_lmcache_is_named_after_its_remote_url() -> None:
    config = SimpleNamespace(remote_url="redis://r:6390", local_disk=None)
    connector = SimpleNamespace(_lmcache_engine=SimpleNamespace(config=config))
    assert place_of(LMCACHE, connector, vllm_config()) == ("lmcache/redis", "r", 6390)
    config.remote_url = None
    assert place_of(LMCACHE, connector, vllm_config()) == ("lmcache/cpu", "", 0)


def test_mooncake_is_named_after_its_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mc.json"
    path.write_text(json.dumps({"protocol": "tcp", "master_server_address": "m:50051"}))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    assert place_of(MOONCAKE_STORE, None, vllm_config()) == ("mooncake-store/tcp", "m", 50051)
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(tmp_path / "absent"))
    assert place_of(MOONCAKE_STORE, None, vllm_config()) == ("mooncake-store", "", 0)


def test_bytes_per_token_come_from_the_cache_geometry() -> None:
    spec = SimpleNamespace(page_size_bytes=32768, block_size=16)
    geometry = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["0", "1", "2", "3"])])
    config = vllm_config()
    config.parallel_config.tensor_parallel_size = 2
    backend = backend_of(EXAMPLE, None, config, geometry)
    assert (backend.rank_bytes, backend.token_bytes, backend.block_tokens) == (8192, 16384, 16)
    assert backend_of(EXAMPLE, None, config, None).token_bytes == 0


def test_the_start_up_lines_say_what_can_be_done_and_what_is_dangerous(caplog: pytest.LogCaptureFixture) -> None:
    runtime: Any = SimpleNamespace(engine_id="h:1/0")
    with caplog.at_level(logging.INFO, LOGGER_NAME):
        announce(runtime, Backend(label="lmcache-mp/resp", capability=LMCACHE_MP), "LMCacheMPConnector", "fail")
        announce(runtime, Backend(label="x", capability=UNKNOWN), "Somebodys", "recompute")
        announce(runtime, Backend(label="nixl", capability=NIXL), "NixlConnector", "fail")
    lines = [record.getMessage() for record in caplog.records]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO", "INFO"]
    assert "guards LMCacheMPConnector as backend lmcache-mp/resp of engine h:1/0 (skip=yes" in lines[0]
    assert "kv_load_failure_policy is 'fail'" in lines[1]
    assert "skip=no, decline=yes" in lines[2]
    assert "read from source" in lines[2]


def test_no_runtime_when_the_hook_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_runtime", None)
    monkeypatch.delenv("KVGUARD_ENDPOINT", raising=False)
    assert runtime_for(vllm_config()) is None


def test_one_runtime_per_process_whose_threads_end_with_its_last_connector(
    monkeypatch: pytest.MonkeyPatch, service: Any
) -> None:
    monkeypatch.setattr(module, "_runtime", None)
    monkeypatch.setenv("KVGUARD_ENDPOINT", service.url)
    monkeypatch.setenv("KVGUARD_INSTANCE", "h:1")
    service.reply = lambda seen: (200, {}, b'{"schema":1,"engine_id":"h:1/0","etag":"\\"1\\"","directives":[]}')
    made = runtime_for(vllm_config())
    assert made is not None
    assert runtime_for(vllm_config()) is made
    assert (made.engine_id, made.scope.model) == ("h:1/0", "tiny")
    backend = Backend(label="b", capability=EXAMPLE)
    made.join(backend, scheduler=True)
    made.join(Backend(label="c", capability=EXAMPLE), scheduler=True)
    made.join(backend, scheduler=False)
    service.wait_for(1)
    for _ in range(200):
        if any("backend=b&backend=c" in seen.path for seen in service.seen):
            break
        service.wait_for(len(service.seen) + 1)
    assert made.current("b") is None
    for _ in range(3):
        made.leave()
    # A poll under way may outlast the time that `leave` waits for it.
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("kvguard")]:
        thread.join(30)
        assert not thread.is_alive()
    again = runtime_for(vllm_config())  # a second engine of this process is guarded as well
    assert again is not None
    assert again is not made
    again.join(backend, scheduler=True)
    again.leave()


def test_an_engine_that_crashes_says_so_in_its_goodbye(monkeypatch: pytest.MonkeyPatch, service: Any) -> None:
    monkeypatch.setattr(module, "_runtime", None)
    monkeypatch.setattr(polls, "GOODBYE_SECONDS", 10.0)  # a busy machine may need longer than an engine's end waits
    monkeypatch.setenv("KVGUARD_ENDPOINT", service.url)
    monkeypatch.setenv("KVGUARD_INSTANCE", "h:1")
    made = runtime_for(vllm_config())
    assert made is not None
    made.join(Backend(label="b", capability=EXAMPLE), scheduler=True)
    service.wait_for(1)

    def run_engine_core() -> None:
        try:
            int("what a request asked")
        finally:
            made.leave()

    with pytest.raises(ValueError, match="invalid literal"):
        run_engine_core()
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("kvguard")]:
        thread.join(30)
    byes = [seen.path for seen in service.seen if seen.method == "DELETE"]
    assert byes == ["/v1/directives/h%3A1/0?error=ValueError"]
