"""What a proof raises: something is shown against the checkpoint, or nothing can be shown."""


class RefusedError(Exception):
    """A checkpoint is shown to be another than the one that the ranks meant to write. Its text: what shows it."""


class NotProvableError(Exception):
    """What a proof needs beside the checkpoint's content is not there. Its text: what; the checkpoint may be well."""
