"""The live view in both forms, and the reader that follows metrics.jsonl."""

import io
import re
import time
from functools import cache
from pathlib import Path

import pytest
from msgspec import structs
from rich.console import Console

from learner.disk.run_folder import MetricsReader
from learner.live.panel import GenerationRates, PanelState, describe_slowness, render_panel, seconds_left, sparkline
from learner.live.status import RunStatus, ServerStatus
from learner.live.view import LiveView

_BEAT = ServerStatus(policy_version=4, running=31, waiting=2, generated_tokens=100)
_STATUS = RunStatus(
    step=4,
    policy_version=4,
    window_used=12,
    window_size=16,
    ready=3,
    detail="step 5 waits for 2 groups on sluice-rollout-0",
    evaluation="10/64",
    servers={"sluice-rollout-0": _BEAT, "sluice-rollout-1": None},
    counts={"retried": 2, "skipped": 1, "failed:retriever": 17, "unused:duplicate": 3},
)


_AGE = {"data/staleness_mean": 0.5, "data/staleness_max": 1.0}
_TIMES = {"time/wait_s": 0.8, "time/train_s": 0.1, "time/push_s": 0.1}
_HEALTH = {"policy/entropy": 0.7, "policy/kl_sampler": 0.001, "length/mean": 61.0, "length/truncated_share": 0.02}
_SCORES = {"eval/held_out/reward": 0.7, "eval/held_out/greedy": 0.875}


def _line(step: int, **values: float) -> dict[str, float]:
    return {"step": step, "policy_version": step, "at_s": time.time() + 60 + step, "reward/mean": step / 10, **values}


def test_plain_view_writes_one_line_per_step_in_the_log_format() -> None:
    file = io.StringIO()
    line = {"step": 412, "policy_version": 412, "policy/loss": -0.0131234, "reward/mean": 0.482, "time/wait_s": 41800.4}
    with LiveView(500, is_terminal=False, file=file) as view:
        view.update(_STATUS, [])
        view.update(_STATUS, [line])
    clock, rest = file.getvalue().split(" ", 1)
    assert time.strptime(clock, "%H:%M:%S").tm_min < 60
    assert rest == (
        "INFO  learner  step  step=412 policy_version=412 reward/mean=0.482 policy/loss=-0.01312 time/wait_s=41800\n"
    )


def test_plain_view_leaves_out_lines_of_an_earlier_life_of_the_run() -> None:
    file = io.StringIO()
    with LiveView(500, is_terminal=False, file=file) as view:
        view.update(_STATUS, [{"step": 1, "at_s": time.time() - 3600}, {"step": 2, "at_s": time.time() + 1}])
    assert [line.split("  ")[-1] for line in file.getvalue().splitlines()] == ["step=2"]


def test_plain_view_shows_a_phase_that_only_counts_on_once() -> None:
    file = io.StringIO()
    with LiveView(5, is_terminal=False, file=file) as view:
        for step in range(3):
            view.show_phase(f"warm start {step}/3 loss 0.{step}")
        view.show_phase("starting servers")
    assert [line.split("  ", 2)[2] for line in file.getvalue().splitlines()] == [
        "phase  warm start 0/3 loss 0.0",
        "phase  starting servers",
    ]


def test_plain_view_writes_a_message_as_one_warning_line_without_control_characters() -> None:
    file = io.StringIO()
    with LiveView(5, is_terminal=False, file=file) as view:
        view.message("server lost\n\x1b[31mred")
        view.message("resuming", "INFO")
    told = [line[8:] for line in file.getvalue().splitlines()]
    assert told == [" WARN  learner  server lost [31mred", " INFO  learner  resuming"]


def test_plain_view_lets_the_run_go_on_when_its_reader_has_left() -> None:
    class ClosedPipe(io.StringIO):
        num_writes = 0

        def write(self, text: str) -> int:
            self.num_writes += 1
            raise BrokenPipeError

    file = ClosedPipe()
    with LiveView(5, is_terminal=False, file=file) as view:
        view.message("one")
        view.message("two")
    assert file.num_writes == 1


@cache
def _panel(num_messages: int = 0) -> str:
    """Return every frame that a terminal was sent, without colours and cursor moves."""
    file = io.StringIO()
    with LiveView(100, is_terminal=True, file=file, width=110) as view:
        view.show_phase("starting servers")
        for index in range(num_messages):
            view.message(f"warning {index} [bold]")
        lines = [*(_line(step, **_AGE, **_TIMES) for step in range(1, 5)), _line(5, **_SCORES, **_AGE, **_HEALTH)]
        time.sleep(0.5)  # frames come every 0.45 s
        view.update(_STATUS, lines)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


