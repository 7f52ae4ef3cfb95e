"""What teams use today in the place of the controller: Prometheus, an alert on TTFT, a webhook that stops reads."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alerts import servers
from lab.stack import Stack

ALERT = "SlowFirstToken"
SCRAPE, FOR, WINDOW = "15s", "30s", "1m"
"""The usual ones: a rate needs four scrapes to be steady, an alert twice the scrape to be no blip."""


class Pager:
    """Switches the fleet off when the alert is told. `at` is when, monotonic seconds; None before."""

    def __init__(self, stack: Stack, webhook: servers.Webhook) -> None:
        self._stack, self._webhook = stack, webhook
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.at: float | None = None

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            if self._webhook.told(ALERT, "firing"):
                self._stack.service.switch("off", stores=False, reason=ALERT)
                self.at = time.monotonic()
                return

    def start(self) -> None:
        """Begins to listen."""
        self._thread.start()

    def stop(self) -> None:
        """Listens no more."""
        self._stop.set()
        self._thread.join()


@contextmanager
def paged(stack: Stack, bound: float, directory: Path) -> Iterator[Pager]:
    """The whole chain beside a running stack: mean TTFT by vLLM's own histogram above `bound` seconds -> `off`.

    Alertmanager tells at once (`group_wait: 0s`; its default would add 10 s to 30 s).
    """
    ttft = "vllm:time_to_first_token_seconds"
    mean = f"sum(rate({ttft}_sum[{WINDOW}])) / sum(rate({ttft}_count[{WINDOW}]))"
    rule = {"alert": ALERT, "expr": f"{mean} > {bound:.4f}", "for": FOR}
    with servers.Webhook() as webhook:
        receiver = {"name": "switch", "webhook_configs": [{"url": webhook.url}]}
        route = {"receiver": "switch", "group_wait": "0s"}
        told = _written(directory / "alertmanager.yml", {"route": route, "receivers": [receiver]})
        _written(directory / "paging.rules.yml", {"groups": [{"name": "paging", "rules": [rule]}]})
        with servers.alertmanager(told, directory / "alertmanager") as manager:
            config = {
                "global": {"scrape_interval": SCRAPE, "evaluation_interval": SCRAPE},
                "rule_files": ["paging.rules.yml"],
                "alerting": {"alertmanagers": [{"static_configs": [{"targets": [manager]}]}]},
                "scrape_configs": [
                    {"job_name": "vllm", "static_configs": [{"targets": [f"127.0.0.1:{stack.client.port}"]}]}
                ],
            }
            with servers.prometheus(_written(directory / "prometheus.yml", config), directory / "tsdb"):
                pager = Pager(stack, webhook)
                pager.start()
                try:
                    yield pager
                finally:
                    pager.stop()


def _written(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data))  # which is YAML, too
    return path
