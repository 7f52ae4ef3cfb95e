"""The hook's counters in real vLLM's own `/metrics` (`KVGUARD_VLLM_METRICS=on`), next to the connector's own."""

from collections import Counter
from types import MappingProxyType

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lab.client import prompt
from lab.config import StackConfig
from lab.processes import wait_until
from lab.stack import Stack

pytestmark = pytest.mark.lab
CHUNK = 256
PREFIX = "vllm:kvguard_"
THEIRS = "vllm:lmcache_mp_lookup_duration_seconds_count"
SCRAPE_SECONDS = 10.0
CONFIG = StackConfig(hook_env=MappingProxyType({"KVGUARD_VLLM_METRICS": "on"}))


def scraped(stack: Stack) -> Counter[str]:
    """Our samples and the connector's count of lookups, summed over vLLM's labels; decisions by `decision reason`."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(stack.client.get("/metrics")):
        for sample in family.samples:
            if sample.name == f"{PREFIX}decisions_total":
                found[f"{sample.labels['decision']} {sample.labels['reason']}"] += int(sample.value)
            elif sample.name == THEIRS or (sample.name.startswith(PREFIX) and sample.name.endswith("_total")):
                found[sample.name.removeprefix(PREFIX)] += int(sample.value)
    return found


def age(stack: Stack) -> float | None:
    """The gauge; None where there is none."""
    for family in text_string_to_metric_families(stack.client.get("/metrics")):
        for sample in family.samples:
            if sample.name == f"{PREFIX}directive_age_seconds":
                return sample.value
    return None


def stored(stack: Stack, seed: int) -> str:
    """A prompt that is in the store and nowhere else."""
    text = prompt(3 * CHUNK + 60, seed)
    stack.client.complete(text, max_tokens=1)
    stack.drain()
    return text


def test_a_hit_a_miss_and_a_refusal_show_in_vllms_own_metrics(stacks) -> None:
    stack = stacks.get(CONFIG)
    try:
        hit, refused = stored(stack, 9101), stored(stack, 9102)
        stack.service.switch("on", wait=10)
        before = scraped(stack)
        stack.client.complete(hit, max_tokens=4)
        stack.client.complete(prompt(2 * CHUNK + 60, 9103), max_tokens=4)
        stack.service.switch("off", wait=10)
        stack.client.complete(refused, max_tokens=4)
        expected = Counter({"remote on": 1, "none miss": 1, "skip off": 1, "reads_begun_total": 1, THEIRS: 2})
        # The skipped request is not looked up, so it is no sample of LMCache's.
        wait_until(lambda: scraped(stack) - before == expected, SCRAPE_SECONDS, f"{expected} in vLLM's metrics")
        now = scraped(stack)
        assert {name: now[f"{name}_total"] for name in ("reads_failed", "records_dropped", "hook_errors")} == {
            "reads_failed": 0,
            "records_dropped": 0,
            "hook_errors": 0,
        }
        told = age(stack)
        assert told is not None
        assert 0.0 <= told < 15.0  # a lease
    finally:
        stack.service.clear()
