"""`sluice migrate` on TRL's commands, Python files and files of values."""

import re
from pathlib import Path

import pytest
import yaml

from deploy.command import run_verb
from protocol.settings.loader import load_settings

GRPO = """
accelerate launch --config_file configs/deepspeed_zero3.yaml --num_processes 4 trl/scripts/grpo.py \\
    --model_name_or_path /models/small --dataset_name trl-lib/tldr --reward_funcs accuracy_reward my.rewards.short \\
    --reward_weights 1.0 0.5 --num_generations 4 --per_device_train_batch_size 2 --gradient_accumulation_steps 4 \\
    --max_completion_length 128 --max_prompt_length 256 --beta 0.04 --loss_type dr_grpo --use_peft --lora_r 8 \\
    --max_steps 20 --warmup_steps 0.1 --chat_template_kwargs '{"enable_thinking": false}'
"""
PYTHON = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

steps = 5
dtype = {"dtype": torch.float32}


def short(completions, **kwargs):
    return [-len(text) for text in completions]


def main():
    dataset, _ = load_dataset("trl-lib/tldr", split=["train[:10%]", "test"])
    dataset = dataset.map(str)
    trainer = GRPOTrainer(
        model="/models/small",
        reward_funcs=[short],
        args=GRPOConfig(max_steps=steps, num_generations=4, epsilon_high=0.28, seed=secret(),
            model_init_kwargs=dtype, bf16=False),
        train_dataset=dataset,
    )
    trainer.train()
