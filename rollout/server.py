"""A rollout server: one warm engine, and the one run that is attached to it now.

`deploy.fleet.fleet` wraps the class into a detached actor, so every method's arguments and results are plain data. Call
order: start, then attach / weight controls / detach for each run, then stop. Nothing is generated for a run before a
push was committed to this server: whatever weights are loaded at attach time are not that run's.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from protocol.errors import NeighbourError, SettingsError
from protocol.node.small_model_files import find_small_files, write_small_files
from protocol.settings.run_spec import EngineRequest, RunSpec
from protocol.weights.controls import Attempt, learner_name
from rollout.attachment import Attachment, KeptOutbox, begin_attachment
from rollout.engine.engine import Engine
from rollout.engine.version_gate import VersionGate
from rollout.neighbours.node import FindNode, this_node
from rollout.neighbours.services import Services
from rollout.newest_attempt import NewestAttempt
from rollout.served_engine import ServedEngine

M = TypeVar("M", bound=BaseModel)
_log = logging.getLogger(__name__)
_WATCH_EVERY_S = 0.5
_REPORT_EVERY_S = 60.0


def die(reason: str) -> None:
    """End this process at once, non-zero, so that whoever started it starts another."""
    _log.critical("this rollout server ends: %s", reason)
    logging.shutdown()
    os._exit(1)


class RolloutServer:
    """All methods run in one event loop.

    name: also the name under which the coordinator knows this server. spec: an `EngineRequest`.
    """

    def __init__(
        self,
        name: str,
        spec: dict[str, Any],
        start_engine: Callable[[EngineRequest], Awaitable[ServedEngine]] = Engine.start,
        find_node: FindNode = this_node,
        end_process: Callable[[str], None] = die,
    ) -> None:
        self.name = name
        self._spec = _parsed(EngineRequest, spec)
        self._start_engine = start_engine
        self._find_node = find_node
        self._end_process = end_process
        self._gate = VersionGate()
        self._newest = NewestAttempt(name)
        self._turn = NewestAttempt(name)  # to use the device
        self._is_asleep = False
        self._is_unserved = False  # weights were committed that the learner has not found right yet
        self._changing = asyncio.Lock()
        self._engine: ServedEngine | None = None
        self._attachment: Attachment | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self, files: Mapping[str, bytes] | None = None) -> dict[str, Any]:
        """Start the engine, 10 to 60 s; returns `describe()`. A started engine stays as it is.

        files: the model's small files; None: those of an earlier start on this node.
        Raises: OperatorError, SettingsError or NeighbourError with the reason.
        """
        async with self._changing:
            if self._engine is None:
                folder = await asyncio.to_thread(_model_folder, self._spec, files)
                self._engine = await self._start_engine(self._spec.model_copy(update={"model": str(folder)}))
                self._watcher = asyncio.create_task(self._watch())
        return await self.describe()

    async def describe(self) -> dict[str, Any]:
        """Return {name, fingerprint, is_started, is_alive, policy_version, run, stats}; run is None when there is none.

        run: {run_id, incarnation, is_connected, num_groups, num_samples, num_kept, failures, cut_observations,
        content_hash, ended}.
        """
        engine, attachment = self._engine, self._attachment
        return {
            "name": self.name,
            "fingerprint": self._spec.fingerprint(),
            "is_started": engine is not None,
            "is_alive": engine is not None and engine.is_alive,
            "policy_version": engine.policy_version if engine is not None else None,
            "run": attachment.describe() if attachment is not None else None,
            "stats": asdict(engine.stats) if engine is not None else {},
        }

    async def attach(self, run: dict[str, Any]) -> dict[str, Any]:
        """Serve this run (a `RunSpec`) from now on, in place of any other; returns `describe()`.

        The run's services are asked first, at most a minute each: when one is down, nothing changes here. A later start
        of the attached run is given what this server finished for the earlier one.
        Raises: SettingsError, OperatorError or NeighbourError with what to change.
        """
        spec = _parsed(RunSpec, run)
        node = self._find_node()
        async with self._changing:
            engine = self._running_engine()
            services = Services(spec, node, engine.tokenizer)
            try:
                await services.check()
            except BaseException:
                await services.close()
                raise
            finished = await self._end_attachment()
            for attempts in (self._newest, self._turn):
                await attempts.expect(learner_name(spec.run_id, spec.incarnation))
            await self._wake()  # where an earlier run ended in its sleep
            self._gate.forget()
            engine.forget_weights()
            self._is_unserved = False
            self._attachment = await begin_attachment(self.name, spec, node, services, engine, self._gate, finished)
        _log.info("%s  attached  run=%s start=%d", self.name, spec.run_id, spec.incarnation)
        return await self.describe()

    async def detach(self) -> None:
        """Forget the run: its samples are stopped and its finished ones dropped. The engine stays warm."""
        async with self._changing:
            await self._end_attachment()

    async def stop(self) -> None:
        """Detach and stop the engine; returns when its processes are gone."""
        await self.detach()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    # -- weight controls (`protocol.weights.controls`): rank 0 calls these in this order, each with a deadline --------

    async def ping(self) -> None:
        """Return at once: a learner that waits for something else here asks whether anyone is there."""

    async def join_weights(self, attempt: Attempt, init: dict[str, Any], timeout_s: float) -> None:
        """Join the learner's weight group; generation goes on."""
        await self._newest.begin(attempt, lambda: self._join_weights(init, timeout_s))

    async def sleep(self, attempt: Attempt) -> None:
        """Begin no turn, and have the engine give its device up; turns being written go on after `wake`."""
        await self._turn.begin(attempt, self._sleep)

    async def wake(self, attempt: Attempt) -> None:
        """Have the engine take its device back and go on, with turns too where the learner found the weights right."""
        await self._turn.begin(attempt, self._wake)

    async def prepare(self, attempt: Attempt, update: dict[str, Any]) -> None:
        """Get ready for a push's buckets; new turns are held back where generation stops for them."""
        await self._newest.begin(attempt, lambda: self._prepare(update))

    async def receive(self, attempt: Attempt) -> None:
        """Return when the last bucket has come."""
        await self._newest.go_on(attempt, lambda: self._running_engine().receive())

    async def commit(self, attempt: Attempt, version: int, digest: str) -> float:
        """Make what was received policy version `version` and go on with what is in flight.

        No turn begins, and none that has tokens of it ends, before `serve`. Returns the seconds for which nothing was
        generated. Raises: NeighbourError when the digest is another.
        """
        return await self._newest.go_on(attempt, lambda: self._commit(version, digest))

    async def serve(self, attempt: Attempt, version: int) -> None:
        """Use the committed version from now on, and ask for leases at once. Raises: NeighbourError."""
        await self._newest.go_on(attempt, lambda: self._serve(version))

    async def probe(self, attempt: Attempt, tokens: list[int]) -> list[float]:
        """Return the logprobs of tokens[1:] under the version held, natural log at temperature 1."""
        return await self._newest.go_on(attempt, lambda: self._running_engine().probe(tokens))

    async def leave(self, attempt: Attempt) -> None:
        """Leave the weight group; with intact weights, generation goes on."""
        await self._newest.go_on(attempt, self._leave)

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _join_weights(self, init: dict[str, Any], timeout_s: float) -> None:
        self._disown_unserved()
        await self._running_engine().join_weights(init, timeout_s)

    async def _sleep(self) -> None:
        self._is_asleep = True
        self._gate.stop_time()
        await self._running_engine().sleep()

    async def _wake(self) -> None:
        if self._is_asleep:
            await (engine := self._running_engine()).wake()
            self._is_asleep = False
            self._gate.start_time()
            if engine.policy_version is not None and not self._is_unserved:
                self._reopen()

    async def _prepare(self, update: dict[str, Any]) -> None:
        engine = self._running_engine()
        self._disown_unserved()
        if not engine.generates_while_receiving:
            self._gate.close()
        await engine.prepare(update)

    async def _commit(self, version: int, digest: str) -> float:
        engine, served = self._running_engine(), self._gate.version
        if served is not None and version < served:
            raise NeighbourError(self.name, f"cannot commit version {version}: it has served version {served}")
        self._gate.close(version)
        try:
            pause_s = await engine.commit(version, digest)
        except asyncio.CancelledError:
            self._is_unserved = True  # the engine may have loaded them all the same
            raise
        self._is_unserved = True
        return pause_s

    async def _serve(self, version: int) -> None:
        held = self._running_engine().policy_version
        if held != version:
            raise NeighbourError(self.name, f"cannot serve version {version}: it holds {held}")
        self._is_unserved = False
        self._reopen()

    async def _leave(self) -> None:
        engine = self._running_engine()
        self._disown_unserved()
        await engine.leave()
        if engine.policy_version is not None and not self._is_asleep:
            self._reopen()

    def _running_engine(self) -> ServedEngine:
        if self._engine is None:
            raise NeighbourError(self.name, "its engine was not started")
        return self._engine

    def _disown_unserved(self) -> None:
        """Forget weights that were committed and never found right, and give up what they write."""
        if self._is_unserved:
            self._is_unserved = False
            self._running_engine().forget_weights()
            self._gate.disown()

    def _reopen(self) -> None:
        self._gate.open(self._running_engine().policy_version)
        if self._attachment is not None:
            self._attachment.session.wake()

    async def _end_attachment(self) -> KeptOutbox | None:
        """Stop working for the attached run; returns what was finished for it."""
        attachment, self._attachment = self._attachment, None
        return await attachment.end() if attachment is not None else None

    async def _watch(self) -> None:
        """End this process when it could only fail from now on."""
        reported_at = time.monotonic()
        while (reason := self._reason_to_end()) is None:
            await asyncio.sleep(_WATCH_EVERY_S)
            if time.monotonic() - reported_at >= _REPORT_EVERY_S:
                reported_at = time.monotonic()
                self._report()
        self._end_process(reason)

    def _reason_to_end(self) -> str | None:
        if self._engine is None or not self._engine.is_alive:
            return "its engine died"
        error = self._attachment.failure if self._attachment is not None else None
        if error is None:
            return None
        _log.error("%s  session failed", self.name, exc_info=error)
        return f"its session failed: {error}"

    def _report(self) -> None:
        if self._attachment is not None:
            facts = {**asdict(self._running_engine().stats), **self._attachment.describe()}
            _log.info("%s  serving  %s", self.name, " ".join(f"{name}={value}" for name, value in facts.items()))


def _model_folder(spec: EngineRequest, files: Mapping[str, bytes] | None) -> Path:
    if not spec.files_digest:
        return Path(spec.model)
    return find_small_files(spec.files_digest) if files is None else write_small_files(files)


def _parsed(model: type[M], value: dict[str, Any]) -> M:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise SettingsError(f"settings: {model.__name__}: {path}: {first['msg']}, got {first['input']!r}") from None
