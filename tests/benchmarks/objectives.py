"""What each objective does for the quick start's facts: scores of 512 held-out questions before and after.

    sluice start && python -m tests.benchmarks.objectives [--folder DIR] [--seed N]

All by the verbs a user has, on the running cluster. A model of random weights is fine-tuned on the quick start's
demonstrations; that model is the start of all others. The teacher is that of 45 steps of the quick start's RL. The
student has half as many parameters and learns the same demonstrations; then it is distilled in a third of these steps,
once on its own samples and once on the teacher's answers. Iterative DPO (with an NLL term) and rejection sampling
have three rounds of 1,024 prompts with 8 samples. KTO and the reward model learn from the answers of DPO's first
round, the reward model without a fifth of the pairs, on which it is measured, and from the start's answers to the
other 2,440 prompts. PPO sees its rewards alone, with a KL term to the start. A model that is in DIR is not trained
again. About half an hour on two cores, so not part of CI.

holds: the targets beside the figures are met.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from protocol.node.home import sluice_home
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.http_servers import module_serving

_CONFIGS = Path(__file__).parents[2] / "deploy" / "configs"
_QUICK_START = _CONFIGS / "quickstart.yaml"
_STUDENT = {"num_key_value_heads": 2, "intermediate_size": 64}
_NUM_PROMPTS, _NUM_SAMPLES, _NUM_ROUNDS, _RL_STEPS, _PPO_STEPS = 1024, 8, 3, 45, 30
_RISE, _ACCURACY, _OF_TEACHER = 0.2, 0.95, 0.9


class Bench:
    """Models in a folder, each trained once, and their scores."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.facts = folder.resolve(), sluice_home() / "quickstart"
        self._seed, self._scores = str(seed), self.folder / "scores.json"
        self.folder.mkdir(parents=True, exist_ok=True)

    def train(self, name: str, config: Path, model: Path, **settings: object) -> Path:
        """Return the model of a finished run. settings: `__` for the dot in their names."""
        trained = self.folder / name / "checkpoints" / "latest" / "model"
        if not (self.folder / name / "done").exists():
            given = {"run.name": name, "run.dir": self.folder, "run.seed": self._seed, "policy.model": model}
            given["run.resume"] = "auto"
            given |= {key.replace("__", "."): value for key, value in settings.items()}
            sluice("run", "--config", config, *(part for key, value in given.items() for part in (f"--{key}", value)))
            (self.folder / name / "done").touch()
        return trained

    def iterate(self, name: str, model: Path, select: str) -> list[Path]:
        """Return the models of the rounds, trained with FOLDER/NAME.yaml."""
        rounds, prompts = self.folder / f"{name}_rounds", self.prompts()
        files = ["--generate", _QUICK_START, "--train", self.folder / f"{name}.yaml"]
        numbers = ["--rounds", _NUM_ROUNDS, "--samples", _NUM_SAMPLES, "--at-least", 1]
        sluice("iterate", model, prompts, rounds, "--select", select, *numbers, *files)
        folders = [rounds / f"round_{number + 1}" / "train" for number in range(_NUM_ROUNDS)]
        return [folder / "checkpoints" / "latest" / "model" for folder in folders]

    def demonstrations(self) -> Path:
        """Return the file of the quick start's demonstrations with weights of 0 and 1: passages count as much."""
        path = self.folder / "demonstrations.jsonl"
        path.write_text((self.facts / "warmstart.jsonl").read_text().replace('"weight": 0.3', '"weight": 1.0'))
        return path

    def prompts(self) -> Path:
        """Return the file of the prompts that are answered for rows."""
        path = self.folder / "prompts.jsonl"
        path.write_text("".join((self.facts / "train.jsonl").read_text().splitlines(keepends=True)[:_NUM_PROMPTS]))
        return path

    def score(self, name: str, model: Path) -> float:
        """Return the mean reward at temperature 1."""
        scores = json.loads(self._scores.read_text()) if self._scores.exists() else {}
        if name not in scores:
            shutil.rmtree(self.folder / "eval" / name, ignore_errors=True)
            held_out, place = self.facts / "eval.jsonl", ["--name", name, "--dir", self.folder / "eval"]
            answer = sluice("eval", model, held_out, "--config", _QUICK_START, "--num-prompts", 512, *place, "--json")
            scores[name] = json.loads(answer.splitlines()[-1])["held_out"]
            self._scores.write_text(json.dumps(scores, indent=1))
        print(f"objectives: {name} score={scores[name]['reward']:.3f} greedy={scores[name]['greedy']:.3f}", flush=True)
        return float(scores[name]["reward"])

    def written(self, name: str, config: str, **sections: dict[str, object]) -> Path:
        """Return a settings file with changes."""
        given = yaml.safe_load((_CONFIGS / config).read_text())
        for section, changes in sections.items():
            given[section] = {**given.get(section, {}), **changes}
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(given))
        return path


