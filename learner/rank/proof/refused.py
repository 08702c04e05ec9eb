"""What a proof raises."""


class RefusedError(Exception):
    """A checkpoint is shown to be another than the one that the ranks meant to write. Its text: what shows it."""
