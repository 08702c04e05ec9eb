"""`--forecast`: figures of a short run, and what they say about other settings."""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean

import pytest

from learner.run.command import main
from learner.run.forecast import Figures, Row, Span, describe, fit_decoding, measure
from learner.run.simulation import Engine, Layout, Rates, simulate
from protocol.errors import SettingsError
from protocol.settings.loader import save_settings
from protocol.settings.settings import Settings

_RATES = Rates(token_s=0.01, token_sample_s=0.001, train_token_s=0.0)


def spans_of(lengths: list[int], every_s: float, outside_s: float = 0.0) -> list[Span]:
    """Return the spans of samples that start on one server one after the other, at 0.01 s + 0.001 s a sample."""
    engine, now, started, spans = Engine(_RATES, 128), 0.0, {}, []
    for sample, length in enumerate([*lengths, 0]):
        while engine.ends_at <= (until := sample * every_s if length else 1e9):
            now = engine.ends_at
            spans += [("s0", lengths[ended], started[ended], now + outside_s) for ended in engine.advance(now)]
        if length:
            engine.advance(until)
            started[sample] = until
            engine.add(sample, length)
    return spans


def test_decoding_times_are_found_from_samples_that_shared_a_server() -> None:
    lengths = [20 + 37 * k % 200 for k in range(200)]
    token_s, token_sample_s = fit_decoding(spans_of(lengths, 0.15), 128)
    assert token_s == pytest.approx(0.01, rel=0.1)
    assert token_sample_s == pytest.approx(0.001, rel=0.2)


