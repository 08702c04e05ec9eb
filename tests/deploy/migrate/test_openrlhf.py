"""`sluice migrate` on OpenRLHF's RL commands: every option is a line with its reason, or in a list."""

from pathlib import Path

import pytest
import yaml

from deploy.command import run_verb
from protocol.settings.loader import load_settings

DOTTED = """
#!/bin/bash
MODEL=/models/small   # the policy
GROUP=${GROUP:-4}
OPTIMIZER=(
   --actor.adam.lr 5e-7
   # --critic.adam.lr 1
)
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray \\
   --actor.model_name_or_path $MODEL \\
   --data.prompt_dataset rows.jsonl --data.label_key answer \\
   --rollout.batch_size $((8 * 4)) --rollout.n_samples_per_prompt $GROUP --train.batch_size 64 \\
   --algo.advantage.estimator group_norm --actor.eps_clip_low_high 0.2 0.27 \\
   --algo.kl.init_coef 0 --ds.packing_samples --actor.num_gpus_per_node 2 \\
   "${OPTIMIZER[@]}" 2>&1 | tee log
"""
FLAT = """
deepspeed --module openrlhf.cli.train_ppo_ray --pretrain /models/small --prompt_data rows.jsonl --label_key answer \\
   --rollout_batch_size 32 --n_samples_per_prompt 4 --train_batch_size 64 --advantage_estimator group_norm \\
   --eps_clip_low_high 0.2 0.27 --init_kl_coef 0 --packing_samples --actor_num_gpus_per_node 2 \\
   --actor_learning_rate 5e-7
"""


def _migrate(folder: Path, script: str, *options: str) -> tuple[int, str]:
    """Return the exit status and the settings file."""
    (folder / "train.sh").write_text(script, encoding="utf-8")
    status = run_verb(["migrate", str(folder / "train.sh"), "--output", str(folder / "new.yaml"), *options])
    return status, (folder / "new.yaml").read_text(encoding="utf-8")


def test_both_spellings_give_settings_that_a_run_accepts(tmp_path: Path) -> None:
    written = [_migrate(tmp_path, script) for script in (DOTTED, FLAT)]
    assert yaml.safe_load(written[0][1]) == yaml.safe_load(written[1][1])
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (settings.policy.model, settings.data.label_key) == ("/models/small", "answer")
    assert (settings.learner.advantage, settings.learner.clip_high, settings.learner.lr) == ("grpo", 0.27, 5e-7)
    assert (settings.learner.dual_clip, settings.learner.lr_warmup_ratio) == (None, 0.03)  # OpenRLHF's defaults
    assert [status for status, _ in written] == [0, 0]
    assert ["ds.packing_samples: Samples" in text for _, text in written] == [True, False]
    assert ["#   packing_samples: Samples" in text for _, text in written] == [False, True]


def test_engines_of_asynchronous_training_have_their_own_gpus(tmp_path: Path) -> None:
    queue = "--train.async_enable --train.async_queue_size 2 --train.colocate_all --vllm.num_engines 2"
    _migrate(tmp_path, DOTTED.replace("--ds.packing_samples", f"--ds.packing_samples {queue}"))
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (settings.placement.devices, settings.learner.max_staleness) == ("split", 2)


def test_ratio_of_gspo_is_to_the_engine_when_it_is_corrected(tmp_path: Path) -> None:
    words = "--actor.policy_loss_type gspo --algo.advantage.is_correction_enable --critic.freezing_steps -1"
    assert _migrate(tmp_path, DOTTED.replace("--ds.packing_samples", words))[0] == 0
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (settings.learner.loss, settings.learner.correction, settings.policy.old_logprobs) == (
        "gspo",
        "none",
        "behaviour",
    )
    assert settings.loss.aggregate == "seq_mean_token_mean"


@pytest.mark.parametrize("size", ["0", "nan", "inf", "many"])
def test_a_size_that_is_no_positive_number_is_written_or_listed(tmp_path: Path, size: str) -> None:
    status, text = _migrate(tmp_path, DOTTED.replace("actor.num_gpus_per_node 2", f"actor.num_gpus_per_node {size}"))
    assert status == 1
    assert "learner.num_ranks = 0 is wrong" in text or "It is not a number" in text


