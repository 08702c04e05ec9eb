"""Runs that learn from rows without generating: they end well, and a killed one ends as an undisturbed one."""

import json
import math
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.numpy import load_file

from learner import audit
from learner.models.critic import load_value_model
from learner.models.settings import critic_settings
from protocol.settings.settings import Settings
from rewards.reward_model import ModelOptions, RewardModel
from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import Bring, Left, Ran, run

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

_NUM_ROWS = 8  # two in a step: four steps are an epoch


def _settings(user: Bring) -> dict[str, object]:
    rows = user.folder / "demonstrations.jsonl"
    texts = [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}"} for i in range(_NUM_ROWS)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in texts), encoding="utf-8")
    return {
        "objective": "sft", "data.train": str(rows), "data.eval": str(rows), "eval.every_steps": 6,
        "rollout.group_size": 1, "rewards.endpoints": [], "run.max_steps": 12, "learner.checkpoint_every_steps": 3,
    }  # fmt: skip


@pytest.fixture(scope="module")
def other_servers(cluster: FlowCluster) -> set[psutil.Process]:
    """Warm servers of runs before this file's: all tests of the room share a cluster."""
    return set(cluster.actors("RolloutServer"))


@pytest.fixture(scope="module")
def whole(cluster: FlowCluster, user: Bring, other_servers: set[psutil.Process]) -> Ran:
    return run(cluster, user, "whole", **{key.replace(".", "__"): each for key, each in _settings(user).items()})


def test_three_epochs_take_each_row_three_times_and_lower_the_loss_without_a_server(
    whole: Ran, cluster: FlowCluster, other_servers: set[psutil.Process]
) -> None:
    left = whole.left
    assert left.trained == dict.fromkeys(range(1, 13), (2, 2))
    assert left.most_often_trained == 3
    losses = [line["policy/loss"] for line in left.metrics]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    held_out = {line["step"]: line["eval/held_out/loss"] for line in left.metrics if "eval/held_out/loss" in line}
    assert list(held_out) == [1, 6, 12]
    assert held_out[12] < held_out[6] < held_out[1]
    assert not [name for name in left.metrics[-1] if name.startswith(("reward/", "policy/ratio"))]
    assert set(cluster.actors("RolloutServer")) <= other_servers
    assert (left.folder / "report.html").is_file()
    assert audit.main([str(left.folder)]) == 0


def test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(
    cluster: FlowCluster, user: Bring, whole: Ran
) -> None:
    left = user.left("killed_rows")
    options = user.options("killed_rows", _settings(user))
    with cluster.running(*options) as first:
        first.wait_until(lambda: left.last_step >= 4)
        first.process.kill()
        first.finished()
    again = cluster.run(*options)
    assert again.returncode == 0, again.stdout + again.stderr
    assert [line["step"] for line in left.metrics] == list(range(1, 13))
    assert audit.main([str(left.folder)]) == 0
    expected, found = _weights(whole.left), _weights(left)
    assert max(abs(expected[name] - found[name]).max() for name in expected) < 1e-6


@pytest.mark.parametrize(("objective", "first_loss"), [("kto", 0.5), ("reward_model", math.log(2))])
def test_compared_answers_are_learnt_from_the_first_steps_closed_form(
    cluster: FlowCluster, user: Bring, objective: str, first_loss: float
) -> None:
    rows = user.folder / f"{objective}.jsonl"
    pairs = [(f"{i} + 1 =", f" {i + 1}", f" {i + 3} !") for i in range(_NUM_ROWS)]
    texts: list[dict[str, object]] = [{"prompt": asked, "chosen": good, "rejected": bad} for asked, good, bad in pairs]
    if objective == "kto":
        texts = [
            {"prompt": asked, "completion": answer, "label": is_good}
            for asked, *answers in pairs
            for answer, is_good in zip(answers, (True, False), strict=True)
        ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in texts), encoding="utf-8")
    own = {"objective": objective, "data.train": str(rows), "data.eval": str(rows), "rollout.group_size": 2}
    given = {**_settings(user), **own, "learner.groups_per_step": 4}
    ran = run(cluster, user, objective, **{key.replace(".", "__"): each for key, each in given.items()})
    first = [ran.left.metrics[0][name] for name in ("policy/loss", "eval/held_out/loss")]
    assert first == pytest.approx([first_loss] * 2, abs=1e-6)
    last = ran.left.metrics[-1]
    assert last["eval/held_out/accuracy"] == 1.0
    assert last["eval/held_out/margin"] > 0.1
    assert audit.main([str(ran.left.folder)]) == 0
    if objective == "reward_model":
        _check_folder(ran.left.folder / "checkpoints" / "latest" / "model", pairs, last["eval/held_out/margin"])


def _check_folder(model: Path, pairs: list[tuple[str, str, str]], margin: float) -> None:
    """Check that a served reward model gives the rank's rewards, and that a critic begins with its head."""
    served = RewardModel(ModelOptions(str(model), device="cpu"))
    good, bad = (np.array(served.score([pair[0] + pair[i] for pair in pairs])) for i in (1, 2))
    assert served._std * (good - bad).mean() == pytest.approx(margin, abs=1e-4)
    assert abs(np.concatenate([good, bad]).mean()) < 1e-4
    critic = load_value_model(critic_settings(Settings.model_validate({"policy": {"dtype": "float32"}}), model))
    assert torch.equal(critic.score.weight, served._model.score.weight / served._model.config.std)


def _weights(left: Left) -> dict[str, object]:
    model = left.folder / "checkpoints" / "latest" / "model"
    return {key: each for path in sorted(Path(model).glob("*.safetensors")) for key, each in load_file(path).items()}
