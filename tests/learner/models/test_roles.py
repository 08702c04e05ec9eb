"""Where the state of each role lies in a checkpoint."""

from pathlib import Path
from typing import cast

import pytest

from learner.models.critic import CriticEngine
from learner.models.policy import PolicyEngine
from learner.models.read_back import WrittenFiles
from learner.models.reference import BaseReference
from learner.models.roles import CRITIC_STEPS, Roles
from protocol.errors import OperatorError


class FilePolicy:
    """A policy whose state is one file."""

    def __init__(self, weights: str) -> None:
        self.weights = weights

    def save_state(self, folder: Path) -> WrittenFiles:
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(self.weights)
        return {}

    def load_state(self, folder: Path) -> None:
        self.weights = (folder / "state.json").read_text()


def roles(weights: str) -> tuple[Roles, FilePolicy]:
    policy = FilePolicy(weights)
    return Roles(cast(PolicyEngine, policy)), policy


def test_policys_state_has_a_folder_of_its_own_and_is_read_from_there(tmp_path: Path) -> None:
    roles("trained")[0].save_state(tmp_path / "state")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")] == ["state/policy/state.json"]
    again, policy = roles("fresh")
    again.load_state(tmp_path / "state")
    assert policy.weights == "trained"


def test_state_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        roles("fresh")[0].load_state(tmp_path / "state")


def test_critic_without_a_state_in_the_checkpoint_stays_untrained_and_is_reported(tmp_path: Path) -> None:
    roles("trained")[0].save_state(tmp_path / "state")
    said: list[str] = []
    critic = FilePolicy("fresh")
    again = Roles(cast(PolicyEngine, FilePolicy("")), cast(CriticEngine, critic), memory={CRITIC_STEPS: 50.0})
    again.load_state(tmp_path / "state", said.append)
    text = "The checkpoint has no critic: it starts untrained, with its warm-up (critic.warmup_steps)."
    assert (critic.weights, said, again.memory) == ("fresh", [text], {CRITIC_STEPS: 0.0})


def test_reference_that_a_start_without_a_kl_did_not_have_is_still_compared(tmp_path: Path) -> None:
    def of_reference(weights: str | None) -> Roles:
        reference = None if weights is None else cast(BaseReference, object())
        origin = {} if weights is None else {"reference": weights}
        return Roles(cast(PolicyEngine, FilePolicy("")), reference=reference, origin=origin)

    of_reference("first").save_state(tmp_path / "a" / "state")
    (tmp_path / "a" / "state" / "reference").mkdir()  # it was saved as it was refreshed
    for before, after in ("ab", "bc"):
        without = of_reference(None)
        without.load_state(tmp_path / before / "state")
        without.save_state(tmp_path / after / "state")
    said: list[str] = []
    of_reference("first").load_state(tmp_path / "c" / "state", said.append)
    assert said == ["The KL was off at an earlier start, which saved no reference: it is the run's first one again."]
    with pytest.raises(OperatorError, match="the weights of the reference or teacher are not those of the run's"):
        of_reference("other").load_state(tmp_path / "c" / "state")


def test_critics_state_has_a_folder_of_its_own(tmp_path: Path) -> None:
    policy, critic = FilePolicy("policy's"), FilePolicy("critic's")
    Roles(cast(PolicyEngine, policy), cast(CriticEngine, critic)).save_state(tmp_path / "state")
    again, critic_again = FilePolicy(""), FilePolicy("")
    Roles(cast(PolicyEngine, again), cast(CriticEngine, critic_again)).load_state(tmp_path / "state")
    assert (again.weights, critic_again.weights) == ("policy's", "critic's")


@pytest.mark.parametrize("content", ["[]", '{"kl_coefficient": "0.1"}'])
def test_memory_that_is_no_table_of_numbers_is_refused(tmp_path: Path, content: str) -> None:
    state, _ = roles("trained")
    state.save_state(tmp_path / "state")
    (tmp_path / "state" / "memory.json").write_text(content)
    with pytest.raises(OperatorError, match="is not a JSON object of numbers"):
        state.load_state(tmp_path / "state")


def test_memory_is_read_back(tmp_path: Path) -> None:
    state, _ = roles("trained")
    state.save_state(tmp_path / "state")
    (tmp_path / "state" / "memory.json").write_text('{"kl_coefficient": 0.25}')
    state.load_state(tmp_path / "state")
    assert state.memory == {"kl_coefficient": 0.25}


def test_facts_of_the_first_models_are_compared_where_both_have_them(tmp_path: Path) -> None:
    def first(**origin: str) -> Roles:
        return Roles(cast(PolicyEngine, FilePolicy("")), origin=origin)

    first(base="digest 1").save_state(tmp_path / "state")
    first(base="digest 1", reference="digest 2").load_state(tmp_path / "state")
    first().load_state(tmp_path / "state")
    with pytest.raises(OperatorError, match=r"cannot be resumed: the weights in the folder of policy\.model are not"):
        first(base="digest 3").load_state(tmp_path / "state")
