"""Names and records of a run folder; records of version 0.1.0 are read under the present names."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from protocol.disk.files import replace_file

LEDGER = "ledger.sqlite"
TOKENS = "tokens.sqlite"  # the token books, which stay when the ledger goes back to a checkpoint
LOGS = (f"{LEDGER}-wal", f"{LEDGER}-shm")  # SQLite's files of an open ledger, or of one whose writer was killed
SETTINGS = "settings.yaml"  # settings as the run's last start resolved them
CHECKPOINTS = "checkpoints"
INSTALLATION = "installation.json"  # code and packages of the run's last start
MODELS = "models.json"  # digests of the model folders that the run began with
WANDB_ID = "wandb_run_id"
LOCK = ".lock"
SEARCH_INDEX = "search_index"  # digest of the index that the run's last start searched
TRAIN_INDEX = "prompts.npz"  # place of each prompt of data.train
SKIPPED_ROWS = "skipped_rows.json"  # rows of data.train that the run skips
LEARNER_VALUES = "learner_values"  # folder: a file for each step and rank that trained a recorded sample
RECORDS = ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl")

# Beginnings of a reason in the ledger, of a group whose mean score decided.
FILTERED = "filtered: "  # it was skipped
LEFT_OUT = f"{FILTERED}curriculum, "  # the curriculum left its prompt out of an epoch
KEPT = "kept: "  # it was trained in spite of its mean score

_MARK_BYTES = 4096  # at least one line of metrics, with its time


def mark_at(file: BinaryIO, place: int) -> bytes:
    """Return the last bytes before a place: if they differ from those that a reader knows, the file is another one."""
    file.seek(max(0, place - _MARK_BYTES))
    return file.read(min(place, _MARK_BYTES))


class MetricsReader:
    """Follows metrics.jsonl while it is written. num_files: how often it was another file than before, or gone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset, self._mark = 0, b""
        self.num_files = 0

    def skip_known(self) -> None:
        """Skip the lines that the file has now."""
        if self._path.exists():
            with self._path.open("rb") as file:
                self._offset = file.seek(0, 2)
                self._mark = mark_at(file, self._offset)

    def new_lines(self) -> list[dict[str, float]]:
        """Return the complete lines written since the last call.

        The file may be missing, or be a new one, as a resume makes it. Lines that are not JSON objects of numbers are
        skipped.
        """
        try:
            with self._path.open("rb") as file:
                if mark_at(file, self._offset) != self._mark:
                    self._begin_again()
                file.seek(self._offset)
                content = file.read()
                complete = content[: content.rfind(b"\n") + 1]
                self._offset += len(complete)
                self._mark = mark_at(file, self._offset)
        except FileNotFoundError:
            if self._offset:
                self._begin_again()
            return []
        return [line for text in complete.splitlines() if (line := parse_metrics_line(text)) is not None]

    def _begin_again(self) -> None:
        self._offset, self._mark = 0, b""
        self.num_files += 1


def parse_metrics_line(text: bytes | str) -> dict[str, float] | None:
    """Return a metrics line's numbers by their present names; None for a line that was cut off by a kill, or edited."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        return None
    return with_present_names({key: value for key, value in line.items() if isinstance(value, int | float)})


def main_set(line: Mapping[str, float]) -> str | None:
    """Return the name of the first set that the evaluation on a metrics line scored; None without an evaluation."""
    scores = (key.split("/") for key in line if key.startswith("eval/") and key.endswith("/reward"))
    return next((parts[1] for parts in scores if len(parts) == 3), None)


def comparable_since(line: Mapping[str, float], metric: str) -> float:
    """Return the first step whose scores of a metric are comparable with a line's evaluation; 0: all steps.

    Earlier ones are of other reward endpoints, or of another set. metric: such as eval/held_out/reward.
    """
    of_set = "/".join([*metric.split("/")[:2], "since"])
    return max(line.get("eval/rewards_since", 0), line.get(of_set, 0))


class SamplePlace(NamedTuple):
    """When a line of samples.jsonl was written."""

    step: int
    start: float  # Unix seconds of the start that wrote it; 0: of an earlier version

    def repeats(self, newest: "SamplePlace") -> bool:
        """Return whether a resume repeated the step of the line before, `newest`, and this one is of the repetition."""
        return self.step < newest.step or (self.step == newest.step and self.start != newest.start)


class SkippedRow(NamedTuple):
    """A row of data.train that the run skips."""

    file: str  # name in the data set
    number: int  # line or row in its file, counted from 1
    reason: str


def write_skipped(folder: Path, rows: Sequence[SkippedRow]) -> None:
    """Record the skipped rows, and remove an earlier start's record. Raises: OSError."""
    if rows:
        replace_file(folder / SKIPPED_ROWS, json.dumps([list(row) for row in rows], indent=0).encode())
    else:
        (folder / SKIPPED_ROWS).unlink(missing_ok=True)