"""


def _migrate(folder: Path, text: str, name: str = "train.sh", *options: str) -> tuple[int, str]:
    """Return the exit status and the settings file."""
    (folder / name).write_text(text, encoding="utf-8")
    status = run_verb(["migrate", str(folder / name), "--output", str(folder / "new.yaml"), *options])
    return status, (folder / "new.yaml").read_text(encoding="utf-8")


def test_attributes_set_after_the_configuration_count(tmp_path: Path) -> None:
    later = "    args = GRPOConfig(beta=0.5, num_generations=4)\n    args.beta = 0.1\n"
    later += "    if steps:\n        args.epsilon = 0.3\n"
    text = PYTHON.replace("def main():\n", f"def main():\n{later}").replace("GRPOConfig(max_steps=steps,", "dict(")
    status, written = _migrate(tmp_path, text, "train.py")
    assert (status, load_settings(tmp_path / "new.yaml", []).kl.coefficient) == (1, 0.1)
    assert "epsilon ${0.3}: The script does not say its value" in written


@pytest.mark.parametrize(("name", "text"), [("a.yaml", "a: [1,"), ("a.yaml", "a: 1\n---\nb: 2"), ("a.json", "{")])
def test_file_that_is_not_one_document_is_refused(
    tmp_path: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert run_verb(["migrate", str(tmp_path / name), "--trainer", "grpo"]) == 2
    assert f"{name} cannot be read: " in capsys.readouterr().err


def test_warm_up_of_steps_counts_before_its_share(tmp_path: Path) -> None:
    values = {
        "model_name_or_path": "/models/small",
        "dataset_name": "rows.jsonl",
        "warmup_ratio": 0.1,
        "warmup_steps": 8,
    }
    assert _migrate(tmp_path, yaml.safe_dump(values), "mine.yaml", "--trainer", "grpo")[0] == 0
    learner = load_settings(tmp_path / "new.yaml", []).learner
    assert (learner.lr_warmup_steps, learner.lr_warmup_ratio) == (8, 0)


def test_step_of_the_asynchronous_trainer_is_one_push_to_its_own_servers(tmp_path: Path) -> None:
    sizes = "per_device_train_batch_size=4, gradient_accumulation_steps=8, weight_sync_steps=2, max_steps=100"
    text = PYTHON.replace("GRPOConfig(max_steps=steps,", f"AsyncGRPOConfig({sizes},").replace("seed=secret(),", "")
    _migrate(tmp_path, text, "train.py")
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (settings.learner.groups_per_step, settings.learner.num_mini_batches, settings.run.max_steps) == (16, 2, 50)
    assert (settings.learner.max_staleness, settings.placement.devices) == (4, "split")
    assert (settings.policy.old_logprobs, settings.rollout.max_response_tokens) == ("behaviour", 2048)


def test_command_gives_settings_that_a_run_accepts(tmp_path: Path) -> None:
    status, text = _migrate(tmp_path, GRPO)
    settings = load_settings(tmp_path / "new.yaml", [])
    assert status == 0
    assert (settings.policy.model, settings.data.train, settings.policy.lora.rank) == (
        "/models/small",
        "hf:trl-lib/tldr:train",
        8,
    )
    assert [(endpoint.name, endpoint.weight) for endpoint in settings.rewards.endpoints] == [
        ("reward", 1.0),
        ("reward1", 0.5),
    ]
    assert "#   sluice serve-reward --function trl.rewards:accuracy_reward --port 9001\n" in text
    assert "#   sluice serve-reward --function my.rewards:short --port 9002\n" in text
    assert (settings.learner.zero_stage, settings.learner.num_ranks, settings.learner.betas) == (3, 4, (0.9, 0.999))
    assert (settings.loss.aggregate, settings.kl.coefficient, settings.learner.dual_clip) == (
        "seq_sum_norm",
        0.04,
        None,
    )
    assert (settings.learner.lr_warmup_ratio, settings.rollout.chat_template_kwargs) == (
        0.1,
        {"enable_thinking": False},
    )


def test_sizes_that_count_samples_become_prompts(tmp_path: Path) -> None:
    _, text = _migrate(tmp_path, f"{GRPO.rstrip()} --steps_per_generation 8 --save_steps 50\n")
    assert "  groups_per_step: 16  # per_device_train_batch_size 2; 16 prompts, 64 samples\n" in text
    assert "  num_mini_batches: 2  # gradient_accumulation_steps 4; 32 samples an update; updates a step: 2," in text
    assert "  max_steps: 10  # max_steps 20; 2 updates a step\n" in text
    assert "  checkpoint_every_steps: 25  # save_steps 50; 2 updates a step\n" in text


def test_ranks_are_read_from_the_launchers_file(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    form = {"num_processes": 16, "num_machines": 2, "deepspeed_config": {"zero_stage": 3}}
    (tmp_path / "configs" / "deepspeed_zero3.yaml").write_text(yaml.safe_dump(form), encoding="utf-8")
    _migrate(tmp_path, GRPO.replace("--num_processes 4", ""))
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (settings.learner.num_ranks, settings.placement.ranks.nodes, settings.rollout.num_servers) == (16, 2, 16)


def test_python_file_is_read_and_never_run(tmp_path: Path) -> None:
    status, text = _migrate(tmp_path, PYTHON, "train.py")
    written = yaml.safe_load(text)
    assert status == 1
    assert "#   seed ${secret()}: The script does not say its value: set run.seed\n" in text
    assert "sluice serve-reward --function train.py:short --port 9001" in text
    assert written["data"]["train"] == "hf:trl-lib/tldr:train"
    assert "#   dataset_train_split train[:10%]: The whole split is taken" in text
    assert (written["run"]["max_steps"], written["rollout"]["group_size"]) == (5, 4)
    assert (written["learner"]["clip_high"], written["learner"]["lr"]) == (0.28, 1e-6)
    assert written["policy"]["dtype"] == "float32"
    assert _migrate(tmp_path, PYTHON, "train.py") == (1, text)
    _, text = _migrate(tmp_path, "DPOConfig(beta=0.2)\n", "train.py")
    assert "#   policy.model: The command does not say it: set policy.model\n#   data.train: The command" in text


@pytest.mark.parametrize(
    ("trainer", "values", "objective", "loss"),
    [
        ("sft", {}, "sft", None),
        ("dpo", {"loss_type": ["ipo"]}, "dpo", "ipo"),
        ("orpo", {}, "dpo", "orpo"),
        ("cpo", {"loss_type": "simpo", "simpo_gamma": 1.0}, "dpo", "simpo"),
        ("kto", {"desirable_weight": 1.5}, "kto", None),
        ("reward", {"center_rewards_coefficient": 0.01}, "reward_model", None),
    ],
)
def test_file_of_values_trains_on_rows(
    tmp_path: Path, trainer: str, values: dict[str, object], objective: str, loss: str | None
) -> None:
    given = {"model_name_or_path": "/models/small", "dataset_name": "rows.jsonl", "max_length": 128} | values
    status, text = _migrate(tmp_path, yaml.safe_dump(given), "values.yaml", "--trainer", trainer)
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (status, settings.objective, settings.data.train) == (0, objective, "rows.jsonl")
    assert settings.learner.groups_per_step == 8
    assert "#   max_length 128: Rows are trained whole; there a longer one is cut" in text
    assert yaml.safe_load(text).get("preference", {}).get("loss") == loss
    command = f"trl {trainer} --config values.yaml\n"
    if trainer not in ("orpo", "cpo"):
        assert _migrate(tmp_path, command)[1].splitlines()[1:] == text.splitlines()[1:]


def test_file_of_values_needs_its_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "values.yaml").write_text("learning_rate: 1.0e-5\n", encoding="utf-8")
    assert run_verb(["migrate", str(tmp_path / "values.yaml")]) == 2
    assert "name the trainer: --trainer grpo," in capsys.readouterr().err.replace("\n", " ")


def test_text_that_is_not_python_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("trainer = GRPOTrainer(\n", encoding="utf-8")
    assert run_verb(["migrate", str(tmp_path / "train.py")]) == 2
    assert capsys.readouterr().err.startswith("migrate: train.py, line 1, is not Python:")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--entropy_coef 0.1", "entropy_coef 0.1: No loss has an entropy term"),
        ("--loss_type sapo", "loss_type sapo: learner.loss has no such name"),
        ("--zebra 1", "Unknown to sluice migrate:\n#   zebra 1"),
        ("--config gone.yaml", "--config gone.yaml: The file is not beside the script"),
        ("; accelerate launch grpo_mine.py --beta 0.1", "grpo_mine: One command is converted"),
    ],
)
def test_what_is_lost_is_named(tmp_path: Path, options: str, sentence: str) -> None:
    status, text = _migrate(tmp_path, GRPO.replace("--loss_type dr_grpo", "").rstrip() + f" {options}\n")
    assert status == 1
    assert sentence in text


def test_adapters_have_the_defaults_of_their_source(tmp_path: Path) -> None:
    _, text = _migrate(tmp_path, GRPO.replace("--lora_r 8", ""))
    lora = load_settings(tmp_path / "new.yaml", []).policy.lora
    assert (lora.rank, lora.alpha, lora.targets) == (16, 32, ("q_proj", "v_proj"))  # of TRL's command line
    assert "#   TRL's default of lora_dropout, 0.05: Adapters have no dropout\n" in text
    adapter = "        peft_config=LoraConfig(target_modules='all-linear'),\n        reward_funcs"
    _, text = _migrate(tmp_path, PYTHON.replace("        reward_funcs", adapter), "train.py")
    written = yaml.safe_load(text)["policy"]["lora"]
    assert (written, "no dropout" in text) == ({"rank": 8, "alpha": 8, "targets": []}, False)  # of PEFT


def test_adapters_without_effect_are_listed(tmp_path: Path) -> None:
    options = "--model_name_or_path /models/small --dataset_name trl-lib/pairs --use_peft --lora_dropout 0.1"
    _, text = _migrate(tmp_path, f"trl reward {options}\n")
    assert "#   use_peft; TRL's default of lora_r: policy.lora.rank has no effect: objective = reward_model" in text
    _, text = _migrate(tmp_path, f"trl sft {options.replace('--use_peft', '')}\n")
    assert "#   lora_dropout 0.1: There is no adapter\n" in text
    assert "#   TRL's default of assistant_only_loss, False: Answers alone are trained; there every token of" in text


def test_command_without_a_reward_says_what_to_start(tmp_path: Path) -> None:
    sentence = "#   serve a reward: the command does not say one (docs/do/rewards.md)\n"
    assert sentence not in _migrate(tmp_path, GRPO)[1]
    assert sentence in _migrate(tmp_path, GRPO.replace("--reward_funcs accuracy_reward my.rewards.short", ""))[1]


def _values(folder: Path, trainer: str, **values: object) -> tuple[int, str]:
    """Migrate a file of a trainer's values; return the exit status and the settings file."""
    given = {"model_name_or_path": "/models/small", "dataset_name": "rows.jsonl"} | values
    return _migrate(folder, yaml.safe_dump(given), "values.yaml", "--trainer", trainer)