def sluice(*arguments: object) -> str:
    """Return the output of a verb that has ended well."""
    command = [str(Path(sys.executable).with_name("sluice")), *map(str, arguments)]
    print("objectives:", " ".join(command[1:]), flush=True)
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def make_student(model: Path, out: Path, seed: int) -> Path:
    """Return the folder of a random model of half the parameters, with the same tokenizer."""
    shutil.copytree(model, out, dirs_exist_ok=True)
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model, **_STUDENT))
    made.save_pretrained(out)
    return out


def split_pairs(rows: Path) -> tuple[Path, Path]:
    """Return the files of four fifths of the pairs, and of the others, which are of other prompts."""
    lines = rows.read_text().splitlines(keepends=True)
    parts = rows.with_name("pairs.jsonl"), rows.with_name("held_out_pairs.jsonl")
    parts[0].write_text("".join(line for number, line in enumerate(lines) if number % 5))
    parts[1].write_text("".join(lines[::5]))
    return parts


def train_reward_model(bench: Bench, start: Path, rows: Path) -> tuple[float, Path]:
    """Return the accuracy on held-out pairs, and the model."""
    some, held_out = split_pairs(rows)
    prompts, answers, others, pairs = (
        bench.folder / f"{name}.jsonl" for name in ("others", "more", "more_rows", "all")
    )
    prompts.write_text("".join((bench.facts / "train.jsonl").read_text().splitlines(keepends=True)[_NUM_PROMPTS:]))
    sluice("generate", start, prompts, answers, "--samples", _NUM_SAMPLES, "--config", _QUICK_START)
    sluice("select", answers, others, "--select", "best_worst")
    pairs.write_text(some.read_text() + others.read_text())
    config = bench.written("reward_model", "reward_model.yaml", **_of_tiny_rows(3e-4, 16, 2))
    model = bench.train("rm", config, start, data__train=pairs, data__eval=held_out, eval__every_steps=20)
    lines = [json.loads(line) for line in (bench.folder / "rm" / "metrics.jsonl").read_text().splitlines()]
    return [line["eval/held_out/accuracy"] for line in lines if "eval/held_out/accuracy" in line][-1], model


def ppo_against(bench: Bench, start: Path, reward_model: Path) -> Path:
    """Return the model that PPO has trained with the rewards of a reward model alone."""
    with module_serving("rewards.serve", "--scorer", "reward_model", "--model", str(reward_model)) as (address, _):
        endpoint = json.dumps([{"name": "rm", "url": f"{address}/"}])
        return bench.train(
            "ppo", _QUICK_START, start, **of_rl(_PPO_STEPS), rewards__endpoints=endpoint,
            learner__recipe="ppo", learner__equal_groups="keep", critic__model=reward_model,
            kl__coefficient=0.1, reference__model=start,
        )  # fmt: skip


def of_rl(num_steps: int) -> dict[str, object]:
    """Return the changes of the quick start's settings for a run from a model that has had its warm start."""
    return {
        "policy__warm_start__data": "null",
        "run__max_steps": num_steps,
        "eval__before": "false",
        "eval__every_steps": 1000,
    }


