"""The coordinator behind real encrypted sockets, with servers and ranks in threads."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from learner.coordinator.coordinator import Coordinator
from learner.coordinator.loop import CoordinatorLoop
from learner.coordinator.process import CoordinatorProcess
from learner.coordinator.steps.record import RunRecord
from learner.data.prompts import Prompt
from learner.ledger.ledger import Ledger
from learner.rank.coordinator_client import CoordinatorClient
from protocol.errors import NeighbourError, OperatorError
from protocol.node.home import write_secret
from protocol.settings.data import DataSettings
from protocol.settings.settings import Settings
from protocol.wire import messages as m
from protocol.wire.channel import DealerChannel, KeyPair, RouterChannel
from protocol.wire.codec import Decoder, encode
from tests.fakes.waiting import wait_until
from tests.protocol.wire.examples import make_trajectory

COORDINATOR_KEYS = KeyPair(*zmq.curve_keypair())
PEER_KEYS = KeyPair(*zmq.curve_keypair())
STAMP: dict[str, Any] = {"run_id": "r1", "incarnation": 1}
SETTINGS = Settings.model_validate(
    {
        "run": {"max_steps": 3},
        "rollout": {"group_size": 2},
        "learner": {"groups_per_step": 2, "num_ranks": 2, "max_staleness": 1},
    }
)


class Running:
    """A coordinator at work and where to reach it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger(folder / "ledger.sqlite")
        prompts = [Prompt(f"p{i}", f"question {i}", f"answer {i}", {}) for i in range(4)]
        self.coordinator = Coordinator(SETTINGS, "r1", self.ledger, prompts, [], RunRecord(folder, 1), last_step=0)
        router = RouterChannel("127.0.0.1", COORDINATOR_KEYS, [PEER_KEYS.public])
        self.address = router.address
        self.loop = CoordinatorLoop(self.coordinator, router)
        self.loop.start()

    def dealer(self, name: str) -> DealerChannel:
        return DealerChannel(self.address, name, PEER_KEYS, COORDINATOR_KEYS.public)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    run = Running(tmp_path)
    yield run
    run.loop.close()
    run.ledger.close()


class FakeServer:
    """A rollout server without an engine: answers every lease at once with trajectories of its current version."""

    def __init__(self, run: Running, name: str) -> None:
        self.name = name
        self.version = 0
        self.outcomes: list[str] = []
        self._newest_lease = 0
        self._run = run
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join(60.0)

    def _serve(self) -> None:
        decoder: Decoder[m.Message] = Decoder(m.ToServer | m.Done)
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.sndhwm = 0
            socket.identity = self.name.encode()
            socket.curve_publickey, socket.curve_secretkey = PEER_KEYS.public, PEER_KEYS.secret
            socket.curve_serverkey = COORDINATOR_KEYS.public
            socket.connect(self._run.address)
            socket.send_multipart(encode(m.Hello(**STAMP, server=self.name, policy_version=self.version)))
            while not self._is_closing.is_set():
                room = {"num_groups": 2, "policy_version": self.version, "heard_of_lease": self._newest_lease}
                socket.send_multipart(encode(m.Demand(**STAMP, **room, leases={})))
                while socket.poll(20):
                    self._answer(socket, decoder.decode(socket.recv_multipart())[0])

    def _answer(self, socket: Any, message: m.Message) -> None:
        if isinstance(message, m.Ack):
            self.outcomes.append(message.outcome)
        if isinstance(message, m.Lease):
            self._newest_lease = message.number
            for index in message.sample_indices:
                trajectory = make_trajectory(
                    message.group,
                    index,
                    self.name,
                    self.version,
                    reward=float(index),
                    attempt=message.attempt,
                    incarnation=1,
                )
                socket.send_multipart(
                    encode(m.TrajectoryDone(**STAMP, facts=trajectory.facts), trajectory.to_buffers())
                )


