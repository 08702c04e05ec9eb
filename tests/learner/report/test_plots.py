"""The report's plots: curves, usual ranges and thinning."""

import json
from pathlib import Path

from learner.report.plots import HEALTHY, compared_plots, describe_band, metric_plots, outside_band, reward_plot, thin


def test_every_metric_is_in_one_section_and_a_constant_one_is_a_number() -> None:
    lines = [
        {"step": step, "policy/loss": step, "behaviour_gap_max": step, "reward/part/em": step, "time/new_s": 2.0}
        for step in range(3)
    ]
    sections = metric_plots(lines)
    assert {name: [plot.title for plot in curves.plots] for name, curves in sections.items()} == {
        "learning": ["Parts of the reward: em"],
        "healthy": ["Loss"],
        "slow": [],
        "rest": ["behaviour_gap_max"],
    }
    assert sections["slow"].constant == ["time/new_s 2"]


def test_endpoint_of_weight_0_is_shown_as_unused() -> None:
    lines = [{"step": step, "reward/part/em": step / 2, "reward/part/style": step / 9} for step in range(2)]
    (parts,) = metric_plots(lines, unused=["style"])["learning"].plots
    assert [each.label for each in parts.series] == ["em", "style (weight 0: recorded, unused)"]


def test_usual_ranges_are_those_of_the_page_of_metrics() -> None:
    rows = [line for line in Path("docs/look_up/metrics.md").read_text().splitlines() if line.startswith("| `")]
    healthy = {key: row.split("|")[3] for key in HEALTHY for row in rows if f"`{key}`" in row.split("|")[1]}
    assert {key: text for key, text in healthy.items() if describe_band(key) not in text} == {}
    assert set(healthy) == set(HEALTHY)


def test_figure_is_outside_of_its_range_by_its_newest_ten_steps() -> None:
    lines = [{"step": step, "policy/entropy": 0.5, "policy/clip_share": 0.5 * (step < 10)} for step in range(20)]
    assert outside_band(lines) == ([], 2)
    assert outside_band(lines[:10]) == (["policy/clip_share 0.5, usually below 0.1"], 2)


def test_compared_runs_share_the_plots_of_metrics_that_both_have() -> None:
    runs = {
        "a": [{"step": 1, "reward/mean": 0.5, "policy/loss": 1.0}, {"step": 2, "reward/mean": 0.75}],
        "b": [{"step": 2, "reward/mean": 0.25}],
    }
    (plot,) = compared_plots(runs)
    assert plot.x == [1, 2]
    assert [(each.label, each.values) for each in plot.series] == [("a", [0.5, 0.75]), ("b", [None, 0.25])]


def test_every_curve_of_an_evaluation_is_at_the_step_that_it_evaluated() -> None:
    scores = {"eval/step": 2, "eval/held_out/reward": 0.75, "eval/held_out/pass@1": 0.75}
    lines = [
        {"step": 1, "reward/mean": 0.5, "eval/held_out/pass@1": 0.5},
        {"step": 2, "reward/mean": 0.5},
        {"step": 3, "reward/mean": 1.0, **scores},
    ]
    reward = reward_plot(lines)
    (of_set,) = metric_plots(lines)["learning"].plots
    assert reward is not None
    assert reward.x == of_set.x == [1, 2, 3]
    assert [each.values for each in reward.series] == [[0.5, 0.5, 1.0], [None, 0.75, None]]
    assert of_set.series[0].values == [0.5, 0.75, None]


def test_thinned_lines_are_means_of_neighbours_and_keep_the_last_step() -> None:
    lines = [{"step": step, "policy/loss": float(step)} | ({"rare": 1.0} if step == 3 else {}) for step in range(1500)]
    points = thin(lines)
    assert len(points) == 750
    assert points[:2] == [{"step": 1, "policy/loss": 0.5}, {"step": 3, "policy/loss": 2.5, "rare": 1.0}]


def test_json_of_a_plot_cannot_end_its_script_element() -> None:
    (plot,) = metric_plots([{"step": step, "</script><script>alert(1)": step} for step in (1, 2)])["rest"].plots
    assert "<" not in plot.json
    assert json.loads(plot.json)["title"] == "</script><script>alert(1)"
