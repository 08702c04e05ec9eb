"""The report's arithmetic: densities over time, axes, thinning, text pieces."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from learner.report.curves import length_chart, metric_charts, staleness_chart
from learner.report.facts import Spans
from learner.report.samples import Piece, SampleLine, split_text
from learner.report.svg import nice_ticks, short, tick_labels
from learner.report.timeline import draw_timelines, mean_in_flight
from tests.learner.report.recorded_run import save_tokenizer


def test_mean_in_flight_counts_open_intervals_by_the_share_of_a_slice() -> None:
    start, end = np.array([0.0, 1.5]), np.array([2.0, 1.75])
    assert mean_in_flight(start, end, np.array([0.0, 1.0, 2.0, 3.0])).tolist() == [1.0, 1.25, 0.0]


def test_mean_in_flight_agrees_with_a_sum_over_intervals_at_unix_times() -> None:
    generator = np.random.default_rng(1)
    start = 1.8e9 + generator.uniform(0, 100, 500)
    end = start + generator.exponential(5, 500)
    edges = np.linspace(1.8e9, 1.8e9 + 100, 51)
    expected = [
        np.clip(np.minimum(end, high) - np.maximum(start, low), 0, None).sum() / (high - low)
        for low, high in pairwise(edges)
    ]
    np.testing.assert_allclose(mean_in_flight(start, end, edges), expected, atol=1e-3)


def test_timeline_does_not_take_the_wait_for_the_last_evaluation_for_training() -> None:
    last = {"step": 2, "policy_version": 2, "eval_policy_version": 2, "at_s": 108.0, "train_s": 2.0, "push_s": 1.0}
    first = {"step": 1, "policy_version": 1, "at_s": 101.0, "train_s": 1.0, "push_s": 0.0}
    (timeline,) = draw_timelines(Spans(), [first, last])
    # 1 s and 2 s of training, 1 s of push in the 4 s from 100 on; the evaluation is after that.
    assert "training: 75% of the time" in timeline.svg
    assert "weight push: 25% of the time" in timeline.svg


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 1, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), (-0.033, 0.02, [-0.03, -0.02, -0.01, 0.0, 0.01, 0.02]), (7, 7, [7])],
)
def test_ticks_are_round_numbers_inside_the_axis(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high, 4) == ticks


def test_ticks_of_what_is_counted_are_whole_numbers() -> None:
    assert nice_ticks(1, 2, 5, least_step=1.0) == [1.0, 2.0]
    assert nice_ticks(0, 100, 5, least_step=1.0) == [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]


def test_tick_labels_tell_neighbours_apart() -> None:
    assert tick_labels([1.0, 1.00002, 1.00004]) == ["1.00000", "1.00002", "1.00004"]
    assert tick_labels([0.0, 2e-6]) == ["0", "2e-06"]
    assert tick_labels([0.995, 1.0, 1.005]) == ["0.995", "1.000", "1.005"]
    assert tick_labels([0.0, 20.0]) == ["0", "20"]
    assert tick_labels([0.0, 20_000.0]) == ["0", "20k"]


@pytest.mark.parametrize(
    ("value", "text"), [(12_500.0, "12.5k"), (0.0312345, "0.0312"), (0, "0"), (1234.0, "1234"), (2.5e9, "2.5G")]
)
def test_numbers_are_shown_short(value: float, text: str) -> None:
    assert short(value) == text


def test_every_metric_gets_a_curve_even_one_nobody_planned_for() -> None:
    lines = [{"step": step, "loss": 0.1, "behaviour_gap_max": 0.2, "reward/em": 0.5} for step in range(3)]
    assert [chart.title for chart in metric_charts(lines)] == ["Parts of the reward", "Loss", "behaviour_gap_max"]


def test_a_curve_has_at_most_two_hundred_points() -> None:
    (chart,) = metric_charts([{"step": step, "loss": float(step)} for step in range(1000)])
    assert chart.svg.count("<title>") == 200


def test_length_histogram_holds_every_trajectory_once() -> None:
    chart = length_chart({1: 4, 60: 2, 61: 3})
    assert chart is not None
    assert chart.caption == "mean 34, max 61 tokens; each bar is 3 tokens wide"
    assert [chart.svg.count(f": {count}</title>") for count in (4, 5)] == [1, 1]


def test_staleness_histogram_shows_values_that_nothing_had() -> None:
    chart = staleness_chart({0: 10, 2: 5})
    assert chart is not None
    assert "<title>1: 0</title>" in chart.svg


def test_text_is_split_where_a_character_lies_across_two_pieces(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    tokens = tokenizer.encode("aé\x07").ids
    line = SampleLine(1, "g", 0.0, {}, 0, "stop", 1, tokens, [0, 1, 0, 0])
    assert split_text(line, tokenizer) == [
        Piece("prompt", "a"),
        Piece("model", "\ufffd"),
        Piece("observation", "\ufffd␇"),
    ]
