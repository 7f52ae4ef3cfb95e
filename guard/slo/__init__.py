"""What operators promise: objectives for time to first token, error budget, goodput. Pure."""
