"""A user's own advantage, loss and correction, from a file."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from learner.algorithms.advantages.advantage import Advantage
from learner.algorithms.by_name import Algorithm, algorithm_of, has_critic
from learner.algorithms.losses.policy_loss import Clip, PolicyLoss
from learner.algorithms.own_algorithm import check_result_shape, load_own
from learner.objectives.advantages import of_groups
from protocol.errors import SettingsError
from protocol.settings.learner import LearnerSettings
from protocol.settings.settings import Settings

OWN = """
import torch
from learner.algorithms.advantages.advantage import Advantage
from learner.algorithms.importance import Band
from learner.algorithms.importance import Correction
from learner.algorithms.losses.policy_loss import PolicyLoss

def doubled(rewards, lengths):
    return 2.0 * rewards

def plain(logprobs, old, advantages, counts, clip):
    return -advantages * (logprobs - old), logprobs > clip.high

def half(weight, counts, band):
    return 0.5 * (weight < band.high)

of_tokens = Advantage(of_tokens=lambda rewards, values, gamma, lam: gamma * rewards, is_whitened=True)
without_ratio = PolicyLoss(plain, has_ratio=False)
narrow = Correction(half, is_weighted=False, band=Band(0.9, 1.1))
number = 3

def mean_of_group(rewards, lengths):
    return rewards.mean(dim=1, keepdim=True)

def one_group(rewards, lengths):
    return rewards[0]

def mean_loss(logprobs, old, advantages, counts, clip):
    return (-advantages * logprobs).mean(), logprobs > clip.high

def loss_alone(logprobs, old, advantages, counts, clip):
    return -advantages * logprobs

def detached(logprobs, old, advantages, counts, clip):
    return -advantages * (logprobs - old).exp().detach(), logprobs > clip.high

def swapped(logprobs, old, advantages, counts, clip):
    return logprobs > clip.high, -advantages * (logprobs - old)

def largest(logprobs, old, advantages, counts, clip):
    return -advantages * (logprobs - old), logprobs > logprobs.max()

def deviations(rewards, lengths):
    return (rewards - rewards.mean(dim=1, keepdim=True)) / rewards.std(dim=1, keepdim=True)

def of_eight(rewards, lengths):
    return (rewards.view(2, 4) - rewards.mean()).view(1, 8)

def of_answers(weight, counts, band):
    return weight[:1]

def in_place(first, *others):
    first *= 2.0
    for each in others:
        if isinstance(each, torch.Tensor):
            each += 1.0
    return first

def loss_in_place(logprobs, old, advantages, counts, clip):
    return in_place(logprobs, old, advantages) - old, logprobs > 0

tokens_in_place = Advantage(of_tokens=in_place)
last_token = Advantage(of_tokens=lambda rewards, values, gamma, lam: rewards[-1:])
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)


def test_functions_of_a_file_are_an_advantage_a_loss_and_a_correction(own: str) -> None:
    found = algorithm_of(LearnerSettings(advantage=f"{own}:doubled", loss=f"{own}:plain", correction=f"{own}:half"))
    assert found.advantage.of_groups is not None
    assert found.advantage.of_groups(torch.ones(1, 2), torch.ones(1, 2)).tolist() == [[2.0, 2.0]]
    assert found.loss.has_ratio
    assert found.loss.of_tokens(torch.ones(1), torch.zeros(1), torch.ones(1), (1,), found.clip)[0].tolist() == [-1.0]
    assert found.correction.is_weighted
    assert found.band == found.correction.band


def test_example_of_the_documents_is_an_advantage(tmp_path: Path) -> None:
    page = Path("docs/do/algorithms.md").read_text(encoding="utf-8")
    path = tmp_path / "mine.py"
    path.write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
    found = algorithm_of(LearnerSettings(advantage=f"{path}:best_of_group"))
    assert found.is_whitened
    assert found.advantage.of_groups is not None
    assert found.advantage.of_groups(torch.tensor([[0.0, 1.0, 3.0]]), torch.ones(1, 3)).tolist() == [[-1.0, 0.0, 2.0]]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("doubled", r"four rewards of 1 got \[2.0, 2.0, 2.0, 2.0\]"),
        ("of_tokens", "it is whitened over the step"),
        ("tokens_in_place", "it is of single tokens"),
    ],
)
def test_advantage_that_learns_from_equal_rewards_is_refused_where_they_are_skipped(
    own: str, name: str, found: str
) -> None:
    with pytest.raises(
        SettingsError, match=rf"learner.equal_groups = skip would skip groups .*: {found}. Set it to keep"
    ):
        algorithm_of(LearnerSettings(advantage=f"{own}:{name}", equal_groups="skip"))


