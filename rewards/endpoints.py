"""`python -m rewards.endpoints RUN_DIR show|set`: the reward endpoints of a run, and others for it while it goes on.

`set FILE.yaml` takes endpoints and combine from a settings file. `set NAME=URL ..` names all endpoints one by one: a
name that the run has keeps its weight, limits and headers, a name without URL stays as it is, a name left out goes.
`set --number N` takes an earlier set again. Every new endpoint is asked first, as `rewards.check` does. The run takes
the set up within about two seconds, without a stop; a group's samples are all scored by one set. A run that is stopped
goes on with its newest set.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from protocol.errors import OperatorError, SettingsError
from protocol.settings.loader import load_settings, with_rewards
from protocol.settings.reward_sets import (
    REWARDS_IN_USE,
    RewardSet,
    changing_sets,
    new_set,
    read_sets,
    with_start,
    write_sets,
)
from protocol.settings.rewards import RewardEndpoint, RewardsSettings
from protocol.settings.settings import Settings
from protocol.settings.yaml_file import read_yaml
from rewards.check import MADE_UP, line_of
from rewards.check_probes import Endpoint, findings

_FILES = (".yaml", ".yml", ".json")
_CHANGEABLE = ("endpoints", "combine", "shadow_wait_s")
# A coordinator writes who uses which set every ten seconds.
_SILENT_S = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0; 1 when an endpoint cannot be trained with; 2 for a wrong set."""
    options = _parser().parse_args(arguments)
    try:
        settings = _settings_of(options.run_dir)
        if options.verb == "show":
            _show(options.run_dir, settings)
            return 0
        return _set(options, settings)
    except OperatorError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _settings_of(folder: Path) -> Settings:
    if not (folder / "settings.yaml").exists():
        raise SettingsError(f"{folder} has no settings.yaml. Give the folder of a run, such as runs/NAME.")
    return load_settings(folder / "settings.yaml", [])


# -- show -------------------------------------------------------------------------------------------------------------


def _show(folder: Path, settings: Settings) -> None:
    sets = with_start(read_sets(folder), settings.rewards)
    for one in sets:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.since))
        by = "the settings" if one.source == "settings" else "this command"
        print(
            f"set {one.number}{' (newest)' if one is sets[-1] else ''}  since {since}, by {by}  combine {one.combine}"
        )
        for endpoint in one.endpoints:
            print(f"  {_described(endpoint)}")
        if not one.endpoints:
            print("  the reward service of the cluster")
    print(_use(folder))


def _described(endpoint: RewardEndpoint) -> str:
    parts = [f"{endpoint.name}  {endpoint.url}"]
    for name, field in RewardEndpoint.model_fields.items():
        value = getattr(endpoint, name)
        if name not in ("name", "url") and value != field.default:
            parts.append(f"{name}={json.dumps(value)}")
    return "  ".join(parts)


def _use(folder: Path) -> str:
    """Return which server scores by which set, as far as the run's coordinator tells."""
    try:
        told: dict[str, Any] = json.loads((folder / REWARDS_IN_USE).read_text(encoding="utf-8"))
        silent_s = time.time() - told["at"]
        if silent_s > _SILENT_S:
            return f"The run is not under way (last heard of {silent_s:.0f} s ago): it goes on with the newest set."
        lines = [f"in force: set {told['reward_set']}"]
        for name, use in sorted(told["servers"].items()):
            problem = f"  {use['problem']}" if use["problem"] else ""
            lines.append(f"  {name} scores by set {use['reward_set']}{problem}")
        return "\n".join(lines)
    except (OSError, ValueError, KeyError):
        return "The run has not begun: its start takes the newest set."


# -- set --------------------------------------------------------------------------------------------------------------


def _set(options: argparse.Namespace, settings: Settings) -> int:
    folder: Path = options.run_dir
    known = with_start(read_sets(folder), settings.rewards)
    now = known[-1].over(settings.rewards)
    wanted = _wanted(options, known, settings.rewards, now)
    if options.combine is not None:
        wanted = _parsed(wanted.model_dump(mode="json") | {"combine": options.combine})
    with_rewards(settings, wanted)
    if known[-1].scores_as(wanted):
        print(f"Set {known[-1].number} is this very set already: nothing is changed.")
        return 0
    if not options.unchecked and not _can_be_trained_with(wanted, now, options):
        print("Nothing is changed. Give --unchecked to set it in spite of this.", file=sys.stderr)
        return 1
    with changing_sets(folder):
        # Looked at again: another command may have been quicker.
        sets = with_start(read_sets(folder), settings.rewards)
        one = new_set(wanted, sets[-1].number + 1, "command")
        write_sets(folder, [*sets, one])
    print(f"Set {one.number} is given: {one.describe()}. {_use(folder)}")
    return 0


