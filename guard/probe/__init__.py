"""Round-trip time to the remote tier, measured the way the KV traffic feels it."""
