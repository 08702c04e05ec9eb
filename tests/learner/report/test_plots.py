"""The report's plots: curves and thinning."""

import json

from learner.report.plots import metric_plots, reward_plot, thin


def test_every_metric_gets_a_plot_under_its_own_name_too() -> None:
    lines = [{"step": step, "policy/loss": 0.1, "behaviour_gap_max": 0.2, "reward/part/em": 0.5} for step in range(3)]
    assert [plot.title for plot in metric_plots(lines)] == ["Parts of the reward", "Loss", "behaviour_gap_max"]


def test_endpoint_of_weight_0_is_shown_as_unused() -> None:
    (parts,) = metric_plots([{"step": 1, "reward/part/em": 0.5, "reward/part/style": 0.1}], unused=["style"])
    assert [each.label for each in parts.series] == ["em", "style (weight 0: recorded, unused)"]


def test_every_curve_of_an_evaluation_is_at_the_step_that_it_evaluated() -> None:
    scores = {"eval/step": 2, "eval/held_out/reward": 0.75, "eval/held_out/pass@1": 0.75}
    lines = [
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "reward/mean": 0.5},
        {"step": 3, "reward/mean": 1.0, **scores},
    ]
    reward = reward_plot(lines)
    (of_set,) = metric_plots(lines)
    assert reward is not None
    assert reward.x == of_set.x == [1, 2, 3]
    assert [each.values for each in reward.series] == [[0.5, 0.5, 1.0], [None, 0.75, None]]
    assert of_set.series[0].values == [None, 0.75, None]


def test_thinned_lines_are_means_of_neighbours_and_keep_the_last_step() -> None:
    lines = [{"step": step, "policy/loss": float(step)} | ({"rare": 1.0} if step == 3 else {}) for step in range(1500)]
    points = thin(lines)
    assert len(points) == 750
    assert points[:2] == [{"step": 1, "policy/loss": 0.5}, {"step": 3, "policy/loss": 2.5, "rare": 1.0}]


def test_json_of_a_plot_cannot_end_its_script_element() -> None:
    (plot,) = metric_plots([{"step": 1, "</script><script>alert(1)": 0.5}])
    assert "<" not in plot.json
    assert json.loads(plot.json)["title"] == "</script><script>alert(1)"