def test_text_in_place_of_a_bound_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.sh").write_text(DOTTED.replace("0.2 0.27", "0.2 wide"), encoding="utf-8")
    assert run_verb(["migrate", str(tmp_path / "train.sh")]) == 2
    assert "could not convert string to float: 'wide'" in capsys.readouterr().err


def test_sizes_are_converted_and_the_line_says_how(tmp_path: Path) -> None:
    _, text = _migrate(tmp_path, DOTTED)
    assert "  groups_per_step: 32  # rollout.batch_size 32; 32 prompts, 128 samples\n" in text
    assert "  num_mini_batches: 2  # train.batch_size 64; 64 samples an update; updates a step: 2, passes: 1\n" in text


def test_unknown_options_are_named_and_fail_until_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = DOTTED.replace("--ds.packing_samples", "--ds.ring_attn_size 2 --ds.zebra 3")
    status, text = _migrate(tmp_path, script)
    assert status == 1
    assert "# Unknown to sluice migrate:\n#   ds.zebra 3\n" in text
    assert "#   ds.ring_attn_size 2: A sequence stays on one rank\n" in text
    assert "Not converted: ds.ring_attn_size 2, ds.zebra 3." in capsys.readouterr().err
    assert _migrate(tmp_path, script, "--accept", "ds.zebra", "ds.ring_attn_size") == (0, text)


def test_settings_without_effect_here_are_listed_with_the_reason(tmp_path: Path) -> None:
    _, text = _migrate(tmp_path, DOTTED.replace("--ds.packing_samples", "--critic.adam.lr 2e-6"))
    assert "critic" not in yaml.safe_load(text)
    assert "#   critic.adam.lr 2e-6: critic.lr has no effect: learner.advantage has no critic\n" in text


def test_key_of_weights_and_biases_is_not_written(tmp_path: Path) -> None:
    _, text = _migrate(tmp_path, DOTTED.replace("--ds.packing_samples", "--logger.wandb.key s3cret"))
    assert "s3cret" not in text
    assert yaml.safe_load(text)["report"] == {"wandb_project": "openrlhf_train_ppo"}


def test_value_that_the_script_does_not_say_is_missing(tmp_path: Path) -> None:
    _, text = _migrate(tmp_path, DOTTED.replace("MODEL=/models/small", "MODEL=$(find / -name small)"))
    assert "The script does not say its value: set policy.model" in text


def test_file_without_a_command_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.sh").write_text("echo\n", encoding="utf-8")
    assert run_verb(["migrate", str(tmp_path / "train.sh")]) == 2
    assert capsys.readouterr().err.startswith(f"migrate: {tmp_path / 'train.sh'} has no command that is known here.")


def test_value_that_only_a_shell_knows_gives_no_endpoint(tmp_path: Path) -> None:
    words = '--reward.remote_url "$(cd .. && pwd)/reward.py" --logger.tensorboard_dir "$(pwd)/../$X"'
    script = DOTTED.replace("--ds.packing_samples", words)
    status, text = _migrate(tmp_path, script)
    assert status == 1
    assert "endpoints:" not in text
    assert "Still wrong" not in text
    assert "The script does not say its value: set rewards.endpoints" in text
    assert "  tensorboard: true  # logger.tensorboard_dir ./../$X; in the run folder\n" in text