@pytest.mark.parametrize(
    "shown",
    [
        "step 4/100",
        "1:35 left",
        "0.500  ▁▃▄▆█  0.100 to 0.500",
        "entropy 0.70, KL 0.0010, 61 tokens an answer, 2% cut off",
        "slow       80% of the last 4 steps waited for generation: add servers or shorten answers",
        "ended after 0:00",
        "0.700 sampled, 0.875 greedy, at step 5, scoring 10/64",
        "staleness mean 0.50, max 1",
        "12/16 groups, 3 ready",
        "2 retried, 1 skipped",
        "failed:retriever 17",
        "sluice-rollout-0",
        "not heard yet",
        "step 5 waits for 2 groups on sluice-rollout-0",
    ],
)
def test_panel_shows_what_a_run_is_watched_for(shown: str) -> None:
    assert shown in _panel()


def test_last_frame_of_a_run_shows_no_server_at_work() -> None:
    assert "running" not in _panel().rsplit("╭", 1)[1]


_FAILING = {"time/wait_s": 1.0, "data/num_samples": 4}


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (
            [{"time/wait_s": 1.0, "time/train_s": 3.0}],
            "75% of the last step was training: add ranks, or raise learner.micro_batch_tokens",
        ),
        ([{"time/wait_s": 1.0, "time/train_s": 1.0, "time/push_s": 1.0}], ""),
        ([{}], ""),
        ([_TIMES | {"perf/outside_share": 0.9}], "80% of the last step waited for rewards or the environment, while"),
        ([_TIMES | {"perf/outside_share": 0.2}], "80% of the last step waited for generation"),
        (
            [_FAILING | {"data/failed": 5}, _FAILING | {"data/failed": 351}],
            "waited for samples that failed (346, most by reward mine) and were sampled again: repair what fails",
        ),
        ([_FAILING | {"data/failed": 350}, _FAILING | {"data/failed": 351}], "waited for generation"),
    ],
)
def test_slowness_is_the_largest_part_of_the_measured_times_and_what_samples_waited_for(
    lines: list[dict[str, float]], text: str
) -> None:
    described = describe_slowness(lines, {"reward mine": 9, "retriever": 2})
    assert text in described
    assert bool(text) == bool(described)


def test_panel_keeps_the_last_three_messages_as_plain_text() -> None:
    last_frame = _panel(num_messages=4).rsplit("╭", 1)[1]
    assert "warning 0" not in last_frame
    assert "warning 3 [bold]" in last_frame


def test_panel_of_a_small_terminal_has_the_newest_message_whole_and_leaves_older_ones_out() -> None:
    state = PanelState(total_steps=9, status=_STATUS)
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(render_panel(state, [(0.0, "old " * 60), (1.0, "new " * 60)], 1.0, (80, 24)))
    text = console.export_text()
    assert (text.count("old"), text.count("new"), len(text.splitlines()) < 24) == (0, 60, True)
    assert max(map(len, text.splitlines())) == 76  # room for the ^C that a terminal writes after it


def test_terminal_gets_its_cursor_back_when_the_run_is_interrupted() -> None:
    file = io.StringIO()
    with pytest.raises(KeyboardInterrupt), LiveView(5, is_terminal=True, file=file, width=80):
        raise KeyboardInterrupt
    assert file.getvalue().rfind("\x1b[?25h") > file.getvalue().rfind("\x1b[?25l") >= 0


def test_panel_is_drawn_at_most_about_twice_a_second() -> None:
    file = io.StringIO()
    with LiveView(5, is_terminal=True, file=file, width=80) as view:
        before = file.getvalue().count("╭")
        for _ in range(50):
            view.update(_STATUS, [])
        assert file.getvalue().count("╭") - before <= 1


def test_sparkline_averages_what_does_not_fit() -> None:
    assert sparkline([0, 0, 1, 1, 7, 7], num_points=3) == "▁▂█"


def test_seconds_left_follows_the_pace_of_this_start_of_the_run() -> None:
    state = PanelState(total_steps=10)
    for step, at_s in ((1, 0.0), (2, 1000.0), (4, 1010.0)):
        assert seconds_left(state) is None
        state.take({"step": step, "at_s": at_s}, is_new=step > 1)
    assert seconds_left(state) == 30.0


def test_generation_rate_starts_again_when_a_server_counts_from_zero() -> None:
    rates = GenerationRates()
    rates.take({"a": structs.replace(_BEAT, generated_tokens=100)}, now=0.0)
    rates.take({"a": structs.replace(_BEAT, generated_tokens=300)}, now=2.0)
    assert rates.of("a") == 100.0
    rates.take({"a": structs.replace(_BEAT, generated_tokens=5)}, now=3.0)
    assert rates.of("a") is None


def test_metrics_reader_returns_a_line_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    assert reader.new_lines() == []
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    assert reader.new_lines() == [{"step": 1, "policy/loss": 0.5}]
    assert reader.new_lines() == []
    with path.open("a") as file:
        file.write('ss": 0.25}\nnonsense\n{"step": 3}\n')
    assert reader.new_lines() == [{"step": 2, "policy/loss": 0.25}, {"step": 3}]


def test_metrics_reader_starts_again_when_the_file_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    path.write_text('{"step": 1}\n{"step": 2}\n')
    reader.new_lines()
    path.write_text('{"step": 1}\n')
    assert reader.new_lines() == [{"step": 1}]
