"""How each family of connectors is skipped, how its stores are stopped, and what it tells about itself."""
