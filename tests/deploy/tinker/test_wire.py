"""Tinker's messages as bytes, and back."""

import numpy as np
import pytest

from deploy.tinker.wire import MESSAGES, RequestError, SampledSequence, read_head, read_pass, write_pass, write_samples

# Written by the tinker client 0.38's own classes.
REQUEST = bytes.fromhex(
    "0a096d3a747261696e3a3010031a710a0c0a0a0a0805000000060000000a080a060a040700000012300a0d7461726765745f746f6b656e73"
    "121f0a180600000000000000070000000000000008000000000000001802220103121e0a077765696768747312130a0c000000000000003f"
    "0000803f18012201031a050a030a0178220370706f2a0f0a046265746111000000000000e03f30013a110a046265746112090900000000"
    "0000e03f3a0b0a046d6f64651203120161"
)


def test_a_clients_request_is_read_and_unknown_fields_are_skipped() -> None:
    request = read_pass(REQUEST)
    (datum,) = request.data

    assert read_head(REQUEST) == ("m:train:0", 3)
    assert (request.loss_fn, request.forward_only, request.config) == ("ppo", True, {"beta": 0.5, "mode": "a"})
    assert datum.tokens.tolist() == [5, 6, 7]
    assert {name: array.tolist() for name, array in datum.inputs.items()} == {
        "target_tokens": [6, 7, 8],
        "weights": [0.0, 0.5, 1.0],
    }


def test_bytes_that_are_no_request_are_refused() -> None:
    with pytest.raises(RequestError, match="no ForwardBackwardRequest"):
        read_pass(b"\xff\xff")


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_data_that_is_no_text_is_refused(kind: str) -> None:
    message = MESSAGES["Request"]()
    setattr(message.data.add().chunks.add(), kind, b"")
    with pytest.raises(RequestError, match=r"data\[0\] has a chunk that is no text"):
        read_pass(message.SerializeToString())


def test_a_sparse_array_is_refused() -> None:
    message = MESSAGES["Request"]()
    message.data.add().inputs["weights"].sparse = b""
    with pytest.raises(RequestError, match=r"data\[0\].weights is sparse"):
        read_pass(message.SerializeToString())


def test_an_array_with_another_number_of_values_than_its_shape_is_refused() -> None:
    message = MESSAGES["Request"]()
    tensor = message.data.add().inputs["weights"]
    tensor.dense, tensor.dtype = b"\0\0\0\0", 1
    tensor.shape.append(2)
    with pytest.raises(RequestError, match=r"data\[0\].weights has 4 bytes"):
        read_pass(message.SerializeToString())


def test_a_passes_result_has_offsets_in_bytes() -> None:
    message = MESSAGES["Output"]()
    message.ParseFromString(write_pass([np.array([-1.0, -2.0]), np.array([-3.0])], {"loss:sum": 6.0}))
    batch = message.records[0].fields["logprobs"]

    assert np.frombuffer(batch.offsets, np.int64).tolist() == [0, 8, 12]
    assert np.frombuffer(batch.data, np.float32).tolist() == [-1.0, -2.0, -3.0]
    assert dict(message.metrics) == {"loss:sum": 6.0}


def test_likeliest_tokens_come_in_rows_and_empty_cells_are_marked() -> None:
    sample = SampledSequence([4], [-0.5], True, [{4: -0.5, 9: -0.25}])
    message = MESSAGES["Samples"]()
    message.ParseFromString(write_samples([sample], [float("nan"), -1.0], [{}, {3: -1.0}], 2, 1))
    top, of_sample = message.top_of_prompt, message.sequences[0].top

    assert message.sequences[0].stop_reason == 1
    assert np.frombuffer(top.token_ids, np.int32).tolist() == [0, 0, 3, 0]
    assert np.frombuffer(top.logprobs, np.float32).tolist() == [-99999.0, -99999.0, -1.0, -99999.0]
    assert (top.k, top.length) == (2, 2)
    assert np.frombuffer(of_sample.token_ids, np.int32).tolist() == [9]
