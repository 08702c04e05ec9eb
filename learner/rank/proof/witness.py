"""Tells what the ranks hold when they save, by other ways than those that write the checkpoint's files."""

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist

from learner.checkpoint.told import Told, ToldModel
from learner.models.roles import Roles
from learner.models.training.state_digest import KEYS, HeldState
from learner.models.world import own_device
from learner.rank.proof.kept_texts import answers, draw_texts
from learner.rank.proof.model_form import made_with
from learner.rank.random_state import random_state_bytes
from protocol.settings.settings import Settings
from protocol.weights.digest import digest_of_all


class Witness:
    """One on every rank; all ranks call `tell` together."""

    def __init__(self, roles: Roles, run_id: str, settings: Settings, before: Told | None) -> None:
        """before: what was told of the checkpoint that the run goes on from; None: of none, or nothing."""
        self._roles = roles
        self._run_id = run_id
        self._seed = settings.run.seed
        self._made_with = made_with(settings)
        self._before = before
        self._num_moves: dict[str, int] = {}

    def tell(self, step: int, policy_version: int, pushed: str) -> Told:
        """Return what the ranks hold now; the same on every rank, but for `pushed`.

        pushed: the digest that the servers hold, as rank 0 knows it. Blocks for one read of each rank's own state and a
        forward pass of three short texts.
        """
        policy, critic, reference = self._roles.policy, self._roles.critic, self._roles.kept_reference
        texts = draw_texts(policy.vocab_size, self._seed, step)
        says = answers(lambda part: policy.logprobs(part, temperature=1.0), texts)
        models = {"policy": self._model("policy", policy.held_state(), says)}
        if critic is not None:
            models["critic"] = self._model("critic", critic.held_state(), answers(critic.values, texts))
        told = Told(
            run_id=self._run_id,
            step=step,
            policy_version=policy_version,
            pushed=pushed,
            texts=texts,
            models=models,
            reference=reference.digest() if reference is not None else None,
            memory=dict(self._roles.memory),
            random=_hashes_of_all(random_state_bytes()),
            made_with=self._made_with,
            step_before=None if self._before is None else self._before.step,
        )
        self._before = told
        return told

    def _model(self, role: str, held: HeldState, says: list[float]) -> ToldModel:
        before = self._before.models.get(role) if self._before is not None else None
        has_moved = held.num_moves > self._num_moves.get(role, 0)
        self._num_moves[role] = held.num_moves
        return ToldModel(
            num_updates=held.num_updates,
            digests=held.digests,
            answers=says,
            before={} if before is None else digests_by_key(before.digests),
            must_differ=has_moved and before is not None,
        )


def digests_by_key(digests: Mapping[str, str]) -> dict[str, str]:
    """Return one digest of all weights, one of all first and one of all second moments."""
    return {
        key: digest_of_all({name: digest for name, digest in digests.items() if name.startswith(f"{key}/")})
        for key in KEYS
    }


def _hashes_of_all(content: bytes) -> list[str]:
    """Return the SHA-256 of every rank's content, by rank."""
    rank, device = dist.get_rank(), own_device()
    hashes = torch.zeros(dist.get_world_size(), 32, dtype=torch.int32, device=device)
    hashes[rank] = torch.tensor(list(hashlib.sha256(content).digest()), dtype=torch.int32, device=device)
    dist.all_reduce(hashes)
    return [bytes(row).hex() for row in hashes.tolist()]
