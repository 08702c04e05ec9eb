"""`sluice VERB`: every command under one name.

Exit status of every verb: 0; 1 with one sentence after a failure; 2 with one sentence for a wrong option or setting,
before anything was started; 130 after Ctrl-C.
"""

import difflib
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import OperatorError


@dataclass(frozen=True)
class Verb:
    about: str
    command: str  # module and function that takes the arguments and returns the exit status
    first: tuple[str, ...] = ()  # arguments before the given ones


VERBS = {
    "start": Verb("start this node's part of a cluster", "deploy.cluster.command:main", ("start",)),
    "run": Verb("train a policy; without settings: the quick start", "learner.run.command:run_command"),
    "plan": Verb("show what would run where, and its memory", "learner.run.command:run_command", ("--plan",)),
    "runs": Verb("list runs; show the output of one, or stop it", "deploy.runs.command:main"),
    "status": Verb("show this node's processes and their logs", "deploy.cluster.command:main", ("status",)),
    "stop": Verb("end this node's part of a cluster", "deploy.cluster.command:main", ("stop",)),
    "dash": Verb("a live page of your runs, in the browser", "learner.report.dash.command:main"),
    "traces": Verb("send a run's samples to OpenTelemetry", "learner.report.dash.traces:main"),
    "report": Verb("write a run's report.html, also while it runs", "learner.report.write:main"),
    "diff": Verb("name where two runs part", "learner.report.diff:main"),
    "replay": Verb("train a kept step again, bit for bit", "learner.rank.replay.command:main"),
    "audit": Verb("prove that each prompt was trained once", "learner.audit.command:main"),
    "eval": Verb("score a model on held-out prompts", "learner.evaluate:main"),
    "generate": Verb("write a model's answers to every prompt of a file", "learner.generation.generate:main"),
    "select": Verb("make rows to train on from answers", "learner.generation.select:main"),
    "iterate": Verb("rounds of generate, select and train", "learner.generation.iterate:main"),
    "chat": Verb("talk with a model in the terminal", "rollout.chat:main"),
    "serve-reward": Verb("serve a reward function or a bundled scorer", "rewards.serve:main"),
    "check-reward": Verb("check that a run can use a reward endpoint", "rewards.check:main"),
    "migrate": Verb("convert another trainer's command to a settings file", "deploy.migrate.command:main"),
    "tinker": Verb("serve Tinker's API: its client trains on this machine", "deploy.tinker.command:main"),
    "prepare-data": Verb("turn a known data set into rows that run", "learner.data.prepare.command:main"),
    "build-index": Verb("build the index of a corpus for the retriever", "retriever.build:main"),
}
_HELP = ("-h", "--help", "help")


def main() -> int:
    """Run the command line; returns its exit status."""
    return run_verb(sys.argv[1:])


def run_verb(arguments: Sequence[str]) -> int:
    """Run `sluice ARGUMENTS`; returns its exit status."""
    name, *rest = arguments or ["--help"]
    if name in _HELP:
        print(_usage())
        return 0
    if name not in VERBS:
        close = difflib.get_close_matches(name, VERBS, n=1)
        hint = f"Did you mean sluice {close[0]}?" if close else f"Use one of {', '.join(VERBS)}."
        print(f"sluice: {name} is not known. {hint}", file=sys.stderr)
        return 2
    verb = VERBS[name]
    try:
        status: int = pkgutil.resolve_name(verb.command)([*verb.first, *rest])
    except OperatorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    return status


def _usage() -> str:
    lines = [f"  {name:<14}{verb.about}" for name, verb in VERBS.items()]
    return "\n".join(
        [
            "usage: sluice VERB [OPTIONS]; VERB --help explains it. First: start, then run.",
            *lines,
        ]
    )
