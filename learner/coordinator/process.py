"""The coordinator's process, a Ray actor: builds the coordinator from a run's settings and runs its loop."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from learner.coordinator.changes import answers_origin
from learner.coordinator.coordinator import Coordinator
from learner.coordinator.groups.eval_scores import HeldOutSet
from learner.coordinator.groups.prompt_source import claim_prompts
from learner.coordinator.groups.written_answers import WrittenAnswers
from learner.coordinator.loop import CoordinatorLoop, tune_garbage_collector
from learner.coordinator.steps.record import RunRecord
from learner.data.prompt_reading import RowName
from learner.data.prompt_set import load_prompts, open_prompts
from learner.data.prompts import Prompt
from learner.data.recorded import group_every
from learner.data.sft_rows import RowEncoder
from learner.data.text_decoder import TextDecoder
from learner.disk.model_folder import read_vocab_size
from learner.disk.run_folder import LEDGER, TRAIN_INDEX, read_skipped
from learner.ledger.ledger import Ledger
from learner.ledger.snapshots import LedgerCopies, run_in_thread
from learner.live.status import RunStatus
from protocol.node.home import load_keys
from protocol.settings.settings import Settings
from protocol.wire.channel import RouterChannel

_STATUS_S = 30.0


class CoordinatorProcess:
    """One per run. Call order: open, then the others, then close.

    host: the address of its ROUTER socket. model: this node's folder of the policy's first model; None: any token is
    accepted, and texts in records are token ids. services: digests of the search index and of the MCP servers' tools.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        run_id: str,
        last_step: int,
        host: str,
        model: Path | None = None,
        services: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._run_id = run_id
        self._last_step = last_step
        self._host = host
        self._model = model
        self._services = dict(services or {})
        self._has_ended = threading.Event()

    def open(self) -> tuple[str, int]:
        """Start the loop; returns (address of the ROUTER socket, incarnation of the run).

        The constructor does not do this, because Ray passes on only the text of a constructor's error.
        Raises: SettingsError and OperatorError of the data sets and the ledger.
        """
        settings, folder, keys = self._settings, self._folder, load_keys()
        # A run that is only a warm start has no prompts.
        data = settings.data
        left_out = [RowName(row.file, row.number) for row in read_skipped(folder)]
        train = open_prompts(data.train, data, folder / TRAIN_INDEX, left_out) if data.train else []
        self._ledger = Ledger(folder / LEDGER)
        claim_prompts(self._ledger, settings, train)
        self._copies = LedgerCopies(self._ledger.begin_copy, run_in_thread)
        channel = RouterChannel(self._host, keys.coordinator, allowed=[keys.peer.public])
        held_out, decoder = held_out_sets(settings), TextDecoder(self._model)
        coordinator = Coordinator(
            settings,
            self._run_id,
            self._ledger,
            train=train,
            held_out=held_out,
            record=RunRecord(
                folder,
                settings.report.samples_per_step,
                decoder,
                group_every(settings),
            ),
            last_step=self._last_step,
            copies=self._copies,
            vocab_size=None if self._model is None else read_vocab_size(self._model),
            encoder=_encoder(settings, self._model),
            answers=_answers(settings, held_out, decoder, self._model, self._services),
            services=self._services,
        )
        self._loop = CoordinatorLoop(coordinator, channel)
        tune_garbage_collector()
        self._loop.start()
        return channel.address, coordinator.incarnation

    def live(self) -> None:
        """Block until this coordinator has closed; processes with the same lifetime wait for it."""
        self._has_ended.wait()

    def status(self, is_final: bool = False) -> RunStatus:
        """Return the state of the run; is_final: as it is now, else up to a second old.

        Raises: the error that ended the loop; TimeoutError.
        """
        if self._loop.failure is not None:
            raise self._loop.failure
        if not is_final:
            return self._loop.status
        newest: Future[RunStatus] = Future()
        self._loop.submit(lambda coordinator: newest.set_result(coordinator.status()))
        return newest.result(_STATUS_S)

    def stop_after_step(self, reason: str) -> None:
        """Let the step under way end and start no other."""
        self._loop.submit(lambda coordinator: coordinator.stop_after_step(reason))

    def lose_server(self, server: str, reason: str) -> None:
        """Take back the leases of a server that died."""
        self._loop.submit(lambda coordinator: coordinator.lose_server(server, reason))

    def close(self) -> None:
        """Stop the loop, cancel a running copy of the ledger, then close the ledger, with all its changes on disk."""
        self._loop.close()
        self._copies.close()
        self._ledger.close(is_failed=self._loop.failure is not None)
        self._has_ended.set()


def _encoder(settings: Settings, model: Path | None) -> RowEncoder | None:
    if not settings.is_of_rows or model is None:
        return None
    return RowEncoder(model, settings.data.form, trust_remote_code=settings.policy.trust_remote_code)


def _answers(
    settings: Settings,
    held_out: Sequence[HeldOutSet],
    decoder: TextDecoder,
    model: Path | None,
    services: Mapping[str, str],
) -> WrittenAnswers | None:
    """Return the file of answers that the run writes in place of scores, or None."""
    if settings.eval.answers is None or model is None:
        return None
    origin = answers_origin(settings, held_out[0].num_samples, model, services)
    rollout = settings.rollout
    besides = None if rollout.environment == "single_turn" else f"rollout.environment = {rollout.environment}"
    besides = "rollout.chat_template_kwargs" if rollout.chat_template_kwargs else besides
    return WrittenAnswers(Path(settings.eval.answers), origin, held_out[0], decoder, besides)


def held_out_sets(settings: Settings) -> list[HeldOutSet]:
    """Return the sets of every evaluation, data.eval's first."""
    data, evaluation = settings.data.of_held_out(), settings.eval
    sets = []
    if data.eval:
        prompts: Sequence[Prompt] = load_prompts(data.eval, data)
        if len(prompts) > evaluation.num_prompts:  # all of a large set stay in their file
            prompts = prompts[: evaluation.num_prompts]
        sets.append(HeldOutSet(prompts, evaluation.samples))
    for one in evaluation.sets:
        prompts = load_prompts(one.data, data)[: one.num_prompts or evaluation.num_prompts]
        sets.append(HeldOutSet(prompts, one.samples or evaluation.samples, one.name, one.temperature))
    return sets