def train(
    run: Running, rank: int, push: Callable[[int], None], shares: dict[int, list[int]], collective: threading.Barrier
) -> None:
    """Do a rank's part of the run, without a model: note which trajectories each step brought."""
    channel = run.dealer(f"rank-{rank}")
    client = CoordinatorClient(channel, "r1", 1)
    step = 0
    while not isinstance(share := client.next_batch(step + 1, rank, timeout_s=20.0), str):
        step += 1
        batch, trajectories = share
        assert sorted(trajectories) == sorted(i for part in batch.micro_batches for i in part)
        assert all(t.tokens.tolist() == [1, 2, 3, 4] for t in trajectories.values())
        shares.setdefault(step, []).extend(trajectories)
        collective.wait(20.0)  # no rank ends a step that another has not begun
        if rank == 0:
            push(step)
            client.report_step(step, step, True, "", {"policy/loss": 0.5})
    assert (step, share) == (3, "all steps are done")
    channel.close()


def test_three_steps_run_over_encrypted_sockets(running: Running) -> None:
    servers = [FakeServer(running, f"s{i}") for i in (1, 2)]
    shares: list[dict[int, list[int]]] = [{}, {}]

    def push(version: int) -> None:
        for server in servers:
            server.version = version

    collective = threading.Barrier(2)
    try:
        with ThreadPoolExecutor(2) as ranks:
            trained = [ranks.submit(train, running, rank, push, shares[rank], collective) for rank in (0, 1)]
        for future in trained:
            future.result()
    finally:
        for server in servers:
            server.close()
    assert {step: sorted(shares[0][step] + shares[1][step]) for step in (1, 2, 3)} == {
        step: [0, 1, 2, 3] for step in (1, 2, 3)
    }
    assert {outcome for server in servers for outcome in server.outcomes} == {"accepted"}
    assert running.loop.failure is None
    lines = [json.loads(line) for line in (running.folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["reward/mean"], line["policy/loss"]) for line in lines] == [
        (1, 0.5, 0.5),
        (2, 0.5, 0.5),
        (3, 0.5, 0.5),
    ]


def test_garbage_from_a_peer_is_answered_and_the_loop_goes_on(running: Running) -> None:
    channel = running.dealer("s1")
    decoder: Decoder[m.Message] = Decoder(m.ToServer)
    for frames in ([b"garbage"], [b""], [b"\x80"], [b"x", b"y", b"z", b"1", b"2"]):
        answer, _ = decoder.decode(channel.call(frames, 20.0))
        assert isinstance(answer, m.Refusal)
    channel.close()
    assert running.loop.failure is None


def test_result_that_is_no_valid_message_is_answered_for_its_sample_and_goes_out_again(running: Running) -> None:
    """It was once sent again for ever, and its group never ended: the refusal named no sample."""
    channel = running.dealer("s1")
    decoder: Decoder[m.Message] = Decoder(m.ToServer)
    lease, _ = decoder.decode(
        channel.call(encode(m.Demand(**STAMP, num_groups=1, policy_version=0, heard_of_lease=0, leases={})), 20.0)
    )
    assert isinstance(lease, m.Lease)
    trajectory = make_trajectory(lease.group, 1, "s1", 0, attempt=1, incarnation=1)
    won = msgspec.structs.replace(trajectory.facts, finish="won")  # what an environment of a user's may call it
    result = encode(m.TrajectoryDone(**STAMP, facts=won), trajectory.to_buffers())
    answer, _ = decoder.decode(channel.call(result, 20.0))
    while isinstance(answer, m.Ping):
        answer, _ = decoder.decode(channel.receive(20.0) or [])
    assert isinstance(answer, m.Ack)
    assert (answer.group, answer.sample_index, answer.outcome) == (lease.group, 1, "refused")
    assert answer.detail == "$.facts.finish: Invalid enum value 'won'"
    assert running.coordinator.counts == {"refused:invalid": 1, "retried": 1}
    channel.close()


def test_call_of_another_incarnation_is_refused_by_name(running: Running) -> None:
    channel = running.dealer("rank-0")
    with pytest.raises(NeighbourError) as caught:
        CoordinatorClient(channel, "r1", 7).next_batch(1, 0, timeout_s=1.0)
    assert str(caught.value) == (
        "coordinator: refused NextBatch: this is run r1, start 1; your message is of run r1, start 7"
    )
    channel.close()


