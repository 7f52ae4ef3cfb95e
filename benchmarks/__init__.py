"""Benchmarks: `python -m benchmarks` (or `make bench`) runs every module here that has a `main`."""
