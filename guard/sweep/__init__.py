"""`kvguard sweep`: steps RTT and concurrency against a live engine and reports where offload stops paying."""
