"""Says in words what holds of Sluice's GPU half on the machine that it stands on.

    python -m tests.gpu.prove [--device cuda|cpu] [--only NAME,NAME] [--short] [--seed N]

Each part stands alone: one whose packages, devices or peers are missing says so and the others go on. Without a GPU the
parts that need one say that they were not checked; `--device cpu` runs them on the CPU all the same, which shows that
the parts work, and nothing about GPUs. holds: no part that was checked failed, and at least one was checked.
Figures that were seen, and on what: README.md beside this file.
"""

import importlib.util
import platform
import sys
import traceback

from tests.chaos.rig.verdict import conclude, options
from tests.gpu.attention import ATTENTION
from tests.gpu.digest import DIGEST
from tests.gpu.finding import Finding, Machine, Part, unchecked
from tests.gpu.learner_step import DEEPSPEED_STEP, STEP
from tests.gpu.loop import HALF_B_LOOP, LOOP, SHARED_LOOP
from tests.gpu.order import LOST_PEER, ORDER
from tests.gpu.push import IPC, NCCL
from tests.gpu.speed import SPEED
from tests.gpu.turns import TURNS
from tests.gpu.whole_models import FLASH4, LORA_TURNS, NOISE, ZERO3_START

DEVICES = ("cuda", "cpu")
_ALONE = (ATTENTION, STEP, DEEPSPEED_STEP, DIGEST, ORDER, LOST_PEER, NOISE, TURNS, LORA_TURNS, ZERO3_START, FLASH4, IPC)
PARTS = (*_ALONE, SPEED, NCCL, LOOP, SHARED_LOOP, HALF_B_LOOP)


def main() -> int:
    arguments = options(__doc__ or "", device="cuda", only="")
    wanted = [name for name in arguments.only.split(",") if name]
    if unknown := sorted(set(wanted) - {part.name for part in PARTS}):
        print(f"prove: --only names {', '.join(unknown)}; parts: {', '.join(part.name for part in PARTS)}")
        return 2
    if arguments.device not in DEVICES:
        names = ", ".join(DEVICES)
        print(f"prove: --device is {arguments.device}; give one of {names}, and CUDA_VISIBLE_DEVICES for one GPU")
        return 2
    if (missing := _missing(("torch",))) is not None:
        print(f"prove: nothing can be checked: {missing}")
        return conclude("prove", False, checked=0, failed=0, unchecked=len(PARTS))
    machine = _machine(arguments.device, is_short=arguments.short)
    findings = {part.name: found(part, machine) for part in PARTS if not wanted or part.name in wanted}
    verdicts = [finding.holds for finding in findings.values()]
    if not any(verdict is not None for verdict in verdicts):
        print("prove: nothing was checked here, so nothing holds. --device cpu --short tries the parts themselves.")
    elif machine.device == "cpu":
        print("prove: the parts work on this machine's CPU; of GPUs that says nothing.")
    return conclude(
        "prove",
        False not in verdicts and True in verdicts,
        device=machine.device,
        checked=verdicts.count(True) + verdicts.count(False),
        failed=",".join(name for name, finding in findings.items() if finding.holds is False) or 0,
        unchecked=verdicts.count(None),
    )


def found(part: Part, machine: Machine) -> Finding:
    """Return what a part found, after telling it; a part that raised does not hold."""
    import torch

    missing = _missing(part.needs)
    if missing is not None:
        finding = unchecked(missing)
    elif machine.device == "cuda" and machine.num_gpus < part.num_gpus:
        finding = unchecked(
            f"that needs {part.num_gpus} GPU{'s' * (part.num_gpus > 1)}, and torch {torch.__version__} sees "
            f"{machine.num_gpus or 'none'} on this machine"
        )
    else:
        try:
            finding = part.show(machine)
        except Exception as error:
            traceback.print_exc()
            finding = Finding(f"raised {type(error).__name__}: {str(error)[:500]}", holds=False)
    word = {True: "holds", False: "FAILS", None: "not checked"}[finding.holds]
    print(f"{part.name:14}  {word:11}  {part.shows}: {finding.sentence}", flush=True)
    for name, value in finding.figures.items():
        print(f"{'':29}  {name} = {value:.4g}", flush=True)
    return finding


def _machine(device: str, *, is_short: bool) -> Machine:
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = {torch.cuda.get_device_name(number) for number in range(num_gpus)}
    seen = f"{num_gpus} GPUs ({', '.join(sorted(names))})" if num_gpus else "no GPU"
    print(f"prove: Python {platform.python_version()}, torch {torch.__version__}, {seen}", flush=True)
    return Machine(device, num_gpus, is_short)


def _missing(packages: tuple[str, ...]) -> str | None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return f"this Python has no {', '.join(missing)}" if missing else None


if __name__ == "__main__":
    sys.exit(main())
