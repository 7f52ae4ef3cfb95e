"""What comes in: OTLP traces from hooks, vLLM and LMCache."""
