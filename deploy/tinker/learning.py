"""The thread that trains: every model's requests in the order of their numbers, models in turns by time used.

A model is on the disk after each optimizer step. A lost or evicted model is read from there, and the passes since
then run again from their bytes: the gradient has the same bits.
"""

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from secrets import randbelow

from deploy.tinker.adapters import Adapter, AdapterForm, BaseModel, form_of
from deploy.tinker.bodies import (
    AdamParams,
    CreateModel,
    LoadWeights,
    LoraConfig,
    OptimStep,
    SaveForSampler,
    SaveWeights,
)
from deploy.tinker.journal import Journal, ModelRow, Request, Result, Row, SamplerRow, SavedRow
from deploy.tinker.naming import check_base, checked_name, file_name, sampler_id
from deploy.tinker.wire import RequestError, read_pass, write_pass
from protocol.http.bodies import BodyError, read_request

_log = logging.getLogger("tinker")
_GRADIENT = "forward_backward"
KEPT_SAMPLERS = 16  # newest weights of one model for sampling sessions; named weights stay
Made = tuple[Result, list[Row]]


@dataclass(frozen=True)
class Limits:
    """The size of the service."""

    adapter_bytes: int  # memory of all adapters with their optimizers
    max_rank: int  # largest rank of an adapter
    base_names: tuple[str, ...]  # names of the base model that clients may use