def test_rank_that_gets_no_batch_says_what_was_missing(running: Running) -> None:
    channel = running.dealer("rank-0")
    with pytest.raises(NeighbourError) as caught:
        CoordinatorClient(channel, "r1", 1).next_batch(1, 0, timeout_s=0.1)
    assert str(caught.value) == (
        "coordinator: no batch for step 1 within learner.batch_timeout_s = 0.1 s: "
        "step 1 waits for a server with the current weights"
    )
    channel.close()


def test_lease_that_cannot_be_delivered_goes_back(running: Running) -> None:
    channel = running.dealer("s1")
    decoder: Decoder[m.Message] = Decoder(m.ToServer | m.Done)
    hello, _ = decoder.decode(channel.call(encode(m.Hello(**STAMP, server="s1", policy_version=0)), 20.0))
    assert isinstance(hello, m.Done)
    channel.close()
    demand = m.Demand(**STAMP, num_groups=1, policy_version=0, heard_of_lease=0, leases={})
    deadline = time.monotonic() + 20.0
    # A ping that finds no connection is undeliverable too, and gives nothing back.
    while running.coordinator.counts["retried"] == 0 and time.monotonic() < deadline:
        running.loop.submit(lambda coordinator: coordinator.receive("s1", demand, [], time.monotonic()))
        time.sleep(0.05)
    assert running.coordinator.counts["undeliverable"] >= 1
    assert running.coordinator.counts["retried"] >= 1


def test_commands_are_obeyed_by_the_loop_s_thread(running: Running) -> None:
    seen: list[str] = []
    obeyed = threading.Event()

    def note(_: Coordinator) -> None:
        seen.append(threading.current_thread().name)
        obeyed.set()

    running.loop.submit(note)
    assert obeyed.wait(20.0)
    assert seen == ["coordinator"]


def test_error_of_the_coordinator_ends_the_loop_and_is_kept(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    error = OperatorError("the disk is full")

    def fail(_: Coordinator) -> None:
        raise error

    with caplog.at_level(logging.ERROR):
        running.loop.submit(fail)
        deadline = time.monotonic() + 20.0
        while running.loop.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
    assert running.loop.failure is error


def test_status_is_made_twice_a_second_and_not_in_each_turn(running: Running) -> None:
    begun, made = time.monotonic(), {id(running.loop.status): running.loop.status}
    while time.monotonic() - begun < 0.45:
        made[id(running.loop.status)] = running.loop.status
        time.sleep(0.01)
    assert len(made) <= 2 + (time.monotonic() - begun) / 0.5
    wait_until(lambda: id(running.loop.status) not in made, 20.0)


def test_process_opens_a_run_on_the_rows_of_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "home"))
    for name, pair in (("coordinator", COORDINATOR_KEYS), ("peer", PEER_KEYS)):
        write_secret(tmp_path / "home" / "keys" / f"{name}.pub", pair.public.decode())
        write_secret(tmp_path / "home" / "keys" / f"{name}.sec", pair.secret.decode())
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "label": "2"}\n')
    given = SETTINGS.model_copy(update={"data": DataSettings(train=str(tmp_path / "rows.jsonl"))})
    process = CoordinatorProcess(given, tmp_path, "r1", 0, "127.0.0.1")
    address, incarnation = process.open()
    channel = DealerChannel(address, "s1", PEER_KEYS, COORDINATOR_KEYS.public)
    demand = m.Demand(run_id="r1", incarnation=incarnation, num_groups=1, policy_version=0, heard_of_lease=0, leases={})
    lease, _ = Decoder(m.ToServer).decode(channel.call(encode(demand), 20.0))
    assert isinstance(lease, m.Lease)
    assert lease.prompt == "1 + 1 ="
    process._loop.submit(lambda coordinator: coordinator.give_up("it failed"))
    assert process.status(is_final=True).give_up_reason == "it failed"
    channel.close()
    process.close()
