"""Recording rules and alerts: what they are, and the files written from them (`python -m alerts`)."""