def distil(bench: Bench, student: Path, teacher: Path) -> Path:
    """Return the student after a third of the teacher's steps, in which rewards are recorded alone."""
    with module_serving("rewards.serve", "--scorer", "exact_match") as (address, _):
        endpoint = json.dumps([{"name": "em", "url": f"{address}/", "weight": 0}])
        return bench.train(
            "student_distilled", _QUICK_START, student, **of_rl(_RL_STEPS // 3), rewards__endpoints=endpoint,
            reference__model=teacher, kl__place="advantage", kl__form="k1", kl__coefficient=1,
            learner__equal_groups="keep", report__samples_per_step=256,
        )  # fmt: skip


def distil_on_rows(bench: Bench, student: Path, teacher: Path) -> Path:
    """Return the student that has learnt the teacher's distributions on its answers, in a third of the teacher's steps.

    A step has 512 rows, twice the samples of a step of RL, and is one update.
    """
    answers, rows = bench.folder / "taught.jsonl", bench.folder / "teacher_rows.jsonl"
    sluice("generate", teacher, bench.prompts(), answers, "--samples", _NUM_SAMPLES, "--config", _QUICK_START)
    sluice("select", answers, rows, "--select", "all")
    config = bench.written("distill", "sft.yaml", **_of_tiny_rows(2e-3, 512, 1))
    given = {"objective": "distill", "reference__model": teacher, "data__train": rows}
    given |= {"run__max_steps": _RL_STEPS // 3, "run__max_epochs": "null", "learner__lr_schedule": "linear"}
    return bench.train("student_of_rows", config, student, **given)


def _of_tiny_rows(lr: float, rows_per_step: int, epochs: int) -> dict[str, dict[str, object]]:
    """Return the changes of a settings file for the tiny model and some hundred rows."""
    return {
        "policy": {"dtype": "float32"},
        "run": {"max_epochs": epochs},
        "learner": {"lr": lr, "groups_per_step": rows_per_step, "checkpoint_every_steps": 0, "lr_warmup_steps": 3},
    }


def main() -> int:
    arguments = options(__doc__ or "", folder="runs/objectives")
    bench = Bench(Path(arguments.folder), arguments.seed)
    base, demonstrations = bench.facts / "model", bench.demonstrations()
    sft = bench.written("sft", "sft.yaml", **_of_tiny_rows(2e-3, 32, 1), data={"shuffle": False})
    figures = {"before": bench.score("before", base)}

    start = bench.train("start", sft, base, data__train=demonstrations)
    figures["start"] = bench.score("start", start)
    teacher = bench.train("teacher", _QUICK_START, start, **of_rl(_RL_STEPS))
    figures["teacher"] = bench.score("teacher", teacher)

    bench.written("dpo", "dpo.yaml", **_of_tiny_rows(3e-4, 32, 2), preference={"nll_coefficient": 1.0})
    bench.written("rejection", "sft.yaml", **_of_tiny_rows(1e-3, 16, 4))
    kto = bench.written("kto", "kto.yaml", **_of_tiny_rows(3e-4, 64, 2))
    for number, model in enumerate(bench.iterate("dpo", start, "best_worst"), 1):
        figures[f"dpo_{number}"] = bench.score(f"dpo_{number}", model)
    first = bench.folder / "dpo_rounds" / "round_1"
    sluice("select", first / "answers.jsonl", bench.folder / "labelled.jsonl", "--select", "best_worst", "--for", "kto")
    figures["kto"] = bench.score("kto", bench.train("kto", kto, start, data__train=bench.folder / "labelled.jsonl"))
    figures["rm_accuracy"], reward_model = train_reward_model(bench, start, first / "rows.jsonl")

    figures["ppo"] = bench.score("ppo", ppo_against(bench, start, reward_model))
    for number, model in enumerate(bench.iterate("rejection", start, "best"), 1):
        figures[f"rejection_{number}"] = bench.score(f"rejection_{number}", model)

    student = make_student(base, bench.folder / "student", arguments.seed)
    student = bench.train("student_start", sft, student, data__train=demonstrations)
    figures["student_start"] = bench.score("student_start", student)
    figures["student_distilled"] = bench.score("student_distilled", distil(bench, student, teacher))
    figures["student_of_rows"] = bench.score("student_of_rows", distil_on_rows(bench, student, teacher))

    risen = ("dpo_1", "dpo_3", "rejection_3", "kto", "ppo")
    met = {name: figures[name] - figures["start"] >= _RISE for name in risen}
    met["sft"] = figures["start"] > figures["before"]
    met["rm_accuracy"] = figures["rm_accuracy"] >= _ACCURACY
    met["student_distilled"] = figures["student_distilled"] >= _OF_TEACHER * figures["teacher"]
    missed = ",".join(name for name, is_met in met.items() if not is_met) or "none"
    return conclude("objectives", missed == "none", **figures, missed=missed)


if __name__ == "__main__":
    sys.exit(main())
