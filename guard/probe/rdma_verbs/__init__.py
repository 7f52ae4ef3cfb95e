"""RDMA READ latency with pyverbs: a program of its own, for an interpreter that has pyverbs.

Standard library and pyverbs only, Python 3.9 or newer: the distribution's Python is often not the one of the service.
"""
