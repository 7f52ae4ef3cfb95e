"""Decides what is asked of each hook: pure functions of (state, evidence, now)."""
