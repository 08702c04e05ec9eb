"""The parts of a run as its settings resolve them, shown before anything starts."""

from learner.plan.needs import needs_rollouts
from learner.plan.processes import Topology
from learner.plan.shown import count_of
from learner.run.checks.user_code import class_gives_reward
from protocol.node.home import ClusterState
from protocol.settings.settings import Settings

_WITHOUT_REWARDS = ("single_turn", "search", "tools")  # bundled environments; a user's own may give rewards


def describe_parts(settings: Settings, cluster: ClusterState | None) -> list[str]:
    """Return a sentence on the model and one on environment and rewards. cluster: None when none runs."""
    if settings.is_of_rows:
        what = {
            "sft": "supervised fine-tuning",
            "dpo": f"preference learning (loss {settings.preference.loss})",
            "kto": "preference learning from single answers (KTO)",
            "distill": f"distillation of {settings.reference.model}",
            "reward_model": "reward model from pairs",
        }
        return [f"Model {settings.policy.model}; {what[settings.objective]} on data.train, without rollout servers."]
    learner = settings.learner
    algorithm = f"advantage {learner.advantage}, loss {learner.loss}, correction {learner.correction}"
    parts = [f"Model {settings.policy.model}; recipe {learner.recipe}: {algorithm}."]
    if needs_rollouts(settings):
        parts.append(f"Environment {settings.rollout.environment}; rewards from {_rewards(settings, cluster)}.")
    return parts


def describe_processes(topology: Topology) -> str:
    """Return the number and the devices of ranks and servers: "2 learner ranks and 1 rollout server on GPUs"."""
    counts = [count_of(roles.count, roles.role) for roles in (topology.ranks, topology.servers) if roles.count]
    return f"{' and '.join(counts)} on {'GPUs' if topology.has_gpus else 'CPUs'}"


def _rewards(settings: Settings, cluster: ClusterState | None) -> str:
    environment = settings.rollout.environment
    own = ("agent:", "openrlhf_agent:")
    gives_rewards = environment == "agents" or environment.startswith(own) or class_gives_reward(environment)
    if settings.rewards.endpoints:
        names = ", ".join(f"{endpoint.name} ({endpoint.url})" for endpoint in settings.rewards.endpoints)
        return f"{names}, added to the environment's own" if gives_rewards else names
    if gives_rewards:
        return "the environment"
    if cluster is None:
        return "the cluster's reward server (sluice start --reward-scorer), because rewards.endpoints is empty"
    if (scorer := _bundled_scorer(cluster)) is None:
        return "the environment, if it has gives_reward = True: rewards.endpoints is empty and no reward server runs"
    unless = "" if environment in _WITHOUT_REWARDS else ", unless the environment gives them"
    return f"the cluster's scorer {scorer}, because rewards.endpoints is empty{unless}"


def _bundled_scorer(cluster: ClusterState) -> str | None:
    """Return the scorer of the cluster's reward server; None without a server."""
    if cluster.reward_url is None:
        return None
    return str(cluster.options.get("reward_scorer", "exact_match"))
