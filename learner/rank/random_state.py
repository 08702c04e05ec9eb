"""The states of a rank's random generators as JSON: nothing in a checkpoint is unpickled.

The learner itself draws nothing between two steps (dropout is off,
prompts come by position), but a user's model code may.
"""

import base64
import json
import random
from pathlib import Path

import torch
from torch import Tensor


def save_random_state(path: Path) -> None:
    """Write the states of torch's and Python's generators. Raises: OSError."""
    state = {
        "python": random.getstate(),
        "torch": _encoded(torch.get_rng_state()),
        "cuda": [_encoded(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(state), encoding="utf-8")


def load_random_state(path: Path) -> None:
    """Put the states back. A rank or device that was not there when they were written keeps its fresh seed."""
    if not path.exists():
        return
    state = json.loads(path.read_text(encoding="utf-8"))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_decoded(state["torch"]))
    for device, cuda in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_decoded(cuda), device)


def _encoded(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decoded(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
