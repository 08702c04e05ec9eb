"""Damaged messages to the coordinator: valid ones with bytes changed on the way, or with wrong contents rightly sealed.

Everything is drawn from one seeded source, so that a finding can be replayed.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from protocol.wire import messages as m
from protocol.wire.codec import encode, seal
from protocol.wire.trajectory import TimedCall, Trajectory, TrajectoryFacts, VersionSpan
from tests.chaos.frames.oracle import INCARNATION, RUN_ID

STAMP: dict[str, Any] = {"run_id": RUN_ID, "incarnation": INCARNATION}
Frames = list[bytes]
_pack, _unpack = msgspec.msgpack.encode, msgspec.msgpack.decode


def random_trajectory(random: Random, version: int = 3, **facts: Any) -> Trajectory:
    """Return a valid trajectory of up to 60 tokens: a prompt, then turns with observations between them."""
    num_prompt = random.randint(1, 8)
    mask, spans = [0] * num_prompt, []
    for _ in range(random.randint(1, 4)):
        mask += [0] * random.randint(0, 5)
        length = random.randint(1, 8)
        spans.append(VersionSpan(len(mask), len(mask) + length, version))
        mask += [1] * length
    n = len(mask)
    reward = random.choice((0.0, 1.0, random.uniform(-2, 2)))
    defaults: dict[str, Any] = {
        "group": f"e0-{random.getrandbits(80):020x}",
        "sample_index": random.randint(0, 7),
        "attempt": 1,
        "incarnation": INCARNATION,
        "kind": "train",
        "is_greedy": False,
        "server": "s1",
        "num_turns": len(spans),
        "finish": random.choice(("answer", "stop", "length", "turns", "context", "time")),
        "reward": reward,
        "reward_parts": {"exact_match": reward},
        "started_at": 1.7e9,
        "finished_at": 1.7e9 + random.random(),
        "generate_s": random.random(),
        "environment_s": 0.0,
        "reward_s": random.random(),
        "calls": [TimedCall("turn", "stop", 1.7e9, 1.7e9 + random.random(), 1, num_prompt, 3)] * random.randint(0, 2),
    }
    return Trajectory(
        TrajectoryFacts(**(defaults | facts), num_tokens=n, num_prompt_tokens=num_prompt, version_spans=spans),
        tokens=np.array([random.randint(0, 151_000) for _ in range(n)], np.int32),
        behaviour_logprobs=np.array([-random.random() * bit for bit in mask], np.float32),
        loss_mask=np.array(mask, np.uint8),
    )


def trajectory_frames(trajectory: Trajectory) -> Frames:
    return encode(m.TrajectoryDone(**STAMP, facts=trajectory.facts), trajectory.to_buffers())


def other_frames(random: Random) -> Frames:
    """Return one of the valid messages that carry no trajectory."""
    count = random.randint(0, 100)
    return encode(
        random.choice(
            (
                m.Hello(**STAMP, server="s1", policy_version=random.choice((None, count))),
                m.Demand(**STAMP, num_groups=count, policy_version=3, heard_of_lease=count, leases={"e0-a": count}),
                m.SampleFailed(
                    **STAMP,
                    group="e0-a",
                    sample_index=1,
                    attempt=1,
                    boundary="reward:em",
                    detail="503",
                    num_model_tokens=count,
                ),
                m.Heartbeat(
                    **STAMP,
                    policy_version=3,
                    num_groups=count,
                    num_running=30,
                    num_waiting=2,
                    generated_tokens=12345,
                    failures={"retriever": count},
                ),
                m.TokensCounted(
                    **STAMP,
                    session="s1-1-a",
                    num_generated=count,
                    rows=[m.TokenCount("e0-a", 1, 1, 1, count, random.choice(("", "done", "died")))],
                ),
                m.NextBatch(**STAMP, step=count, rank=0, part=random.choice((UNSET, count))),
                m.StepEnd(**STAMP, step=3, policy_version=3, is_applied=True, detail="", metrics={"policy/loss": 0.5}),
                m.SaveLedger(**STAMP, path="checkpoints/ledger.sqlite", step=3),
            )
        )
    )


def mutate(frames: Frames, random: Random) -> tuple[Frames, bool]:
    """Return damaged frames, and whether they are sealed again (only their contents can then give them away)."""
    if random.random() < 0.2:
        return damage_bytes(frames, random), False
    content = frames[:-1]
    if random.random() < 0.3:
        content = damage_bytes(content, random)
    elif len(content) == 4 and random.random() < 0.4:
        content = random.choice(_ARRAY_DAMAGES)(content, random)
    else:
        content = damage_fields(content, random)
    return [*content, seal(content)], True


# -- bytes ------------------------------------------------------------------------------------------------------------


def damage_bytes(frames: Frames, random: Random) -> Frames:
    """Return frames with one to three changes of a kind that a faulty link or memory makes."""
    damaged = list(frames)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        random.choice(_BYTE_DAMAGES)(damaged, random.randrange(len(damaged)) if damaged else 0, random)
    return damaged


def _flip(frames: Frames, place: int, random: Random) -> None:
    if frames and frames[place]:
        changed = bytearray(frames[place])
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        frames[place] = bytes(changed)


def _overwrite(frames: Frames, place: int, random: Random) -> None:
    if frames:
        at = random.randint(0, len(frames[place]))
        junk = random.randbytes(random.randint(0, 5))
        frames[place] = frames[place][:at] + junk + frames[place][at + random.randint(0, 5) :]


def _truncate(frames: Frames, place: int, random: Random) -> None:
    if frames:
        frames[place] = frames[place][: random.randint(0, len(frames[place]))]


def _drop(frames: Frames, place: int, random: Random) -> None:
    if frames:
        del frames[place]


def _repeat(frames: Frames, place: int, random: Random) -> None:
    if frames:
        frames[place:place] = [frames[place]] * random.choice((1, 1, 2, 5))


def _swap(frames: Frames, place: int, random: Random) -> None:
    if frames:
        other = random.randrange(len(frames))
        frames[place], frames[other] = frames[other], frames[place]


def _replace(frames: Frames, place: int, random: Random) -> None:
    if frames:
        frames[place] = random.randbytes(random.choice((0, 1, 8, 100)))


def _append(frames: Frames, place: int, random: Random) -> None:
    frames.append(random.randbytes(random.choice((0, 8, 40))))


_BYTE_DAMAGES: tuple[Callable[[Frames, int, Random], None], ...] = (
    _flip, _flip, _flip, _overwrite, _overwrite, _truncate, _drop, _repeat, _swap, _replace, _append,
)  # fmt: skip


# -- arrays -----------------------------------------------------------------------------------------------------------


def _set_item(place: int, dtype: str, *values: float) -> Callable[[Frames, Random], Frames]:
    """Return a damage that puts one of these values somewhere into the array at this place."""

    def damage(content: Frames, random: Random) -> Frames:
        array = np.frombuffer(content[place], dtype).copy()
        array[random.randrange(len(array))] = random.choice(values)
        return [*content[:place], array.tobytes(), *content[place + 1 :]]

    return damage


def _resize(content: Frames, random: Random) -> Frames:
    place = random.randint(1, 3)
    size = (4, 4, 1)[place - 1] * random.randint(1, 3)
    resized = content[place][:-size] if random.random() < 0.5 else content[place] + bytes(size)
    return [*content[:place], resized, *content[place + 1 :]]


def _shift(content: Frames, random: Random) -> Frames:
    """All three arrays have another length than the facts say, and the same."""
    return [content[0], content[1][4:], content[2][4:], content[3][1:]]


def _damage_spans(content: Frames, random: Random) -> Frames:
    message = _unpack(content[0])
    facts = message["facts"]
    spans = facts["version_spans"]
    place = random.randrange(len(spans))
    start, end, version = spans[place]
    facts["version_spans"] = random.choice(
        (
            [*spans[:place], [start - 1, end, version], *spans[place + 1 :]],
            [*spans[:place], [start, end + 1, version], *spans[place + 1 :]],
            [*spans[:place], [end, start, version], *spans[place + 1 :]],
            [*spans[:place], [start, end], *spans[place + 1 :]],
            [*spans[:place], [start, end, -1], *spans[place + 1 :]],
            [*spans[:place], [start, 2**31, version], *spans[place + 1 :]],
            spans[:place] + spans[place + 1 :],
            [*spans, spans[place]],
            spans * 257,
            spans[::-1],
            [[0, facts["num_tokens"], version]],
            [[start, end, version]] * 4097,
            [],
        )
    )
    return [_pack(message), *content[1:]]


def _nudge_counts(content: Frames, random: Random) -> Frames:
    """Have the facts count a few tokens more or fewer: in all, or in the prompt."""
    message = _unpack(content[0])
    message["facts"][random.choice(("num_tokens", "num_prompt_tokens"))] += random.choice((-3, -1, 1, 2, 4))
    return [_pack(message), *content[1:]]


_ARRAY_DAMAGES: tuple[Callable[[Frames, Random], Frames], ...] = (
    _set_item(1, "<i4", -1, -(2**31), -151_000),
    _set_item(2, "<f4", float("nan"), float("inf"), -float("inf"), 0.5, 1e30, -0.25),
    _set_item(3, "u1", 0, 1, 2, 255),
    _resize, _shift, _nudge_counts, _damage_spans, _damage_spans,
)  # fmt: skip


# -- fields -----------------------------------------------------------------------------------------------------------


def damage_fields(content: Frames, random: Random) -> Frames:
    """Return a message with one field of another value, without it, with one more, or as something else altogether."""
    message = _unpack(content[0])
    facts = message.get("facts")
    target = facts if facts is not None and random.random() < 0.7 else message
    match random.randint(0, 9):
        case 0:
            del target[random.choice(sorted(target))]
        case 1:
            target[random.choice(("colour", "Type", "server", "", "x" * 300))] = random.choice(_WILD)
        case 2:
            message["type"] = random.choice(("trajectory", "hello", "ack", "batch", "lease", "telepathy", "", 1, None))
        case 3:
            message["schema"] = random.choice((1, 2, 5, 0, -1, 2**64 - 1, 4.0, "4", None, True))
        case 4:
            message[random.choice(("run_id", "incarnation"))] = random.choice(("r2", "", 0, 2, 2**31, None, "r1 "))
        case 5:
            return [random.choice(_WILD_HEADERS), *content[1:]]
        case _:
            target[random.choice(sorted(target))] = random.choice(_WILD)
    return [_pack(message), *content[1:]]


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


_WILD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 2**31 - 1, 2**31, 2**63, 2**64 - 1, -(2**63), 0.0, -0.5, 1e18, 1.1e18, 1e308,
    -1e308, float("nan"), float("inf"), -float("inf"), "", "x", "x" * 200, "x" * 201, "x" * 2001, "x" * 100_000, "\0",
    "\U0001f600", "../../etc/passwd", b"", b"bytes", [], [1], [[]], [0] * 5000, [None] * 70_000, {}, {"a": 1},
    {"a": "b"}, {"": 1.0}, {str(i): 0.5 for i in range(65)}, {str(i): i for i in range(1100)}, [[2, 4, 3]],
    [[0, 1, 2, 3]], {"x" * 201: 1.0}, {"em": float("nan")}, {"em": 1e19}, _nested(20), _nested(40), _nested(500),
)  # fmt: skip
_WILD_HEADERS: tuple[bytes, ...] = (
    b"", b"\xc0", b"\xc1", b"\x80", b"\x90", b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff",
    b"\x91" * 5000, b"\x81\xa4type" * 900, b"\x90" * 70_000, b"\xff" * 3000, b"\xc7\xff\xff" + b"x" * 255,
    b"\x81\xa6schema\x04", b"\x82\xa6schema\x04\xa4type\xa5hello", _pack([{"schema": 4}]), _pack({"schema": [4] * 10}),
    b"\xdd\x00\x01\x86\xa0" + b"\x80" * 100_000, bytes((1 << 20) + 1),
)  # fmt: skip
