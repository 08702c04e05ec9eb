"""The protobuf messages of Tinker's API as arrays.

Only the fields that this service reads or writes are declared. A reader skips the others.
Shape: N tokens of one datum.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from numpy.typing import NDArray

Array = NDArray[Any]

# MESSAGE: FIELD NUMBER TYPE, ...; * repeats a type, @ is a map from strings to it.
_SCHEMA = """
Request: model_id 1 string, seq_id 2 int32, data 3 *Datum, loss_fn 4 string, config 5 @double, forward_only 6 bool,
    config_v2 7 @Value
Value: number 1 double, text 2 string
Datum: chunks 1 *Chunk, inputs 2 @Tensor
Chunk: text 1 Text, image 2 bytes, audio 3 bytes
Text: tokens 1 bytes
Tensor: dense 1 bytes, sparse 2 bytes, dtype 3 int32, shape 4 *int64
Output: type 1 string, records 2 *Record, metrics 3 @double
Record: tag 1 string, fields 2 @Batch, num_datums 3 int64
Batch: data 1 bytes, offsets 2 bytes, dtype 3 int32
Samples: sequences 1 *Sequence, prompt_logprobs 2 bytes, top_of_prompt 3 Top
Sequence: stop_reason 1 int32, tokens 2 bytes, logprobs 3 bytes, top 4 Top
Top: token_ids 1 bytes, logprobs 2 bytes, k 3 uint32, length 4 uint32
"""
_PACKAGE = "sluice_tinker"
_DTYPES: dict[int, Any] = {1: np.float32, 2: np.int64, 3: np.int32}
_FLOAT32 = 1
_NO_LOGPROB = -99999.0  # of an empty cell


class RequestError(Exception):
    """The client can correct this request: the message names the value and the change."""


@dataclass(frozen=True)
class Datum:
    """One text and the inputs of its loss."""

    tokens: Array  # [N] int64
    inputs: dict[str, Array]  # arrays by name, each of its own shape


@dataclass(frozen=True)
class Pass:
    """A forward pass, with a backward pass or without."""

    data: list[Datum]
    loss_fn: str  # name of the loss
    config: dict[str, float | str]  # constants of the loss
    forward_only: bool  # True: no gradient


@dataclass(frozen=True)
class SampledSequence:
    """One sample."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    is_cut: bool  # True: it reached its limit of tokens
    top: Sequence[Mapping[int, float]] = ()  # token -> logprob of the likeliest, for each sampled token


def read_head(body: bytes) -> tuple[str, int]:
    """Return (model, seq_id) of a pass. Raises: RequestError for bytes that are no such message."""
    message = _parse(body)
    return message.model_id, message.seq_id


def in_order(body: bytes) -> bytes:
    """Return the body of a pass with its maps in order, so that a pass that is sent again has the same bytes."""
    ordered: bytes = _parse(body).SerializeToString(deterministic=True)
    return ordered


def read_pass(body: bytes) -> Pass:
    """Return a pass. Raises: RequestError for data that is not text, or arrays that are not dense."""
    message = _parse(body)
    config: dict[str, float | str] = dict(message.config)
    for name, value in message.config_v2.items():
        config[name] = value.text if value.HasField("text") else value.number
    data = [_datum(number, each) for number, each in enumerate(message.data)]
    return Pass(data, message.loss_fn, config, message.forward_only)


