"""Real Prometheus and Alertmanager: alerts go pending, fire, reach a webhook with filled annotations, and resolve.

Alerts whose `for` is at most 2 minutes run live, with windows divided by `SPEED` (a `for` of at least 1 s, a range of
at least 10 s, evaluation and scrape each second). The others keep their `for`: promtool tests them (test_rules.py),
and here they may not fire. `test_every_alert_is_on_one_list` prints both lists.
"""

import contextlib
import re
import signal
import threading
import time

import pytest
import yaml

from alerts import __main__ as generate
from alerts import alerting, planted, servers
from alerts.servers import Page, Webhook

pytestmark = pytest.mark.quiet

SPEED = 30
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
PATIENCE = 90.0
YOUNG = {"KVGuardResidualHigh"}  # a ratio of rates of series that have just begun; it waits 15 minutes to fire
LONGER = {"KVGuardDown": 10}  # Prometheus takes 5 s to discover its targets: within 2 minutes, not within 4 s


def seconds(text):
    return int(text[:-1]) * UNITS[text[-1]]


LIVE = {alert.name for alert in alerting.ALERTS if seconds(alert.wait) <= 120}
BY_PROMTOOL = {alert.name for alert in alerting.ALERTS} - LIVE


def shortened(rules):
    """The same rules, faster."""
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule["expr"] = re.sub(
                r"\[(\d+[smhd])\]", lambda m: f"[{min(60, max(10, seconds(m[1]) // SPEED))}s]", rule["expr"]
            )
            if rule.get("alert") in LIVE:
                rule["for"] = f"{LONGER.get(rule['alert'], max(1, seconds(rule['for']) // SPEED))}s"
    return rules