@pytest.mark.parametrize("value", ["1", "yes", "True", "t"])
def test_truth_values_are_those_of_transformers_parser(tmp_path: Path, value: str) -> None:
    _migrate(tmp_path, GRPO.replace("--use_peft", f"--use_peft {value}"))
    assert load_settings(tmp_path / "new.yaml", []).policy.lora.rank == 8


@pytest.mark.parametrize("option", ["--no_gradient_checkpointing", "--no-gradient-checkpointing"])
def test_negated_and_dashed_options_are_read(tmp_path: Path, option: str) -> None:
    assert _migrate(tmp_path, GRPO.replace("--max_steps", f"{option} --max-steps"))[0] == 0
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (settings.learner.gradient_checkpointing, settings.run.max_steps) == (False, 20)


def test_maps_of_a_python_file_keep_the_kinds_of_their_values(tmp_path: Path) -> None:
    maps = "chat_template_kwargs={'enable_thinking': thinks}, lr_scheduler_kwargs={'min_lr': 1e-7}, learning_rate=1e-6,"
    text = PYTHON.replace("steps = 5", "steps = 5\nthinks = False").replace("seed=secret(),", maps)
    _migrate(tmp_path, text, "train.py")
    settings = load_settings(tmp_path / "new.yaml", [])
    assert settings.rollout.chat_template_kwargs == {"enable_thinking": False}
    assert settings.learner.min_lr_ratio == pytest.approx(0.1)


