"""A rollout server: one warm engine, and the run that is attached to it.

`deploy.fleet.fleet` makes the class a detached actor, so arguments and results of all methods are plain data. Call
order: start; then attach, weight controls and detach for each run; then stop. The engine starts with dummy weights, and
nothing is generated for a run before a push was verified on this server.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from protocol.errors import NeighbourError, SettingsError
from protocol.node.small_model_files import find_small_files, write_small_files
from protocol.settings.run_spec import EngineRequest, RunSpec
from protocol.weights.controls import learner_name
from rollout.attachment import Attachment, KeptOutbox, begin_attachment
from rollout.attempt_fence import AttemptFence, fence_calls
from rollout.engine.engine import Engine
from rollout.engine.version_gate import VersionGate
from rollout.episodes.conversation import Generator
from rollout.neighbours.node import FindNode, this_node
from rollout.neighbours.services import Services

M = TypeVar("M", bound=BaseModel)
_log = logging.getLogger(__name__)
_WATCH_EVERY_S = 0.5
_REPORT_EVERY_S = 60.0


class ServedEngine(Generator, Protocol):
    """`rollout.engine.engine.Engine` as a server uses it."""

    @property
    def generates_while_receiving(self) -> bool: ...
    def forget_weights(self) -> None: ...
    def shutdown(self) -> None: ...
    async def join_weights(self, init: dict[str, Any], timeout_s: float) -> None: ...
    async def prepare(self, update: dict[str, Any]) -> None: ...
    async def receive(self) -> None: ...
    async def commit(self, version: int, digest: str) -> float: ...
    async def probe(self, tokens: list[int]) -> list[float]: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    async def leave(self) -> None: ...


def exit_process(reason: str) -> None:
    """End this process with a failure, so that its supervisor restarts it."""
    _log.critical("this rollout server ends: %s", reason)
    logging.shutdown()
    os._exit(1)


class RolloutServer:
    """All methods run in one event loop."""

    def __init__(
        self,
        name: str,
        spec: dict[str, Any],
        start_engine: Callable[[EngineRequest], Awaitable[ServedEngine]] = Engine.start,
        find_node: FindNode = this_node,
        end_process: Callable[[str], None] = exit_process,
    ) -> None:
        """name: the coordinator knows the server by it. spec: an `EngineRequest`."""
        self.name = name
        self._spec = _validate(EngineRequest, spec)
        self._start_engine = start_engine
        self._find_node = find_node
        self._end_process = end_process
        self._gate = VersionGate()
        self._pushes = AttemptFence(name)
        self._turns = AttemptFence(name)  # calls to sleep and to wake, which are numbered apart
        self._is_asleep = False
        self._is_unverified = False  # True: weights were committed that the learner has not verified
        self._changing = asyncio.Lock()
        self._engine: ServedEngine | None = None
        self._attachment: Attachment | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self, files: Mapping[str, bytes] | None = None) -> dict[str, Any]:
        """Start the engine, 10 to 60 s; returns `describe()`. A started engine is kept as it is.

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

        run: {run_id, incarnation, is_connected, num_groups, num_samples, num_kept, failures, content_hash,
        tools_digest, ended}.
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
        """Serve this run (a `RunSpec`) in place of any other; returns `describe()`.

        The run's services are checked first, at most a minute each; if one is down, nothing changes. A later start of
        the attached run gets the results of the earlier start.
        Raises: SettingsError, OperatorError or NeighbourError with the cure.
        """
        spec = _validate(RunSpec, run)
        node = self._find_node()
        async with self._changing:
            engine = self._running_engine()
            services = Services(spec, node, engine.tokenizer, engine.end_tokens)
            try:
                await services.check()
            except BaseException:
                await services.close()
                raise
            finished = await self._end_attachment()
            for fence in (self._pushes, self._turns):
                await fence.expect(learner_name(spec.run_id, spec.incarnation))
            await self._wake()  # an earlier run may have ended while the engine slept
            self._gate.forget()
            engine.forget_weights()
            self._is_unverified = False
            self._attachment = await begin_attachment(self.name, spec, node, services, engine, self._gate, finished)
        _log.info("%s  attached  run=%s start=%d", self.name, spec.run_id, spec.incarnation)
        return await self.describe()

    async def detach(self) -> None:
        """Stop the run's samples and drop its finished ones. The engine stays warm."""
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

    # -- weight controls (`protocol.weights.controls.ServerControls`): callers pass the attempt as first argument -----

    async def ping(self) -> None:
        """Return at once."""

    @fence_calls("_pushes", begins=True)
    async def join_weights(self, init: dict[str, Any], timeout_s: float) -> None:
        self._invalidate_unverified()
        await self._running_engine().join_weights(init, timeout_s)

    @fence_calls("_pushes", begins=True)
    async def prepare(self, update: dict[str, Any]) -> None:
        engine = self._running_engine()
        self._invalidate_unverified()
        if not engine.generates_while_receiving:
            self._gate.close()
        await engine.prepare(update)

    @fence_calls("_pushes")
    async def receive(self) -> None:
        await self._running_engine().receive()

    @fence_calls("_pushes")
    async def commit(self, version: int, digest: str) -> float:
        engine, served = self._running_engine(), self._gate.version
        if served is not None and version < served:
            raise NeighbourError(self.name, f"cannot commit version {version}: it has served version {served}")
        self._gate.close(version)
        try:
            pause_s = await engine.commit(version, digest)
        except asyncio.CancelledError:
            self._is_unverified = True  # the engine may have loaded them
            raise
        self._is_unverified = True
        return pause_s

    @fence_calls("_pushes")
    async def probe(self, tokens: list[int]) -> list[float]:
        return await self._running_engine().probe(tokens)

    @fence_calls("_pushes")
    async def serve(self, version: int) -> None:
        held = self._running_engine().policy_version
        if held != version:
            raise NeighbourError(self.name, f"cannot serve version {version}: it holds {held}")
        self._is_unverified = False
        self._reopen()

    @fence_calls("_pushes")
    async def leave(self) -> None:
        engine = self._running_engine()
        self._invalidate_unverified()
        await engine.leave()
        if engine.policy_version is not None and not self._is_asleep:
            self._reopen()

    @fence_calls("_turns", begins=True)
    async def sleep(self) -> None:
        self._is_asleep = True
        self._gate.stop_time()
        await self._running_engine().sleep()

    @fence_calls("_turns", begins=True)
    async def wake(self) -> None:
        await self._wake()

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _wake(self) -> None:
        if self._is_asleep:
            await (engine := self._running_engine()).wake()
            self._is_asleep = False
            self._gate.start_time()
            if engine.policy_version is not None and not self._is_unverified:
                self._reopen()

    def _running_engine(self) -> ServedEngine:
        if self._engine is None:
            raise NeighbourError(self.name, "its engine was not started")
        return self._engine

    def _invalidate_unverified(self) -> None:
        """Drop weights that were committed and never verified, and the turns that they write."""
        if self._is_unverified:
            self._is_unverified = False
            self._running_engine().forget_weights()
            self._gate.invalidate_unverified()

    def _reopen(self) -> None:
        self._gate.open(self._running_engine().policy_version)
        if self._attachment is not None:
            self._attachment.session.wake()

    async def _end_attachment(self) -> KeptOutbox | None:
        """Stop working for the attached run; returns its finished results."""
        attachment, self._attachment = self._attachment, None
        return await attachment.end() if attachment is not None else None

    async def _watch(self) -> None:
        """End this process once it can only fail."""
        reported_at = time.monotonic()
        while (reason := self._reason_to_end()) is None:
            await asyncio.sleep(_WATCH_EVERY_S)
            if time.monotonic() - reported_at >= _REPORT_EVERY_S:
                reported_at = time.monotonic()
                self._log_report()
        self._end_process(reason)

    def _reason_to_end(self) -> str | None:
        if self._engine is None or not self._engine.is_alive:
            return "its engine died or hangs"
        error = self._attachment.failure if self._attachment is not None else None
        if error is None:
            return None
        _log.error("%s  session failed", self.name, exc_info=error)
        return f"its session failed: {error}"

    def _log_report(self) -> None:
        if self._attachment is not None:
            facts = {**asdict(self._running_engine().stats), **self._attachment.describe()}
            _log.info("%s  serving  %s", self.name, " ".join(f"{name}={value}" for name, value in facts.items()))


def _model_folder(spec: EngineRequest, files: Mapping[str, bytes] | None) -> Path:
    if not spec.files_digest:
        return Path(spec.model)
    return find_small_files(spec.files_digest) if files is None else write_small_files(files)


def _validate(model: type[M], value: dict[str, Any]) -> M:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise SettingsError(f"settings: {model.__name__}: {path}: {first['msg']}, got {first['input']!r}") from None
