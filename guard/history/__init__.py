"""What the service remembers across restarts."""