def read_skipped(folder: Path) -> list[SkippedRow]:
    """Return the rows that the run skips."""
    try:
        rows = json.loads((folder / SKIPPED_ROWS).read_bytes())
    except FileNotFoundError:
        return []
    return [SkippedRow(str(file), int(number), str(reason)) for file, number, reason in rows]


def read_only_uri(path: Path) -> str:
    """Return the URI with which SQLite reads a ledger and does not write it.

    Without a write-ahead log the ledger has no other user, and SQLite makes no files of its own.
    """
    is_shared = path.with_name(f"{path.name}-wal").exists()
    return f"{path.resolve().as_uri()}?{'mode=ro' if is_shared else 'mode=ro&immutable=1'}"


class Answer(msgspec.Struct, frozen=True):
    """One answer to a held-out prompt."""

    step: int
    uid: str
    reward: float
    set: str = ""
    sample: int = 0
    is_greedy: bool = False
    prompt: str = ""
    response: str = ""
    label: str = ""


class _Place(msgspec.Struct, frozen=True):
    step: int
    set: str = ""


def read_answers(path: Path, steps: Collection[int], held_out: str) -> dict[int, list[Answer]]:
    """Return the answers to a held-out set in the evaluations of these steps, in the order of their prompts.

    Broken lines are skipped. If a start repeated an evaluation, its last answers count. Earlier versions named no set.
    """
    by_step: dict[int, dict[tuple[str, int], Answer]] = {step: {} for step in steps}
    with path.open("rb") as file:
        for text in file:
            try:
                place = msgspec.json.decode(text, type=_Place)
                if place.step in by_step and place.set in ("", held_out):
                    answer = msgspec.json.decode(text, type=Answer)
                    by_step[place.step][answer.uid, answer.sample] = answer
            except msgspec.DecodeError:
                continue
    return {step: list(answers.values()) for step, answers in by_step.items()}


# Old name -> present name; None: another key of the same line has the figure.
RENAMED: Mapping[str, str | None] = {
    **{name: f"policy/{name}" for name in ("loss", "grad_norm", "num_updates", "entropy", "kl_fresh", "kl_stale")},
    **{name: f"policy/{name}" for name in ("ratio_mean", "ratio_outside_share", "effective_sample_share")},
    **{name: f"policy/{name}" for name in ("logprob_difference_max", "advantage_std", "kl_coefficient")},
    "router_aux_loss": "policy/router_aux_loss",
    "kl": "policy/kl_sampler",
    "reference_kl": "policy/kl_reference",
    "clip_fraction": "policy/clip_share",
    "value_loss": "critic/loss",
    "critic_grad_norm": "critic/grad_norm",
    "num_critic_updates": "critic/num_updates",
    "value_mean": "critic/value_mean",
    "return_mean": "critic/return_mean",
    "value_clip_fraction": "critic/clip_share",
    "value_explained": "critic/explained_share",
    "reward_mean": "reward/mean",
    "reward_std": "reward/std",
    "score_mean": "reward/score",
    "equal_group_share": "reward/equal_group_share",
    "equal_groups": None,
    "response_tokens_mean": "length/mean",
    "response_tokens_better": "length/better",
    "response_tokens_worse": "length/worse",
    "turns_mean": "length/turns",
    "truncated_share": "length/truncated_share",
    **{name: f"data/{name}" for name in ("staleness_mean", "staleness_max", "window_used", "skipped", "retried")},
    **{name: f"data/{name}" for name in ("num_samples", "num_model_tokens", "num_trained_tokens")},
    **{name: f"data/{name}" for name in ("filtered_low", "filtered_high", "curriculum_easy", "curriculum_hard")},
    "wait_s": "time/wait_s",
    "train_s": "time/train_s",
    "switch_s": "time/switch_s",
    "push_s": "time/push_s",
    "pause_s": "time/push_pause_s",
    "samples_per_s": "perf/samples_per_s",
    "tokens_per_s": "perf/tokens_per_s",
    "alarms": "health/alarms",
    **{f"eval_{name}": f"eval/{name}" for name in ("step", "policy_version", "failed", "rewards_since")},
    **{f"eval_version_{end}": f"eval/version_{end}" for end in ("min", "max")},
    "eval_reward": None,
    "eval_reward_greedy": None,
}


def with_present_names(line: Mapping[str, float]) -> dict[str, float]:
    """Return a metrics line under the present names; a line of this version is returned as it is."""
    if line.keys().isdisjoint(RENAMED):
        return dict(line)
    renamed: dict[str, float] = {}
    for key, value in line.items():
        group, slash, rest = key.partition("/")
        if slash:
            prefix = {"reward": "reward/part/", "reward_log": "reward/log/"}.get(group)
            renamed[f"{prefix}{rest}" if prefix else key] = value
        elif (name := RENAMED.get(key, key)) is not None:
            renamed[name] = value
    return renamed