class Lab:
    """A fleet that lives in real time, scraped by Prometheus."""

    def __init__(self, directory):
        self.fleet = planted.Fleet(now=time.time(), rate=6.0)
        self.directory = directory
        self.lock = threading.Lock()
        self.stop = threading.Event()

    def text(self, openmetrics):
        with self.lock:
            return self.fleet.telemetry.render(openmetrics=openmetrics).decode()

    def vllm(self, number):
        with self.lock:
            return "\n".join(self.fleet.vllm_lines(f"10.0.0.{number}:8000")) + "\n"

    def live(self):
        while not self.stop.wait(0.25):
            with self.lock:
                self.fleet.step(max(0.0, time.time() - self.fleet.now))

    def config(self, page, alertmanager, *, scraped=True):
        """prometheus.yml of the tree, with this machine's addresses and one-second intervals."""
        config = yaml.safe_load((generate.ROOT / "alerts" / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [alertmanager]
        job = config["scrape_configs"][0]
        job["static_configs"][0]["targets"] = [page] if scraped else []
        job.pop("authorization")
        job.pop("scrape_timeout")
        config["scrape_configs"] = [job]
        path = self.directory / "prometheus.yml"
        path.write_text(generate.dump(config))
        return path

    def alertmanager_config(self, url):
        """alertmanager.yml of the tree, with the webhook of the test as every receiver and no long waits."""
        config = yaml.safe_load((generate.ROOT / "alerts" / "alertmanager.yml").read_text())
        config["route"] |= {"group_wait": "1s", "group_interval": "1s"}
        for receiver in config["receivers"]:
            receiver["webhook_configs"] = [{"url": url, "send_resolved": True}]
        path = self.directory / "alertmanager.yml"
        path.write_text(generate.dump(config))
        return path


def wait_for(what, said):
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, said()
        time.sleep(0.2)


@pytest.fixture
def lab(tmp_path, needs):
    needs("prometheus", servers.program(*servers.ALERTMANAGER))
    (tmp_path / "kvguard.rules.yml").write_text(generate.dump(shortened(generate.rules())))
    (tmp_path / "kvguard.alerts.yml").write_text(generate.dump(shortened(generate.alerts())))
    with contextlib.ExitStack() as stack:
        lab = Lab(tmp_path)
        lab.webhook = stack.enter_context(Webhook())
        lab.page = stack.enter_context(Page({"/metrics": lab.text}))
        manager = stack.enter_context(servers.alertmanager(lab.alertmanager_config(lab.webhook.url), tmp_path / "am"))
        lab.alertmanager = manager
        config = lab.config(lab.page.address, manager)
        lab.prometheus, lab.process = stack.enter_context(servers.prometheus(config, tmp_path / "tsdb"))
        thread = threading.Thread(target=lab.live)
        thread.start()
        try:
            yield lab
        finally:
            lab.stop.set()
            thread.join()


def evaluations(lab, count):
    """Waits until Prometheus has evaluated all its groups so many times more."""

    def last():
        return [group["lastEvaluation"] for group in lab.prometheus.get("rules")["groups"]]

    for _ in range(count):
        before = max(last())
        wait_for(lambda: min(last()) > before, lambda: "rules are not evaluated")  # noqa: B023


def silent(lab, count=4, after=frozenset()):
    """Nothing is even pending for some evaluations, but for `after`, which remembers what was; nothing fires."""
    wait_for(lambda: lab.prometheus.query('up{job="kvguard"} == 1'), lambda: "not scraped")
    evaluations(lab, 2)
    for _ in range(count):
        evaluations(lab, 1)
        assert (lab.prometheus.alerts("pending") - after, lab.prometheus.alerts("firing")) == (set(), set())


def fire(lab, *names):
    """Each is seen pending, then firing, then told to the webhook; exactly these fire."""
    for name in names:
        wait_for(lambda: name in lab.prometheus.alerts("firing"), lambda: f"{name} does not fire")  # noqa: B023
        wait_for(lambda: lab.webhook.told(name, "firing"), lambda: f"{name} was not told")  # noqa: B023
    assert set(names) <= lab.prometheus.ever("pending", "2m")
    evaluations(lab, 2)
    assert lab.prometheus.alerts("firing") == set(names)


def heal(lab, *names):
    wait_for(lambda: not lab.prometheus.alerts("firing"), lambda: str(lab.prometheus.alerts("firing")))
    for name in names:
        wait_for(lambda: lab.webhook.told(name, "resolved"), lambda: f"{name} was not resolved")  # noqa: B023


def test_rtt_steps_and_faults(lab):
    fleet = lab.fleet
    silent(lab)  # an empty system
    fleet.rate = 0.0
    fleet.grow()
    silent(lab)  # a quiet start
    fleet.rate = 6.0
    silent(lab, after=YOUNG)  # traffic over a good link

    slow = fleet.backends["lmcache-mp/resp"]
    slow.guarded = False  # so that departure alone is seen
    slow.rtt = 0.002
    fire(lab, "KVGuardDepartureCrossed")
    told = lab.webhook.told("KVGuardDepartureCrossed", "firing")[0]
    assert told["labels"]["backend"] == "lmcache-mp/resp"
    assert told["annotations"]["description"] == (
        f"llama-3.1-8b, backend lmcache-mp/resp, class {told['labels']['class']}: RTT 2ms (measured), departure at"
        " 1.2ms (measured), break-even at 6ms (measured). Remote reads still pay, but less."
    )
    assert told["annotations"]["runbook_url"].endswith("/KVGuardDepartureCrossed.md")

    slow.guarded = True
    slow.rtt = 0.012
    fire(lab, "KVGuardBreakEvenCrossed", "KVGuardThrottling")
    assert {one["labels"]["state"] for one in lab.webhook.told("KVGuardThrottling", "firing")} == {"bypass"}

    slow.rtt = 0.0003
    heal(lab, "KVGuardDepartureCrossed", "KVGuardBreakEvenCrossed", "KVGuardThrottling")

    with lab.lock:
        slow.stalled, slow.probes_failing = 33.0, 1.0
        fleet.engines[0].age, fleet.engines[1].age = 600.0, 20.0
        fleet.engines[2].dropping, fleet.engines[3].failing = 40.0, 3.0
        fleet.engines[3].queue = fleet.engines[2].queue = fleet.engines[1].queue = 2.0
        fleet.ticking = False
        fleet.last_tick -= 60.0
    faults = {
        "KVGuardFetchStalled", "KVGuardProbeFailing", "KVGuardEngineSilent", "KVGuardDirectiveStale",
        "KVGuardRecordsDropped", "KVGuardHookErrors", "KVGuardTTFTBudgetBurn1h", "KVGuardLoopStalled",
    }  # fmt: skip
    for name in faults:
        wait_for(lambda: name in lab.prometheus.alerts("firing"), lambda: f"{name} does not fire")  # noqa: B023
    assert lab.prometheus.alerts("firing") == faults  # of which Alertmanager holds back what a stalled loop explains
    assert faults <= lab.prometheus.ever("pending", "2m")
    with lab.lock:
        fleet.ticking = True
    for name in faults:
        wait_for(lambda: lab.webhook.told(name, "firing"), lambda: f"{name} was not told")  # noqa: B023
    assert "{{" not in str([one["annotations"] for one in lab.webhook.alerts])
    assert all(one["annotations"]["description"] for one in lab.webhook.alerts)
    with lab.lock:
        slow.stalled, slow.probes_failing = 0.0, 0.0
        for engine in fleet.engines:
            engine.age, engine.queue, engine.dropping, engine.failing = 1.0, 0.01, 0.0, 0.0
    heal(lab, *faults)

    with lab.lock:
        fleet.restart()
    silent(lab, after=YOUNG | {f"KVGuardTTFTBudgetBurn{window}" for window in ("6h", "1d", "3d")})  # a restart

    lab.page.up = False
    fire(lab, "KVGuardInstanceUnreachable")
    lab.page.up = True
    heal(lab, "KVGuardInstanceUnreachable")
    lab.config(lab.page.address, lab.alertmanager, scraped=False)
    lab.process.send_signal(signal.SIGHUP)
    fire(lab, "KVGuardDown")
    lab.config(lab.page.address, lab.alertmanager)
    lab.process.send_signal(signal.SIGHUP)
    heal(lab, "KVGuardDown")

    assert lab.prometheus.ever("firing", "10m") == LIVE
    assert {one["labels"]["alertname"] for one in lab.webhook.alerts} == LIVE


def test_every_alert_is_on_one_list(capsys):
    with capsys.disabled():
        print(f"\nlive (windows / {SPEED}):", *sorted(LIVE))  # noqa: T201
        print("by promtool:", *sorted(BY_PROMTOOL))  # noqa: T201
    assert {alert.name for alert in alerting.ALERTS} == LIVE | BY_PROMTOOL
    assert len(LIVE) >= 12
