"""Records the run that `sluice dash --demo` shows: `python -m tests.learner.report.dash.make_demo`.

It runs the quick start on the cluster that runs (about five minutes on two cores) and packs what the page reads of its
folder. Times in the ledger are rounded to a thousandth of a second, paths of this machine become /home/user.
"""

import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from learner.disk.run_folder import LEARNER_VALUES
from learner.report.dash.command import DEMO
from protocol.node.home import sluice_home

_MOST_BYTES = 400_000
_NAME, _HOME = "quickstart", "/home/user/.sluice"
_OPTIONS = {"report.samples_per_step": 8, "eval.every_steps": 10, "eval.num_prompts": 128}
_TIMES = {
    "trajectories": ("started_at", "finished_at", "received_at"),
    "prompts": ("changed_at",),
    "failures": ("at",),
    "waste": ("at",),
}
_FILES = ("settings.yaml", "metrics.jsonl", "samples.jsonl", "ledger.sqlite")
_TOKENIZER = Path("checkpoints", "latest", "model", "tokenizer.json")


def main() -> int:
    """Write learner/report/dash/demo.zip. Returns 1 when it is too large, or names a path of this machine."""
    with tempfile.TemporaryDirectory() as scratch:
        options = {"run.dir": scratch, **_OPTIONS}
        given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        subprocess.run([sys.executable, "-m", "learner.run", *given], check=True)
        run = Path(scratch, _NAME)
        packed = Path(scratch, "packed")
        (packed / _TOKENIZER).parent.mkdir(parents=True)
        for name in (*_FILES[:3], _TOKENIZER):
            shutil.copy(run / name, packed / name)
        settings = (packed / "settings.yaml").read_text().replace(str(sluice_home()), _HOME).replace(scratch, "runs")
        (packed / "settings.yaml").write_text(settings)
        shutil.copytree(run / LEARNER_VALUES, packed / LEARNER_VALUES)
        _copy_ledger(run / "ledger.sqlite", packed / "ledger.sqlite")
        return _pack(packed)


def _copy_ledger(source: Path, target: Path) -> None:
    with sqlite3.connect(source) as there, sqlite3.connect(target) as here:
        there.backup(here)
        for table, columns in _TIMES.items():
            # Multiples of 1/1024 have few digits in binary: three times less to pack.
            changes = ", ".join(f"{column} = round({column} * 1024) / 1024" for column in columns)
            here.execute(f"UPDATE {table} SET {changes}")  # noqa: S608  # names of columns
        here.commit()
        here.execute("PRAGMA journal_mode = DELETE")
        here.execute("VACUUM")


def _pack(folder: Path) -> int:
    values = sorted(str(path.relative_to(folder)) for path in (folder / LEARNER_VALUES).iterdir())
    names = [*_FILES, str(_TOKENIZER), *values]
    private = [name for name in names if str(sluice_home()).encode() in (folder / name).read_bytes()]
    with zipfile.ZipFile(DEMO, "w", zipfile.ZIP_LZMA) as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(f"{_NAME}/{name}"), (folder / name).read_bytes(), zipfile.ZIP_LZMA)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scores = [line["eval/held_out/reward"] for line in lines if "eval/held_out/reward" in line]
    size = DEMO.stat().st_size
    print(f"{DEMO}: {size} bytes, held-out reward {scores}, paths of this machine in {private or 'no file'}")
    return 0 if size <= _MOST_BYTES and not private else 1


if __name__ == "__main__":
    sys.exit(main())
