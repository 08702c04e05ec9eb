"""What differs between this start of a run and the earlier ones, recorded in the ledger: the user gets a line for each.

Statistics that depend on a changed part start again.
"""

import http.client
import json
import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from pydantic import HttpUrl

from learner.coordinator.groups.eval_scores import HeldOutSet
from learner.data.answers import Origin
from learner.disk.model_folder import weights_digest
from learner.ledger.ledger import REWARDS_SINCE_STEP, Ledger
from protocol.errors import OperatorError
from protocol.node.home import read_cluster
from protocol.node.small_model_files import read_small_files, small_files_digest
from protocol.settings.paths import data_files, user_files
from protocol.settings.run_spec import digests_of
from protocol.settings.settings import Settings

_log = logging.getLogger(__name__)
_HEALTH_S, _HEALTH_BYTES = 5.0, 1 << 16
_DATA = "Data files that are named by the code of "
# Settings of rollout that decide nothing in a sample.
_OF_SERVERS = {"num_servers", "tensor_parallel_size", "max_groups_in_flight", "lease_timeout_s", "start_timeout_s"}


class StartChanges(NamedTuple):
    """The changes of this start, and of earlier ones that still matter."""

    comparable_since: dict[str, int]  # metric -> first step whose evaluations are comparable with this start's
    notices: tuple[str, ...]  # lines for the user


class _Tells(NamedTuple):
    """What a reward service tells of itself."""

    code: str | None  # digest of its code; None: it did not answer in time
    is_old: bool = False  # its files are newer
    data: str = ""  # digest of the data files that its code names


def begin_start(
    ledger: Ledger,
    settings: Settings,
    held_out: Sequence[HeldOutSet],
    from_step: int,
    incarnation: int,
    services: Mapping[str, str],
) -> StartChanges:
    """Record what this start, from `from_step` on, gets its samples and scores by; returns what changed.

    services: digests of what the policy reads from services, by their names for the user.
    """
    source = settings.rewards.reward_source(settings.rollout.environment)
    sampling = sampled_by(settings, services, without={"group_size", "temperature"})
    measured_by = f"sampled by {sampling}, solved at {settings.eval.solved_at:g}"
    other = "other prompts or other sampling"
    if settings.is_of_rows:
        measured_by, other = f"{settings.preference!r} {settings.distill!r}", "other rows or another loss"
    sets = {one.name: f"{one.identity(settings.rollout.temperature)}, {measured_by}" for one in held_out}
    told = dict(_served_code(settings))
    served = {scorer: tells.code for scorer, tells in told.items()}
    # Servers may still hold results that the scorers' earlier code has scored: those are not trained either. Scorers
    # count without their addresses: a cluster that was started again may have others.
    made_by = sampled_by(settings, services, sets, list(served.values()))
    edited = ledger.begin_code({**_code_digests(settings, told), **services})
    unused = {f"The scorer behind {endpoint.url}" for endpoint in settings.rewards.endpoints if not endpoint.weight}
    rescored = (served.keys() - unused).intersection(edited)
    earlier = ledger.begin_rewards(source, made_by, from_step, incarnation, is_edited=bool(rescored))
    since, changed = ledger.begin_sets(sets, from_step)
    notices = []
    if earlier is not None:
        notices.append(
            f"Rewards come from {source} from step {from_step} on, and came from {earlier} before: reward "
            "normalisation, the best checkpoint and the curriculum start again."
        )
    for name in changed:
        notices.append(f"The held-out set {name} has {other} from step {from_step} on: earlier scores do not count.")
    notices += _notices_of_scorers(told)
    notices += [_notice_edited(path, from_step, decides_scores=path in rescored) for path in edited]
    for notice in notices:
        _log.warning("%s", notice)
    metrics = {f"eval/{name}/since": step for name, step in since.items()}
    if step := int(ledger.meta(REWARDS_SINCE_STEP) or 0):
        metrics["eval/rewards_since"] = step
    return StartChanges(metrics, tuple(notices))


