"""The lab: real vLLM, LMCache and Redis on one machine, with a network between them that can be slowed at will."""
