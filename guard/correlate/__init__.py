"""Joins spans into requests, keeps a window of them, and says where TTFT goes. Pure: no clock, no I/O."""
