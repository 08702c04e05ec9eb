"""The report's plots: densities over time, thinning, histograms; and the text pieces of a trajectory."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np

from learner.report.facts import Spans
from learner.report.plots import (
    length_plot,
    mean_in_flight,
    metric_plots,
    reward_plot,
    staleness_plot,
    thin,
    timeline_plots,
)
from learner.report.samples import Piece, SampleLine, split_text
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


def test_timeline_shows_the_shares_of_training_and_push() -> None:
    lines = [{"step": 1, "at_s": 101.0, "train_s": 1.0}, {"step": 2, "at_s": 104.0, "train_s": 2.0, "push_s": 1.0}]
    (learner,) = timeline_plots(Spans(), lines)
    assert learner.caption == "training: 75% of the time, weight push: 25% of the time"
    assert (len(learner.x), learner.series[0].values[0], learner.series[1].values[-1]) == (1000, 1.0, 1.0)


def test_timeline_sums_the_servers_that_have_no_curve_of_their_own() -> None:
    names = tuple(f"s{index:02}" for index in range(18))
    spans = Spans(names, np.arange(18), np.zeros(18) + 100.0, np.zeros(18) + 110.0)
    (servers,) = timeline_plots(spans, [])
    assert [each.label for each in servers.series] == [*names[:16], "2 more servers"]
    assert servers.series[-1].values[0] == 2.0


def test_every_metric_gets_a_plot_under_its_own_name_too() -> None:
    lines = [{"step": step, "loss": 0.1, "behaviour_gap_max": 0.2, "reward/em": 0.5} for step in range(3)]
    assert [plot.title for plot in metric_plots(lines)] == ["Parts of the reward", "Loss", "behaviour_gap_max"]


def test_endpoint_of_weight_0_is_shown_as_unused() -> None:
    (parts,) = metric_plots([{"step": 1, "reward/em": 0.5, "reward/style": 0.1}], unused=["style"])
    assert [each.label for each in parts.series] == ["em", "style (weight 0: recorded, unused)"]


def test_held_out_score_stands_at_the_version_that_was_scored() -> None:
    plot = reward_plot([{"step": 1, "reward_mean": 0.5}, {"step": 3, "eval_policy_version": 2, "eval_reward": 0.75}])
    assert plot is not None
    assert plot.x == [1, 2]
    assert [each.values for each in plot.series] == [[0.5, None], [None, 0.75]]


def test_thinned_lines_are_means_of_neighbours_and_keep_the_last_step() -> None:
    lines = [{"step": step, "loss": float(step)} | ({"rare": 1.0} if step == 3 else {}) for step in range(1500)]
    points = thin(lines)
    assert len(points) == 750
    assert points[:2] == [{"step": 1, "loss": 0.5}, {"step": 3, "loss": 2.5, "rare": 1.0}]


def test_json_of_a_plot_cannot_end_its_script_element() -> None:
    (plot,) = metric_plots([{"step": 1, "</script><script>alert(1)": 0.5}])
    assert "<" not in plot.json
    assert json.loads(plot.json)["title"] == "</script><script>alert(1)"


def test_length_histogram_holds_every_trajectory_once() -> None:
    plot = length_plot({1: 4, 60: 2, 61: 3})
    assert plot is not None
    assert plot.caption == "mean 34, max 61 tokens; each bar is 3 tokens wide"
    assert {x: count for x, count in zip(plot.x, plot.series[0].values, strict=True) if count} == {0.0: 4, 60.0: 5}


def test_staleness_histogram_shows_values_that_nothing_had() -> None:
    plot = staleness_plot({0: 10, 2: 5})
    assert plot is not None
    assert (plot.x, plot.series[0].values) == ([0.0, 1.0, 2.0], [10, 0, 5])


def test_text_is_split_where_a_character_lies_across_two_pieces(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    tokens = tokenizer.encode("aé\x07").ids
    line = SampleLine(1, "g", 0.0, {}, 0, "stop", 1, tokens, [0, 1, 0, 0])
    assert split_text(line, tokenizer) == [
        Piece("prompt", "a"),
        Piece("model", "\ufffd"),
        Piece("observation", "\ufffd␇"),
    ]
