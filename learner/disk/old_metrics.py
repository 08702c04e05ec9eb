"""The names that metrics had in version 0.1.0, so that old run folders are read under the present names."""

from collections.abc import Mapping

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
