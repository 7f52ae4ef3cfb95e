"""What the lab says when it cannot go on."""


class LabError(Exception):
    """A piece of the lab is missing or did not start; the text names the piece and what to do about it."""
