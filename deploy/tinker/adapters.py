"""One base model in memory, and a LoRA adapter with its own optimizer for each client's model.

A pass puts one adapter's tensors into the model's layers, so that no other adapter takes part in it. Without another
adapter's tensors a pass has the same bits in any company.
Shape: N tokens of one datum.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from deploy.tinker.bodies import AdamParams, LoraConfig
from deploy.tinker.losses import TARGETS, Loss, loss_of
from deploy.tinker.wire import Array, Datum, Pass, RequestError
from learner.data.packing import plan_step
from learner.models.gradient import Sums, add_gradient, score_tokens
from learner.models.micro_batch import MicroBatch
from learner.models.model_loading import load_model
from learner.models.scoring.scored_model import scored_model
from learner.models.settings import PolicySettings
from learner.models.start_check import check_model
from learner.models.weights.lora import LoraForm, adapted_layers, write_adapters
from learner.models.world import own_device
from protocol.disk.files import replacing
from protocol.errors import OperatorError

ALPHA = 32.0  # numerator of an adapter's factor alpha / rank, as in Tinker
_BYTES_PER_NUMBER = 16  # weight, gradient and two moments in float32
_SLOT = "default"  # name of the model's only adapter
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class AdapterForm:
    """The form of one client's adapter."""

    rank: int
    seed: int  # seed of its first weights
    train_attn: bool = True  # layers of attention have an adapter
    train_mlp: bool = True  # the other linear layers have one; the head has none


class Adapter:
    """One client's trained weights and their optimizer."""

    def __init__(self, form: AdapterForm, parameters: dict[str, Parameter]) -> None:
        self.form = form
        self.parameters = parameters  # by their names in the model
        self.optimizer = torch.optim.AdamW([*parameters.values()])
        self.num_bytes = _BYTES_PER_NUMBER * sum(each.numel() for each in parameters.values())

    def save(self, path: Path) -> None:
        """Write weights and moments; the file is complete on the disk when this returns."""
        tensors = {name: each.detach().cpu() for name, each in self.parameters.items()}
        for name, each in self.parameters.items():
            for key, value in self.optimizer.state.get(each, {}).items():
                tensors[f"{name}.{key}"] = value.cpu()
        with replacing(path) as aside:
            save_file(tensors, aside, metadata={"form": json.dumps(asdict(self.form))})

    def load(self, path: Path, *, with_optimizer: bool) -> None:
        """Take weights, and moments or none; drop the gradient."""
        stored = load_file(path)
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        for name, each in self.parameters.items():
            with torch.no_grad():
                each.copy_(stored[name])
            if with_optimizer and f"{name}.step" in stored:
                moments = {key: stored[f"{name}.{key}"] for key in _MOMENTS}
                self.optimizer.state[each] = {k: v if k == "step" else v.to(each.device) for k, v in moments.items()}

    def export(self, folder: Path, base: str) -> None:
        """Write the adapter as peft and vLLM load it."""
        tensors = {name: each.detach().cpu() for name, each in self.parameters.items()}
        write_adapters(folder, LoraForm(self.form.rank, ALPHA, ()), base, tensors)

    def step(self, adam: AdamParams) -> dict[str, float]:
        """Update the weights with the gradient so far, and drop it; returns metrics.

        Raises: RequestError for a gradient or new weights that are not finite. Load the weights and moments then.
        """
        for group in self.optimizer.param_groups:
            group.update(lr=adam.learning_rate, betas=(adam.beta1, adam.beta2))
            group.update(eps=adam.eps, weight_decay=adam.weight_decay)
        try:
            largest = adam.grad_clip_norm if adam.grad_clip_norm > 0 else math.inf
            norm = float(clip_grad_norm_([*self.parameters.values()], largest))
            if not math.isfinite(norm):
                raise RequestError(
                    "The gradient is not finite, so the weights were not changed. Check logprobs and weights."
                )
            self.optimizer.step()
            if not all(bool(each.isfinite().all()) for each in self.parameters.values()):
                raise RequestError(
                    f"The step makes weights that are not finite, so they were not changed. learning_rate = "
                    f"{adam.learning_rate:g} is too large, or eps = {adam.eps:g} too small."
                )
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "learning_rate": adam.learning_rate}


