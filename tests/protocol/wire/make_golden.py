"""Writes golden/TAG.hex, one line of hex per frame, for the example of every message, and the limits as schema.txt.

`python -m tests.protocol.wire.make_golden`: only when SCHEMA_VERSION was raised or a field with a default was added.
The difference is then part of the review.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from protocol.wire import messages as m
from protocol.wire.codec import encode
from tests.protocol.wire.examples import example_messages

GOLDEN = Path(__file__).parent / "golden"


def schema() -> list[str]:
    """Return a line for each field of each message and of its parts: type, limits, default."""
    kinds: dict[str, Any] = msgspec.json.schema(m.ToCoordinator | m.ToServer | m.ToRank)["$defs"]
    return [
        f"{kind}.{number if is_array else field}: {json.dumps(limits, sort_keys=True)}"
        for kind, content in sorted(kinds.items())
        for is_array in ["prefixItems" in content]
        for number, field in enumerate(content["prefixItems"] if is_array else content["properties"])
        for limits in [field if is_array else content["properties"][field]]
    ]


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for tag, (message, buffers) in example_messages().items():
        frames = encode(message, buffers)
        (GOLDEN / f"{tag}.hex").write_text("".join(frame.hex() + "\n" for frame in frames), encoding="ascii")
    (GOLDEN / "schema.txt").write_text("\n".join(schema()) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