def _code_digests(settings: Settings, told: Mapping[str, _Tells]) -> dict[str, str]:
    """Return the digests of the user's code and of the data files that it names, by their names for the user."""
    learner = settings.learner
    code = digests_of(_sampling_files(settings))
    code |= digests_of(user_files("", learner.advantage, learner.loss, learner.correction))
    code |= digests_of(data_files(map(Path, code)))
    code |= {scorer: tells.code for scorer, tells in told.items() if tells.code is not None}
    return code | {
        f"{_DATA}{scorer[0].lower()}{scorer[1:]}": tells.data for scorer, tells in told.items() if tells.data
    }


def _notices_of_scorers(told: Mapping[str, _Tells]) -> Iterator[str]:
    for scorer, tells in told.items():
        if tells.code is None:
            yield f"{scorer} did not answer GET /health within {_HEALTH_S:g} s: whether it changed is not known."
        elif tells.is_old:
            yield (
                f"{scorer} scores by code that is older than its files: they were edited since it started. Restart it, "
                "and give this command again."
            )


def _notice_edited(path: str, from_step: int, *, decides_scores: bool) -> str:
    if path.startswith(_DATA):
        return (
            f"{path} have changed since the last start: restart it if it reads them once. Earlier scores still count."
        )
    again = " Held-out scores, the best checkpoint and the curriculum start again." if decides_scores else ""
    return f"{path} has changed since the last start: steps from {from_step} on use it as it is now.{again}"


def answers_origin(settings: Settings, num_samples: int, model: Path, services: Mapping[str, str]) -> Origin:
    """Return what decides the answers of `sluice generate`: rows of another origin are not mixed with them.

    Raises: OperatorError for a scorer that does not tell in time what it is.
    """
    source = settings.rewards.reward_source(settings.rollout.environment)
    files = read_small_files(model, with_code=settings.policy.trust_remote_code)
    served = {scorer: tells.code for scorer, tells in _served_code(settings)}
    if silent := [scorer for scorer, digest in served.items() if digest is None]:
        raise OperatorError(
            f"{silent[0]} did not answer GET /health within {_HEALTH_S:g} s: answers of two scorers could be mixed. "
            "Give the command again when it has less work."
        )
    scorers = list(served.values())  # without addresses: a cluster that was started again may have others
    sampling = sampled_by(settings, source, num_samples, settings.policy.dtype, scorers, services)
    return Origin(f"{weights_digest(model)} {small_files_digest(files)}", f"{sampling} {settings.run.seed}")


def _served_code(settings: Settings) -> Iterator[tuple[str, _Tells]]:
    """Yield (name, what it tells) of each reward service that tells its code: Sluice's own do."""
    urls = {f"The scorer behind {endpoint.url}": endpoint.url for endpoint in settings.rewards.endpoints}
    with suppress(OperatorError):  # no cluster: a coordinator without Ray
        if not urls and not settings.is_of_rows and (own := read_cluster().reward_url):
            urls = {"The scorer of the cluster": HttpUrl(own)}  # its port may be another one at the next start
    for name, url in urls.items():
        connect = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = connect(str(url.host).strip("[]"), url.port, timeout=_HEALTH_S)
        with suppress(OSError, http.client.HTTPException, ValueError, AttributeError):
            try:
                connection.request("GET", "/health")
                told = connection.getresponse().read(_HEALTH_BYTES)
            except TimeoutError:
                told = b""
                yield name, _Tells(None)
            answer = json.loads(told)
            if isinstance(digest := answer.get("code"), str):
                yield name, _Tells(digest, answer.get("is_edited") is True, str(answer.get("data") or ""))
        connection.close()


def _sampling_files(settings: Settings) -> list[Path]:
    """Return the user's files of the environment, and those that a command of an MCP server names."""
    named = [Path(server.folder, part) for server in settings.tools.mcp for part in server.command[1:]]
    return [*user_files(settings.rollout.environment), *(file for file in named if file.is_file())]


def sampled_by(settings: Settings, *others: object, without: Set[str] = frozenset()) -> str:
    """Return a hash of what decides a sample besides weights and prompt: samples of other starts may not count.

    without: fields of `rollout` that decide nothing here.
    """
    rollout = settings.rollout.model_dump(mode="json", exclude={*_OF_SERVERS, *without})
    sections = (settings.sampling, settings.tools, settings.agents, settings.retriever)
    given = [rollout, settings.rewards.credit, *(section.model_dump(mode="json") for section in sections), *others]
    given.append(digests_of(_sampling_files(settings)))
    return sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()
