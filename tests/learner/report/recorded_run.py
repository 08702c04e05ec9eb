"""A run folder as the coordinator's own classes write it, without a run: for tests of the report.

`record_run(folder, num_steps=3)` records an evaluation before the first step and one after the last.
"""

import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from learner.coordinator.steps.record import RunRecord
from learner.coordinator.steps.step_batch import StepBatch
from learner.data.text_decoder import TextDecoder
from learner.ledger.ledger import Ledger
from protocol.settings.loader import save_settings
from protocol.settings.settings import Settings
from protocol.wire.trajectory import TimedCall, Trajectory, TrajectoryFacts, VersionSpan
from tests.fakes.tool_models import byte_core
from tests.learner.coordinator.steps.data_metrics import data_metrics

PROMPT = "What is the code of <b>Belarus</b>?"
SEARCH = "<search>Belarus</search>"
OBSERVATION = "<script>alert(1)</script> code BY"
ANSWER = "<answer>BY</answer>"


def record_run(folder: Path, num_steps: int, groups_per_step: int = 2, group_size: int = 4) -> Settings:
    """Write settings, metrics, samples and ledger of a run of num_steps steps; returns its settings."""
    settings = Settings.model_validate(
        {
            "run": {"name": folder.name, "max_steps": num_steps},
            "policy": {"warm_start": {"data": "demonstrations.jsonl"}},
            "rollout": {
                "group_size": group_size,
                "engine_args": {"download_dir": "http://user:secret@127.0.0.1:9/rows"},
            },
            "learner": {"groups_per_step": groups_per_step},
            "data": {"train": "rows.jsonl"},
            "rewards": {"endpoints": [{"name": "em", "url": "http://127.0.0.1:9/score"}]},
        }
    )
    save_settings(settings, folder / "settings.yaml")
    tokenizer = save_tokenizer(folder.parent / "model")
    decoder = TextDecoder(folder.parent / "model")
    record = RunRecord(folder, samples_per_step=1, decoder=decoder, group_every=num_steps)
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.begin_incarnation(0)
    began = time.time() - 2.0 * num_steps
    if num_steps:
        record.write_line(record.stamp(0, 0, _scores(0, 0.5, 0.5)))
        record.write_answers([_answer(0, "a", 0.0, "guess"), _answer(0, "b", 1.0, "BY")])
    for step in range(1, num_steps + 1):
        trajectories = []
        for place in range(groups_per_step):
            name = f"e0-q{step}-{place}"
            ledger.lease(name, 0, f"q{step}-{place}", step * groups_per_step + place, "rollout-0", 1)
            for index in range(group_size):
                version = max(0, step - 1 - index % 2)
                trajectory = make_trajectory(
                    tokenizer, name, index, version, began + 2.0 * step - index / group_size, reward=float(index % 2)
                )
                ledger.add_trajectory(trajectory.facts)
                trajectories.append(trajectory)
            ledger.mark_trained([name], step, step - 1)
        batch = StepBatch(step, step - 1, (), tuple(trajectories), [], [])
        metrics = {"policy/loss": 0.1 / step, "time/wait_s": 0.5, "time/train_s": 1.0, "time/push_s": 0.1}
        metrics |= {"data/retried": 0, "data/skipped": 1}
        if step == num_steps:
            metrics |= _scores(step, 1.0, 0.0)
            record.write_answers([_answer(step, "a", 1.0, "<b>found</b>"), _answer(step, "b", 1.0, "BY")])
        record.write_line(record.stamp(step, step, {**data_metrics(batch), **metrics}))
        record.write_samples(batch)
    ledger.lease("e0-bad", 0, "bad", 10**6, "rollout-0", 3)
    ledger.set_state(["e0-bad"], "skipped", reason="reward: <i>timeout</i>")
    ledger.close()
    return settings


def save_tokenizer(folder: Path) -> Tokenizer:
    """Write tokenizer.json with one token per byte; returns the tokenizer."""
    tokenizer = byte_core()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def make_trajectory(
    tokenizer: Tokenizer,
    group: str,
    index: int,
    version: int,
    at: float,
    reward: float = 1.0,
) -> Trajectory:
    """Return a trajectory of one search and one answer, finished at `at`."""
    tokens: list[int] = []
    mask: list[int] = []
    spans: list[VersionSpan] = []
    for text, is_model in ((PROMPT, 0), (SEARCH, 1), (OBSERVATION, 0), (ANSWER, 1)):
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        if is_model:
            spans.append(VersionSpan(len(tokens), len(tokens) + len(piece), version))
        tokens += piece
        mask += [is_model] * len(piece)
    facts = TrajectoryFacts(
        group=group,
        sample_index=index,
        attempt=1,
        incarnation=1,
        kind="train",
        is_greedy=False,
        server="rollout-0",
        num_tokens=len(tokens),
        num_prompt_tokens=len(PROMPT),
        num_turns=2,
        finish="answer",
        reward=reward,
        reward_parts={"em": reward},
        version_spans=spans,
        started_at=at - 1.5,
        finished_at=at,
        generate_s=1.0,
        environment_s=0.3,
        reward_s=0.1,
        calls=[
            TimedCall("turn", "stop", at - 1.4, at - 0.9, 0, len(PROMPT), len(SEARCH)),
            TimedCall("tool", "search", at - 0.8, at - 0.6, 1),
            TimedCall("environment", "step", at - 0.9, at - 0.6),
            TimedCall("turn", "stop", at - 0.6, at - 0.1, 0, len(tokens) - len(ANSWER), len(ANSWER)),
            TimedCall("reward", "em", at - 0.1, at, 2),
        ],
    )
    return Trajectory(facts, np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), np.array(mask, np.uint8))


def _scores(step: int, reward: float, error: float) -> dict[str, float]:
    """Return the figures of an evaluation of two prompts whose greedy answers score 1."""
    figures = {"reward": reward, "reward_error": error, "greedy": 1.0, "greedy_error": 0.0, "num_prompts": 2.0}
    means: dict[str, float] = {"eval/step": step, "eval/policy_version": step}
    return means | {f"eval/held_out/{name}": value for name, value in figures.items()}


def _answer(step: int, uid: str, reward: float, response: str) -> dict[str, object]:
    """Return a greedy answer of an evaluation."""
    texts = {"prompt": f"Question {uid}?", "response": response, "label": f"right {uid}"}
    return {"step": step, "set": "held_out", "uid": uid, "sample": 1, "is_greedy": True, "reward": reward, **texts}
