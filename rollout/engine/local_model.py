"""The folder of this node that an engine loads its model from."""

from pathlib import Path

from protocol.node.keeper_files import reader_of
from protocol.node.model_copy import have_model
from protocol.settings.run_spec import EngineRequest


def local_model(spec: EngineRequest) -> Path:
    """Return the model's folder: as asked for, or a copy of this node's own, which may take minutes to come.

    Raises: as `have_model`.
    """
    if spec.files is None:
        return Path(spec.model)
    return have_model(spec.files, reader_of(spec.files.node_id), with_weights=False)