@pytest.mark.parametrize(("schedule", "ratio"), [("constant", 0), ("constant_with_warmup", 0.1), ("linear", 0.1)])
def test_the_constant_schedule_has_no_warm_up(tmp_path: Path, schedule: str, ratio: float) -> None:
    status, text = _values(tmp_path, "sft", lr_scheduler_type=schedule, warmup_ratio=0.1)
    assert (status, load_settings(tmp_path / "new.yaml", []).learner.lr_warmup_ratio) == (0, ratio)
    assert ("#   warmup_ratio 0.1: The schedule constant has no warm-up there\n" in text) == (ratio == 0)


@pytest.mark.parametrize(("loss", "status"), [({}, 1), ({"loss_type": "hinge"}, 1), ({"loss_type": "simpo"}, 0)])
def test_cpo_has_no_reference_and_trains_chosen_answers_too(
    tmp_path: Path, loss: dict[str, object], status: int
) -> None:
    given, text = _values(tmp_path, "cpo", **loss)
    assert (given, "CPO compares logprobs without a reference" in text) == (status, status == 1)
    assert load_settings(tmp_path / "new.yaml", []).preference.nll_coefficient == 1.0
    _values(tmp_path, "cpo", loss_type="simpo", cpo_alpha=0)
    assert load_settings(tmp_path / "new.yaml", []).preference.nll_coefficient == 0


def test_defaults_that_differ_are_written_or_listed(tmp_path: Path) -> None:
    _, text = _values(tmp_path, "grpo", eval_strategy="steps", eval_steps=5, learning_rate="${LR}")
    assert load_settings(tmp_path / "new.yaml", []).eval.samples == 8
    assert "  lr: 1.0e-06  # TRL's default of learning_rate\n" in text
    assert "#   learning_rate ${LR}: The script does not say its value: set learner.lr\n" in text
    assert "#   TRL's default of router_aux_loss_coef, 0.001: Set learner.router_aux_loss for a mixture" in text
    assert "#   TRL's default of save_total_limit, all: 2 are kept here: learner.keep_checkpoints takes" in text


def test_a_reward_model_beside_functions_is_an_endpoint(tmp_path: Path) -> None:
    words = "--reward_model_name_or_path judge --reward_weights 2 1 0.5 --reward_funcs"
    _, text = _migrate(tmp_path, GRPO.replace("--reward_weights 1.0 0.5", "").replace("--reward_funcs", words))
    assert [each.weight for each in load_settings(tmp_path / "new.yaml", []).rewards.endpoints] == [2, 1, 0.5]
    assert "#   sluice serve-reward --scorer reward_model --model judge --port 9001\n" in text
    _, text = _migrate(tmp_path, GRPO.replace("accuracy_reward my.rewards.short", "org/judge"))
    assert "#   sluice start --reward-scorer reward_model:org/judge\n" in text
    assert "endpoints:" not in text


