"""The part of kvguard that runs inside vLLM: standard library, vLLM and the connector it guards, nothing else."""