def _wanted(
    options: argparse.Namespace, known: Sequence[RewardSet], own: RewardsSettings, now: RewardsSettings
) -> RewardsSettings:
    """Return the rewards settings asked for. own: of the run's settings. now: as the newest set has them."""
    items: list[str] = options.endpoints
    if options.number is not None:
        found = [one for one in known if one.number == options.number]
        if items or not found:
            numbers = ", ".join(str(one.number) for one in known)
            raise SettingsError(
                f"rewards: --number {options.number} takes one of the sets {numbers}, and no endpoints."
            )
        return found[0].over(own)
    if len(items) == 1 and items[0].endswith(_FILES) and "=" not in items[0]:
        return _of_file(Path(items[0]), now)
    if not items:
        raise SettingsError("rewards: set takes FILE.yaml, NAME=URL .. or --number N.")
    by_name = {endpoint.name: endpoint.model_dump(mode="json") for endpoint in now.endpoints}
    return _parsed(now.model_dump(mode="json") | {"endpoints": [_named(item, by_name) for item in items]})


def _named(item: str, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    name, equals, url = item.partition("=")
    if not equals and name not in known:
        raise SettingsError(
            f"rewards: {name} is none of the run's endpoints ({', '.join(known) or 'none'}). Give NAME=URL, or a file "
            f"that ends in {', '.join(_FILES)}."
        )
    return {"name": name, **known.get(name, {}), **({"url": url} if equals else {})}


def _of_file(path: Path, now: RewardsSettings) -> RewardsSettings:
    """Return what a file sets: its section rewards, or the keys of that section alone."""
    content = read_yaml(path)
    given = content.get("rewards", content)
    if not isinstance(given, dict):
        raise SettingsError(f"rewards: {path} holds no map of settings under rewards.")
    before = now.model_dump(mode="json")
    for name, value in given.items():
        if name in before and name not in _CHANGEABLE and value != before[name]:
            raise SettingsError(
                f"rewards: {path}: rewards.{name} = {value} cannot be changed while the run goes on (it is "
                f"{before[name]}). Leave it out, or stop the run and start it with that setting."
            )
    fresh = RewardsSettings().model_dump(mode="json")
    return _parsed(before | {name: fresh[name] for name in _CHANGEABLE} | given)


def _parsed(rewards: dict[str, Any]) -> RewardsSettings:
    try:
        return RewardsSettings.model_validate(rewards)
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            name = ".".join(["rewards", *(str(part) for part in problem["loc"])])
            lines.append(f"settings: {name} is wrong: {problem['msg'].removeprefix('Value error, ').rstrip('.')}.")
        raise SettingsError("\n".join(lines)) from None


def _can_be_trained_with(wanted: RewardsSettings, now: RewardsSettings, options: argparse.Namespace) -> bool:
    """Ask every endpoint that is new, and print what is found. A shadow's problems are shown and stop nothing."""
    is_usable = True
    for endpoint in wanted.endpoints:
        if endpoint in now.endpoints:
            continue
        missing = [name for name in endpoint.headers_env.values() if not os.environ.get(name)]
        if missing:
            print(f"{endpoint.name}: not asked, {', '.join(missing)} is not set here. Servers need it in theirs.")
            continue
        headers = {header.lower(): os.environ[name] for header, name in endpoint.headers_env.items()}
        with Endpoint(str(endpoint.url), headers, endpoint.timeout_s) as asked:
            for finding in findings(asked, MADE_UP):
                print(f"{endpoint.name}: {line_of(finding)}", flush=True)
                is_usable = is_usable and (finding.kind != "problem" or endpoint.shadow)
    return is_usable


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rewards.endpoints", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run, such as runs/NAME")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="show|set")
    verbs.add_parser("show", help="every set of the run, and which server scores by which")
    change = verbs.add_parser("set", help="give the run another set of endpoints")
    change.add_argument("endpoints", nargs="*", metavar="FILE.yaml | NAME[=URL]", help="all endpoints of the new set")
    change.add_argument("--combine", choices=["sum", "mean", "product", "shard"], help="as rewards.combine")
    change.add_argument("--number", type=int, metavar="N", help="take the endpoints of set N again")
    change.add_argument("--unchecked", action="store_true", help="ask no endpoint before")
    return parser


if __name__ == "__main__":
    sys.exit(main())
