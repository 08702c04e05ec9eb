"""verl's own functions, from the package index."""

import importlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.node.home import sluice_home

_REQUIREMENTS = Path(__file__).with_name("requirements.txt")


@dataclass(frozen=True)
class Peer:
    """The modules of verl that have formulas in them."""

    algorithms: Any  # verl.trainer.ppo.core_algos
    corrections: Any  # verl.trainer.ppo.rollout_corr_helper
    actor_settings: Any  # verl.workers.config.ActorConfig
    algorithm_settings: Any  # verl.trainer.config.AlgoConfig


def load_peer() -> Peer:
    """Return verl, installed first where it is not yet: half a minute."""
    folder = sluice_home() / "cache" / "agreement"
    stamp = folder / "requirements.txt"
    wanted = _REQUIREMENTS.read_text()
    if not stamp.is_file() or stamp.read_text() != wanted:
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
        subprocess.run([*command, "-r", str(_REQUIREMENTS)], check=True)
        stamp.write_text(wanted)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    sys.path.append(str(folder))  # behind our own packages
    return Peer(
        algorithms=importlib.import_module("verl.trainer.ppo.core_algos"),
        corrections=importlib.import_module("verl.trainer.ppo.rollout_corr_helper"),
        actor_settings=importlib.import_module("verl.workers.config").ActorConfig,
        algorithm_settings=importlib.import_module("verl.trainer.config").AlgoConfig,
    )
