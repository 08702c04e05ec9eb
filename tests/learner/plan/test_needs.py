"""What a run needs follows from what it does."""

import pytest

from learner.algorithms.by_name import algorithm_of
from learner.plan.needs import needs_prompts, needs_rollouts, takes_parts
from protocol.settings.settings import Settings

_WARM = {"warm_start": {"data": "rows.jsonl"}}
_EVALUATED = {"data": {"eval": "e.jsonl"}, "eval": {"every_steps": 1}}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        pytest.param({"run": {"max_steps": 0}, "policy": _WARM}, (False, False), id="a warm start alone"),
        pytest.param(
            {"run": {"max_steps": 0}, "policy": _WARM, **_EVALUATED}, (False, True), id="a warm start, evaluated"
        ),
        pytest.param({"run": {"max_steps": 0}, **_EVALUATED}, (False, True), id="an evaluation alone"),
        pytest.param({"run": {"max_steps": 1}, "policy": _WARM}, (True, True), id="a warm start and a step"),
        pytest.param({"run": {"max_steps": 1}, "objective": "sft"}, (True, False), id="steps on rows"),
        pytest.param({"run": {"max_steps": 1}}, (True, True), id="steps"),
        pytest.param({"run": {"max_steps": 0}}, (True, True), id="no steps"),
    ],
)
def test_needs_of_a_run_are_those_of_all_that_it_does(sections: dict[str, object], expected: tuple[bool, bool]) -> None:
    settings = Settings.model_validate(sections)
    assert (needs_prompts(settings), needs_rollouts(settings)) == expected


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, True),
        ({"kl": {"coefficient": 0.1}}, True),
        ({"learner": {"recipe": "reinforce_pp", "whiten": False}}, True),
        ({"learner": {"recipe": "reinforce_pp"}}, False),
        ({"learner": {"recipe": "ppo", "whiten": False}}, False),
        ({"learner": {"advantage": "reinforce_pp_baseline"}}, False),
        ({"learner": {"whiten": True}}, False),
        ({"learner": {"num_epochs": 2}}, False),
        ({"learner": {"num_mini_batches": 2}}, False),
        ({"learner": {"advantage": "rloo"}, "rewards": {"normalize": True}}, False),
        ({"learner": {"router_aux_loss": 0.1}}, False),
        ({"learner": {"stream": False}}, False),
        ({"learner": {"keep_batches": 1}}, False),
        ({"kl": {"coefficient": 0.1}, "reference": {"offload": True}}, False),
    ],
)
def test_step_takes_parts_when_none_of_them_needs_the_others(sections: dict[str, object], expected: bool) -> None:
    settings = Settings.model_validate(sections)
    algorithm = algorithm_of(settings.learner)
    loaded = {"is_whitened": algorithm.is_whitened, "has_critic": algorithm.advantage.needs_critic}
    assert takes_parts(settings) == takes_parts(settings, **loaded) == expected


@pytest.mark.parametrize("own", [{"is_whitened": True}, {"has_critic": True}])
def test_step_by_an_own_advantage_that_is_whitened_or_has_a_critic_is_whole(own: dict[str, bool]) -> None:
    settings = Settings.model_validate({"learner": {"advantage": "own.py:advantage"}})
    assert takes_parts(settings)
    assert not takes_parts(settings, **own)
