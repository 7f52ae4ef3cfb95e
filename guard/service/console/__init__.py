"""The page at `/` and the files it is made of."""
