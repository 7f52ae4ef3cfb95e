"""Every number and address that an operator may want to change. `make generate` writes the files anew."""

from typing import Final

JOB: Final = "kvguard"
"""`job_name` of kvguard in prometheus.yml."""

RUNBOOKS: Final = "https://github.com/kvguard/kvguard/blob/main/docs/runbooks"
GRAFANA: Final = "http://localhost:3000"
"""Where annotations point; override with `python -m alerts --runbooks URL --grafana URL`."""

LOOP_STALLED_SECONDS: Final = 30
READS_SHARE: Final = 0.2  # of a class's requests that still read remotely although that is a loss
FETCH_AGE_SECONDS: Final = 10
LOOKUPS_PER_HOUR: Final = 100  # below that, no hit says nothing
LEASE_SECONDS: Final = 15  # guard.wire.LEASE_SECONDS
SILENT_SECONDS: Final = 60
PROBE_FAILURES: Final = 0.5
PROJECTION_ERROR: Final = 0.3
RESIDUAL: Final = 0.1
LOST_SPANS: Final = 0.01

MISSES_AT_LEAST: Final = 5  # in the long window: one slow request at night is no incident
WORST_SHARE: Final = 0.9  # a loose objective (p90 and below) cannot burn 14.4 times its budget; this share pages too
BURN: Final = (
    # name, factor, long window, short window, for, severity: https://sre.google/workbook/alerting-on-slos (table 5-8)
    ("1h", 14.4, "1h", "5m", "2m", "critical"),
    ("6h", 6, "6h", "30m", "15m", "critical"),
    ("1d", 3, "1d", "2h", "1h", "warning"),
    ("3d", 1, "3d", "6h", "3h", "warning"),
)
