"""A command of verl, and its migration."""

from pathlib import Path

from deploy.command import run_verb

VERL = """
files="['a.parquet', 'b.parquet']"
more="
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28"
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo data.train_files="$files" data.train_batch_size=$(((8 + 8) * 4)) \\
    data.max_prompt_length=512 data.max_response_length=1024 data.filter_overlong_prompts=True \\
    actor_rollout_ref.model.path=/models/small actor_rollout_ref.actor.optim.lr=2e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002 \\
    actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.level=3 \\
    trainer.logger='["console","wandb"]' trainer.project_name=mine trainer.n_gpus_per_node=8 trainer.nnodes=1 \\
    trainer.val_before_train=False trainer.total_epochs=3 $more $@ 2>&1 | tee log
"""


def migrate(folder: Path, text: str, name: str = "train.sh") -> tuple[int, str]:
    """Return the exit status and the settings file."""
    (folder / name).write_text(text, encoding="utf-8")
    status = run_verb(["migrate", str(folder / name), "--output", str(folder / "new.yaml")])
    return status, (folder / "new.yaml").read_text(encoding="utf-8")
