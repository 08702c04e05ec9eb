"""`sluice iterate MODEL PROMPTS FOLDER`: rounds of generate, select and train, each on the model of the one before.

    FOLDER/round_1/answers.jsonl   of sluice generate
    FOLDER/round_1/rows.jsonl      of sluice select; it is there when the answers are whole
    FOLDER/round_1/train/          run of sluice run, complete when its last step has a checkpoint

Each part resumes or is skipped by what it left, so the same command goes on after any kill.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from learner.checkpoint.folder import newest_valid
from learner.data.answers import find_difference
from learner.disk.run_folder import CHECKPOINTS, SETTINGS
from learner.evaluate import as_options, model_of
from learner.generation import generate
from learner.generation.select import Selection, add_options, check_selection, describe, write_rows
from learner.run.command import main as run
from protocol.disk.files import replace_file
from protocol.errors import SettingsError
from protocol.settings.loader import load_saved_settings, load_settings

_ABOUT = """\
Rejection sampling (--select best, and objective: sft in the --train file) or iterative DPO (--select best_worst, and
objective: dpo): in each round the newest model answers PROMPTS, and the selected answers train it. The model of round
K is FOLDER/round_K/train. After a kill the same command goes on; more --rounds continue a finished one."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("sluice iterate", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="model of the first round, as for sluice generate")
    parser.add_argument("prompts", metavar="PROMPTS", help="prompts of every round")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder of the rounds")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (3)")
    parser.add_argument("--samples", type=int, default=8, help="samples of a prompt (8)")
    parser.add_argument("--generate", type=Path, required=True, metavar="FILE", help="settings of the generation")
    parser.add_argument("--train", type=Path, required=True, metavar="FILE", help="settings of the training")
    add_options(parser)
    given = parser.parse_args(arguments)
    selection = check_selection(Selection(given.select, load_settings(given.train, []).objective, given.at_least))
    model = _claim(given)
    for number in range(1, given.rounds + 1):
        _claim(given)  # days may lie between two rounds
        folder = given.folder / f"round_{number}"
        if status := _play(given, folder, number, model, selection):
            return status
        if not _is_trained(folder / "train"):
            return 0  # stopped; the run has said so
        model = str(folder / "train")
    print(f"Model: {model}")
    return 0


def check_same(answers: Path, first: Path) -> None:
    """Raise SettingsError when a round's answers were sampled or scored otherwise than the first round's."""
    if (changed := find_difference(answers, first)) is not None:
        raise SettingsError(
            f"{answers} was made with other {changed} than {first}: the rounds would learn from rewards that cannot be "
            f"compared. Put them back and remove {answers.parent}, or begin from the newest model in another folder."
        )


def _claim(given: argparse.Namespace) -> str:
    """Record the command in its folder; return the model of its first round, which a run may have left behind since.

    Raises: SettingsError when another command made the folder's rounds.
    """
    read = [path for path in (given.generate, given.train, Path(given.prompts)) if path.is_file()]
    files = [sha256(path.read_bytes()).hexdigest() for path in read]
    record = [given.model, given.prompts, given.samples, given.select, given.at_least, *files]
    path, model = given.folder / "iterate.json", model_of(given.model)
    if not path.exists():
        given.folder.mkdir(parents=True, exist_ok=True)
        first = str(Path(model).resolve()) if Path(model).is_dir() else model
        replace_file(path, json.dumps([*record, first]).encode())
    *known, first = json.loads(path.read_bytes())
    if known != record:
        raise SettingsError(
            f"{given.folder} holds rounds of another command, or of other settings or prompts: {path}. Give another "
            "folder, or the command and the files that began this one; only --rounds may change."
        )
    return str(first)


def _play(given: argparse.Namespace, folder: Path, number: int, model: str, selection: Selection) -> int:
    """Do what is missing of a round; returns the exit status of the part that failed, or 0."""
    answers, rows = folder / "answers.jsonl", folder / "rows.jsonl"
    if _is_trained(folder / "train"):
        return 0
    folder.mkdir(exist_ok=True)
    print(f"Round {number} of {given.rounds}: {model}")
    if not rows.exists():
        seed = load_settings(given.generate, []).run.seed + number - 1  # equal seeds would repeat samples
        options = ["--config", str(given.generate), "--samples", str(given.samples), "--run.seed", str(seed)]
        status = generate.main([model, given.prompts, str(answers), *options])
        if status or not generate.is_whole(answers):
            return status
        check_same(answers, given.folder / "round_1" / "answers.jsonl")
        counts = write_rows(answers, rows, selection)
        print(f"Round {number}: {describe(counts)}")
    own = {
        "run.name": "train",
        "run.dir": str(folder),
        "run.resume": "auto",
        "policy.model": model_of(model),
        "data.train": str(rows),
    }
    return run(["--config", str(given.train), *as_options(own)])


def _is_trained(folder: Path) -> bool:
    """Return whether a training run's last step has a checkpoint."""
    if not (folder / SETTINGS).is_file():
        return False
    checkpoint = newest_valid(folder / CHECKPOINTS)
    return checkpoint is not None and checkpoint.step >= load_saved_settings(folder / SETTINGS).run.max_steps


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
