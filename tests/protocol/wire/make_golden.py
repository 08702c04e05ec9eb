"""Writes golden/TAG.hex, one line of hex per frame, for the example of every message.

`python -m tests.protocol.wire.make_golden`: only when SCHEMA_VERSION was raised or a field with a default was added.
The difference is then part of the review.
"""

from pathlib import Path

from protocol.wire.codec import encode
from tests.protocol.wire.examples import example_messages

GOLDEN = Path(__file__).parent / "golden"


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for tag, (message, buffers) in example_messages().items():
        frames = encode(message, buffers)
        (GOLDEN / f"{tag}.hex").write_text("".join(frame.hex() + "\n" for frame in frames), encoding="ascii")


if __name__ == "__main__":
    main()
