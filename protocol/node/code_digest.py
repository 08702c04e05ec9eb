"""Which code a process runs: processes that outlive a run are started anew when theirs is no longer the checkout's.

Two processes with one digest run the same code, however long ago each was started.
"""

import functools
from hashlib import sha256
from pathlib import Path

# What a rollout server and the fleet import of ours. Learner, rewards and retriever do not matter to them.
SERVER_ROOMS = ("protocol", "rollout")
FLEET_ROOMS = ("protocol", "rollout", "deploy")


@functools.cache
def code_digest(rooms: tuple[str, ...]) -> str:
    """Return a hash of the rooms' Python files as they were at the first call: 16 hexadecimal digits."""
    root, digest = Path(__file__).resolve().parents[2], sha256()
    for path in sorted(path for room in rooms for path in (root / room).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
