"""The models of a run: the small files that nodes without the weights build them from."""

from pathlib import Path

from learner.disk.model_folder import find_named_model
from protocol.node.small_model_files import SmallFiles, read_small_files
from protocol.settings.settings import Settings


def run_models(settings: Settings, model: Path) -> dict[str, SmallFiles]:
    """Return the small files of each model of a run, by the setting that names it. model: the policy's folder."""
    named = {"critic.model": settings.critic.model, "reference.model": settings.reference.model}
    folders = {setting: find_named_model(setting, name) for setting, name in named.items() if name}
    return {
        setting: read_small_files(folder, with_code=settings.policy.trust_remote_code)
        for setting, folder in {"policy.model": model, **folders}.items()
    }