def make_run(folder: Path, num_steps: int, times_s: Sequence[float] = ()) -> None:
    """Write the records of a run whose steps of 16 samples ended then, or took 3 s."""
    settings = {"rollout": {"group_size": 4}, "learner": {"groups_per_step": 4, "max_staleness": 1}}
    save_settings(Settings.model_validate(settings), folder / "settings.yaml")
    spans = spans_of([20 + 37 * k % 200 for k in range(200)], 0.15, 0.5)
    step = {"time/train_s": 1.0, "time/push_s": 0.2, "time/push_pause_s": 0.1, "time/wait_s": 1.7}
    times_s = times_s or [3.0 * k for k in range(1, num_steps + 1)]
    lines = [{"step": k, **step, "time_s": at, "data/num_model_tokens": 1600} for k, at in enumerate(times_s, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    calls = [["turn", "stop", start, end - 0.5, 0, 6, tokens] for _, tokens, start, end in spans]
    rewards = [["reward", "math", end - 0.5, end, 1, 0, 0] for *_, end in spans]
    samples = [{"calls": list(pair)} for pair in zip(calls, rewards, strict=True)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger:
        columns = "server TEXT, num_model_tokens INTEGER, started_at REAL, finished_at REAL"
        ledger.execute(f"CREATE TABLE trajectories ({columns}, kind TEXT DEFAULT 'train')")
        insert = "INSERT INTO trajectories (server, num_model_tokens, started_at, finished_at) VALUES (?, ?, ?, ?)"
        ledger.executemany(insert, spans)
        ledger.commit()


def test_figures_of_a_run_make_its_own_simulation_as_fast_as_it_was(tmp_path: Path) -> None:
    make_run(tmp_path, 6)
    figures = measure(tmp_path, num_cores=0)
    assert figures.reward_s == pytest.approx(0.5)
    assert (figures.push_s, figures.pause_s, len(figures.lengths or [])) == (0.2, 0.1, 200)
    assert figures.token_sample_s / figures.token_s == pytest.approx(0.1, rel=0.2)
    assert simulated_step_s(figures, 6) == pytest.approx(3.0, rel=0.03)


def test_step_of_a_run_is_the_mean_of_steps_that_differ(tmp_path: Path) -> None:
    make_run(tmp_path, 6, [3.0, 5.0, 9.5, 11.5, 13.5, 18.0])  # three of 2 s and two of 4.5 s
    assert simulated_step_s(measure(tmp_path, num_cores=0), 6) == pytest.approx(3.0, rel=0.03)


def simulated_step_s(figures: Figures, num_steps: int) -> float:
    """Return the mean step of many simulations of the run of `make_run`, which begins with filled servers."""
    own = Layout(num_servers=1, num_ranks=1, groups_per_step=4, group_size=4, max_staleness=1)
    drawer = figures.drawer(1 << 30, has_long_tails=False)
    return fmean(simulate(own, figures, drawer, num_steps).step_s for _ in range(30))


def test_run_that_is_too_short_and_a_folder_without_a_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is not the folder of a run"):
        measure(tmp_path, num_cores=0)
    make_run(tmp_path, 4)
    with pytest.raises(SettingsError, match=r"has 4 steps\. Give a run of 5 or more\."):
        measure(tmp_path, num_cores=0)


def test_long_tails_keep_the_mean_and_have_ten_times_the_median() -> None:
    figures = Figures(token_s=0.01, train_token_s=0.0, mean_tokens=500)
    draw = figures.drawer(1 << 30, has_long_tails=True)
    lengths = sorted(draw() for _ in range(100_000))
    assert sum(lengths) / len(lengths) == pytest.approx(500, rel=0.03)
    assert lengths[99_000] / lengths[50_000] == pytest.approx(10.0, rel=0.05)


_CLUSTER = """
nodes:
  - {count: 1, gpus: 4, gpu_memory_gb: 80, memory_gb: 2000}
model: {parameters: 500000000, num_hidden_layers: 24, hidden_size: 896, num_attention_heads: 14,
        num_key_value_heads: 2, intermediate_size: 4864}
"""


def plan(folder: Path, *options: str) -> int:
    (folder / "cluster.yaml").write_text(_CLUSTER)
    run = ["--config", "/dev/null", "--policy.model", "m", "--data.train", "p", "--learner.num_ranks", "2"]
    return main(["--plan", "--cluster", str(folder / "cluster.yaml"), *run, "--rollout.num_servers", "2", *options])


def test_plan_shows_each_split_at_each_staleness_and_the_fastest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = '{"mean_tokens": 300, "token_s": 0.01, "token_sample_s": 0.0001, "train_token_s": 0.0001, "push_s": 1}'
    assert plan(tmp_path, "--forecast", figures, "--long-tails") == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("│") for line in lines if line.startswith("│") and " s " in line]
    splits = {(int(row[1]), row[2].strip(), int(row[3])) for row in rows}
    assert {split[0] for split in splits} == {1, 2, 3, 4}
    assert (4, "4*", 0) in splits
    assert {(2, "2", staleness) for staleness in range(5)} <= splits
    assert sum(line.startswith("Fastest: ") for line in lines) == 1


def test_figures_that_are_wrong_or_out_of_place_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, "--forecast", '{"token_s": 1, "train_token_s": 1}') == 2
    assert "--forecast: mean_tokens: Field required. It takes token_s, token_sample_s," in capsys.readouterr().err
    assert plan(tmp_path, "--forecast", "{}", "--json") == 2
    assert plan(tmp_path, "--long-tails") == 2
    sentence = "settings: --forecast belongs to --plan without --json, and --long-tails to --forecast.\n"
    assert capsys.readouterr().err == 2 * sentence


# NeMo RL 0.6 publishes the seconds of a step (docs/about/performance-summary.md), not those of its phases. They follow
# from two published rows and one assumption, named at each; a third row or a ratio is compared.


def published(generate: float, train: float, samples: int, tokens: int) -> Rates:
    """Return rates from the seconds of a step on one server and one rank; a server's speed is that of a full batch."""
    num_tokens = samples * tokens
    return Rates(token_s=1e-9, token_sample_s=generate / num_tokens, train_token_s=train / num_tokens)


def step_s(rates: Rates, servers: int, ranks: int, staleness: int, tokens: int, groups: tuple[int, int]) -> Row:
    is_shared = not staleness
    numbers = Layout(servers, ranks, *groups, staleness, max_running=4096, shares_devices=is_shared)
    return Row(numbers, simulate(numbers, rates, lambda: tokens, 4 * staleness + 6, 2 * staleness + 2))


def test_asynchrony_loses_for_qwen3_30b_a3b_on_16_gb200() -> None:
    """Published: 221 s in turns on 16, 301 s with one step of staleness on 8 + 8. Assumed: one side takes the 301 s."""
    rates = published(301.0, 2 * 221.0 - 301.0, 2048, 3198)
    turns, split = (step_s(rates, *numbers, 3198, (64, 32)) for numbers in ((2, 2, 0), (1, 1, 1)))
    assert turns.outcome.step_s == pytest.approx(221.0, rel=0.02)
    assert split.outcome.step_s == pytest.approx(301.0, rel=0.05)
    synchronous = Row(Layout(1, 1, 64, 32, 0, max_running=4096), split.outcome)
    assert "Asynchrony loses with 1 servers, 1 ranks: 0.7" in " ".join(describe([turns, synchronous, split]))


def test_staleness_of_one_step_makes_deepseek_v3_1_7_times_as_fast_on_twice_the_gpus() -> None:
    """Published: 134 s in turns on 256 H100, 111 s on 512; 64.1 s on 256 + 256: 1.73 times. Assumed: equal phases."""
    rates = published(67.0, 67.0, 512, 705)
    turns, split = (step_s(rates, 1, 1, staleness, 705, (16, 32)) for staleness in (0, 1))
    assert turns.outcome.step_s == pytest.approx(134.0, rel=0.02)
    assert 111.0 / split.outcome.step_s == pytest.approx(1.73, rel=0.1)


def test_six_times_the_gpus_make_qwen3_30b_a3b_four_times_as_fast() -> None:
    """Published: 152 s on 16 + 16 H100; 34.5 s on 64 + 128 at staleness 8. Assumed: generation is the limit."""
    rates = published(152.0, 100.0, 2048, 3203)
    small, large = (step_s(rates, *numbers, 3203, (64, 32)) for numbers in ((1, 1, 1), (4, 8, 8)))
    assert small.outcome.step_s == pytest.approx(152.0, rel=0.05)
    assert large.outcome.step_s == pytest.approx(34.5, rel=0.15)
