"""Staleness 0 is the textbook: the learner's weights are, bit for bit, those of a loop that one can read in a minute.

DeepSpeed at ZeRO 0 on one rank, float32, for real, in a process of its own: one start for all tests here.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes.warm_process import run_warm
from tests.learner.models.small_policy import flat
from tests.textbook import loop, loop_rank

pytestmark = [pytest.mark.stack, pytest.mark.ranks]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what loop_rank found."""
    folder = tmp_path_factory.mktemp("textbook")
    ended = run_warm("tests.textbook.loop_rank", str(folder), str(loop_rank.NUM_STEPS), timeout=280)
    assert ended.returncode == 0, ended.stderr[-3000:]
    result: dict[str, Any] = torch.load(folder / "found.pt")
    return {**result, "two_ranks": torch.load(folder / "few.pt")}


def test_textbook_is_at_most_150_lines() -> None:
    assert len(Path(loop.__file__).read_text().splitlines()) <= 150


@pytest.mark.parametrize("name", ["grpo", "dapo", "ppo", "sft", "dpo", "in parts"])
def test_steps_have_the_bits_of_the_textbook(found: dict[str, Any], name: str) -> None:
    """DAPO: groups come through a real coordinator, which filters them. PPO: critic, GAE, two mini-batches times two
    epochs, KL in the reward with an adaptive coefficient."""
    assert len(found["textbook"][name]["metrics"]) == loop_rank.NUM_STEPS
    assert found["textbook"][name]["first_difference"] is None


def test_filter_critic_mini_batches_epochs_adaptive_kl_and_adapters_together_have_the_bits_of_the_textbook(
    found: dict[str, Any],
) -> None:
    together = found["textbook"]["together"]
    assert together["first_difference"] is None
    assert (together["memory"]["kl_coefficient"], together["memory"]["critic_steps"]) == (together["beta"], 6.0)
    assert together["is_level"]
    assert (
        sum(line["data/filtered_low"] + line["data/filtered_high"] for line in together["lines"])
        > loop_rank.NUM_TOGETHER
    )
    for key in ("policy/num_updates", "critic/num_updates"):
        assert [line[key] for line in together["metrics"]] == [4] * loop_rank.NUM_TOGETHER
    moved = {name for name, weight in together["after"].items() if not torch.equal(weight, together["before"][name])}
    assert all(".lora_" in name or name.startswith("critic/") for name in together["after"])
    assert {name for name in together["after"] if ".lora_" in name} <= moved


def test_all_of_it_goes_on_in_the_middle_with_two_ranks_and_zero_3(found: dict[str, Any]) -> None:
    """Saved by one rank at ZeRO 0. The distance is of each role's weights, as a share of their norm."""
    one, two = found["textbook"]["together"], found["two_ranks"]["together"]
    for role in ("policy/", "critic/"):
        expected = flat({name: weight for name, weight in one["after"].items() if name.startswith(role)})
        apart = flat({name: weight for name, weight in two["after"].items() if name.startswith(role)}) - expected
        assert float(apart.norm() / expected.norm()) < 1e-6
    assert two["memory"] == pytest.approx(one["memory"], rel=1e-6)


def test_dynamic_sampling_takes_and_filters_the_groups_of_the_textbook(found: dict[str, Any]) -> None:
    dapo = found["textbook"]["dapo"]
    assert dapo["is_level"]
    for side in ("low", "high"):
        assert sum(line[f"data/filtered_{side}"] for line in dapo["lines"]) > loop_rank.NUM_STEPS


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_two_ranks_with_zero_3_have_its_weights_but_for_rounding(found: dict[str, Any], name: str) -> None:
    one, two = _without_rounding_alone(found["textbook"][name]["few"]), found["two_ranks"][name]
    for weight in one:
        torch.testing.assert_close(two[weight], one[weight], rtol=1e-6, atol=1e-6)


def test_steps_in_parts_give_the_weights_of_whole_ones_on_one_rank_and_on_two_in_each_zero_stage(
    found: dict[str, Any],
) -> None:
    """The distance is of five steps of Adam, as a share of their way: sums round in the order of the parts."""
    before, whole = (_without_rounding_alone(found["textbook"]["grpo"][name]) for name in ("before", "few"))
    start, end = flat(before), flat(whole)
    for stage, weights in {"one rank": found["in parts"], **found["two_ranks"]["in parts"]}.items():
        distance = flat(_without_rounding_alone(weights)) - end
        assert float(distance.norm() / (end - start).norm()) < 1e-5, stage


def test_rows_give_two_ranks_the_weights_of_one_in_each_zero_stage(found: dict[str, Any]) -> None:
    assert len(found["two_ranks"]["rows"]) == 8
    far = {}
    for name, two in found["two_ranks"]["rows"].items():
        one = _without_rounding_alone(found["rows"][name.partition(",")[0]])
        far[name] = max(float((two[weight] - one[weight]).abs().max()) for weight in one)
    # Adam divides by |gradient| + 1e-8: two of KTO's gradients cancel to 2e-9, and then a sum's order shows.
    assert all(each < (1e-5 if name.startswith("kto") else 1e-6) for name, each in far.items()), far


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_packed_trajectories_have_its_weights_but_for_rounding(found: dict[str, Any], name: str) -> None:
    of_each = (found["textbook"][name]["before"], found["textbook"][name]["few"], found["packed"][name])
    before, plain, packed = map(_without_rounding_alone, of_each)
    for role in {weight.partition("/")[0] for weight in plain}:
        start, end, other = (
            flat({n: w for n, w in weights.items() if n.startswith(role)}) for weights in (before, plain, packed)
        )
        assert float((end - other).norm()) < 1e-3 * float((end - start).norm())


def _without_rounding_alone(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights without those whose gradient is rounding alone, which Adam makes large.

    What is added to every key alike moves no softmax.
    """
    return {name: weight for name, weight in weights.items() if not name.endswith("k_proj.bias")}


def test_coefficient_of_the_kl_follows_as_in_the_textbook(found: dict[str, Any]) -> None:
    ppo = found["textbook"]["ppo"]
    assert (ppo["memory"]["kl_coefficient"], ppo["memory"]["critic_steps"]) == (ppo["beta"], float(loop_rank.NUM_STEPS))
    assert ppo["beta"] != loop_rank.SETTINGS["ppo"]["kl"]["coefficient"]


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_resuming_in_the_middle_gives_the_weights_of_not_stopping(found: dict[str, Any], name: str) -> None:
    """GRPO: several updates and normalised rewards. PPO: critic, adaptive KL and a reference that is refreshed."""
    resumed = found["resumed"][name]
    assert resumed["is_same"]
    assert resumed["memory"][0] == resumed["memory"][1] != {}


def test_checkpoint_holds_what_the_settings_cannot_bring_back(found: dict[str, Any]) -> None:
    assert found["resumed"]["grpo"]["files"] == ["memory.json", "origin.json", "policy/state.json"]
    assert {"critic/state.json", "memory.json", "policy/state.json", "reference/config.json"} <= set(
        found["resumed"]["ppo"]["files"]
    )


def test_critic_alone_is_trained_while_it_warms_up(found: dict[str, Any]) -> None:
    alone, both = {"policy": False, "critic": True}, {"policy": True, "critic": True}
    assert found["warm_up"]["moved"] == [alone, alone, both]
    first, _, last = found["warm_up"]["metrics"]
    assert "policy/loss" not in first
    assert {
        "critic/loss",
        "critic/explained_share",
        "policy/loss",
        "policy/kl_reference",
        "policy/kl_coefficient",
    } <= last.keys()
