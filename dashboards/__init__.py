"""Grafana dashboards: what they show, and the JSON files written from it (`python -m dashboards`)."""
