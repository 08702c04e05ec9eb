"""A host's disk that is full for a while."""

from pathlib import Path

from tests.chaos.soak.nemesis import Lasting

_FULL_S = 20.0
_CHUNK_BYTES = 1 << 20


def filled(disk: Path) -> Lasting:
    """Return the fault that nothing more fits there, for 20 s."""
    ballast = disk / "ballast"
    return Lasting(lambda: _fill(ballast), lambda: ballast.unlink(missing_ok=True), _FULL_S)


def _fill(path: Path) -> None:
    try:
        with path.open("wb", buffering=0) as file:
            while file.write(bytes(_CHUNK_BYTES)) == _CHUNK_BYTES:
                pass
    except OSError:
        return  # full
