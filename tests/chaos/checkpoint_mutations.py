"""Damage to checkpoint folders, one seeded case after the other: is anything corrupt taken for a checkpoint?

    python -m tests.chaos.checkpoint_mutations [--seed N] [--short] [--mutations N]

A run folder with four checkpoints (small files, real ledgers) is copied; some of its checkpoints are damaged, each in
one way; then a run is started in it as the driver does. Counted are: damaged checkpoints that are accepted
(corrupt_loads), and starts from another checkpoint than the newest untouched one, with another ledger than that one's,
or with a `latest` that names no valid one (wrong_choice). holds: both are 0. `--short` makes 80 mutations.
"""

import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from learner.checkpoint.folder import begin, newest_valid
from learner.checkpoint.manifest import MANIFEST, Checkpoint, CorruptCheckpointError, verify
from learner.disk.run_folder import CHECKPOINTS, LEDGER
from learner.ledger.ledger import Ledger
from learner.run.start import plan_start, prepare_folder
from protocol.settings.settings import Settings
from tests.chaos.rig.verdict import conclude, options
from tests.fakes.checkpoints import commit

_STEPS = (2, 4, 6, 8)
_MODEL = "model-1"
_SHORT = 80


def main() -> int:
    asked = options(__doc__ or "", mutations=1000)
    num_mutations = min(_SHORT, asked.mutations) if asked.short else asked.mutations
    draw = random.Random(asked.seed)
    kinds: Counter[str] = Counter()
    corrupt_loads = wrong_choice = num_done = 0
    with tempfile.TemporaryDirectory() as scratch:
        pristine, folder = Path(scratch) / "pristine", Path(scratch) / "runs" / "run"
        make_run(pristine, draw)
        while num_done < num_mutations:
            shutil.copytree(pristine, folder, symlinks=True)
            victims = draw.sample(_STEPS, draw.choice((1, 1, 2, 3, 4)))
            victims = victims[: num_mutations - num_done]
            made = [mutate(folder / CHECKPOINTS, step, draw) for step in victims]
            damage_latest(folder / CHECKPOINTS, draw)
            num_done += len(made)
            kinds.update(made)
            accepted = [step for step in victims if is_accepted(folder / CHECKPOINTS, step)]
            problem = start_wrongly(folder, pristine, max(set(_STEPS) - set(victims), default=0))
            corrupt_loads += len(accepted)
            wrong_choice += problem is not None
            if accepted or problem:
                print(f"steps {victims} were damaged by {made}: accepted {accepted}; {problem}")
            shutil.rmtree(folder)
    for kind, count in sorted(kinds.items()):
        print(f"{kind:24} {count}")
    holds = num_done >= num_mutations and corrupt_loads == wrong_choice == 0
    figures = {"mutations": num_done, "corrupt_loads": corrupt_loads, "wrong_choice": wrong_choice}
    return conclude("checkpoint_mutations", holds, **figures)


def make_run(folder: Path, draw: random.Random) -> None:
    """Make a run folder as a run leaves it that was killed after its last checkpoint."""
    (folder / CHECKPOINTS).mkdir(parents=True)
    ledger = Ledger(folder / LEDGER)
    for step in _STEPS:
        for position in range(step * 4, step * 4 + 8):
            ledger.lease(f"g{position}", 0, f"u{position}", position, "server", 1)
        ledger.mark_trained([f"g{position}" for position in range(step * 4, step * 4 + 8)], step, step - 1)
        aside = begin(folder / CHECKPOINTS, step)
        for name in ("state/state_00000.safetensors", "state/state_00001.safetensors", "model/model.safetensors"):
            (aside / name).parent.mkdir(exist_ok=True)
            (aside / name).write_bytes(draw.randbytes(draw.randint(500, 5000)))
        (aside / "state" / "state.json").write_text(f'{{"schema": 1, "num_updates": {step}}}')
        ledger.begin_copy(aside / LEDGER).make()
        commit(aside, Checkpoint(aside, step, step, "run", _MODEL))
    ledger.lease("after", 0, "after", 10**6, "server", 1)
    ledger.close()


def mutate(root: Path, step: int, draw: random.Random) -> str:
    """Damage one checkpoint in one way; returns its name. What changes no byte is drawn again."""
    folder = root / f"step_{step:06d}"
    name, before = "", content(folder)
    while content(folder) == before:
        name = draw.choice(sorted(MUTATIONS))
        MUTATIONS[name](folder, draw)
    return name


def content(folder: Path) -> object:
    """Return what the folder is: for each thing in it its kind and bytes."""
    if not folder.is_dir():
        return folder.read_bytes() if folder.exists() else None
    return {
        str(path.relative_to(folder)): (path.is_symlink(), path.read_bytes())
        for path in folder.rglob("*")
        if not path.is_dir()
    }


def is_accepted(root: Path, step: int) -> bool:
    try:
        verify(root / f"step_{step:06d}")
    except CorruptCheckpointError:
        return False
    return True


