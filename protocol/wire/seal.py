"""The last frame of every message: eight bytes that say whether the frames before it are the ones that were written.

CURVE protects a message between two sockets; the seal protects it from the encoder to the decoder. It finds faults, it
stops no forger: a peer with a key can seal what it likes, and `protocol.wire.codec` judges the contents after the seal.
"""

from collections.abc import Sequence

import xxhash

SEAL_BYTES = 8


def seal(frames: Sequence[bytes]) -> bytes:
    """Return XXH3-64, big-endian, over each frame's length (8 bytes, little-endian) and the frame, in order.

    With the lengths inside, bytes that moved over a frame's border and an empty frame that was lost are found too.
    """
    digest = xxhash.xxh3_64()
    for frame in frames:
        digest.update(len(frame).to_bytes(8, "little"))
        digest.update(frame)
    return digest.digest()
