"""The simulated run beside numbers that follow by hand."""

import itertools
from random import Random

import pytest

from learner.run.simulation import Engine, Layout, Rates, simulate
from tests.benchmarks import long_tails

_RATES = Rates(token_s=0.01, token_sample_s=0.005, train_token_s=0.001)


def test_samples_share_decoding_steps() -> None:
    engine = Engine(_RATES, max_running=8)
    engine.add(1, 100)
    engine.add(2, 100)
    assert engine.ends_at == pytest.approx(2.0)
    assert engine.advance(1.0) == []
    engine.add(3, 10)  # three samples: 0.025 s for a step
    assert engine.advance(1.25) == [3]
    assert engine.ends_at == pytest.approx(1.25 + 40 * 0.02)
    assert sorted(engine.advance(engine.ends_at)) == [1, 2]
    assert engine.num_tokens == pytest.approx(210.0)
    assert engine.busy_s == pytest.approx(2.05)


def test_paused_engine_decodes_nothing_and_a_full_one_has_samples_wait() -> None:
    engine = Engine(_RATES, max_running=1)
    engine.add(1, 100)
    engine.add(2, 100)
    engine.speed = 0.0
    assert engine.advance(5.0) == []
    engine.speed = 1.0
    assert engine.advance(5.0 + 1.5) == [1]
    assert engine.ends_at == pytest.approx(8.0)


def layout(**changes: int | bool) -> Layout:
    usual = {"num_servers": 1, "num_ranks": 1, "groups_per_step": 1, "group_size": 2, "max_staleness": 0}
    return Layout(**{**usual, **changes})  # type: ignore[arg-type]


def test_synchronous_step_is_generation_reward_training_and_push() -> None:
    rates = _RATES.model_copy(update={"reward_s": 0.5, "push_s": 0.3, "pause_s": 0.1, "step_s": 0.2})
    out = simulate(layout(), rates, lambda: 100, num_steps=5)
    # two samples of 100 tokens: 2 s; reward 0.5; 200 tokens trained: 0.2, and 0.2; push 0.3
    assert out.step_s == pytest.approx(3.2)
    assert out.samples_per_s == pytest.approx(2 / 3.2)
    assert out.tokens_per_s == pytest.approx(200 / 3.2)
    assert out.server_idle == pytest.approx(1.2 / 3.2)
    assert out.rank_idle == pytest.approx(2.8 / 3.2)


def test_asynchronous_step_is_the_slower_of_generation_and_training() -> None:
    slow_servers = simulate(layout(max_staleness=1, max_groups=1), _RATES, lambda: 100, 12, 4)
    assert slow_servers.step_s == pytest.approx(2.0)
    assert slow_servers.server_idle == pytest.approx(0.0, abs=1e-6)
    slow_ranks = simulate(layout(max_staleness=1), Rates(token_s=0.001, train_token_s=0.01), lambda: 100, 12, 4)
    assert slow_ranks.step_s == pytest.approx(2.0)
    assert slow_ranks.rank_idle == pytest.approx(0.0, abs=1e-6)


def test_streamed_step_trains_while_its_last_groups_are_made() -> None:
    lengths = itertools.cycle([100, 100, 300, 300])
    numbers = layout(groups_per_step=2)
    rates = Rates(token_s=0.01, train_token_s=0.01)
    assert simulate(numbers, rates, lambda: next(lengths), 5).step_s == pytest.approx(3.0 + 6.0)  # 2 s of 8 overlap
    whole = layout(groups_per_step=2, is_streamed=False)
    assert simulate(whole, rates, lambda: next(lengths), 5).step_s == pytest.approx(3.0 + 8.0)


def test_devices_in_turns_overlap_nothing_and_shared_cores_slow_both() -> None:
    turns = simulate(layout(shares_devices=True, num_ranks=2), _RATES, lambda: 100, 5)
    assert turns.step_s == pytest.approx(2.0 + 0.1)
    rates = Rates(token_s=0.01, train_token_s=0.005)  # 1 s each for a step of 200 tokens
    alone = simulate(layout(max_staleness=1, max_groups=1), rates, lambda: 100, 12, 4)
    one_core = rates.model_copy(update={"num_cores": 1.0})
    shared = simulate(layout(max_staleness=1, max_groups=1), one_core, lambda: 100, 12, 4)
    assert alone.step_s == pytest.approx(1.0)
    assert shared.step_s == pytest.approx(2.0)


def test_larger_window_is_faster_when_answers_have_long_tails() -> None:
    rates = Rates(token_s=0.01, train_token_s=0.0001)

    def step_s(max_staleness: int) -> float:
        lengths = itertools.cycle([*[10] * 31, 1000])
        return simulate(
            layout(groups_per_step=4, max_staleness=max_staleness), rates, lambda: next(lengths), 40, 10
        ).step_s

    steps = [step_s(staleness) for staleness in range(5)]
    assert steps == sorted(steps, reverse=True)
    assert steps[4] < 0.5 * steps[0]


@pytest.mark.parametrize("max_groups", [0, 16])
def test_simulation_is_as_fast_as_the_real_coordinator_with_the_same_servers(max_groups: int) -> None:
    real = long_tails.measure(1, (2, 5), seed=1, max_groups=max_groups)
    numbers = Layout(1, 1, long_tails.GROUPS, long_tails.SAMPLES, 4, max_groups or None)
    rates = long_tails.RATES.model_copy(update={"train_token_s": long_tails.train_token_s(1)})
    draw = Random(1)
    simulated = simulate(numbers, rates, lambda: long_tails.draw_length(draw), 5, 2)
    assert simulated.step_s == pytest.approx(real.step_s, rel=0.05)
