"""Requests of clients: their order, retries, failures, memory, and a service that starts again."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from deploy.tinker.adapters import Adapter, BaseModel
from tests.deploy.tinker.played_client import MODEL, Client, datum, pass_body, read_logprobs

ONE, TWO = [datum([5, 6, 7, 8])], [datum([9, 3, 4])]
OTHER = "other:train:0"


def state(client: Client, owner: str = MODEL) -> dict[str, torch.Tensor]:
    """Return a model's tensors on the disk."""
    (path,) = (client.folder / "states" / owner.replace(":", "-")).iterdir()
    return load_file(path)


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(each, other[name]) for name, each in one.items())


def run_script(client: Client, first: int, last: int) -> None:
    """Send two passes and a step for each of some steps, and wait."""
    name = ""
    for step in range(first, last):
        client.send("forward_backward", 3 * step + 1, pass_body(ONE, seq=3 * step + 1))
        client.send("forward_backward", 3 * step + 2, pass_body(TWO, seq=3 * step + 2))
        name = client.step(3 * step + 3, learning_rate=0.01)
    client.wait(name)


def test_requests_run_in_the_order_of_their_numbers_not_of_arrival(base: BaseModel, tmp_path: Path) -> None:
    client = Client(tmp_path, base)
    step = client.step(3)
    second = client.send("forward_backward", 2, pass_body(TWO, seq=2))
    client.start()
    first = client.send("forward_backward", 1, pass_body(ONE, seq=1))
    created = client.create()

    client.wait(step)
    assert client.order == [created, first, second, step]


def test_a_request_that_is_sent_twice_is_applied_once(base: BaseModel, tmp_path: Path) -> None:
    twice, once = Client(tmp_path / "twice", base), Client(tmp_path / "once", base)
    for client in (twice, once):
        client.begin()
        client.send("forward_backward", 1, pass_body(ONE))
        if client is twice:
            client.send("forward_backward", 1, pass_body(ONE))
        client.wait(client.step(2, learning_rate=0.01))
    twice.step(2, learning_rate=0.01)
    for client in (twice, once):
        client.wait(client.send("forward_backward", 3, pass_body(TWO, seq=3)))

    assert_same_bits(state(twice), state(once))
    assert twice.order == once.order


def test_a_service_that_starts_again_continues_with_the_same_bits(base: BaseModel, tmp_path: Path) -> None:
    whole = Client(tmp_path / "whole", base).begin()
    run_script(whole, 0, 4)

    first = Client(tmp_path / "cut", base).begin()
    run_script(first, 0, 2)
    first.wait(first.send("forward_backward", 7, pass_body(ONE, seq=7)))  # its gradient is in memory alone
    second = Client(tmp_path / "cut", base)
    second.send("forward_backward", 8, pass_body(TWO, seq=8))
    unfinished = Client(tmp_path / "cut", base)  # 8 is in the journal, and has no result
    unfinished.start()
    unfinished.wait(unfinished.step(9, learning_rate=0.01))
    run_script(unfinished, 3, 4)

    assert_same_bits(state(unfinished), state(whole))


def test_saved_state_makes_a_new_model_with_its_optimizer(base: BaseModel, tmp_path: Path) -> None:
    client = Client(tmp_path, base).begin()
    run_script(client, 0, 2)
    body = {"model_id": MODEL, "seq_id": 7, "path": "mid"}
    path = json.loads(client.wait(client.send("save_weights", 7, body)))["path"]
    client.send("forward_backward", 8, pass_body(ONE, seq=8))
    client.wait(client.step(9, learning_rate=0.01))
    load = {"session_id": "other", "model_seq_id": 0, "path": path, "optimizer": True}
    client.send("load_weights", 0, load, OTHER)
    client.send("forward_backward", 1, pass_body(ONE), OTHER)
    client.wait(client.step(2, OTHER, learning_rate=0.01))

    assert path == f"tinker://{MODEL}/weights/mid"
    assert_same_bits(state(client, OTHER), state(client))
    again = client.send("save_weights", 10, body)
    assert client.error(again)["error"] == f"{path} exists. Use another name, or overwrite=True."


