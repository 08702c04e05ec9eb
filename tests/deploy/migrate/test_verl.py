"""`sluice migrate` on commands and configurations of verl and Search-R1."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from protocol.settings.loader import load_settings
from tests.deploy.migrate.verl_command import VERL, migrate

SEARCH_R1 = """
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo data.train_files=train.parquet data.train_batch_size=512 \\
    data.max_prompt_length=4096 data.max_response_length=500 data.max_start_length=2048 data.max_obs_length=400 \\
    algorithm.adv_estimator=gae actor_rollout_ref.rollout.n_agent=5 actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.model.path=/models/small max_turns=2 retriever.url="http://127.0.0.1:8000/retrieve" \\
    critic.optim.lr_warmup_steps_ratio=0.015 \\
    trainer.total_training_steps=1005 trainer.total_epochs=15 +trainer.val_before_train=true
"""
FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_main"
ONE_STEP_OFF = "verl.experimental.one_step_off_policy.main_ppo"
ROWS = """
torchrun --nnodes=2 --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer data.train_files=rows.parquet \\
    model.partial_pretrain=/models/small optim.lr=1e-4 data.max_length=2048 data.response_key=answer
"""


def test_a_step_of_verls_asynchronous_trainer_has_the_prompts_of_its_updates(tmp_path: Path) -> None:
    sizes = "data.train_batch_size=0 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=16"
    step = "async_training.require_batches=4 async_training.staleness_threshold=0.5 rollout.total_rollout_steps=51200"
    rates = "actor_rollout_ref.actor.optim.lr_warmup_steps=10 rollout.test_freq=20 trainer.save_freq=5 rollout.n=9"
    status, text = migrate(tmp_path, f"python -m {FULLY_ASYNC} {sizes} {step} {rates} data.val_files=held_out.parquet")
    settings = load_settings(tmp_path / "new.yaml", [])
    learner = settings.learner
    assert (learner.groups_per_step, learner.num_mini_batches, settings.run.max_steps) == (512, 16, 100)  # 4 batches
    assert (status, settings.rollout.group_size, learner.max_staleness) == (1, 16, 1)  # no model and no rows
    assert (learner.lr_warmup_steps, learner.checkpoint_every_steps, settings.eval.every_steps) == (3, 5, 20)
    assert (settings.placement.devices, settings.rollout.num_servers) == ("split", 4)  # its configuration's own node
    assert settings.policy.old_logprobs == "behaviour"
    assert "rollout.n=9: It sets no option of verl" in text


@pytest.mark.parametrize(
    ("program", "words", "staleness", "old_logprobs"),
    [
        (FULLY_ASYNC, "async_training.staleness_threshold=0", 0, "behaviour"),
        (FULLY_ASYNC, "async_training.staleness_threshold=1.5", 2, "behaviour"),
        (FULLY_ASYNC, "async_training.compute_prox_log_prob=True", 1, "recompute"),
        (FULLY_ASYNC, "algorithm.rollout_correction.bypass_mode=False", 1, "recompute"),
        (ONE_STEP_OFF, "", 1, "behaviour"),
        ("verl.trainer.main_ppo", "trainer.v1.trainer_mode=colocate_async", 1, "recompute"),
        (
            "verl.trainer.main_ppo",
            "trainer.v1.trainer_mode=colocate_async trainer.v1.sampler.max_off_policy_threshold=1",
            0,
            "recompute",
        ),
        ("verl.trainer.main_ppo", "", 0, "recompute"),
    ],
)
def test_staleness_of_verls_trainers_counts_pushes(
    tmp_path: Path, program: str, words: str, staleness: int, old_logprobs: str
) -> None:
    migrate(tmp_path, f"python -m {program} actor_rollout_ref.rollout.n=8 algorithm.adv_estimator=grpo {words}")
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (settings.learner.max_staleness, settings.policy.old_logprobs) == (staleness, old_logprobs)


@pytest.mark.parametrize(
    ("words", "correction", "low", "high"),
    [
        ("rollout_is=token rollout_is_threshold=3", "tis", None, 3),
        ("rollout_is=token rollout_is_threshold=0.5_2", "icepop", 0.5, 2),
        ("rollout_rs=seq_mean_k1 rollout_rs_threshold=0.8_2.5", "geo_mask", 0.4, 1.25),  # there of the inverse weight
        ("rollout_rs=seq_mean_k1 rollout_rs_threshold=1.25", "geo_mask", 0.8, 1.25),
        ("rollout_is=token bypass_mode=True", "none", None, None),  # PPO's ratio has the weight
        ("rollout_is=token bypass_mode=True loss_type=reinforce", "tis", None, 2),
    ],
)
def test_corrections_of_verl_keep_its_bounds(
    tmp_path: Path, words: str, correction: str, low: float | None, high: float | None
) -> None:
    more = " ".join(f"algorithm.rollout_correction.{word}" for word in words.split())
    migrate(tmp_path, VERL.replace("$more", f"$more {more} actor_rollout_ref.actor.policy_loss.loss_mode=gspo"))
    learner = load_settings(tmp_path / "new.yaml", []).learner
    assert (learner.correction, learner.correction_low, learner.correction_high) == (correction, low, high)
    assert learner.loss == ("gspo" if "bypass" not in words else "reinforce" if "loss_type" in words else "ppo")


def test_servers_of_their_own_nodes_have_these_nodes_gpus(tmp_path: Path) -> None:
    nodes = "trainer.nnodes=1 trainer.n_gpus_per_node=2 rollout.nnodes=2 rollout.n_gpus_per_node=4"
    size = "actor_rollout_ref.rollout.tensor_model_parallel_size=4"
    migrate(tmp_path, f"python -m {ONE_STEP_OFF} {nodes} {size}")
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (settings.rollout.tensor_parallel_size, settings.rollout.num_servers, settings.learner.num_ranks) == (
        4,
        2,
        2,
    )


def test_a_number_of_warm_up_steps_counts_before_its_share(tmp_path: Path) -> None:
    both = [f"actor_rollout_ref.actor.optim.lr_warmup_steps{each}" for each in ("=0", "_ratio=0.1")]
    critic = "$more algorithm.adv_estimator=gae trainer.critic_warmup=5"
    text = migrate(tmp_path, VERL.replace("$more", " ".join([critic, *both])))[1]
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (settings.learner.lr_warmup_steps, settings.learner.lr_warmup_ratio) == (0, 0)
    assert settings.critic.warmup_steps == 4  # the policy's first step is the fifth
    assert "actor.optim.lr_warmup_steps_ratio 0.1: The number of steps decides the warm-up" in text


@pytest.mark.parametrize(
    ("words", "setting", "value"),
    [
        ("actor.clip_ratio=0.1", "learner.clip_low", 0.2),  # each side has a default of its own
        ("actor.policy_loss.loss_mode=gspo", "loss.aggregate", "seq_mean_token_mean"),
        ("actor.kl_loss_type=k3+", "kl.form", "k2"),
        ("actor.optim.min_lr=1e-6 actor.optim.warmup_style=cosine", "learner.min_lr_ratio", 0.5),
    ],
)
def test_options_of_verl_mean_what_its_code_does(tmp_path: Path, words: str, setting: str, value: object) -> None:
    more = " ".join(f"actor_rollout_ref.{word}" for word in words.split())
    assert migrate(tmp_path, VERL.replace("$more", f"$more {more}"))[0] == 0
    section, name = setting.split(".")
    assert getattr(getattr(load_settings(tmp_path / "new.yaml", []), section), name) == value


def test_limit_of_verls_filter_counts_its_own_batches(tmp_path: Path) -> None:
    names = "enable=True", "max_num_gen_batches=10", "metric=acc"
    more = " ".join(["data.gen_batch_size=192", *(f"algorithm.filter_groups.{each}" for each in names)])
    migrate(tmp_path, VERL.replace("$more", f"$more {more} algorithm.norm_adv_by_std_in_grpo=False"))
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (settings.filter.dynamic_sampling, settings.filter.max_replaced) == (True, 29)  # 10 x 192 = 30 x 64 prompts


@pytest.mark.parametrize(
    ("words", "every", "passes"), [("", 1, 10), ("rollout.test_freq=7 rollout.total_epochs=20", 7, 20)]
)
def test_fully_asynchronous_trainer_evaluates_and_passes_over_its_data_by_its_own_configuration(
    tmp_path: Path, words: str, every: int, passes: int
) -> None:
    script = VERL.replace("verl.trainer.main_ppo", FULLY_ASYNC).replace("trainer.total_epochs=3", "")
    _, text = migrate(tmp_path, script.replace("$more", f"$more data.val_files=held_out.parquet {words}"))
    assert yaml.safe_load(text)["eval"]["every_steps"] == every
    assert f"at most {passes} passes over data.train" in text


@pytest.mark.parametrize("words", ["algorithm.filter_groups.enable=True", "async_training.require_batches=1"])
def test_a_step_of_0_prompts_is_still_wrong_and_no_error_of_python(tmp_path: Path, words: str) -> None:
    sizes = "data.train_batch_size=0 actor_rollout_ref.actor.ppo_mini_batch_size=0"
    more = f"$more {sizes} algorithm.filter_groups.max_num_gen_batches=2 rollout.total_rollout_steps=9 {words}"
    status, text = migrate(tmp_path, VERL.replace("$more", more))
    assert (status, "Still wrong:\n#   settings: learner.groups_per_step" in text) == (1, True)


def test_an_adapter_of_rank_0_is_none(tmp_path: Path) -> None:
    adapter = [
        f"actor_rollout_ref.model.{each}" for each in ("lora_rank=0", "lora_alpha=0", "target_modules=all-linear")
    ]
    status, text = migrate(tmp_path, VERL.replace("$more", " ".join(["$more", *adapter])))
    assert (status, load_settings(tmp_path / "new.yaml", []).policy.lora.rank) == (0, 0)
    assert "#   model.lora_alpha 0: There is no adapter: its rank is 0" in text


def test_command_of_verl_gives_settings_that_a_run_accepts(tmp_path: Path) -> None:
    status, text = migrate(tmp_path, VERL)
    settings = load_settings(tmp_path / "new.yaml", [])
    assert status == 0
    assert (settings.policy.model, settings.data.train) == ("/models/small", ["a.parquet", "b.parquet"])
    assert (settings.learner.advantage, settings.learner.clip_low, settings.learner.clip_high) == ("grpo", 0.2, 0.28)
    assert (settings.kl.coefficient, settings.kl.place, settings.kl.form) == (0.002, "loss", "k3")
    assert (settings.placement.devices, settings.rollout.num_servers, settings.learner.num_ranks) == ("shared", 4, 8)
    assert (settings.learner.betas, settings.learner.lr_schedule) == ((0.9, 0.999), "constant")  # verl's defaults
    assert (settings.run.max_epochs, settings.learner.max_staleness, settings.report.wandb_project) == (3, 0, "mine")
    assert settings.rollout.engine_args == {"compilation_config": {"level": 3}}
    assert "data.eval" not in text
    assert migrate(tmp_path, VERL) == (0, text)


def test_sizes_of_verl_count_prompts(tmp_path: Path) -> None:
    _, text = migrate(tmp_path, VERL)
    assert "  groups_per_step: 64  # data.train_batch_size 64; 64 prompts, 320 samples\n" in text
    assert "16; 80 samples an update; updates a step: 4, passes: 1\n" in text


def test_search_r1_has_the_defaults_of_its_verl(tmp_path: Path) -> None:
    assert migrate(tmp_path, SEARCH_R1)[0] == 0
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (settings.rollout.environment, settings.rollout.group_size, settings.rollout.max_turns) == ("search", 5, 2)
    assert (settings.rollout.max_context_tokens, settings.data.max_prompt_tokens) == (4596, 2048)
    assert (settings.learner.num_mini_batches, settings.run.max_steps) == (10, 1005)  # its size counts samples
    assert (settings.kl.place, settings.kl.coefficient, settings.learner.dual_clip) == ("reward", 0.001, None)
    assert (settings.learner.advantage, settings.critic.lr_warmup_steps) == ("gae", 15)
    assert (str(settings.retriever.url), settings.retriever.words) == ("http://127.0.0.1:8000/retrieve", "search_r1")


def test_fine_tuning_of_verl_trains_on_rows(tmp_path: Path) -> None:
    status, text = migrate(tmp_path, ROWS)
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (status, settings.objective, settings.learner.num_ranks, settings.placement.ranks.nodes) == (1, "sft", 8, 2)
    assert (settings.learner.groups_per_step, settings.learner.lr_schedule, settings.run.max_epochs) == (
        256,
        "cosine",
        4,
    )
    assert "#   data.response_key answer: Rows have fixed columns" in text


def test_configuration_file_gives_the_same_as_its_overrides(tmp_path: Path) -> None:
    values = {
        "defaults": ["ppo_trainer"],
        "actor_rollout_ref": {"model": {"path": "/models/small"}, "rollout": {"n": 4}},
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_files": ["a.parquet"], "train_batch_size": "${oc.select:data.gone,32}", "seed": 7},
        "trainer": {"total_epochs": 2, "logger": ["console"], "val_before_train": False, "seed": "${data.seed}"},
    }
    _, of_file = migrate(tmp_path, yaml.safe_dump(values), "mine.yaml")
    command = "python -m verl.trainer.main_ppo --config-path=config --config-name=mine algorithm.adv_estimator=rloo\n"
    _, of_command = migrate(tmp_path, command)
    assert yaml.safe_load(of_file)["learner"].pop("advantage") == "grpo"
    assert yaml.safe_load(of_file)["run"]["seed"] == 7
    first, second = (yaml.safe_load(text) for text in (of_file, of_command))
    assert second["learner"].pop("advantage") == "rloo"
    first["learner"].pop("advantage")
    assert first == second


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "${EXTRA:+trainer.total_epochs=9}",
            "${EXTRA:+trainer.total_epochs=9}: Only a running shell knows these words",
        ),
        ("data.train_files[0]=c.parquet", "data.train_files[0]=c.parquet: It sets no option of verl"),
        ("$EXTRA", "$EXTRA: Only a running shell knows these words"),
        ("--config-name=gone", "--config-name gone: The file is not beside the script"),
        ("actor_rollout_ref.actor.entropy_coeff=0.1", "actor.entropy_coeff 0.1: No loss has an entropy term"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=sapo", "loss_mode sapo: learner.loss has no such name"),
        ("algorithm.use_kl_in_reward=True", "algorithm.use_kl_in_reward: There is one KL, and it is in the loss"),
        ("algorithm.adv_estimator=gae critic.ppo_epochs=4", "critic.ppo_epochs 4: The critic has as many updates"),
        ("actor_rollout_ref.actor.zebra=1", "Unknown to sluice migrate:\n#   actor.zebra 1"),
    ],
)
def test_what_is_lost_is_named(tmp_path: Path, words: str, sentence: str) -> None:
    status, text = migrate(tmp_path, VERL.replace("$more", f"$more {words}"))
    assert status == 1
    assert sentence in text


def test_configuration_file_brings_its_list_of_defaults(tmp_path: Path) -> None:
    base = {"data": {"train_batch_size": 32}, "trainer": {"total_epochs": 2}, "rollout": {"n": 9}}
    mine = {
        "defaults": ["base", {"actor_rollout_ref": "small"}, {"data@data": "legacy_data"}, "gone", "_self_"],
        "actor_rollout_ref": {"rollout": {"n": 4}},
        "trainer": {"total_epochs": 3},
    }
    (tmp_path / "actor_rollout_ref").mkdir()
    (tmp_path / "actor_rollout_ref" / "small.yaml").write_text("model:\n  path: /models/small\n", encoding="utf-8")
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"defaults": ["fully_async_ppo_trainer"], **base}), "utf-8")
    status, text = migrate(tmp_path, yaml.safe_dump(mine), "mine.yaml")
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (settings.policy.model, settings.rollout.group_size) == ("/models/small", 4)
    assert (settings.placement.devices, settings.learner.max_staleness) == ("split", 1)  # of the fully asynchronous one
    assert "at most 3 passes" in text
    assert (status, "defaults: gone: The file is not beside the configuration" in text) == (1, True)


def test_list_of_defaults_may_have_several_files_none_an_empty_one_and_itself(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "empty.yaml").write_text("# none\n", encoding="utf-8")
    (tmp_path / "data" / "large.yaml").write_text("train_batch_size: 32\n", encoding="utf-8")
    mine = {"defaults": [{"data": ["empty", "large"]}, {"trainer": None}, "again"], "actor_rollout_ref": {}}
    (tmp_path / "again.yaml").write_text(yaml.safe_dump({"defaults": ["again"]}), encoding="utf-8")
    _, text = migrate(tmp_path, yaml.safe_dump(mine), "mine.yaml")
    assert load_settings(tmp_path / "new.yaml", []).learner.groups_per_step == 32
    assert "defaults: again: The file is not beside the configuration" in text


def test_server_over_several_nodes_becomes_one_of_a_node(tmp_path: Path) -> None:
    wide = VERL.replace("tensor_model_parallel_size=2", "tensor_model_parallel_size=16").replace("nnodes=1", "nnodes=4")
    status, text = migrate(
        tmp_path, wide.replace("data.train_batch_size", "data.image_key=images data.train_batch_size")
    )
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (settings.rollout.tensor_parallel_size, settings.rollout.num_servers, settings.learner.num_ranks) == (
        8,
        4,
        32,
    )
    assert "16 there: here a server's GPUs are of one node" in text
    assert (status, "data.image_key images: Pictures are not there" in text) == (1, True)


def test_equal_commands_give_equal_files_in_different_processes(tmp_path: Path) -> None:
    script = VERL.replace("$more", "algorithm.kl_ctrl.kl_coef=0.001 algorithm.kl_penalty=kl $more")
    (tmp_path / "train.sh").write_text(script, encoding="utf-8")
    code = f"from deploy.command import run_verb; run_verb(['migrate', {str(tmp_path / 'train.sh')!r}])"
    texts = set()
    for seed in ("1", "2", "3", "4"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        program = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        texts.add(program.stdout)
    assert len(texts) == 1
    assert "#   algorithm.kl_ctrl.kl_coef 0.001: The KL is in the loss\n" in texts.pop()


def test_tools_have_verls_limits(tmp_path: Path) -> None:
    tools = "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml"
    _, text = migrate(tmp_path, VERL.replace("$more", f"$more {tools}"))
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (settings.tools.max_calls_per_turn, settings.tools.call_format) == (1, "hermes")
    assert (settings.rollout.max_turns, settings.rollout.max_observation_tokens) == (1000, 256)
    assert "of one turn; there of all turns with their replies\n" in text
    migrate(tmp_path, VERL.replace("$more", f"$more {tools} actor_rollout_ref.rollout.multi_turn.max_user_turns=3"))
    assert load_settings(tmp_path / "new.yaml", []).rollout.max_turns == 3


@pytest.mark.parametrize("tools", ["", "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml "])
def test_interaction_keeps_its_limit_of_turns(tmp_path: Path, tools: str) -> None:
    given = f"{tools}actor_rollout_ref.rollout.multi_turn.interaction_config_path=interactions.yaml"
    given += " actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.multi_turn.max_user_turns=5"
    status, text = migrate(tmp_path, VERL.replace("$more", f"$more {given}"))
    assert (status, load_settings(tmp_path / "new.yaml", []).rollout.max_turns) == (1, 5)
    assert "There are no tools" not in text
    cure = "Here one environment has the tools or the interaction" if tools else "Put the adapter of docs"
    assert f"interaction_config_path interactions.yaml: {cure}" in text


@pytest.mark.parametrize(
    ("words", "alpha"), [("model.lora_rank=64", 16), ("model.lora.rank=64", 32), ("actor.grad_clip=1.0", None)]
)
def test_adapters_have_verls_alpha(tmp_path: Path, words: str, alpha: float | None) -> None:
    _, text = migrate(tmp_path, VERL.replace("$more", f"$more actor_rollout_ref.{words}"))
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (settings.policy.lora.alpha, "lora" in text) == (alpha, alpha is not None)


def test_defaults_that_differ_are_said(tmp_path: Path) -> None:
    _, text = migrate(tmp_path, SEARCH_R1.replace("data.max_obs", "data.val_files=test.parquet data.max_obs"))
    assert "#   Search-R1's default of actor.entropy_coeff, 0.001: No loss has an entropy term" in text
    assert "  num_prompts: 256  # the first ones; there every row of data.eval\n" in text
    assert "  every_steps: 0  # Search-R1's default of trainer.test_freq; never; there once, before the first" in text
    _, text = migrate(tmp_path, VERL)
    assert "  max_epochs: 3  # trainer.total_epochs 3; there a pass leaves out the rows that do not fill a last" in text


@pytest.mark.parametrize(
    ("trainer", "schedule", "share", "betas"),
    [("fsdp_sft_trainer", "cosine", 0.1, (0.9, 0.95)), ("sft_trainer", "constant", 0, (0.9, 0.999))],
)
def test_each_trainer_of_rows_has_its_own_defaults(
    tmp_path: Path, trainer: str, schedule: str, share: float, betas: tuple[float, float]
) -> None:
    migrate(tmp_path, ROWS.replace("fsdp_sft_trainer", trainer))
    learner = load_settings(tmp_path / "new.yaml", []).learner
    assert (learner.lr_schedule, learner.lr_warmup_ratio, learner.betas, learner.lr) == (schedule, share, betas, 1e-4)
    assert load_settings(tmp_path / "new.yaml", []).report.wandb_project == "gsm8k-sft"
    parts = {"data": {"train_files": "a.csv"}, "trainer": {}, "model": {}}
    copy = {"defaults": [{"optim@optim": "fsdp"}, "_self_"], **parts}
    migrate(tmp_path, yaml.safe_dump(copy), "copy.yaml")
    assert load_settings(tmp_path / "new.yaml", []).learner.lr_schedule == "constant"


def test_the_name_of_an_option_that_says_something_counts(tmp_path: Path) -> None:
    actor = {"optim": {"lr_scheduler_type": "cosine", "warmup_style": None}}
    policy = {"actor": actor, "model": {"path": "/models/small"}}
    values = {"actor_rollout_ref": policy, "data": {"train_files": "a.csv"}}
    migrate(tmp_path, yaml.safe_dump(values), "config.yaml")
    assert load_settings(tmp_path / "new.yaml", []).learner.lr_schedule == "cosine"


def test_a_key_of_a_program_is_not_written(tmp_path: Path) -> None:
    words = "+ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY=s3cret"
    assert "s3cret" not in migrate(tmp_path, VERL.replace("$more", f"$more {words}"))[1]


def test_a_reward_model_behind_a_function_is_named(tmp_path: Path) -> None:
    words = "custom_reward_function.path=f.py reward_model.enable=True reward_model.model.path=/models/judge"
    status, text = migrate(tmp_path, VERL.replace("$more", f"$more {words}"))
    assert (status, "sluice start" in text) == (1, False)
    assert "#   reward_model.enable: The function scores alone: it may call a service of the model\n" in text