@pytest.mark.parametrize(
    "options",
    [
        "--my_token s3cret",
        "--logger.wandb.key first --logger.wandb.key s3cret",
        "--reward.remote_url http://me:s3cret@host/score",
        "--zebra hf_s3cret0123456789abcdef",
        "--actor.model_name_or_path https://me:s3cret@host/model --actor.model_name_or_path /models/small",
    ],
)
def test_secrets_are_not_written(tmp_path: Path, options: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = _migrate(tmp_path, DOTTED.replace("--ds.packing_samples", options))
    assert "s3cret" not in text + capsys.readouterr().err
    assert "***" in text


def test_second_command_of_a_file_is_named(tmp_path: Path) -> None:
    second = "python -m openrlhf.cli.train_sft --pretrain /models/small\n"
    assert _migrate(tmp_path, DOTTED + second)[0] == 1
    assert "#   train_ppo_ray: One command is converted" in _migrate(tmp_path, second + DOTTED)[1]


def test_command_on_rows_has_the_defaults_of_its_trainer(tmp_path: Path) -> None:
    options = (
        "--model.model_name_or_path /models/small --data.dataset pairs.jsonl --train.batch_size 64 --model.ipo_enable"
    )
    status, text = _migrate(tmp_path, f"deepspeed --num_gpus 4 --module openrlhf.cli.train_dpo {options}\n")
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (status, settings.objective, settings.data.train, settings.preference.loss) == (
        0,
        "dpo",
        "pairs.jsonl",
        "ipo",
    )
    assert (settings.learner.num_ranks, settings.learner.groups_per_step, settings.learner.lr) == (4, 64, 1e-5)
    assert settings.run.max_epochs == 1
    assert "#   OpenRLHF's default of data.max_len, 512: Rows are trained whole" in text


def test_variable_that_a_branch_sets_is_not_said(tmp_path: Path) -> None:
    script = DOTTED.replace("GROUP=${GROUP:-4}", 'if [ -n "$BIG" ]; then\n  GROUP=16\nelse\n  GROUP=4\nfi')
    status, text = _migrate(tmp_path, script)
    assert status == 1
    assert "rollout.n_samples_per_prompt ${GROUP}: The script does not say its value" in text


def test_limits_of_openrlhf_are_kept_or_said(tmp_path: Path) -> None:
    filters = "--algo.dynamic_filtering_enable --ds.lora.rank 64"
    _, text = _migrate(tmp_path, DOTTED.replace("--ds.packing_samples", filters))
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (settings.filter.max_replaced, settings.policy.lora.alpha) == (0, 16)
    assert "  overlong: skip  # longer prompts are skipped; there they leave less for the answer\n" in text
    assert "clips rewards; there their distances from the group's mean, in deviations\n" in text
    assert "#   serve a reward: the command does not say one" in text
    _, text = _migrate(tmp_path, DOTTED.replace("--ds.packing_samples", "--rollout.max_new_tokens 256"))
    assert (load_settings(tmp_path / "new.yaml", []).rollout.truncate_left, "overlong" in text) == (True, False)


def test_template_of_rows_is_listed_as_missing(tmp_path: Path) -> None:
    options = "--model.model_name_or_path /models/small --data.dataset rows.jsonl"
    status, text = _migrate(
        tmp_path, f"deepspeed --module openrlhf.cli.train_sft {options} --data.input_template 'Q: {{}}'\n"
    )
    assert (status, "#   data.input_template Q: {}: Write it into the rows' prompts\n" in text) == (1, True)
    held_out = "--eval.dataset org/pairs --eval.steps 5"
    _migrate(tmp_path, f"deepspeed --module openrlhf.cli.train_dpo {options} {held_out}\n")
    assert load_settings(tmp_path / "new.yaml", []).data.eval == "hf:org/pairs:test"


@pytest.mark.parametrize(("option", "weight"), [("", 1.5), ("--kd_coef 0.8", 0.25), ("--kd_coef 0", None)])
def test_distillation_keeps_its_divergence_and_weights(tmp_path: Path, option: str, weight: float | None) -> None:
    options = f"--pretrain /models/small --teacher_model /models/large --dataset rows.jsonl {option}"
    status, text = _migrate(tmp_path, f"deepspeed --module openrlhf.cli.train_kd {options}\n")
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (settings.distill.beta, settings.run.max_epochs) == (0, 1)
    assert (settings.distill.nll_coefficient, status) == (weight or 0, 0 if weight else 1)
    assert ("#   kd_coef 0: distill.nll_coefficient is beside the divergence" in text) == (weight is None)


@pytest.mark.parametrize(
    ("schedule", "ratio", "last"), [("constant", 0, 0.1), ("cosine", 0.03, 0), ("cosine_with_min_lr", 0.03, 0.1)]
)
def test_schedules_are_those_of_transformers(tmp_path: Path, schedule: str, ratio: float, last: float) -> None:
    words = f"--actor.lr_scheduler {schedule} --actor.min_lr_ratio 0.1"
    status, text = _migrate(tmp_path, DOTTED.replace("--ds.packing_samples", words))
    learner = load_settings(tmp_path / "new.yaml", []).learner
    assert (status, learner.lr_warmup_ratio, learner.min_lr_ratio) == (0, ratio, last)
    assert ("#   actor.min_lr_ratio 0.1: cosine_with_min_lr alone reads it there\n" in text) == (last == 0)


def test_the_critic_begins_as_the_reward_model(tmp_path: Path) -> None:
    script = DOTTED.replace("--ds.packing_samples", "--reward.model_name_or_path /models/judge")
    _, text = _migrate(tmp_path, script.replace("group_norm", "gae"))
    assert load_settings(tmp_path / "new.yaml", []).critic.model == "/models/judge"
    assert "#   OpenRLHF's default of critic.lr_warmup_ratio, 0.03: Set critic.lr_warmup_steps to this share" in text
    other = script.replace("group_norm", "gae").replace("--actor.num", "--reward.remote_url http://h/score --actor.num")
    _migrate(tmp_path, other)
    assert load_settings(tmp_path / "new.yaml", []).critic.model == ""
    text = _migrate(tmp_path, script.replace("--actor.num", "--critic.lr_warmup_ratio 0.1 --actor.num"))[1]
    assert "#   critic.lr_warmup_ratio 0.1: There is no critic\n" in text


def test_a_chat_template_comes_in_place_of_the_template_of_prompts(tmp_path: Path) -> None:
    words = "--data.apply_chat_template --data.input_template 'Q: {}'"
    _, text = _migrate(tmp_path, DOTTED.replace("--ds.packing_samples", words))
    data = load_settings(tmp_path / "new.yaml", []).data
    assert (data.template, data.apply_chat_template) == (None, True)
    assert "#   data.input_template Q: {}: The chat template comes in its place there\n" in text
    options = "--model.model_name_or_path /models/small --data.dataset rows.jsonl"
    status, text = _migrate(tmp_path, f"deepspeed --module openrlhf.cli.train_sft {options}\n")
    assert (status, "OpenRLHF's default of data.input_template, 'User: {}\\nAssistant: '" in text) == (0, True)
    status, text = _migrate(tmp_path, f"deepspeed --module openrlhf.cli.train_sft {options} {words}\n")
    assert (status, "#   data.apply_chat_template: Rows of text stay text: give messages" in text) == (1, True)
    assert "#   data.input_template Q: {}: The chat template comes in its place there\n" in text


def test_the_temperature_of_evaluations_is_listed_when_it_is_the_default(tmp_path: Path) -> None:
    _, text = _migrate(tmp_path, DOTTED.replace("--ds.packing_samples", "--eval.dataset a.jsonl --eval.steps 5"))
    assert "#   OpenRLHF's default of eval.temperature, 0.6: Samples have rollout.temperature" in text


def test_a_reward_model_beside_an_address_is_not_started(tmp_path: Path) -> None:
    words = "--reward.remote_url http://h/score --reward.model_name_or_path /models/judge"
    _, text = _migrate(tmp_path, DOTTED.replace("--ds.packing_samples", words))
    assert "sluice start" not in text
    assert "#   reward.model_name_or_path /models/judge: Another source of rewards counts there\n" in text


def test_several_urls_are_shards_of_one_reward(tmp_path: Path) -> None:
    urls = "--reward.remote_url http://a/score,http://b/score"
    _migrate(tmp_path, DOTTED.replace("--ds.packing_samples", f"--ds.packing_samples {urls}"))
    rewards = load_settings(tmp_path / "new.yaml", []).rewards
    assert (len(rewards.endpoints), rewards.combine) == (2, "shard")


def test_reward_beside_an_agent_has_no_effect_as_there(tmp_path: Path) -> None:
    both = "--reward.remote_url reward.py --train.agent_func_path agent.py"
    status, text = _migrate(tmp_path, DOTTED.replace("--ds.packing_samples", f"--ds.packing_samples {both}"))
    assert "#   reward.remote_url reward.py: The agent's reward alone counts there\n" in text
    assert ("serve-reward" in text, "endpoints:" in text, status) == (False, False, 0)