class BaseModel:
    """The frozen model that every adapter shares."""

    def __init__(self, settings: PolicySettings) -> None:
        """settings: with a LoraForm of any rank. Raises: OperatorError for a model that mixes data of a pass."""
        self._settings = settings
        self.device = own_device()
        try:
            method = check_model(settings, "language model", name=str(settings.model_dir))
        except OperatorError as error:
            text = str(error).replace("learner.micro_batch_tokens to 1", "--micro-batch-tokens to 1")
            raise OperatorError(f"tinker: {text}") from None
        self._model = load_model(settings).to(self.device)
        scored_model(self._model).method = method
        self._layers = adapted_layers(self._model)
        self.layer_kinds = sorted({name.rpartition(".")[2] for name in self._layers})  # such as q_proj
        self.vocab_size = int(self._model.config.vocab_size)

    def __call__(self, **inputs: Any) -> Any:
        return self._model(**inputs)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def make_adapter(self, form: AdapterForm) -> Adapter:
        """Return a new adapter, whose product is zero. Raises: RequestError for one without a layer."""
        random = torch.Generator().manual_seed(form.seed)
        parameters: dict[str, Parameter] = {}
        for name, layer in self._layers.items():
            if form.train_attn if "attn" in name else form.train_mlp:
                first = torch.empty(form.rank, layer.in_features)
                torch.nn.init.kaiming_uniform_(first, a=math.sqrt(5), generator=random)
                second = torch.zeros(layer.out_features, form.rank)
                parameters[f"{name}.lora_A.{_SLOT}.weight"] = Parameter(first.to(self.device))
                parameters[f"{name}.lora_B.{_SLOT}.weight"] = Parameter(second.to(self.device))
        if not parameters:
            raise RequestError("The adapter has no layer to train. Set train_attn or train_mlp to True.")
        return Adapter(form, parameters)

    def run(self, adapter: Adapter, request: Pass) -> tuple[list[Array], float]:
        """Return (logprobs of each datum's targets [N], sum of the losses), and add the gradient if it is requested.

        Raises: RequestError for data that does not fit. The gradient is then unchanged.
        """
        loss, constants = loss_of(request, self.vocab_size, self._settings.max_tokens)
        lengths = [len(datum.tokens) for datum in request.data]
        found: list[Array] = [np.empty(0)] * len(lengths)
        plan = plan_step(lengths, 1, self._settings.micro_batch_tokens)[0] if lengths else []
        total = 0.0
        with self._in_place(adapter), _added_gradient([*adapter.parameters.values()]):
            for indices in plan:
                ordered = sorted(indices, key=lambda index: -lengths[index])
                batch = _micro_batch([request.data[index] for index in ordered])
                logprobs, value = self._run_batch(batch, loss, constants, request.forward_only)
                total += value
                parts = torch.split(logprobs, [lengths[index] for index in ordered])
                for index, part in zip(ordered, parts, strict=True):
                    found[index] = part.numpy()
        return found, total

    def _run_batch(
        self, batch: MicroBatch, loss: Loss, constants: Mapping[str, float], forward_only: bool
    ) -> tuple[Tensor, float]:
        kept: list[Tensor] = []

        def sum_of(logprobs: Tensor, entropies: Tensor, on_device: MicroBatch) -> tuple[Tensor, Sums]:
            kept.append(logprobs.detach().cpu())
            return loss.of_tokens(logprobs, on_device, constants).sum(), {}

        if forward_only:
            with torch.no_grad():
                moved = batch.to(self.device)
                logprobs, entropies = score_tokens(self, moved, 1.0, with_entropy=False)
                value = sum_of(logprobs, entropies, moved)[0]
        else:
            value = add_gradient(self, [batch], sum_of, 1.0, temperature=1.0, with_entropy=False)["loss"]
        return kept[0], float(value)

    @contextmanager
    def _in_place(self, adapter: Adapter) -> Iterator[None]:
        """Put an adapter's tensors into the model's layers within the block."""
        for name, layer in self._layers.items():
            first = adapter.parameters.get(f"{name}.lora_A.{_SLOT}.weight")
            layer._disable_adapters = first is None
            if first is not None:
                layer.lora_A[_SLOT].weight = first
                layer.lora_B[_SLOT].weight = adapter.parameters[f"{name}.lora_B.{_SLOT}.weight"]
                layer.scaling[_SLOT] = ALPHA / adapter.form.rank
        yield


def base_settings(model: Path, max_tokens: int, micro_batch_tokens: int, **more: Any) -> PolicySettings:
    """Return the settings of a frozen base model, whose optimizer is each adapter's own; `more` adds fields."""
    unused: dict[str, Any] = {"zero_stage": 0, "lr": 0.0, "betas": (0.9, 0.95), "weight_decay": 0.0}
    unused |= {"max_grad_norm": 0.0, "warmup_steps": 0, "total_steps": 0, "min_lr_ratio": 1.0, "schedule": "constant"}
    return PolicySettings(
        model_dir=model,
        max_tokens=max_tokens,
        longest_text=max_tokens,
        micro_batch_tokens=micro_batch_tokens,
        lora=LoraForm(1, 1.0, ()),  # the place of every client's adapter
        **{"dtype": "float32", "seed": 0, **unused, **more},
    )


def form_of(lora: LoraConfig, seed: int) -> AdapterForm:
    """Return the form that a client requests. seed: used without one of its own."""
    return AdapterForm(lora.rank, seed if lora.seed is None else lora.seed, lora.train_attn, lora.train_mlp)


@contextmanager
def _added_gradient(parameters: Sequence[Parameter]) -> Iterator[None]:
    """Add the block's gradient to the one before it, or leave that one unchanged when the block fails."""
    before = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    try:
        yield
    except BaseException:
        for each, old in zip(parameters, before, strict=True):
            each.grad = old
        raise
    for each, old in zip(parameters, before, strict=True):
        if old is not None:
            each.grad = old if each.grad is None else old + each.grad


def _micro_batch(data: Sequence[Datum]) -> MicroBatch:
    """Return the data end to end, longest first: every token predicts its target."""
    lengths = tuple(len(datum.tokens) for datum in data)
    tokens = torch.from_numpy(np.concatenate([datum.tokens for datum in data]))
    return MicroBatch(
        tokens=tokens[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        lengths=lengths,
        prompts=((0, 0),) * len(lengths),
        counts=lengths,
        predict_at=torch.arange(len(tokens)),
        targets=_column(data, TARGETS, 0.0).long(),
        behaviour_logprobs=_column(data, "logprobs", 0.0),
        advantages=_column(data, "advantages", 0.0),
        weights=_column(data, "weights", 1.0),
    )


def _column(data: Sequence[Datum], name: str, default: float) -> Tensor:
    """Return one input of all data, float32, or int64 for whole numbers."""
    arrays = [datum.inputs.get(name, np.full(len(datum.tokens), default, np.float32)) for datum in data]
    joined = torch.from_numpy(np.concatenate(arrays))
    return joined if joined.dtype == torch.int64 else joined.float()
