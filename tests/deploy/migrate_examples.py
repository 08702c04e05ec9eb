"""Every example command of other trainers' repositories: does it convert, and does `sluice plan` accept the settings?

python -m tests.deploy.migrate_examples FOLDER [FOLDER ..]     FOLDER: a checkout of OpenRLHF, verl, Search-R1 or TRL

Commands are taken from shell scripts, Python files, configurations and the code blocks of documents. The plan has a
tiny model and made rows in place of models and data of the hub, and at most 1,024 tokens of context; the rest is the
converted file's. The last line has the figures; exit 0: no option was unknown, and at least 40 commands converted.
"""

import contextlib
import io
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from deploy.command import run_verb
from deploy.migrate.command import check, read, settings_file
from deploy.migrate.convert import Draft
from protocol.errors import SettingsError
from tests.fakes.tiny_models import make_tiny_model

_BLOCK = re.compile(r"^[ \t]*```(\w+)[^\n]*\n(.*?)^[ \t]*```", re.S | re.M)
_SUFFIXES = {"bash": ".sh", "shell": ".sh", "sh": ".sh", "python": ".py", "py": ".py"}
_LEAST = 40  # commands
_ROWS: dict[str, dict[str, Any]] = {
    "policy_gradient": {"prompt": "{} + 1 =", "label": "2"},
    "sft": {"prompt": "{} + 1 =", "completion": " 2"},
    "distill": {"prompt": "{} + 1 =", "completion": " 2"},
    "dpo": {"prompt": "{} + 1 =", "chosen": " 2", "rejected": " 3"},
    "reward_model": {"prompt": "{} + 1 =", "chosen": " 2", "rejected": " 3"},
    "kto": {"prompt": "{} + 1 =", "completion": " 2", "label": True},
}
_OF_DATA = ("prompt_key", "label_key", "template", "apply_chat_template", "system_prompt", "form", "max_skipped_share")


@dataclass(frozen=True)
class Result:
    name: str
    unknown: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    problem: str = ""  # of the converted settings
    plan: str = ""  # sentence of `sluice plan`; "" when it accepts them
    is_stable: bool = True  # a second conversion gave the same bytes

    def __str__(self) -> str:
        lost = ", ".join(" ".join(each.split())[:80] for each in [*self.unknown, *self.missing])
        status = 1 if lost or self.problem else 0
        parts = [f"exit {status}", f"unknown {len(self.unknown)}", "valid" if not self.problem else "wrong"]
        return " | ".join([self.name, *parts, "planned" if not self.plan else self.plan, lost or "-"])


def main(folders: Sequence[str]) -> int:
    """Convert and plan the commands of folders; returns 0 when no option was unknown."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="sluice-migrate-") as name:
        model = make_tiny_model(Path(name) / "model", tied=True)
        _write_rows(Path(name))
        for folder in map(Path, folders):
            for path, label in _sources(folder, Path(name)):
                if result := _result(path, label, model, Path(name)):
                    results.append(result)
                    print(result, flush=True)
    unknown = sum(len(each.unknown) for each in results)
    valid, planned = (sum(not getattr(each, part) for each in results) for part in ("problem", "plan"))
    holds = not unknown and len(results) >= _LEAST and all(each.is_stable for each in results)
    print(
        f"migrate_examples commands={len(results)} unknown={unknown} valid={valid} planned={planned} "
        f"whole={sum(not each.missing for each in results)} holds={'yes' if holds else 'no'}"
    )
    return 0 if holds else 1


def _sources(folder: Path, scratch: Path) -> Iterator[tuple[Path, str]]:
    """Yield files that may hold a command, with a name; blocks of documents become files in `scratch`."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        label = str(path.relative_to(folder.parent))
        if path.suffix in (".sh", ".py") or (
            path.suffix == ".yaml" and "actor_rollout_ref:" in path.read_text("utf-8")
        ):
            yield path, label
        elif path.suffix in (".md", ".rst"):
            for number, match in enumerate(_BLOCK.finditer(path.read_text("utf-8"))):
                if suffix := _SUFFIXES.get(match[1]):
                    block = scratch / f"block{suffix}"
                    block.write_text(textwrap.dedent(match[2]), encoding="utf-8")
                    yield block, f"{label} block {number}"


def _result(path: Path, label: str, model: Path, scratch: Path) -> Result | None:
    """Return the result of a file's first command; None for a file without one."""
    try:
        draft, source = read(path)
    except (SettingsError, UnicodeDecodeError):
        return None
    problem = check(draft)
    text = settings_file(draft, source, problem)
    again, _ = read(path)
    is_stable = settings_file(again, source, check(again)) == text
    plan = problem or _plan(draft, yaml.safe_load(text), model, scratch)
    return Result(label, draft.unknown, list(draft.missing), problem, plan, is_stable)


def _plan(draft: Draft, settings: dict[str, Any], model: Path, scratch: Path) -> str:
    """Return what `sluice plan` says of settings with a tiny model and made rows; "" when it accepts them."""
    objective = settings.get("objective", "policy_gradient")
    for section, name in (("policy", "model"), ("critic", "model"), ("reference", "model")):
        if section == "policy" or name in settings.get(section, {}):
            settings.setdefault(section, {})[name] = str(model)
    data = settings.setdefault("data", {})
    for name in _OF_DATA:
        data.pop(name, None)
    data |= {name: str(scratch / f"{objective}.jsonl") for name in ("train", "eval") if name in data or name == "train"}
    rollout = settings.setdefault("rollout", {})
    rollout["max_context_tokens"] = min(1024, rollout.get("max_context_tokens", 1024))
    if objective == "policy_gradient":
        rollout["max_response_tokens"] = min(500, rollout.get("max_response_tokens", 500))
        data |= {"max_prompt_tokens": min(400, data.get("max_prompt_tokens", 400)), "apply_chat_template": False}
    rollout.pop("chat_template_kwargs", None)
    if ":" in rollout.get("environment", ""):  # a file of the other repository
        rollout["environment"] = "single_turn"
        rollout.pop("max_turns", None)
        settings.pop("tools", None)
    settings.setdefault("run", {})["dir"] = str(scratch / "runs")
    config = scratch / "small.yaml"
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    said, problems = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(problems):
        status = run_verb(["plan", "--config", str(config)])
    last = [line for line in (problems.getvalue() or said.getvalue()).splitlines() if line.strip()]
    return "" if status == 0 else f"plan {status}: {' '.join(last)}"


def _write_rows(folder: Path) -> None:
    for objective, row in _ROWS.items():
        rows = [row | {"prompt": row["prompt"].format(number)} for number in range(2048)]
        text = "".join(json.dumps(each) + "\n" for each in rows)
        (folder / f"{objective}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