def test_advantage_of_distances_may_skip_groups_of_equal_rewards(own: str) -> None:
    with Path(own).open("a", encoding="utf-8") as file:
        file.write("\ndef centred(rewards, lengths):\n    return rewards - rewards.mean(dim=1, keepdim=True)\n")
    algorithm_of(LearnerSettings(advantage=f"{own}:centred", equal_groups="skip"))


@pytest.mark.parametrize(
    ("name", "section", "changed", "reason"),
    [
        ("doubled", "learner", {"gamma": 0.9}, "is of whole answers"),
        ("of_tokens", "critic", {"warmup_steps": 10}, "has no critic (Advantage(.., needs_critic=True))"),
    ],
)
def test_setting_that_an_advantage_of_ones_own_does_not_read_is_refused(
    own: str, name: str, section: str, changed: dict[str, float], reason: str
) -> None:
    given = {"learner": {"advantage": f"{own}:{name}"}}
    assert not has_critic(Settings.model_validate(given))
    with pytest.raises(SettingsError) as refused:
        has_critic(Settings.model_validate({**given, section: {**given.get(section, {}), **changed}}))
    ((setting, value),) = changed.items()
    assert str(refused.value) == (
        f"settings: {section}.{setting} = {value} has no effect: learner.advantage = {own}:{name} {reason}. Remove it."
    )


def test_loss_of_whole_answers_refuses_an_advantage_of_ones_own_for_tokens(own: str) -> None:
    algorithm_of(LearnerSettings(advantage=f"{own}:doubled", loss="gspo"))
    with pytest.raises(SettingsError, match=r"gspo clips whole answers, and learner.advantage = .*:of_tokens gives"):
        algorithm_of(LearnerSettings(advantage=f"{own}:of_tokens", loss="gspo"))


def test_functions_of_a_file_share_its_variables(own: str) -> None:
    advantage = load_own("learner.advantage", f"{own}:doubled", Advantage)
    assert advantage.__globals__ is load_own("learner.loss", f"{own}:plain", PolicyLoss).__globals__


def test_records_of_a_file_say_what_else_they_are(own: str) -> None:
    found = algorithm_of(
        LearnerSettings(advantage=f"{own}:of_tokens", loss=f"{own}:without_ratio", correction=f"{own}:narrow")
    )
    assert found.advantage.of_tokens is not None
    assert found.is_whitened
    assert not found.loss.has_ratio
    assert (found.band.low, found.band.high) == (0.9, 1.1)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("{own}:missing", "has no function or Advantage of the name missing. See docs/do/algorithms.md."),
        ("{own}:number", "has no function or Advantage of the name number."),
        ("{own}.py:doubled", "there is no file "),
        ("no_such_module:doubled", "no_such_module cannot be loaded: ModuleNotFoundError: No module named"),
    ],
)
def test_what_cannot_be_loaded_is_named_with_the_reason(own: str, name: str, problem: str) -> None:
    with pytest.raises(SettingsError) as caught:
        algorithm_of(LearnerSettings(advantage=name.format(own=own)))
    assert str(caught.value).startswith("settings: learner.advantage = ")
    assert problem in str(caught.value)


def _call_own(own: str, setting: str, name: str, group: torch.Tensor, tokens: torch.Tensor) -> None:
    _call(algorithm_of(LearnerSettings.model_validate({setting: f"{own}:{name}"})), setting, group, tokens)


def _call(found: Algorithm, setting: str, group: torch.Tensor, tokens: torch.Tensor) -> None:
    if setting == "loss":
        found.loss.of_tokens(tokens, tokens, tokens, (len(tokens),), found.clip)
    elif setting == "correction":
        found.correction.kept(tokens, (len(tokens),), found.band)
    elif found.advantage.of_groups is not None:
        found.advantage.of_groups(group, group)
    elif found.advantage.of_tokens is not None:
        found.advantage.of_tokens(tokens, None, 1.0, 1.0)


