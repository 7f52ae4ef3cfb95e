"""One request over the whole path: real vLLM, real LMCache, real Redis, the hook, the service."""

import pytest

from lab.client import prompt, traceparent
from lab.stack import Stack

pytestmark = pytest.mark.lab
CHUNK = 256


def test_a_remote_hit_becomes_a_joined_record(mp: Stack) -> None:
    text = prompt(4 * CHUNK + 100, seed=1)
    miss = mp.client.complete(text)
    mp.drain()
    header, trace_id = traceparent()

    with mp.redis.counting() as store:
        hit = mp.client.complete(text, headers={"traceparent": header})
    record = mp.service.request(hit.request_id)

    assert (miss.cached, hit.cached) == (0, 4 * CHUNK)
    assert (store.delta["EXISTS"], store.delta["GET"]) == (4, 4)
    assert hit.tokens == miss.tokens
    assert record["decision"] == "remote"
    assert record["trace_id"] == trace_id
    assert record["tokens"]["prompt"] == len(text)
    assert record["tokens"]["local"] == 0
    assert record["tokens"]["remote_loaded"] == 4 * CHUNK
    assert record["tokens"]["computed"] == 100
    assert 0 < record["timeline"][4]["seconds"] < record["ttft_seconds"] <= hit.ttft


def test_a_miss_and_a_local_hit_are_told_apart(mp: Stack) -> None:
    text = prompt(3 * CHUNK + 100, seed=2)

    miss = mp.client.complete(text)
    local = mp.client.complete(text)
    records = [mp.service.request(done.request_id) for done in (miss, local)]

    assert [record["tokens"]["remote_loaded"] for record in records] == [0, 0]
    assert records[0]["tokens"]["local"] == 0
    assert records[1]["tokens"]["local"] == local.cached > 0
    assert [record["decision"] for record in records] == ["none", "none"]


def test_the_link_slows_what_it_should(mp: Stack) -> None:
    text = prompt(4 * CHUNK, seed=3)
    mp.client.complete(text)
    mp.drain()
    mp.injector.rtt(20_000)

    with mp.redis.counting() as store:
        hit = mp.client.complete(text)

    round_trips = store.delta["EXISTS"] + store.delta["GET"]
    assert round_trips == 2 * 4
    assert hit.ttft >= round_trips * 0.020
