"""The HTTP service: receives spans, shows what they say, and tells the hooks what to do."""
