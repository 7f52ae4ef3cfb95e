"""kvguard: sees, explains and guards remote KV-cache offloading in vLLM."""

__version__ = "0.1.0"
