"""Damaged and invented messages, between valid ones, into the decoder and the checks of a coordinator.

    python -m tests.chaos.frame_fuzz [--seed N] [--short] [--frames N]

Every message goes through `Decoder`, the check of run and start, and `Trajectory.from_buffers`, and must be
taken exactly when `tests.chaos.frames.oracle` says that it is valid, or when its bytes did not change.
`tests.chaos.bad_network` damages the messages of a run on real sockets. holds: no crash, nothing invalid taken,
everything valid taken, memory grown by less than 50 MB.
"""

import sys
import time
from random import Random

import psutil

from learner.coordinator.accounts import Mailbox
from protocol.errors import FrameError
from protocol.wire import messages as m
from protocol.wire.codec import Decoder
from protocol.wire.trajectory import Trajectory
from tests.chaos.frames.mutations import Frames, mutate, other_frames, random_trajectory, trajectory_frames
from tests.chaos.frames.oracle import INCARNATION, RUN_ID, is_valid
from tests.chaos.frames.verdicts import Verdicts
from tests.chaos.rig.verdict import conclude, options

MAX_GROWTH_MB = 50.0
_VALID_EVERY = 10
_FRESH_EVERY = 50


def main() -> int:
    chosen = options(__doc__, frames=0)
    num_frames = chosen.frames or (30_000 if chosen.short else 1_000_000)
    random = Random(chosen.seed)
    fuzz_in_process(2_000, Random(0))  # so that caches and imports are no growth
    before_mb = rss_mb()
    started = time.monotonic()
    verdicts = fuzz_in_process(num_frames, random)
    growth_mb = rss_mb() - before_mb
    print(f"{verdicts.text()}; {time.monotonic() - started:.0f} s, {growth_mb:+.1f} MB", flush=True)
    return conclude(
        "frame_fuzz",
        verdicts.is_sound and growth_mb < MAX_GROWTH_MB,
        frames=verdicts.num_damaged,
        valid=verdicts.num_valid,
        crashes=verdicts.num_crashes,
        invalid_accepted=verdicts.num_invalid_taken,
        valid_refused=verdicts.num_valid_refused,
        growth_mb=growth_mb,
    )


def fuzz_in_process(num_frames: int, random: Random) -> Verdicts:
    """Return how damaged messages, with a valid one before every tenth, were judged by the decoder and the oracle."""
    verdicts = Verdicts()
    receiver = Receiver()
    for i in range(num_frames):
        if i % _FRESH_EVERY == 0:
            originals = [trajectory_frames(random_trajectory(random)) for _ in range(6)] + [
                other_frames(random) for _ in range(2)
            ]
        original = random.choice(originals)
        if i % _VALID_EVERY == 0:
            verdicts.judge(original, True, False, receiver.refusal)
        damaged, is_sealed = mutate(original, random)
        is_allowed = damaged == original or (is_sealed and len(damaged) > 1 and is_valid(damaged[0], damaged[1:-1]))
        verdicts.judge(damaged, is_allowed, True, receiver.refusal)
    return verdicts


class Receiver:
    """What a coordinator does with frames before it uses them."""

    def __init__(self) -> None:
        self._decoder: Decoder[m.Message] = Decoder(m.ToCoordinator)
        self._mailbox = Mailbox(RUN_ID, INCARNATION)

    def refusal(self, frames: Frames) -> str | None:
        """Return the reason why frames are not taken, None when they are."""
        try:
            message, buffers = self._decoder.decode(frames)
            if not self._mailbox.is_ours(message):
                return "incarnation"
            if isinstance(message, m.TrajectoryDone):
                Trajectory.from_buffers(message.facts, buffers)
        except FrameError as error:
            return error.reason
        return None


def rss_mb() -> float:
    return float(psutil.Process().memory_info().rss) / 1e6


if __name__ == "__main__":
    sys.exit(main())