def start_wrongly(folder: Path, pristine: Path, expected_step: int) -> str | None:
    """Start a run in the folder; returns what is wrong with what it starts from, None when nothing is."""
    run = {"dir": str(folder.parent), "name": folder.name, "max_steps": 100}
    settings = Settings.model_validate({"run": run})
    root = folder / CHECKPOINTS
    found = newest_valid(root)
    if (found.step if found else 0) != expected_step:
        return f"newest_valid gives {found}, expected step {expected_step}"
    start = plan_start(settings.run, _MODEL)
    prepare_folder(start, settings)
    if start.step != expected_step:
        return f"the run starts from step {start.step}, expected {expected_step}"
    if not expected_step:
        return "a ledger is left" if (folder / LEDGER).exists() else None
    name = f"step_{expected_step:06d}"
    if (folder / LEDGER).read_bytes() != (pristine / CHECKPOINTS / name / LEDGER).read_bytes():
        return "the run starts with another ledger than its checkpoint's"
    if not (root / "latest").is_symlink() or (root / "latest").readlink() != Path(name):
        return "latest does not name the checkpoint that the run starts from"
    return None


# -- what is done to a checkpoint -------------------------------------------------------------------------------------


def truncate(folder: Path, draw: random.Random) -> None:
    file = any_file(folder, draw)
    file.write_bytes(file.read_bytes()[: draw.randrange(max(1, file.stat().st_size))])


def flip_a_byte(folder: Path, draw: random.Random) -> None:
    file = any_file(folder, draw)
    flip(file, draw)


def flip_a_byte_of_the_manifest(folder: Path, draw: random.Random) -> None:
    flip(folder / MANIFEST, draw)


def zero_a_range(folder: Path, draw: random.Random) -> None:
    file = any_file(folder, draw)
    changed = bytearray(file.read_bytes())
    start = draw.randrange(max(1, len(changed)))
    stop = min(len(changed), start + draw.choice((1, 64, 512, 4096)))
    changed[start:stop] = bytes(stop - start)
    file.write_bytes(changed)


def append(folder: Path, draw: random.Random) -> None:
    with any_file(folder, draw).open("ab") as file:
        file.write(draw.randbytes(draw.randint(1, 100)))


def delete_a_file(folder: Path, draw: random.Random) -> None:
    any_file(folder, draw).unlink()


def add_a_file(folder: Path, draw: random.Random) -> None:
    (folder / draw.choice(("", "state", "model")) / f"extra_{draw.randrange(10**6)}").write_bytes(b"extra")


def swap_two_files(folder: Path, draw: random.Random) -> None:
    one, other = any_file(folder, draw), any_file(folder, draw)
    content_of_one = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content_of_one)


def take_a_file_of_another(folder: Path, draw: random.Random) -> None:
    """Put a file of another checkpoint in, valid there: the manifest, say, or the ledger."""
    file = any_file(folder, draw)
    others = [path for path in folder.parent.glob("step_*") if path != folder and (path / file.name).is_file()]
    if others:
        shutil.copyfile(draw.choice(others) / file.name, file)


def link_a_file(folder: Path, draw: random.Random) -> None:
    """Put a link to the very same bytes in place of a file: they can change after they were verified."""
    file = draw.choice([path for path in files(folder) if path.name != MANIFEST])
    elsewhere = folder.parent.parent / f"elsewhere_{folder.name}"
    shutil.move(file, elsewhere)
    file.symlink_to(elsewhere)


def empty_the_manifest(folder: Path, draw: random.Random) -> None:
    (folder / MANIFEST).write_bytes(b"")


def garble_the_manifest(folder: Path, draw: random.Random) -> None:
    garbage = (draw.randbytes(200), b"[" * 100_000, b"null", b"{}", b'{"schema": 1}', b"\xff\xfe{")
    (folder / MANIFEST).write_bytes(draw.choice(garbage))


def delete_the_folder(folder: Path, draw: random.Random) -> None:
    shutil.rmtree(folder)


def rename_the_folder(folder: Path, draw: random.Random) -> None:
    """Have the folder claim a later step than its manifest tells of."""
    folder.rename(folder.with_name(f"step_{draw.randint(9, 999):06d}"))


def empty_the_folder(folder: Path, draw: random.Random) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def put_a_file_in_its_place(folder: Path, draw: random.Random) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"a file")


MUTATIONS: dict[str, Callable[[Path, random.Random], None]] = {
    mutation.__name__: mutation
    for mutation in (
        truncate,
        flip_a_byte,
        flip_a_byte_of_the_manifest,
        zero_a_range,
        append,
        delete_a_file,
        add_a_file,
        swap_two_files,
        take_a_file_of_another,
        link_a_file,
        empty_the_manifest,
        garble_the_manifest,
        delete_the_folder,
        rename_the_folder,
        empty_the_folder,
        put_a_file_in_its_place,
    )
}


def damage_latest(root: Path, draw: random.Random) -> None:
    """Now and then, leave `latest` as a death or a stray hand may: it decides nothing."""
    kind = draw.choice(("as it is", "as it is", "dangling", "gone", "at the oldest", "a leftover beside it"))
    if kind == "a leftover beside it":
        (root / ".latest").symlink_to("step_000099")
        (root / ".tmp-step_000009").mkdir()
    elif kind != "as it is":
        (root / "latest").unlink()
        if kind != "gone":
            (root / "latest").symlink_to("step_000099" if kind == "dangling" else f"step_{_STEPS[0]:06d}")


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def any_file(folder: Path, draw: random.Random) -> Path:
    return draw.choice(files(folder))


def flip(file: Path, draw: random.Random) -> None:
    changed = bytearray(file.read_bytes())
    changed[draw.randrange(len(changed))] ^= draw.randint(1, 255)
    file.write_bytes(changed)


if __name__ == "__main__":
    sys.exit(main())
