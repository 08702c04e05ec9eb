"""The view of a running run: a live panel on a terminal, one plain line per step anywhere else."""

import contextlib
import re
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live

from learner.disk.run_folder import main_set
from learner.live.panel import PanelState, one_line, render_panel
from learner.live.status import RunStatus

# Metrics of a step's plain line, in this order.
_LINE_KEYS = (
    *("step", "policy_version", "reward/mean", "policy/loss", "policy/grad_norm"),
    *("policy/entropy", "policy/kl_sampler", "length/mean", "length/truncated_share"),
    *("data/staleness_max", "perf/samples_per_s", "time/wait_s", "time/train_s", "time/push_s"),
    *("data/retried", "data/skipped", "data/filtered_low", "data/filtered_high"),
)
_REFRESH_S = 0.45
_PHASE_EVERY_S = 30.0
_NUM_WARNINGS = 3


class LiveView:
    """Shows a run until the `with` block ends, and then restores the terminal's cursor and modes."""

    def __init__(
        self, total_steps: int, is_terminal: bool | None = None, *, file: TextIO | None = None, width: int | None = None
    ) -> None:
        """is_terminal: None detects it from `file` (default: standard output) and TERM. width: columns."""
        self._file = file if file is not None else sys.stdout
        is_forced = is_terminal or None
        console = Console(
            file=self._file, force_terminal=is_forced, width=width, markup=False, emoji=False, highlight=False
        )
        self._is_terminal = console.is_terminal and not console.is_dumb_terminal if is_terminal is None else is_terminal
        self._is_open = True
        self._started_at = time.time()
        self._state = PanelState(total_steps=total_steps)
        self._messages: deque[tuple[float, str]] = deque(maxlen=_NUM_WARNINGS)
        self._drawn_at = self._phase_at = float("-inf")
        self._phase_shape = ""
        # No refresh thread: it would draw four times a second on the run's cores.
        self._live = Live(console=console, auto_refresh=False, transient=False) if self._is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._state.is_over = True
            try:
                self._draw(is_forced=True)
            finally:
                with contextlib.suppress(OSError):  # the terminal was closed
                    self._live.stop()

    def show_phase(self, text: str) -> None:
        """Show the phase of the start-up. A plain view repeats a phase whose numbers change every 30 s only."""
        text = one_line(text)
        self._state.phase = text
        now, shape = time.monotonic(), re.sub(r"[\d.,]+", "#", text)
        is_new = shape != self._phase_shape
        self._phase_shape = shape
        if not self._is_terminal and (is_new or now - self._phase_at >= _PHASE_EVERY_S):
            self._phase_at = now
            self._write_line("INFO ", "phase", text)
        self._draw(is_forced=is_new)

    def update(self, status: RunStatus, new_lines: Sequence[Mapping[str, float]]) -> None:
        """Show the coordinator's status and the new metrics lines."""
        state = self._state
        state.status = status
        state.rates.take(status.servers, time.monotonic())
        for line in new_lines:
            is_new = line.get("at_s", self._started_at) >= self._started_at
            state.take(line, is_new)
            if is_new and not self._is_terminal:
                self._write_line("INFO ", "step", describe_step(line), at_s=line.get("at_s"))
        self._draw(is_forced=False)

    def message(self, text: str, level: str = "WARN") -> None:
        """Show a message: as a line, or in the panel until three newer ones arrive. level: INFO, WARN or ERROR."""
        text = one_line(text)
        self._messages.append((time.time(), text))
        if self._is_terminal:
            self._draw(is_forced=True)
        else:
            self._write_line(f"{level:5}", text)

    def _draw(self, *, is_forced: bool) -> None:
        now = time.monotonic()
        if self._live is None or not self._is_open or not (is_forced or now - self._drawn_at >= _REFRESH_S):
            return
        self._drawn_at = now
        elapsed_s, size = time.time() - self._started_at, self._live.console.size
        panel = render_panel(self._state, list(self._messages), elapsed_s, (size.width, size.height))
        try:
            self._live.update(panel, refresh=True)
        except OSError:
            self._is_open = False

    def _write_line(self, level: str, *parts: str, at_s: float | None = None) -> None:
        if not self._is_open:
            return
        clock = time.strftime("%H:%M:%S", time.localtime(at_s))
        try:
            self._file.write(f"{clock} {level} learner  {'  '.join(parts)}\n")
            self._file.flush()
        except OSError:
            # The reader of the pipe has left (`| head`), or the disk is full: the run continues without a view.
            self._is_open = False


def describe_step(line: Mapping[str, float]) -> str:
    """Return a step as `key=value` pairs with four significant digits, held-out scores last."""
    scores = [f"eval/{main_set(line)}/{figure}" for figure in ("reward", "greedy")]
    return " ".join(f"{key}={_short(line[key])}" for key in (*_LINE_KEYS, *scores) if key in line)


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
