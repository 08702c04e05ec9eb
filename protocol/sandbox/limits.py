"""What one program in the sandbox may use, and how its run ended."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Limits:
    """Of one program with all the processes that it starts."""

    wall_s: float = 10.0  # from its start to its end
    # address space of each process, and what all of them hold together; files in its folder take a quarter besides
    memory_bytes: int = 512 << 20
    output_bytes: int = 64 << 10  # that are kept of what it prints, and of what it prints as errors; it ends over them
    num_processes: int = 32  # processes and threads at a time


@dataclass(frozen=True)
class Ran:
    """What a program did."""

    output: str  # printed; at most Limits.output_bytes of it
    errors: str  # printed as errors, the same
    # exit: by itself. time: it reached Limits.wall_s. output: it printed more than Limits.output_bytes
    how: Literal["exit", "time", "output"]
    exit_code: int  # 0: in order; 128 + n: ended by signal n; of no meaning unless how is exit
