"""Checkpoints that are well formed and wrong: every file reads, every hash is right, and it is not what was saved.

A lie changes a copy of a checkpoint, whose manifest is then written anew. Each comes with words of the sentence that
has to refuse it.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random

import msgspec
import torch
from safetensors.torch import save_file

from learner.checkpoint.told import write_told
from learner.disk.layout import LEDGER
from learner.rank.proof.witness import digests_by_key
from tests.chaos.rig.lying_case import (
    Case,
    change_one,
    describe,
    draw_shard,
    exchange,
    files_of,
    is_square,
    mix_in,
    retell,
    set_tensor,
    shards,
    stale_tensor,
    take,
    tensors_in,
    told_before,
)  # fmt: skip

# -- the save before, again --


def repeats_the_whole_save(case: Case) -> None:
    shutil.rmtree(case.folder)
    shutil.copytree(case.before, case.folder)


def repeats_the_save_with_new_words(case: Case) -> None:
    repeats_the_whole_save(case)
    write_told(case.folder, case.told)


def repeats_a_state(case: Case) -> None:
    take(case, f"state/{case.role()}")


def repeats_a_state_under_new_updates(case: Case) -> None:
    role = case.role()
    take(case, f"state/{role}")
    describe(case, role, num_updates=case.told.models[role].num_updates)


def repeats_a_shard(case: Case) -> None:
    file = draw_shard(case, case.role())
    take(case, str(file.relative_to(case.folder)))


def repeats_the_model(case: Case) -> None:
    take(case, "model")


def repeats_the_reference(case: Case) -> None:
    take(case, "state/reference")


def repeats_the_memory(case: Case) -> None:
    take(case, "state/memory.json")


def repeats_the_ledger(case: Case) -> None:
    take(case, LEDGER)


def repeats_the_version(case: Case) -> None:
    case.facts = replace(case.facts, policy_version=case.facts.policy_version - 1)


def repeats_the_step(case: Case) -> None:
    case.facts = replace(case.facts, step=case.facts.step - 1)


# -- a stale part --


def has_a_stale_optimizer(case: Case) -> None:
    role = case.role()
    for file in shards(case, role):
        mix_in(file, case.before / file.relative_to(case.folder), lambda name: not name.startswith("weight/"))


def has_a_stale_moment(case: Case) -> None:
    stale_tensor(case, "exp_avg/")


def has_a_stale_weight(case: Case) -> None:
    stale_tensor(case, "weight/")


def has_a_stale_tensor_in_the_model(case: Case) -> None:
    file = case.folder / "model" / "model.safetensors"
    name = case.draw.choice(sorted(tensors_in(file)))
    mix_in(file, case.before / "model" / file.name, lambda other: other == name)


def miscounts_its_updates(case: Case) -> None:
    role = case.role()
    describe(case, role, num_updates=case.told.models[role].num_updates + case.draw.choice((-1, 1)))


# -- another's part --


def swaps_two_shards(case: Case) -> None:
    one, other = case.draw.sample(shards(case, case.role()), 2)
    exchange(one, other)


def swaps_the_roles(case: Case) -> None:
    exchange(case.folder / "state" / "policy", case.folder / "state" / "critic")


def takes_a_tensor_of_the_other_role(case: Case) -> None:
    policy, critic = (files_of(case, role) for role in ("policy", "critic"))
    name = case.draw.choice(sorted(policy.keys() & critic.keys()))
    set_tensor(policy[name], name, tensors_in(critic[name])[name])


def takes_the_policy_for_the_reference(case: Case) -> None:
    shutil.copyfile(case.folder / "model/model.safetensors", case.folder / "state/reference/model.safetensors")
    file = case.folder / "state/reference/model.safetensors"
    tensors = tensors_in(file)
    save_file({name: tensor + 1e-4 for name, tensor in tensors.items()}, file)


def takes_another_ranks_generators(case: Case) -> None:
    file = case.folder / "random" / "rank_00000.json"
    state = json.loads(file.read_bytes())
    state["python"] = list(Random(case.draw.random()).getstate())
    file.write_text(json.dumps(state))


def swaps_two_parameters(case: Case) -> None:
    tensors = files_of(case, case.role())
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, file in sorted(tensors.items()):
        by_shape.setdefault(tuple(tensors_in(file)[name].shape), []).append(name)
    key = case.draw.choice(("weight/", "exp_avg/", "exp_avg_sq/"))
    alike = [[n for n in names if n.startswith(key)] for names in by_shape.values()]
    one, other = case.draw.choice([pair for names in alike for pair in pairwise(names)])
    first, second = tensors_in(tensors[one])[one], tensors_in(tensors[other])[other]
    set_tensor(tensors[one], one, second)
    set_tensor(tensors[other], other, first if not torch.equal(first, second) else first + 1.0)


def swaps_its_moments(case: Case) -> None:
    tensors = files_of(case, case.role())
    name = case.draw.choice([name for name in sorted(tensors) if name.startswith("exp_avg/")])
    other = name.replace("exp_avg/", "exp_avg_sq/")
    first, second = tensors_in(tensors[name])[name], tensors_in(tensors[other])[other]
    set_tensor(tensors[name], name, second)
    set_tensor(tensors[other], other, first)


def is_of_another_run(case: Case) -> None:
    case.facts = replace(case.facts, run_id="another")


def is_of_another_model(case: Case) -> None:
    case.facts = replace(case.facts, model_digest="0" * 64)


def has_another_models_config(case: Case) -> None:
    file = case.folder / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "rope_theta": 7.0}))


def has_a_role_too_many(case: Case) -> None:
    shutil.copytree(case.folder / "state" / case.role(), case.folder / "state" / "judge")


def has_a_role_too_few(case: Case) -> None:
    shutil.rmtree(case.folder / "state" / case.draw.choice(("critic", "reference")))


# -- a part that was never anyone's --


def has_a_changed_number(case: Case) -> None:
    tensors = files_of(case, case.role())
    change_one(case, tensors, case.draw.choice(sorted(tensors)))


def has_a_changed_number_in_the_model(case: Case) -> None:
    file = case.folder / "model" / "model.safetensors"
    tensors = dict.fromkeys(tensors_in(file), file)
    change_one(case, tensors, case.draw.choice(sorted(tensors)))


def has_a_transposed_weight(case: Case) -> None:
    tensors = files_of(case, case.role())
    square = [name for name, file in sorted(tensors.items()) if is_square(tensors_in(file)[name])]
    name = case.draw.choice([name for name in square if name.startswith("weight/")])
    set_tensor(tensors[name], name, tensors_in(tensors[name])[name].T.contiguous())


def has_zeros(case: Case) -> None:
    tensors = files_of(case, case.role())
    name = case.draw.choice([name for name in sorted(tensors) if not name.startswith("weight/")])
    set_tensor(tensors[name], name, torch.zeros_like(tensors_in(tensors[name])[name]) - 0.0)


def lacks_a_parameter(case: Case) -> None:
    role = case.role()
    tensors = files_of(case, role)
    name = case.draw.choice(sorted(tensors))
    left = tensors_in(tensors[name])
    del left[name]
    save_file(left, tensors[name])


# -- the ranks held what they should not --


def was_held_unchanged(case: Case) -> None:
    """The optimizer stepped, and the ranks' own weights stood still."""
    role = case.role()
    told = case.told.models[role]
    retell(case, role, msgspec.structs.replace(told, before=digests_by_key(told.digests)))