@pytest.mark.parametrize(
    ("setting", "name", "said"),
    [
        ("advantage", "mean_of_group", "returned [1, 1], expected [1, 4]"),
        ("advantage", "one_group", "returned [4], expected [1, 4]"),
        ("advantage", "last_token", "returned [1], expected [3]"),
        ("loss", "mean_loss", "returned [] and [3], expected [3] and [3]"),
        ("loss", "loss_alone", "returned [3], expected [3] and [3]"),
        ("correction", "of_answers", "returned [1], expected [3]"),
    ],
)
def test_result_of_another_shape_is_refused_and_not_spread_over_all(
    own: str, setting: str, name: str, said: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        _call_own(own, setting, name, torch.ones(1, 3), torch.ones(3))
    assert str(caught.value).startswith(f"settings: learner.{setting} = {own}:{name} {said}: ")


@pytest.mark.parametrize("name", ["detached", "swapped"])
def test_loss_without_a_gradient_is_refused(own: str, name: str) -> None:
    with pytest.raises(SettingsError, match=rf"own\.py:{name} returned a value without a gradient, which trains"):
        algorithm_of(LearnerSettings.model_validate({"loss": f"{own}:{name}"}))
    loss = check_result_shape("learner.loss", name, load_own("learner.loss", f"{own}:{name}", PolicyLoss), 5, 2)
    tokens = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        loss(tokens, tokens, tokens, (3,), Clip(0.2, 0.2, 3.0))


@pytest.mark.parametrize(
    ("setting", "name", "number", "signature"),
    [
        ("advantage", "plain", 2, "(logprobs, old, advantages, counts, clip)"),
        ("loss", "half", 5, "(weight, counts, band)"),
        ("correction", "doubled", 3, "(rewards, lengths)"),
    ],
)
def test_function_of_another_number_of_arguments_is_refused(
    own: str, setting: str, name: str, number: int, signature: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        algorithm_of(LearnerSettings.model_validate({setting: f"{own}:{name}"}))
    said = f"{own}:{name} takes {signature}, but is called with {number} arguments by position."
    assert str(caught.value).startswith(f"settings: learner.{setting} = {said}")


def test_no_tokens_are_not_given_to_a_function(own: str) -> None:
    """A rank without work has none, and the largest of none raises."""
    found = algorithm_of(LearnerSettings.model_validate({"loss": f"{own}:largest", "correction": f"{own}:half"}))
    tokens = torch.zeros(0, requires_grad=True)
    loss, is_clipped = found.loss.of_tokens(tokens, tokens, tokens, (0,), found.clip)
    assert loss.requires_grad
    assert (loss.shape, is_clipped.shape) == (tokens.shape, tokens.shape)
    assert found.correction.kept(tokens, (0,), found.band).shape == tokens.shape


@pytest.mark.parametrize("equal_groups", ["keep", "skip"])
def test_advantage_that_is_no_number_for_equal_rewards_is_refused(own: str, equal_groups: str) -> None:
    with pytest.raises(SettingsError, match=r"gives \[nan, nan, nan, nan\] to four rewards of 0, .* such as std \+ 1e"):
        algorithm_of(LearnerSettings.model_validate({"advantage": f"{own}:deviations", "equal_groups": equal_groups}))


def test_advantage_for_groups_of_one_size_is_taken(own: str) -> None:
    algorithm_of(LearnerSettings(advantage=f"{own}:of_eight"))


def test_file_that_ends_itself_is_told_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("raise SystemExit(3)")
    with pytest.raises(SettingsError, match=r"script\.py cannot be loaded: SystemExit: 3"):
        algorithm_of(LearnerSettings(loss=f"{path}:main"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_advantages_may_be_of_any_type(dtype: torch.dtype) -> None:
    batch: Any = SimpleNamespace(facts=[SimpleNamespace(num_model_tokens=2)] * 2, groups=[[0, 1]])
    micro_batch: Any = SimpleNamespace(numbers=[0, 1], counts=[2, 1])
    rewards = torch.tensor([0.0, 1.0], dtype=torch.float64)
    (found,) = of_groups([micro_batch], rewards, batch, lambda rewards, lengths: (2 * rewards).to(dtype))
    assert (found.dtype, found.tolist()) == (torch.float64, [0.0, 0.0, 2.0])


def test_advantage_has_one_of_the_two_functions() -> None:
    with pytest.raises(ValueError, match="either of_groups or of_tokens"):
        Advantage()
    with pytest.raises(ValueError, match="needs_critic is of of_tokens"):
        Advantage(of_groups=lambda rewards, lengths: rewards, needs_critic=True)


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("advantage", "in_place"),
        ("advantage", "tokens_in_place"),
        ("loss", "loss_in_place"),
        ("correction", "in_place"),
    ],
)
def test_function_that_changes_its_arguments_changes_nothing_else(own: str, setting: str, name: str) -> None:
    """The step uses them again: for the KL, the correction, the metrics and the next pass over its samples."""
    group, tokens = torch.ones(1, 3), torch.ones(3)
    _call_own(own, setting, name, group, tokens)
    assert torch.equal(group, torch.ones(1, 3))
    assert torch.equal(tokens, torch.ones(3))


def test_own_function_imports_a_module_beside_its_file(tmp_path: Path) -> None:
    (tmp_path / "beside_own.py").write_text("factor = 3.0\n")
    own = tmp_path / "own.py"
    own.write_text("import beside_own\ndef scaled(rewards, lengths):\n    return beside_own.factor * rewards\n")
    scaled = load_own("learner.advantage", f"{own}:scaled", Advantage)
    assert scaled(torch.ones(1, 2), torch.ones(1, 2)).tolist() == [[3.0, 3.0]]