def write_pass(logprobs: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """Return the result of a pass. logprobs: of each datum [N]."""
    message = MESSAGES["Output"](type="ArrayRecord", metrics=dict(metrics))
    record = message.records.add(tag="ArrayRecord", num_datums=len(logprobs))
    flat = [np.asarray(each, np.float32) for each in logprobs]
    batch = record.fields["logprobs"]
    batch.dtype = _FLOAT32
    batch.data = b"".join(each.tobytes() for each in flat)
    batch.offsets = np.cumsum([0, *(each.nbytes for each in flat)], dtype=np.int64).tobytes()
    written: bytes = message.SerializeToString()
    return written


def write_samples(
    sequences: Sequence[SampledSequence],
    prompt_logprobs: Sequence[float] | None,
    top_of_prompt: Sequence[Mapping[int, float]] = (),
    k: int = 0,
    k_of_samples: int = 0,
) -> bytes:
    """Return the result of a sample request. prompt_logprobs: the first is NaN; None: not requested."""
    message = MESSAGES["Samples"]()
    for each in sequences:
        sequence = message.sequences.add(stop_reason=int(each.is_cut))
        sequence.tokens = np.asarray(each.tokens, np.int32).tobytes()
        sequence.logprobs = np.asarray(each.logprobs, np.float32).tobytes()
        if k_of_samples:
            _fill_top(sequence.top, each.top, k_of_samples)
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(prompt_logprobs, np.float32).tobytes()
    if k:
        _fill_top(message.top_of_prompt, top_of_prompt, k)
    written: bytes = message.SerializeToString()
    return written


def _parse(body: bytes) -> Any:
    message = MESSAGES["Request"]()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise RequestError("the body is no ForwardBackwardRequest. Use the tinker client 0.25 or newer.") from None
    return message


def _datum(number: int, message: Any) -> Datum:
    if any(not chunk.HasField("text") for chunk in message.chunks):
        raise RequestError(f"data[{number}] has a chunk that is no text. Only encoded text is served.")
    text = b"".join(chunk.text.tokens for chunk in message.chunks)
    tokens = np.frombuffer(text, np.int32).astype(np.int64)
    return Datum(tokens, {name: _array(number, name, each) for name, each in message.inputs.items()})


def _array(number: int, name: str, message: Any) -> Array:
    if message.HasField("sparse") or message.dtype not in _DTYPES:
        raise RequestError(
            f"data[{number}].{name} is sparse or of an unknown type. Use a dense float32 or int64 array."
        )
    kind, shape = np.dtype(_DTYPES[message.dtype]), [*message.shape]
    if len(message.dense) != kind.itemsize * math.prod(shape):
        raise RequestError(
            f"data[{number}].{name} has {len(message.dense)} bytes, and its shape is {shape}. Give both."
        )
    return np.frombuffer(message.dense, kind).reshape(shape)


def _fill_top(message: Any, rows: Sequence[Mapping[int, float]], k: int) -> None:
    tokens = np.zeros((len(rows), k), np.int32)
    logprobs = np.full((len(rows), k), _NO_LOGPROB, np.float32)
    for place, row in enumerate(rows):
        best = sorted(row.items(), key=lambda pair: -pair[1])[:k]
        tokens[place, : len(best)] = [token for token, _ in best]
        logprobs[place, : len(best)] = [logprob for _, logprob in best]
    message.k, message.length = k, len(rows)
    message.token_ids, message.logprobs = tokens.tobytes(), logprobs.tobytes()


def _message_classes() -> dict[str, Any]:
    file = FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE)
    for line in _SCHEMA.replace("\n    ", " ").strip().split("\n"):
        name, _, fields = line.partition(":")
        message = file.message_type.add(name=name)
        for field in fields.split(","):
            key, number, kind = field.split()
            if kind.startswith("@"):
                entry = message.nested_type.add(name=f"{key.title().replace('_', '')}Entry")
                entry.options.map_entry = True
                _add_field(entry, "key", 1, "string")
                _add_field(entry, "value", 2, kind[1:])
                kind = f"*{name}.{entry.name}"
            _add_field(message, key, int(number), kind)
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    names = [message.name for message in file.message_type]
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in names}


def _add_field(message: Any, name: str, number: int, kind: str) -> None:
    plain = kind.lstrip("*")
    repeated, optional = FieldDescriptorProto.LABEL_REPEATED, FieldDescriptorProto.LABEL_OPTIONAL
    field = message.field.add(name=name, number=number, label=repeated if kind.startswith("*") else optional)
    if plain[0].isupper():
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{_PACKAGE}.{plain}"
    else:
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{plain.upper()}")


MESSAGES = _message_classes()  # protobuf classes by the names above