def test_a_gradient_that_is_not_finite_changes_no_weight(base: BaseModel, tmp_path: Path) -> None:
    client = Client(tmp_path, base).begin()
    run_script(client, 0, 1)
    before = state(client)
    bad = datum([5, 6, 7], logprobs=[-1.0, -np.inf], advantages=[1.0, 1.0])
    client.send("forward_backward", 4, pass_body([bad], "importance_sampling", seq=4))
    client.send("forward_backward", 5, pass_body(ONE, seq=5))

    failure = client.error(client.step(6, learning_rate=0.01))
    assert (failure["category"], failure["error"][:26]) == ("user", "The gradient is not finite")
    assert_same_bits(state(client), before)
    again = Client(tmp_path, base)  # the dropped gradient does not come back
    again.start()
    run_script(again, 2, 3)
    assert all(torch.isfinite(each).all() for each in state(client).values())
    assert not torch.equal(*(next(iter(each.values())) for each in (state(client), before)))


def test_a_step_that_makes_weights_that_are_not_finite_changes_none(base: BaseModel, tmp_path: Path) -> None:
    client = Client(tmp_path, base)
    client.start()
    client.wait(client.create())
    before = state(client)
    for seq in (1, 2):
        client.send("forward_backward", seq, pass_body(ONE, seq=seq))
    failure = client.error(client.step(3, learning_rate=0.01, eps=1e-60))

    assert failure["error"].startswith("The step makes weights that are not finite, so they were not changed.")
    assert_same_bits(state(client), before)
    run_script(client, 1, 2)
    assert all(torch.isfinite(each).all() for each in state(client).values())


