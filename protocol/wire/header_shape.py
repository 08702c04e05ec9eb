"""The number of values in a MessagePack header and its depth, counted before any object is made.

Each byte of a header can become an object of 64 bytes or more, and free-form fields (`Lease.columns`) have no types
that would bound them.
"""

from protocol.errors import FrameError

MAX_VALUES = 1 << 16
MAX_DEPTH = 32

# First byte -> bytes of a fixed-width value; bytes of the length field of a string, binary or extension; bytes of the
# length field of a container and its values per unit of length.
_SKIPPED = {0xC0: 0, 0xC1: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8} | {
    **{0xCC + i: 1 << i for i in range(4)},
    **{0xD0 + i: 1 << i for i in range(4)},
    **{0xD4 + i: 1 + (1 << i) for i in range(5)},
}
_LENGTH_BYTES = {0xD9: 1, 0xDA: 2, 0xDB: 4, 0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4}
_EXTENSIONS = (0xC7, 0xC8, 0xC9)
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def check_shape(header: bytes, max_values: int = MAX_VALUES, max_depth: int = MAX_DEPTH) -> None:
    """Raise FrameError "oversized" when a header holds more values or nests deeper than that. Keys count as values.

    Truncated or invalid MessagePack is left for the decoder to refuse.
    """
    at, num_values, end = 0, 0, len(header)
    left = [1]
    while left and at < end:
        if left[-1] == 0:
            left.pop()
            continue
        left[-1] -= 1
        num_values += 1
        at, num_inside = _step_over(header, at)
        if num_values + num_inside > max_values:
            raise FrameError("$", f"holds more than {max_values} values", "oversized")
        if num_inside:
            left.append(num_inside)
            if len(left) > max_depth + 1:
                raise FrameError("$", f"nests deeper than {max_depth}", "oversized")


def _step_over(header: bytes, at: int) -> tuple[int, int]:
    """Return the place after the value's own bytes, and the number of values inside it."""
    code = header[at]
    at += 1
    if code <= 0x7F or code >= 0xE0:
        return at, 0
    if code <= 0x8F:
        return at, 2 * (code & 0x0F)
    if code <= 0x9F:
        return at, code & 0x0F
    if code <= 0xBF:
        return at + (code & 0x1F), 0
    if (skipped := _SKIPPED.get(code)) is not None:
        return at + skipped, 0
    if (container := _CONTAINERS.get(code)) is not None:
        width, values_each = container
        return at + width, values_each * int.from_bytes(header[at : at + width], "big")
    width = _LENGTH_BYTES[code]
    length = int.from_bytes(header[at : at + width], "big")
    return at + width + length + (code in _EXTENSIONS), 0