class Learning:
    """Runs requests one at a time. `run` is the thread; the other methods are for any thread."""

    def __init__(
        self,
        journal: Journal,
        base: BaseModel,
        folder: Path,
        limits: Limits,
        on_result: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_result: called in this thread with a request's id once its result is in the journal. clock: seconds."""
        self._journal, self._base, self._folder, self._limits = journal, base, folder, limits
        self._on_result, self._clock = on_result, clock
        self._adapters: dict[str, Adapter] = {}
        self._released: set[str] = set()  # models whose memory may be used for others
        self._next = journal.next_seqs()
        self._arrived: dict[str, set[int]] = {}  # model -> unfinished requests
        self._used: dict[str, float] = {}  # model -> seconds, of those with unfinished requests
        self._changed = threading.Condition()
        for request in journal.open_requests(of_samples=False):
            self.add(request)

    def add(self, request: Request) -> None:
        """Run a request of the journal when the requests before it are done."""
        with self._changed:
            self._released.discard(request.owner)
            self._arrived.setdefault(request.owner, set()).add(request.seq)
            # A model that waited for its client has no claim to the time that it did not use.
            others = [self._used[owner] for owner in self._runnable() if owner != request.owner]
            self._used[request.owner] = max(self._used.get(request.owner, 0.0), min(others, default=0.0))
            self._changed.notify()

    def release(self, prefix: str) -> None:
        """Let others use the memory of a session's models. They are read again when a request comes."""
        with self._changed:
            self._released.update(name for name in self._adapters if name.startswith(prefix))

    def delete(self, path: str) -> bool:
        """Remove saved weights; False where there are none. Any thread may call it."""
        row = self._journal.forget(path)
        if row is not None and row.place.endswith(".safetensors"):
            (self._folder / row.place).unlink(missing_ok=True)
        elif row is not None:
            shutil.rmtree(self._folder / row.place, ignore_errors=True)
        return row is not None

    def run(self) -> None:
        """Run requests for ever. The process ends when the journal cannot be written: a new start resumes."""
        try:
            self._run_all()
        except BaseException:
            _log.exception("the service ends, because a request has no place on the disk")
            os._exit(1)

    def _run_all(self) -> None:
        while True:
            with self._changed:
                while not (ready := self._runnable()):
                    self._changed.wait()
                owner = min(ready, key=lambda name: self._used[name])
                seq = self._next.get(owner, 0)
            request = self._journal.request(owner, seq)
            started = self._clock()
            if request is not None:
                self._run(request)
            with self._changed:
                self._arrived[owner].discard(seq)
                self._next[owner] = seq + 1
                self._used[owner] += self._clock() - started

    def _runnable(self) -> list[str]:
        return [owner for owner, seqs in self._arrived.items() if self._next.get(owner, 0) in seqs]

    def _run(self, request: Request) -> None:
        rows: list[Row] = []
        try:
            result, rows = _VERBS[request.verb](self, request)
        except (RequestError, BodyError) as error:
            result = Result.failure(str(error), "user")
        except Exception as error:
            # What it left in memory is unknown; the disk has the model.
            self._adapters.pop(request.owner, None)
            _log.exception("request failed  id=%s verb=%s", request.id, request.verb)
            kept = "The request changed nothing: weights and gradient are as before it."
            result = Result.failure(f"{type(error).__name__}: {error}. {kept}", "server")
        self._journal.finish(request, result, rows)
        self._remove_old_files(request, rows)
        self._on_result(request.id)

    def _create(self, request: Request) -> Made:
        body = read_request(CreateModel, request.body)
        check_base(body.base_model, self._limits.base_names)
        if body.optimizer_config.type != "adamw":
            raise RequestError(f"optimizer_config.type = {body.optimizer_config.type} is not served. Use adamw.")
        form = form_of(body.lora_config or LoraConfig(rank=min(32, self._limits.max_rank)), randbelow(1 << 31))
        self._adapters[request.owner] = self._make(form)
        return _json(model_id=request.owner, type="create_model"), [self._save_state(request, 0)]

    def _pass(self, request: Request) -> Made:
        found, total = self._base.run(self._adapter(request), read_pass(request.body))
        return Result("protobuf", write_pass(found, {"loss:sum": total})), []

    def _step(self, request: Request) -> Made:
        body = read_request(OptimStep, request.body)
        if body.optimizer_params is not None:
            raise RequestError(f"The optimizer {body.optimizer_params.get('type')} is not served. Use AdamParams.")
        adapter, row = self._adapter(request), self._row(request.owner)
        try:
            metrics = adapter.step(body.adam_params or AdamParams())
        except RequestError as error:
            adapter.load(self._state_folder(row.id) / f"{row.seq}.safetensors", with_optimizer=True)
            # The dropped gradient stays dropped after a restart.
            return Result.failure(str(error), "user"), [self._save_state(request, row.step)]
        return _json(metrics=metrics, type="optim_step"), [self._save_state(request, row.step + 1)]

    def _save(self, request: Request) -> Made:
        body = read_request(SaveWeights, request.body)
        adapter, row = self._adapter(request), self._row(request.owner)
        path = f"tinker://{request.owner}/weights/{checked_name(body.path)}"
        if self._journal.saved_weights(path) and not body.overwrite:
            raise RequestError(f"{path} exists. Use another name, or overwrite=True.")
        place = f"weights/{file_name(request.owner)}-{request.seq}-{body.path}.safetensors"
        adapter.save(self._folder / place)
        return _json(path=path, type="save_weights"), [SavedRow(path, place, row.form, row.step)]

    def _load(self, request: Request) -> Made:
        body = read_request(LoadWeights, request.body)
        check_base(body.base_model, self._limits.base_names)
        saved = self._journal.saved_weights(body.path)
        if saved is None or not saved.place.endswith(".safetensors"):
            raise RequestError(f"{body.path} is no saved state here. Use the path that save_state returned.")
        form = AdapterForm(**json.loads(saved.form))
        adapter = self._make(form) if request.seq == 0 else self._adapter(request)
        if replace(adapter.form, seed=0) != replace(form, seed=0):
            raise RequestError(
                f"{body.path} has the form {saved.form}, and this model another. Make a new model of it."
            )
        adapter.load(self._folder / saved.place, with_optimizer=body.optimizer)
        self._adapters[request.owner] = adapter
        row = self._save_state(request, saved.step)
        return _json(path=body.path, model_id=request.owner, type="load_weights"), [row]

    def _save_sampler(self, request: Request) -> Made:
        body = read_request(SaveForSampler, request.body)
        adapter, row = self._adapter(request), self._row(request.owner)
        name = f"request-{request.seq}" if body.path is None else checked_name(body.path)
        kind = "named" if body.path is not None else "session"
        place = f"samplers/{file_name(request.owner)}/{kind}-{request.seq}"
        shutil.rmtree(self._folder / place, ignore_errors=True)  # of an export that a crash cut
        adapter.export(self._folder / place, self._limits.base_names[0])
        path = f"tinker://{request.owner}/sampler_weights/{name}"
        saved = SavedRow(path, place, row.form, row.step)
        if body.path is not None or body.sampling_session_seq_id is None:
            return _json(path=path, type="save_weights_for_sampler"), [saved]
        session = request.owner.partition(":train:")[0]
        sampler = SamplerRow(sampler_id(session, body.sampling_session_seq_id), path, place, row.step)
        self._journal.check_sampler(sampler)
        return _json(sampling_session_id=sampler.id, type="save_weights_for_sampler"), [saved, sampler]

    def _refuse_external(self, request: Request) -> Made:
        raise RequestError(
            "save_weights_external is not served. Use save_weights_for_sampler: its folder, below samplers/ in the "
            "service's --folder, is an adapter as peft loads it."
        )

    def _make(self, form: AdapterForm) -> Adapter:
        """Return a new adapter for which there is memory."""
        if form.rank > self._limits.max_rank:
            raise RequestError(
                f"rank = {form.rank} is over {self._limits.max_rank}. Use less, or start with --max-rank."
            )
        adapter = self._base.make_adapter(form)
        free = self._limits.adapter_bytes - adapter.num_bytes - sum(each.num_bytes for each in self._adapters.values())
        with self._changed:
            released = [*self._released & self._adapters.keys()]
        for name in released:
            if free < 0:
                free += self._adapters.pop(name).num_bytes
        if free < 0:
            raise RequestError(
                f"The adapters of {len(self._adapters)} models leave no memory for one more of "
                f"{adapter.num_bytes / 2**20:.1f} MiB. End a client, use a lower rank, or start with --adapter-gib."
            )
        return adapter

    def _adapter(self, request: Request) -> Adapter:
        """Return a model's adapter with the gradient before this request."""
        if request.owner not in self._adapters:
            row = self._row(request.owner)
            adapter = self._make(AdapterForm(**json.loads(row.form)))
            adapter.load(self._state_folder(row.id) / f"{row.seq}.safetensors", with_optimizer=True)
            for earlier in self._journal.finished_since(row.id, row.seq, _GRADIENT):
                read = read_pass(earlier.body)
                if not read.forward_only:
                    self._base.run(adapter, read)
            self._adapters[request.owner] = adapter
        return self._adapters[request.owner]

    def _row(self, model_id: str) -> ModelRow:
        row = self._journal.model(model_id)
        if row is None:
            raise RequestError(f"The model {model_id} was not created. Create it first, and read that request's error.")
        return row

    def _save_state(self, request: Request, step: int) -> ModelRow:
        """Write a model's state; the row makes it the one that counts."""
        adapter, folder = self._adapters[request.owner], self._state_folder(request.owner)
        folder.mkdir(parents=True, exist_ok=True)
        adapter.save(folder / f"{request.seq}.safetensors")
        return ModelRow(request.owner, json.dumps(asdict(adapter.form)), request.seq, step)

    def _state_folder(self, model_id: str) -> Path:
        return self._folder / "states" / file_name(model_id)

    def _remove_old_files(self, request: Request, rows: list[Row]) -> None:
        """Remove files that the request's rows replaced, after the rows are in the journal."""
        if any(isinstance(row, ModelRow) for row in rows):
            for path in self._state_folder(request.owner).iterdir():
                if path.name != f"{request.seq}.safetensors":
                    path.unlink()
        if any(isinstance(row, SamplerRow) for row in rows):
            folder = self._folder / "samplers" / file_name(request.owner)
            of_sessions = sorted(folder.glob("session-*"), key=lambda path: int(path.name.partition("-")[2]))
            for path in of_sessions[:-KEPT_SAMPLERS]:
                shutil.rmtree(path)


def _json(**values: object) -> Result:
    return Result("json", json.dumps(values).encode())


_VERBS: dict[str, Callable[[Learning, Request], Made]] = {
    "create_model": Learning._create,
    _GRADIENT: Learning._pass,
    "optim_step": Learning._step,
    "save_weights": Learning._save,
    "load_weights": Learning._load,
    "save_weights_for_sampler": Learning._save_sampler,
    "save_weights_external": Learning._refuse_external,
}