def test_a_step_that_a_full_disk_ends_can_be_sent_again(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, plain = Client(tmp_path / "full", base), Client(tmp_path / "plain", base)
    for client in (full, plain):
        client.begin()
        run_script(client, 0, 1)
        client.wait(client.send("forward_backward", 4, pass_body(ONE, seq=4)))
        if client is full:
            with monkeypatch.context() as patch:
                patch.setattr(Adapter, "save", no_space)
                failure = client.error(client.step(5, learning_rate=0.01))
            client.wait(client.step(6, learning_rate=0.01))
        else:
            client.wait(client.step(5, learning_rate=0.01))

    assert failure["category"] == "server"
    assert failure["error"].endswith("space left. The request changed nothing: weights and gradient are as before it.")
    assert_same_bits(state(full), state(plain))


def no_space(adapter: Adapter, path: Path) -> None:
    raise OSError("no space left")


def test_a_failed_request_leaves_the_gradient_and_the_order(base: BaseModel, tmp_path: Path) -> None:
    failing, plain = Client(tmp_path / "failing", base), Client(tmp_path / "plain", base)
    for client in (failing, plain):
        client.begin()
        client.send("forward_backward", 1, pass_body(ONE))
        loss = "gspo" if client is failing else "cross_entropy"
        client.send("forward_backward", 2, pass_body(TWO, loss, seq=2, forward_only=client is plain))
        client.wait(client.step(3, learning_rate=0.01))

    assert_same_bits(state(failing), state(plain))


def test_a_refused_request_fails_in_its_place_and_the_next_one_runs(base: BaseModel, tmp_path: Path) -> None:
    client = Client(tmp_path, base).begin()
    wrong = client.error(client.step(1, beta2=1.0))
    body = {"model_id": MODEL, "seq_id": 2, "path": "mine"}
    external = client.error(client.send("save_weights_external", 2, body))

    assert (wrong["category"], wrong["error"][:20]) == ("user", "$.adam_params.beta2 ")
    assert (external["category"], external["error"][:21]) == ("user", "save_weights_external")
    client.wait(client.step(3))


def test_a_model_beyond_the_memory_is_refused_until_another_session_ends(base: BaseModel, tmp_path: Path) -> None:
    probe = Client(tmp_path / "probe", base)
    probe.start()
    probe.wait(probe.create())
    size = next(iter(probe.learning._adapters.values())).num_bytes
    client = Client(tmp_path / "client", base, adapter_bytes=size).begin()
    client.send("forward_backward", 1, pass_body(ONE))
    client.wait(client.step(2, learning_rate=0.01))

    refusal = client.error(client.create(OTHER))
    assert refusal["category"] == "user"
    assert refusal["error"].startswith("The adapters of 1 models leave no memory for one more of")
    client.learning.release("session:")
    client.wait(client.create("third:train:0"))
    client.learning.release("third:")
    logprobs = read_logprobs(client.wait(client.send("forward_backward", 3, pass_body(ONE, seq=3))))
    assert logprobs != read_logprobs(client.wait(client.send("forward_backward", 1, pass_body(ONE))))


def test_a_model_of_another_base_or_a_larger_rank_is_refused(base: BaseModel, tmp_path: Path) -> None:
    client = Client(tmp_path, base)
    client.start()
    body = {"session_id": "s", "model_seq_id": 0, "base_model": "large"}
    other = client.send("create_model", 0, body, "s:train:0")
    load = {"session_id": "s", "model_seq_id": 1, "path": "tinker://a", "optimizer": True, "base_model": "large"}
    loaded = client.send("load_weights", 0, load, "s:train:1")

    for name in (other, loaded):
        assert client.error(name)["error"].startswith("base_model = large is not served. Use base: one service has")
    assert client.error(client.create(rank=17))["error"].startswith("rank = 17 is over 16.")
    assert client.error(client.step(1))["error"].startswith(f"The model {MODEL} was not created.")


def test_a_busy_client_takes_no_more_than_its_share(base: BaseModel, tmp_path: Path) -> None:
    client = Client(tmp_path, base, clock=itertools.count().__next__)  # each request takes a second
    owners = [f"s{number:02}:train:0" for number in range(16)]
    for owner in owners:
        client.create(owner)
    for seq in range(1, 61):  # all of the first client's requests arrive first
        client.send("forward_backward", seq, pass_body(ONE * 4, seq=seq), owners[0])
    for owner in owners[1:]:
        for seq in range(1, 5):
            client.send("forward_backward", seq, pass_body(ONE * 4, seq=seq), owner)
    client.start()
    client.wait(f"{owners[0]}#60")

    early = client.order[16 : 16 + 64]  # 64 passes: four for each
    assert [sum(name.startswith(owner) for name in early) for owner in owners] == [4] * 16


def test_sixteen_clients_have_the_bits_that_each_has_alone(base: BaseModel, tmp_path: Path) -> None:
    together = Client(tmp_path / "together", base)
    together.start()
    owners = [f"s{number:02}:train:0" for number in range(16)]
    for place, owner in enumerate(owners):
        together.create(owner, rank=1 + place % 3)
    for seq in (1, 2, 4, 5):
        for place, owner in enumerate(owners):
            together.send("forward_backward", seq, pass_body([datum([6 + place, seq, 9])], seq=seq), owner)
            if seq in (2, 5):
                together.step(seq + 1, owner, learning_rate=0.01 * (place + 1))
    for owner in owners:
        together.wait(f"{owner}#6")
    alone = Client(tmp_path / "alone", base)  # from here on the only one that uses the base model
    alone.start()
    for place in (0, 7, 15):
        owner = owners[place]
        alone.create(owner, rank=1 + place % 3)
        for seq in (1, 2, 4, 5):
            alone.send("forward_backward", seq, pass_body([datum([6 + place, seq, 9])], seq=seq), owner)
            if seq in (2, 5):
                alone.wait(alone.step(seq + 1, owner, learning_rate=0.01 * (place + 1)))
        assert_same_bits(state(alone, owner), state(together, owner))


def test_weights_of_sampling_sessions_are_removed_when_sixteen_are_newer(base: BaseModel, tmp_path: Path) -> None:
    client = Client(tmp_path, base).begin()
    body = {"model_id": MODEL, "path": "kept"}
    client.send("save_weights_for_sampler", 1, {**body, "seq_id": 1})
    for seq in range(2, 20):
        session = {"model_id": MODEL, "seq_id": seq, "sampling_session_seq_id": seq}
        name = client.send("save_weights_for_sampler", seq, session)
    made = json.loads(client.wait(name))["sampling_session_id"]

    left = {path.name for path in (tmp_path / "samplers" / "session-train-0").iterdir()}
    assert left == {"named-1", *(f"session-{seq}" for seq in range(4, 20))}
    row = client.journal.sampler(made)
    assert row is not None
    assert (row.path, row.step) == (f"tinker://{MODEL}/sampler_weights/request-19", 0)
