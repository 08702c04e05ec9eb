"""A cluster described in a file, for a plan before one has it: `learner.run --plan --cluster FILE`.

    nodes:
      - {count: 8, gpus: 8, gpu_memory_gb: 80, memory_gb: 2000, resources: {h100: 8}}
    model: {parameters: 70553706496, num_hidden_layers: 80, hidden_size: 8192, num_attention_heads: 64,
            num_key_value_heads: 8, intermediate_size: 28672}

`model` is policy.model's shape as its config.json has it; with it nothing is looked for and nothing downloaded.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveFloat, ValidationError, field_validator

from learner.disk.model_size import ModelSize, size_of_shape
from learner.plan.processes import Node
from protocol.errors import SettingsError
from protocol.settings.placement import MOST_OF_A_RESOURCE, refuse_names_of_ray
from protocol.settings.section import Count, CountAboveZero, Section
from protocol.settings.yaml_file import read_yaml


class NodesOfAKind(Section):
    """Equal nodes."""

    count: Annotated[CountAboveZero, Field(le=100_000)] = 1  # of them
    name: str = "node"  # what the plan calls them, each with a number behind it
    gpus: Count = 0  # of each
    gpu_memory_gb: PositiveFloat | None = None  # of each GPU, in 1e9 bytes
    memory_gb: PositiveFloat | None = None  # of each node, in 1e9 bytes
    # as for start_cluster.sh
    resources: dict[str, Annotated[float, Field(gt=0.0, le=MOST_OF_A_RESOURCE, multiple_of=1)]] = Field({})

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, value: dict[str, float]) -> dict[str, float]:
        refuse_names_of_ray(value)
        return value


class ModelShape(Section):
    """A model that need not be there, in the words of config.json."""

    parameters: Annotated[float, Field(ge=1.0)]  # all of its weights
    num_hidden_layers: CountAboveZero  # of the transformer
    hidden_size: CountAboveZero  # floats of a token between layers
    num_attention_heads: CountAboveZero  # of each layer
    num_key_value_heads: CountAboveZero | None = None  # None: as many as attention heads
    head_dim: CountAboveZero | None = None  # floats of a head; None: hidden_size over the attention heads
    intermediate_size: CountAboveZero  # width inside a layer's linear part
    moe_intermediate_size: CountAboveZero | None = None  # of one expert; None: as intermediate_size
    num_experts_per_tok: CountAboveZero | None = None  # that a token goes through; None: no mixture of experts


class ClusterDescription(Section):
    """What the file holds."""

    nodes: Annotated[list[NodesOfAKind], Field(min_length=1)]  # kind by kind; the first node is the head
    model: ModelShape | None = None  # None: policy.model is looked for as for a run


def read_description(path: Path) -> ClusterDescription:
    """Return what the file describes. Raises: SettingsError naming the file, what is wrong and what was expected."""
    try:
        return ClusterDescription.model_validate(read_yaml(path, "--cluster"))
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(str(part) for part in problem["loc"]) or "nodes"
        what = f" = {problem['input']!r} is wrong"
        said = {
            "missing": " is missing",
            "model_type": f"{what}: expected a map",
            "list_type": f"{what}: expected a list",
        }
        why = said.get(problem["type"], f"{what}: {problem['msg'].removeprefix('Value error, ')}")
        part = ("A model has", ModelShape) if name.startswith("model.") else ("Each of nodes has", NodesOfAKind)
        raise SettingsError(f"{path}: {name}{why}. {part[0]} {', '.join(part[1].model_fields)}.") from None


def described_nodes(description: ClusterDescription) -> list[Node]:
    """Return the nodes, one by one."""
    nodes: list[Node] = []
    for kind in description.nodes:
        for _ in range(kind.count):
            nodes.append(
                Node(
                    node_ip=f"{kind.name} {len(nodes) + 1}",
                    num_gpus=kind.gpus,
                    resources=kind.resources,
                    gpu_bytes=None if kind.gpu_memory_gb is None else int(kind.gpu_memory_gb * 1e9),
                    host_bytes=None if kind.memory_gb is None else int(kind.memory_gb * 1e9),
                    is_head=not nodes,
                )
            )
    return nodes


def described_size(shape: ModelShape) -> ModelSize:
    """Return what memory is planned by."""
    return size_of_shape(int(shape.parameters), shape.model_dump())
