"""The service's Prometheus metrics: counted as records arrive, rendered when scraped."""

from guard.metrics.gauges import GaugeSource
from guard.metrics.labels import IDLE_SECONDS, LABEL_LIMITS, OTHER
from guard.metrics.tables import SCRAPE_SAMPLES
from guard.metrics.telemetry import Telemetry

__all__ = ["IDLE_SECONDS", "LABEL_LIMITS", "OTHER", "SCRAPE_SAMPLES", "GaugeSource", "Telemetry"]