def is_not_what_the_servers_hold(case: Case) -> None:
    case.told = msgspec.structs.replace(case.told, pushed=told_before(case).pushed)
    write_told(case.folder, case.told)


def computes_another_loss(case: Case) -> None:
    role = case.role()
    told = case.told.models[role]
    shift = case.draw.choice((-0.5, 0.5))
    retell(case, role, msgspec.structs.replace(told, answers=[answer + shift for answer in told.answers]))


_HELD = "is not what the ranks held"
LIES: dict[Callable[[Case], None], tuple[str, ...]] = {
    repeats_the_whole_save: ("told.json is not",),
    repeats_the_save_with_new_words: ("memory.json", "updates", "ledger"),
    repeats_a_state: ("updates, its ranks held",),
    repeats_a_state_under_new_updates: (_HELD,),
    repeats_a_shard: (_HELD,),
    repeats_the_model: ("weights in model/",),
    repeats_the_reference: ("state/reference",),
    repeats_the_memory: ("memory.json",),
    repeats_the_ledger: ("ledger accounts",),
    repeats_the_version: ("manifest is of",),
    repeats_the_step: ("manifest is of",),
    has_a_stale_optimizer: (_HELD,),
    has_a_stale_moment: (_HELD,),
    has_a_stale_weight: (_HELD,),
    has_a_stale_tensor_in_the_model: ("weights in model/",),
    miscounts_its_updates: ("updates, its ranks held",),
    swaps_two_shards: ("holds other tensors",),
    swaps_the_roles: ("other parameters",),
    takes_a_tensor_of_the_other_role: (_HELD,),
    takes_the_policy_for_the_reference: ("state/reference",),
    takes_another_ranks_generators: ("random generators",),
    swaps_two_parameters: (_HELD,),
    swaps_its_moments: (_HELD,),
    is_of_another_run: ("manifest is of",),
    is_of_another_model: ("manifest is of",),
    has_another_models_config: ("another model or tokenizer",),
    has_a_role_too_many: ("state/ holds",),
    has_a_role_too_few: ("state/ holds",),
    has_a_changed_number: (_HELD,),
    has_a_changed_number_in_the_model: ("weights in model/",),
    has_a_transposed_weight: (_HELD,),
    has_zeros: (_HELD,),
    lacks_a_parameter: ("holds other tensors",),
    was_held_unchanged: ("byte for byte",),
    is_not_what_the_servers_hold: ("servers hold",),
    computes_another_loss: ("on the kept texts",),
}
