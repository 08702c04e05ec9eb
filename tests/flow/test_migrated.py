"""Commands of OpenRLHF, verl, Search-R1 and TRL, converted by `sluice migrate`, train two steps.

CI runs two of them, and all with SLUICE_ALL_MIGRATED=1, in four minutes.
"""

import json
import os
from pathlib import Path

import pytest

from deploy.command import run_verb
from learner import audit
from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import Bring, Left

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]
_IN_CI = ("verl_grpo", "openrlhf_dpo")

COMMANDS = {
    "verl_grpo": """
        python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$ROWS data.train_batch_size=2 \\
            data.max_prompt_length=64 data.max_response_length=24 data.filter_overlong_prompts=True \\
            actor_rollout_ref.model.path=$MODEL actor_rollout_ref.actor.fsdp_config.dtype=float32 \\
            actor_rollout_ref.actor.optim.lr=1e-3 actor_rollout_ref.actor.ppo_mini_batch_size=2 \\
            actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.rollout.n=4 \\
            actor_rollout_ref.rollout.tensor_model_parallel_size=1 trainer.n_gpus_per_node=1 trainer.logger=console \\
            trainer.val_before_train=False trainer.total_training_steps=2 trainer.save_freq=-1
        """,
    "search_r1_ppo": """
        python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae data.train_files=$ROWS data.train_batch_size=4 \\
            data.max_prompt_length=200 data.max_start_length=64 data.max_response_length=24 data.max_obs_length=64 \\
            actor_rollout_ref.model.path=$MODEL actor_rollout_ref.rollout.dtype=float32 max_turns=2 \\
            actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.rollout.n_agent=1 \\
            actor_rollout_ref.rollout.tensor_model_parallel_size=1 trainer.n_gpus_per_node=1 trainer.logger=console \\
            +trainer.val_before_train=false trainer.total_training_steps=2
        """,
    "openrlhf_ppo": """
        python3 -m openrlhf.cli.train_ppo_ray --pretrain $MODEL --param_dtype fp32 --prompt_data $ROWS \\
            --input_key prompt --label_key label --remote_rm_url $REWARD --advantage_estimator gae \\
            --rollout_batch_size 4 --train_batch_size 4 --n_samples_per_prompt 1 --max_samples 8 --num_episodes 1 \\
            --prompt_max_len 64 --generate_max_len 24 --actor_num_gpus_per_node 1 --init_kl_coef 0.01
        """,
    "openrlhf_dpo": """
        deepspeed --num_gpus 1 --module openrlhf.cli.train_dpo --model.model_name_or_path $MODEL \\
            --ds.param_dtype fp32 --data.dataset $PAIRS --train.batch_size 4 --data.max_len 128 --train.max_epochs 1
        """,
    "trl_sft": """
        accelerate launch --num_processes 1 trl/scripts/sft.py --model_name_or_path $MODEL --dataset_name $SHOWN \\
            --dtype float32 --bf16 False --max_length 128 --per_device_train_batch_size 4 --max_steps 2
        """,
    "trl_grpo": """
        trl grpo --model_name_or_path $MODEL --dataset_name $ROWS --dtype float32 --bf16 False --num_generations 4 \\
            --num_processes 1 --per_device_train_batch_size 8 --max_completion_length 24 --max_prompt_length 64 \\
            --max_steps 2
        """,
}
_ROWS = {
    "PAIRS": {"prompt": "{} + 1 =", "chosen": " 2", "rejected": " 3 !"},
    "SHOWN": {"prompt": "{} + 1 =", "completion": " 2"},
}


@pytest.mark.parametrize("name", COMMANDS)
def test_converted_command_trains_two_steps(cluster: FlowCluster, user: Bring, tmp_path: Path, name: str) -> None:
    if name not in _IN_CI and not os.environ.get("SLUICE_ALL_MIGRATED"):
        pytest.skip("takes half a minute: set SLUICE_ALL_MIGRATED=1")
    known = {"MODEL": str(user.model), "ROWS": str(user.folder / "prompts.jsonl"), "REWARD": user.reward_url}
    for variable, row in _ROWS.items():
        known[variable] = str(tmp_path / f"{variable.lower()}.jsonl")
        rows = [json.dumps(row | {"prompt": row["prompt"].format(number)}) for number in range(8)]
        Path(known[variable]).write_text("\n".join(rows) + "\n", encoding="utf-8")
    script = tmp_path / "train.sh"
    assigned = "".join(f"{variable}={value}\n" for variable, value in known.items())
    script.write_text(assigned + COMMANDS[name], encoding="utf-8")
    config = str(tmp_path / "new.yaml")
    assert run_verb(["migrate", str(script), "--output", config]) == 0
    options = ["--run.dir", str(user.folder / "runs"), "--run.name", name]
    if "dpo" not in name and "sft" not in name:  # CPUs are not shared, and the reward and the retriever are here
        options += ["--placement.devices", "auto"]
        options += ["--rewards.endpoints", json.dumps([{"name": "mine", "url": user.reward_url}])]
    if name.startswith("search_r1"):
        options += ["--retriever.url", "null"]
    ran = cluster.run("--config", config, *options)
    left = Left(user.folder / "runs" / name)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [line["step"] for line in left.metrics if "policy/loss" in line] == [1, 2]
    assert audit.main([str(left.folder)]) == 0
