"""A cluster described in a file, for plans without a running one: `learner.run --plan --cluster FILE`.

    nodes:
      - {count: 8, gpus: 8, gpu_memory_gb: 80, memory_gb: 2000, resources: {h100: 8}}
    model: {parameters: 70553706496, num_hidden_layers: 80, hidden_size: 8192, num_attention_heads: 64,
            num_key_value_heads: 8, intermediate_size: 28672}

`model` is the shape of policy.model: the values of its config.json, or `{parameters: N, config: PATH}` with the path of
that file, which starts at the description's folder. With it no model is looked up or downloaded.
"""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, ValidationError, field_validator

from learner.disk.model_folder import ModelSize, adapters_of_shape, size_of_shape
from learner.plan.processes import Node
from protocol.errors import SettingsError
from protocol.settings.loader import read_yaml
from protocol.settings.placement import MOST_OF_A_RESOURCE, refuse_names_of_ray
from protocol.settings.policy import LoraSettings
from protocol.settings.section import Count, CountAboveZero, Section


class NodesOfAKind(Section):
    """Equal nodes."""

    count: Annotated[CountAboveZero, Field(le=100_000)] = 1
    name: str = "node"  # name in the plan, followed by a number
    gpus: Count = 0
    gpu_memory_gb: PositiveFloat | None = None  # memory of each GPU, in 1e9 bytes
    memory_gb: PositiveFloat | None = None  # memory of each node, in 1e9 bytes
    # custom resources of each node, as for start_cluster.sh
    resources: dict[str, Annotated[float, Field(gt=0.0, le=MOST_OF_A_RESOURCE, multiple_of=1)]] = Field({})

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, value: dict[str, float]) -> dict[str, float]:
        refuse_names_of_ray(value)
        return value


class ModelShape(Section):
    """The shape of a model, in the names of config.json."""

    parameters: Annotated[float, Field(ge=1.0)]  # number of all weights
    num_hidden_layers: CountAboveZero
    hidden_size: CountAboveZero  # floats of a token between layers
    num_attention_heads: CountAboveZero
    num_key_value_heads: CountAboveZero | None = None  # key-value heads; None: as many as attention heads
    head_dim: CountAboveZero | None = None  # floats of a head; None: hidden_size / num_attention_heads
    intermediate_size: CountAboveZero  # width of a layer's linear part
    vocab_size: CountAboveZero | None = None  # rows of the embedding; None: the embedding counts as any other weight
    moe_intermediate_size: CountAboveZero | None = None  # width of an expert; None: intermediate_size
    num_experts_per_tok: CountAboveZero | None = None  # experts of a token; None: no mixture of experts


class ClusterDescription(Section):
    """The content of the file."""

    nodes: Annotated[list[NodesOfAKind], Field(min_length=1)]  # groups of equal nodes; the first node is the head
    model: ModelShape | None = None  # None: the model is read from policy.model


def read_description(path: Path) -> ClusterDescription:
    """Return the description in the file. Raises: SettingsError with the file and the wrong value."""
    try:
        return ClusterDescription.model_validate(_with_config(read_yaml(path, "--cluster"), path))
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(str(part) for part in problem["loc"]) or "nodes"
        wrong = f" = {problem['input']!r} is wrong"
        texts = {
            "missing": " is missing",
            "model_type": f"{wrong}: expected a map",
            "list_type": f"{wrong}: expected a list",
        }
        why = texts.get(problem["type"], f"{wrong}: {problem['msg'].removeprefix('Value error, ')}")
        part = ("A model has", ModelShape) if problem["loc"][:1] == ("model",) else ("Each of nodes has", NodesOfAKind)
        raise SettingsError(f"{path}: {name}{why}. {part[0]} {', '.join(part[1].model_fields)}.") from None


def _with_config(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the description with the values of the config.json that its model names; given values win."""
    model = content.get("model")
    if not isinstance(model, dict) or "config" not in model:
        return content
    file = path.parent / str(model["config"])
    try:
        config = json.loads(file.read_bytes())
        from_config = {name: config[name] for name in ModelShape.model_fields if config.get(name) is not None}
    except (OSError, ValueError, AttributeError) as error:
        raise SettingsError(
            f"{path}: model.config = {file} cannot be used ({type(error).__name__}). Give the path of a model's "
            "config.json."
        ) from None
    return {**content, "model": from_config | {name: value for name, value in model.items() if name != "config"}}


def described_nodes(description: ClusterDescription) -> list[Node]:
    """Return one Node for each node of the cluster, numbered from 1. The first is the head."""
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


def described_size(shape: ModelShape, lora: LoraSettings) -> ModelSize:
    """Return the sizes from which the memory of a model of this shape, with these adapters, is planned."""
    config = shape.model_dump()
    return size_of_shape(int(shape.parameters), config, adapters_of_shape(config, lora))
