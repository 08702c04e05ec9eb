"""The models of a run on this rank's node: those that are here, and copies of those that are not."""

from collections.abc import Callable, Mapping
from pathlib import Path

from protocol.node.keeper_files import reader_of
from protocol.node.model_copy import ReadFile, have_model
from protocol.node.model_files import ModelFiles
from protocol.settings.settings import Settings


def with_own_models(
    settings: Settings, wanted: Mapping[str, ModelFiles], reader: Callable[[str], ReadFile] = reader_of
) -> tuple[Settings, Path]:
    """Return the settings with the folders of this node, and the policy's folder. Blocks while a model is copied.

    wanted: by the setting that names each. reader: returns what reads files of a node. Raises: as `have_model`.
    """
    own = {setting: have_model(files, reader(files.node_id), with_weights=True) for setting, files in wanted.items()}
    for setting, files in wanted.items():
        section, _, name = setting.partition(".")
        if section != "policy" and str(own[setting]) != files.path:
            changed = getattr(settings, section).model_copy(update={name: str(own[setting])})
            settings = settings.model_copy(update={section: changed})
    return settings, own["policy.model"]