def test_rewards_of_a_python_file_keep_their_names_and_weights(tmp_path: Path) -> None:
    head = "from my_lib.rewards import right as correct\nfrom trl.rewards import accuracy_reward as accurate\n"
    head += "cosine = get_cosine_scaled_reward(max_len=100)\n"
    made = "get_soft_overlong_punishment(max_completion_len=64, soft_punish_cache=8)"
    rewards = f"[accurate, {made}, correct, cosine, repeats(3, -1.0)]"
    file = head + PYTHON.replace("[short]", rewards).replace("seed=", "reward_weights=[1, 2, 3, 4, 5], seed=")
    status, text = _migrate(tmp_path, file, "a.py")
    names = re.findall("--function (.*) --port", text)
    assert names == ["trl.rewards:accuracy_reward", "my_lib.rewards:right", "a.py:cosine", "FILE.py:NAME"]
    assert [each["weight"] for each in yaml.safe_load(text)["rewards"]["endpoints"]] == [1, 3, 4, 5]
    assert "#   reward_funcs get_soft_overlong_punishment: A service gets no tokens" in text
    assert "#   reward_funcs repeats: Give its result a name in a file" in text
    assert "move functions out of a file that trains" in text
    assert status == 1


def test_do_eval_takes_no_evaluation_away(tmp_path: Path) -> None:
    _migrate(tmp_path, GRPO.rstrip() + " --eval_strategy steps --eval_steps 5 --do_eval\n")
    assert load_settings(tmp_path / "new.yaml", []).eval.every_steps == 5


def test_values_without_a_keyword_are_read(tmp_path: Path) -> None:
    text = PYTHON.replace('model="/models/small"', '"/models/small"').replace("GRPOConfig(", 'GRPOConfig("out", ')
    _migrate(tmp_path, text, "train.py")
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (settings.policy.model, settings.run.dir) == ("/models/small", "out")


def test_values_of_variables_are_not_written(tmp_path: Path) -> None:
    status, text = _values(tmp_path, "grpo", env={"WANDB_API_KEY": "s3cret", "WANDB_PROJECT": "mine"})
    assert (status, "s3cret" in text) == (1, False)
    assert "#   env WANDB_API_KEY,WANDB_PROJECT: Export these variables before the run\n" in text


@pytest.mark.parametrize(
    "change", ["if big:\n    steps = 500", "steps *= 2", "steps = steps * 2", "for steps in (1, 2):\n    pass"]
)
def test_a_name_with_several_values_is_not_said(tmp_path: Path, change: str) -> None:
    status, text = _migrate(tmp_path, PYTHON.replace("steps = 5", f"steps = 5\n{change}"), "train.py")
    assert (status, "max_steps:" in text) == (1, False)
    assert "#   max_steps ${steps}: The script does not say its value: set run.max_steps\n" in text
    text = PYTHON.replace("dtype = {", "dtype = {}\ndtype.update({").replace("float32}", "float32})")
    _, text = _migrate(tmp_path, text, "train.py")
    assert "#   model_init_kwargs ${dtype}: The script does not say its value" in text


def test_the_part_and_the_changes_of_a_data_set_are_said(tmp_path: Path) -> None:
    load = 'load_dataset("trl-lib/tldr", split=["train[:10%]", "test"])'
    assert load in PYTHON
    text = PYTHON.replace(f"dataset, _ = {load}", 'dataset = load_dataset("trl-lib/tldr")')
    text = text.replace("train_dataset=dataset", 'train_dataset=dataset["train_prefs"]')
    _, written = _migrate(tmp_path, text, "train.py")
    assert load_settings(tmp_path / "new.yaml", []).data.train == "hf:trl-lib/tldr:train_prefs"
    assert "#   dataset_changes map: The program changes its rows by these calls: write them into a file" in written


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"learning_rate": "fast"}, "an option of values.yaml takes numbers: could not convert string to float"),
        ({"lr_scheduler_kwargs": {"min_lr": "low"}}, "could not convert string to float: 'low'"),
        ({"save_total_limit": "all"}, "learner.keep_checkpoints = 'all' is wrong: expected a whole number"),
    ],
)
def test_text_in_place_of_a_number_is_a_sentence(
    tmp_path: Path, values: dict[str, object], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"model_name_or_path": "/models/small", "dataset_name": "rows.jsonl"} | values
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
    assert run_verb(["migrate", str(tmp_path / "values.yaml"), "--trainer", "sft"]) in (1, 2)
    assert sentence in capsys.readouterr().err.replace("\n", " ")


def test_a_program_of_ones_own_may_set_more(tmp_path: Path) -> None:
    status, text = _migrate(tmp_path, GRPO.replace("trl/scripts/grpo.py", "mine/grpo_agent.py"))
    assert (status, "#   grpo_agent.py: What the program itself sets is not read: compare it\n" in text) == (1, True)
