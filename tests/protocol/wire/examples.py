"""One example of every message and of a trajectory, with fixed values: what golden bytes and tests are made from."""

from typing import Any

import msgspec
import numpy as np

from protocol.wire import messages as m
from protocol.wire.conversation import ConversationPart, FinishedTurn
from protocol.wire.trajectory import Trajectory, TrajectoryFacts, VersionSpan

STAMP: dict[str, Any] = {"run_id": "r1", "incarnation": 2}


def example_facts(**changes: Any) -> TrajectoryFacts:
    """Return facts of six tokens: two of the prompt, [2, 4) by version 3, [5, 6) by version 4."""
    facts = TrajectoryFacts(
        group="e0-aa",
        sample_index=1,
        attempt=1,
        incarnation=2,
        kind="train",
        is_greedy=False,
        server="s1",
        num_tokens=6,
        num_prompt_tokens=2,
        num_turns=2,
        finish="answer",
        reward=0.5,
        reward_parts={"exact_match": 0.5},
        version_spans=[VersionSpan(2, 4, 3), VersionSpan(5, 6, 4)],
        started_at=100.0,
        finished_at=101.5,
        generate_s=1.0,
        environment_s=0.25,
        reward_s=0.25,
    )
    return msgspec.structs.replace(facts, **changes)


def example_trajectory(**changes: Any) -> Trajectory:
    """Return the trajectory that `example_facts` describes, its facts changed as given."""
    return Trajectory(
        facts=example_facts(**changes),
        tokens=np.array([10, 11, 12, 13, 14, 15], np.int32),
        behaviour_logprobs=np.array([0.0, 0.0, -0.5, -1.5, 0.0, -0.25], np.float32),
        loss_mask=np.array([0, 0, 1, 1, 0, 1], np.uint8),
    )


def make_trajectory(
    group: str, sample_index: int, server: str, version: int, reward: float = 0.0, **changes: Any
) -> Trajectory:
    """Return a trajectory of four tokens, two of them written by `version`."""
    facts = example_facts(
        group=group,
        sample_index=sample_index,
        server=server,
        reward=reward,
        reward_parts={"exact_match": reward},
        num_tokens=4,
        version_spans=[VersionSpan(2, 4, version)],
    )
    return Trajectory(
        facts=msgspec.structs.replace(facts, **changes),
        tokens=np.array([1, 2, 3, 4], np.int32),
        behaviour_logprobs=np.array([0.0, 0.0, -0.5, -0.5], np.float32),
        loss_mask=np.array([0, 0, 1, 1], np.uint8),
    )


def example_part(**changes: Any) -> ConversationPart:
    """Return the first turn of the example's trajectory with the reply to it: five tokens."""
    part = ConversationPart(
        group="e0-aa",
        sample_index=1,
        attempt=1,
        num_tokens=5,
        num_prompt_tokens=2,
        version_spans=[VersionSpan(2, 4, 3)],
        turns=[FinishedTurn(2, 4, "stop", "</search>")],
        snapshot='{"turns":1}',
        started_at=100.0,
        generate_s=0.5,
        environment_s=0.25,
    )
    return msgspec.structs.replace(part, **changes)


def part_buffers(first: int = 0, end: int = 5) -> list[bytes]:
    """Return the arrays of tokens [first, end) of the example's trajectory."""
    trajectory = example_trajectory()
    arrays = (trajectory.tokens, trajectory.behaviour_logprobs, trajectory.loss_mask)
    return [array[first:end].tobytes() for array in arrays]


def example_messages() -> dict[str, tuple[m.Message, list[bytes]]]:
    """Return an example of every message with its buffers, by the message's tag."""
    trajectory = example_trajectory()
    buffers = trajectory.to_buffers()
    lease = m.Lease(
        **STAMP,
        number=7,
        group="e0-aa",
        attempt=1,
        kind="train",
        prompt="What is the alpha-3 code of the country Belarus?",
        label={"target": ["BLR"]},
        columns={"hops": 1},
        sample_indices=[0, 1],
        greedy_indices=[],
        seed=7,
    )
    failed = m.SampleFailed(
        **STAMP, group="e0-aa", sample_index=1, attempt=1, boundary="reward:em", detail="503", num_model_tokens=412
    )
    batch = m.Batch(**STAMP, step=3, facts=[trajectory.facts], groups=[[0]], planned=[0], micro_batches=[[0]])
    metrics = {"loss": -0.25}
    examples: list[tuple[m.Message, list[bytes]]] = [
        (m.Hello(**STAMP, server="s1", policy_version=None), []),
        (m.Demand(**STAMP, num_groups=4, policy_version=3, heard_of_lease=7, leases={"e0-aa": 1}), []),
        (m.TrajectoryDone(**STAMP, facts=trajectory.facts), buffers),
        (m.TurnsDone(**STAMP, parts=[example_part()]), part_buffers()),
        (failed, []),
        (
            m.Heartbeat(
                **STAMP,
                policy_version=3,
                num_groups=4,
                num_running=30,
                num_waiting=2,
                generated_tokens=12345,
                failures={"retriever": 1},
            ),
            [],
        ),
        (
            m.TokensCounted(
                **{**STAMP, "request": 7},
                session="s1-2-ab12",
                num_generated=60,
                rows=[
                    m.TokenCount("e0-aa", 1, 2, 3, 40, "done", 12, 2),
                    m.TokenCount("e0-aa", 0, 2, 3, 20),
                ],
            ),
            [],
        ),
        (lease, []),
        (m.Ack(**STAMP, group="e0-aa", sample_index=1, outcome="accepted"), []),
        (m.TurnsKept(**STAMP, samples=[m.KeptSample("e0-aa", 1, 1, 5, True)]), []),
        (m.GroupsTrained(**STAMP, groups=["e0-aa"]), []),
        (m.Ping(**STAMP, newest_lease=7), []),
        (m.Refusal(**STAMP, detail="another run"), []),
        (m.NextBatch(**STAMP, step=3, rank=0), []),
        (m.StepEnd(**STAMP, step=3, policy_version=3, is_applied=True, detail="", metrics=metrics), []),
        (m.SaveLedger(**STAMP, path="/runs/r1/checkpoints/step_000003/ledger.sqlite", step=3), []),
        (batch, buffers),
        (m.Wait(**STAMP, detail="step 3 waits for 2 groups"), []),
        (m.PushAgain(**STAMP, step=4), []),
        (m.RunEnd(**STAMP, step=4, detail="all steps are done"), []),
        (m.Done(**STAMP), []),
    ]
    return {msgspec.inspect.type_info(type(message)).tag: (message, frames) for message, frames in examples}  # type: ignore[attr-defined]
