"""The models of a run as this node has them: what the nodes of its ranks and servers are to have."""

from pathlib import Path

from learner.disk.model_folder import find_named_model
from protocol.node.model_files import ModelFiles, describe_model
from protocol.ray_calls import own_node_id
from protocol.settings.settings import Settings


def run_models(settings: Settings, model: Path) -> dict[str, ModelFiles]:
    """Return what each model folder of a run holds, by the setting that names it. model: the policy's folder."""
    named = {"critic.model": settings.critic.model, "reference.model": settings.reference.model}
    folders = {setting: find_named_model(setting, name) for setting, name in named.items() if name}
    node_id = own_node_id()
    return {setting: describe_model(folder, node_id) for setting, folder in {"policy.model": model, **folders}.items()}
