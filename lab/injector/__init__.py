"""Pieces that slow the road to the store: `tundelay.c` (every packet) and `proxy.py` (TCP, or one Redis command)."""
