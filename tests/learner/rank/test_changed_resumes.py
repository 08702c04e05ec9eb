"""A resume with changed settings: models are compared, the schedule keeps its place, a new critic is warmed up."""

import json
import shutil
from typing import Any

import pytest
import torch

from tests.fakes.tiny_models import make_tiny_model
from tests.fakes.warm_process import run_warm

pytestmark = [pytest.mark.stack, pytest.mark.ranks]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of each function of `changed_resumes`, by its name."""
    folder = tmp_path_factory.mktemp("changed")
    for name, seed in (("model", 0), ("other", 1)):
        make_tiny_model(folder / name, tied=True, hidden_size=32, num_layers=1, seed=seed)
    for name, answer in (("rows", "yes"), ("other rows", "no")):
        row = {"segments": [{"text": "Is it?", "weight": 0}, {"text": answer, "weight": 1}]}
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    shutil.copytree(folder / "other", folder / "other form")
    config = folder / "other form" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 0.1}))
    ended = run_warm("tests.learner.rank.changed_resumes", str(folder), timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return {name: torch.load(folder / f"{name}.pt") for name in ("refusals", "schedules", "critics")}


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        (
            "other alpha",
            "policy.lora is rank 4, alpha 64, targets all, and the checkpoint's is rank 4, alpha 8, targets",
        ),
        ("without adapters", "policy.lora is none, and the checkpoint's is rank 4, alpha 8, targets all: the policy"),
        ("adapters of a whole policy", "policy.lora is rank 4, alpha 8, targets all, and the checkpoint's is none"),
        ("other base", "the weights in the folder of policy.model are not those to which the checkpoint's adapters"),
        ("other reference", "the weights of the reference or teacher are not those of the run's"),
        (
            "reference of another first policy",
            "policy.model, or their warm start, are not those that the run began with, and they would be its",
        ),
        ("reference of another warm start", "or their warm start, are not those that the run began with"),
        ("reference without the first warm start", "or their warm start, are not those that the run began with"),
        ("reference of a later warm start", "or their warm start, are not those that the run began with"),
        ("other reference of adapters", "the weights of the reference or teacher are not those of the run's"),
        ("base again as the reference", "the weights of the reference or teacher are not those of the run's"),
        ("other reference that is refreshed", "the weights of the reference or teacher are not those of the run's"),
        ("other named reference", "the checkpoint holds the reference of a run with empty. Set it back"),
        ("other form of the reference", "config.json or code in the folder of reference.model is not what the run's"),
        ("other form of the critic", "config.json or code in the folder of critic.model is not what the run's earlier"),
        ("critic of another form than the policy's", "Put it back (policy.model's, if critic.model is empty)"),
    ],
)
def test_resume_with_other_models_is_refused(found: dict[str, Any], case: str, problem: str) -> None:
    assert problem in found["refusals"][case]


@pytest.mark.parametrize(
    "case",
    [
        "same adapters",
        "same reference",
        "same base as the reference",
        "reference of the first policy",
        "reference of the first warm start",
        "critic of the policy's form",
    ],
)
def test_resume_with_the_same_models_is_not_refused(found: dict[str, Any], case: str) -> None:
    assert found["refusals"][case] == ""


@pytest.mark.parametrize("resume", ["1 epochs", "4 epochs"])
def test_learning_rate_keeps_its_place_with_other_updates_per_step(found: dict[str, Any], resume: str) -> None:
    assert found["schedules"][resume] == pytest.approx(found["schedules"]["as before"], rel=2e-2)


def test_state_counts_applied_updates_and_steps_of_the_schedule(found: dict[str, Any]) -> None:
    state = found["schedules"]["state"]
    assert (state["num_updates"], state["schedule_steps"]) == (8, 8.0)


@pytest.mark.parametrize("run", ["new", "resumed"])
def test_critic_without_a_state_is_warmed_up(found: dict[str, Any], run: str) -> None:
    assert found["critics"][run] == [0, 0, 1, 1]
