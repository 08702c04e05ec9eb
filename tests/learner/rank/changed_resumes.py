"""Resumes with changed settings and models, run by test_changed_resumes: `python changed_resumes.py FOLDER`.

The folder has `model`, `other` with the same shape and other weights, and `other form`, whose weights are those of
`other`. Rank 0 writes its results to FOLDER/NAME.pt.
"""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from learner.models.training.deepspeed_config import import_deepspeed
from learner.models.world import reduce_tensor
from learner.objectives.policy_gradient import PolicyGradient
from learner.rank.start import load_roles, record_models
from protocol.errors import OperatorError
from protocol.settings.settings import Settings
from tests.learner.models.forked_world import run_world
from tests.learner.rank.resumed_ranks import step_of

_LORA = {"lora": {"rank": 4, "alpha": 8.0}}
_KL = {"coefficient": 0.05, "form": "k3", "place": "loss"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "same adapters": (_LORA, _LORA),
    "other alpha": (_LORA, {"lora": {"rank": 4, "alpha": 64.0}}),
    "without adapters": (_LORA, {}),
    "adapters of a whole policy": ({}, _LORA),
    "other base": (_LORA, {**_LORA, "model": "other"}),
    "same reference": ({"kl": _KL}, {"kl": _KL}),
    "other reference": ({"kl": _KL}, {"kl": _KL, "model": "other"}),
    "reference of another first policy": ({}, {"kl": _KL, "model": "other"}),
    "reference of the first policy": ({}, {"kl": _KL}),
    "reference of the first warm start": ({"warm": "rows"}, {"warm": "rows", "kl": _KL}),
    "reference of another warm start": ({"warm": "rows"}, {"warm": "other rows", "kl": _KL}),
    "reference without the first warm start": ({"warm": "rows"}, {"kl": _KL}),
    "reference of a later warm start": ({}, {"warm": "rows", "kl": _KL}),
    "other reference of adapters": ({**_LORA, "kl": _KL}, {**_LORA, "kl": _KL, "reference": {"model": "other"}}),
    "base again as the reference": ({**_LORA, "kl": _KL, "reference": {"model": "other"}}, {**_LORA, "kl": _KL}),
    "same base as the reference": ({**_LORA, "kl": _KL}, {**_LORA, "kl": _KL, "reference": {"refresh_every_steps": 1}}),
    "other reference that is refreshed": (
        {"kl": _KL},
        {"kl": _KL, "model": "other", "reference": {"refresh_every_steps": 1}},
    ),
    "other named reference": (
        {"kl": _KL, "reference": {"refresh_every_steps": 1}},
        {"kl": _KL, "reference": {"model": "other"}},
    ),
    "other form of the reference": (
        {"kl": _KL, "reference": {"model": "other"}},
        {"kl": _KL, "reference": {"model": "other form"}},
    ),
    "other form of the critic": (
        {"advantage": "gae", "critic": {"model": "other"}},
        {"advantage": "gae", "critic": {"model": "other form"}},
    ),
    "critic of another form than the policy's": (
        {"advantage": "gae"},
        {"advantage": "gae", "critic": {"model": "other form"}},
    ),
    "critic of the policy's form": ({"advantage": "gae", "critic": {"model": "other"}}, {"advantage": "gae"}),
}


class Run:
    """A run's models on this rank."""

    def __init__(
        self,
        folder: Path,
        lora: dict[str, Any] | None = None,
        model: str = "model",
        kl: dict[str, Any] | None = None,
        reference: dict[str, Any] | None = None,
        critic: dict[str, Any] | None = None,
        warm: str = "",
        **learner: Any,
    ) -> None:
        folders = {"policy.model": folder / model}
        for role, section in (("reference", reference), ("critic", critic)):
            if section and "model" in section:
                folders[f"{role}.model"] = folder / section["model"]
        settings = Settings.model_validate(
            {
                "run": {"max_steps": 100},
                "policy": {
                    "model": str(folder / model),
                    "dtype": "float32",
                    "lora": lora or {},
                    "warm_start": {"data": str(folder / f"{warm}.jsonl"), "max_steps": 1} if warm else {},
                },
                "learner": {
                    "groups_per_step": 6,
                    "micro_batch_tokens": 64,
                    "lr": 1e-3,
                    "lr_warmup_steps": 5,
                    **learner,
                },
                "kl": kl or {"coefficient": 0.0},
                "reference": reference or {},
                "critic": critic or {},
                "rollout": {"group_size": 2},
            }
        )
        self.settings = settings
        self.roles = load_roles(settings, folders, None, lambda phase: None)
        self._objective = PolicyGradient(self.roles, settings, reduce_tensor)

    def step(self, number: int) -> int:
        """Take a step; return its number of policy updates."""
        return int(step_of(self._objective, self.settings, number).metrics.get("policy/num_updates", 0))

    def learning_rate(self) -> float:
        """Return the share of the peak."""
        return float(self.roles.policy.learning_rate / self.settings.learner.lr)


def refusals(folder: Path) -> dict[str, str]:
    """Return by case what a resume with changed models is refused with; empty: it is not refused."""
    found = {}
    for name, (before, after) in CASES.items():
        (folder / name).mkdir()
        run = Run(folder, **before)
        run.step(1)
        record_models(folder / name, {"policy.model": folder / before.get("model", "model")})
        state = folder / name / "checkpoints" / "step_000001" / "state"
        run.roles.save_state(state)
        try:
            Run(folder, **after).roles.load_state(state)
        except OperatorError as error:
            found[name] = str(error)
        else:
            found[name] = ""
    return found


def schedules(folder: Path) -> dict[str, Any]:
    """Return the learning rate after eight steps, and of resumes with other numbers of updates per step."""
    run = Run(folder)
    for number in range(1, 9):
        run.step(number)
    run.roles.save_state(folder / "eight" / "state")
    found: dict[str, Any] = {"as before": run.learning_rate()}
    for num_epochs in (1, 4):
        again = Run(folder, num_epochs=num_epochs)
        again.roles.load_state(folder / "eight" / "state")
        found[f"{num_epochs} epochs"] = again.learning_rate()
    again.roles.save_state(folder / "again" / "state")
    found["state"] = json.loads((folder / "again" / "state" / "policy" / "state.json").read_bytes())
    return found


def critics(folder: Path) -> dict[str, Any]:
    """Return the policy updates of four steps with a critic's warm-up of two, of a new run and of a resumed one."""
    Run(folder).roles.save_state(folder / "without a critic" / "state")
    found = {}
    for name, first in (("new", 1), ("resumed", 51)):
        run = Run(folder, advantage="gae", critic={"warmup_steps": 2})
        if name == "resumed":
            run.roles.load_state(folder / "without a critic" / "state")
        found[name] = [run.step(number) for number in range(first, first + 4)]
    return found


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0])
    import_deepspeed()
    for name, work in (("refusals", refusals), ("schedules", schedules), ("critics", critics)):
        run_world(1, folder, name, partial(work))


if __name__ == "__main__":
    main(sys.argv[1:])
