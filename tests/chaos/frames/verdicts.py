"""What became of damaged and of valid messages, counted; the first findings are printed whole. For `frame_fuzz`."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.frames.mutations import Frames

_NUM_SHOWN = 10


@dataclass
class Verdicts:
    """outcomes: how often each reason was given for a refusal of a damaged message; "taken" when it was valid still."""

    num_damaged: int = 0
    num_valid: int = 0
    num_invalid_taken: int = 0
    num_valid_refused: int = 0
    num_crashes: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def is_sound(self) -> bool:
        return not (self.num_invalid_taken or self.num_valid_refused or self.num_crashes)

    def judge(
        self, frames: Frames, is_allowed: bool, is_damaged: bool, refusal: Callable[[Frames], str | None]
    ) -> None:
        """Have frames taken or refused, and note whether that was right."""
        try:
            reason = refusal(frames)
        except Exception as error:  # whatever is no refusal is a crash, and the finding that this is for
            self.num_crashes += 1
            self._show(f"crash by {error!r}", frames)
            return
        self.note(frames, is_allowed, is_damaged, reason)

    def note(self, frames: Frames, is_allowed: bool, is_damaged: bool, reason: str | None) -> None:
        if is_damaged:
            self.num_damaged += 1
            self.outcomes[reason or "taken"] += 1
        else:
            self.num_valid += 1
        if is_allowed and reason is not None:
            self.num_valid_refused += 1
            self._show(f"valid, refused as {reason}", frames)
        elif not is_allowed and reason is None:
            self.num_invalid_taken += 1
            self._show("invalid, taken", frames)

    def text(self) -> str:
        by_reason = " ".join(f"{reason}={number}" for reason, number in self.outcomes.most_common())
        return f"{self.num_damaged} damaged ({by_reason}), {self.num_valid} valid"

    def _show(self, what: str, frames: Frames) -> None:
        if self.num_invalid_taken + self.num_valid_refused + self.num_crashes <= _NUM_SHOWN:
            print(f"{what}: {[frame[:2000].hex() for frame in frames]}", flush=True)
