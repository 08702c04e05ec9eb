"""DeepSpeed for real: one and two ranks in processes of their own, ZeRO 0, 2 and 3, one start of each world."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from learner.models.weights.digested import digest_of_folder
from protocol.weights.digest import digest_of_tensor
from tests.fakes.ports import free_port
from tests.fakes.tiny_models import make_tiny_model
from tests.learner.models import policy_ranks
from tests.learner.models.policy_ranks import flat

pytestmark = [pytest.mark.stack, pytest.mark.ranks]
STAGES = (0, 2, 3)
WORLDS = (1, 2)
CASES = [(world_size, stage) for world_size in WORLDS for stage in STAGES]
Found = dict[int, dict[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    make_tiny_model(folder / "model", tied=True, hidden_size=64)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """Return [ranks][ZeRO stage] -> what policy_ranks found on rank 0."""
    return {world_size: run_world(world_size, folder) for world_size in WORLDS}


@pytest.fixture(scope="module")
def resumed(found: Found, folder: Path) -> dict[tuple[int, int], dict[int, dict[int, dict[str, Any]]]]:
    """Return [writer's ranks, reader's ranks] -> [reader's stage][writer's stage] -> what going on gave."""
    in_this_start = {(1, 2): {stage: found[2][stage]["resumed_from_1"] for stage in STAGES}}
    return in_this_start | {(2, read): run_world(read, folder, written_by=2) for read in (1, 3)}


def run_world(world_size: int, folder: Path, written_by: int | None = None) -> dict[int, dict[Any, Any]]:
    port = free_port()
    root = Path(__file__).parents[3]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    logs = [folder / f"log_{world_size}_{rank}" for rank in range(world_size)]
    ranks = []
    for rank, log in enumerate(logs):
        command = [sys.executable, policy_ranks.__file__, str(rank), str(world_size), str(port), str(folder)]
        command += [] if written_by is None else [str(written_by)]
        with log.open("wb") as file:
            ranks.append(subprocess.Popen(command, env=environment, cwd=root, stdout=file, stderr=subprocess.STDOUT))
    try:
        codes = [rank.wait(timeout=280) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0] * world_size, "\n".join(log.read_text()[-3000:] for log in logs)
    name = f"ranks_{world_size}.pt" if written_by is None else f"resumed_{world_size}_{written_by}.pt"
    result: dict[int, dict[Any, Any]] = torch.load(folder / name, weights_only=False)
    return result


@pytest.fixture(scope="module")
def plain_gradient(folder: Path) -> torch.Tensor:
    """Return the step's gradient, clipped to norm 1: one trajectory at a time, transformers alone, float64."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64, attn_implementation="sdpa")
    samples = policy_ranks.trajectories()
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens).long()[None]
        mask = torch.from_numpy(sample.loss_mask)[1:]
        logprobs = model(input_ids=tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0][mask]
        ratio = (logprobs - torch.from_numpy(sample.behaviour_logprobs)[1:][mask]).exp()
        (-(ratio * sample.advantage).sum() / sum(int(s.loss_mask.sum()) for s in samples)).backward()
    gradient = flat({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return gradient / max(1.0, float(gradient.norm()))


@pytest.mark.parametrize(("world_size", "stage"), CASES)
def test_gradient_equals_that_of_a_plain_loop(
    found: Found, plain_gradient: torch.Tensor, world_size: int, stage: int
) -> None:
    gradient = flat(found[world_size][stage]["moments"]) / 0.1
    assert float((gradient - plain_gradient).norm() / plain_gradient.norm()) < 2e-6


@pytest.mark.parametrize(("world_size", "stage"), CASES)
def test_gradient_is_the_same_for_any_number_of_ranks_and_any_stage(found: Found, world_size: int, stage: int) -> None:
    expected, gradient = flat(found[1][0]["moments"]), flat(found[world_size][stage]["moments"])
    assert float((gradient - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize(("world_size", "stage"), CASES)
def test_step_reports_loss_norm_and_sums_of_all_ranks(found: Found, world_size: int, stage: int) -> None:
    expected, result = found[1][0]["first"], found[world_size][stage]["first"]
    assert result.applied
    assert result.loss == pytest.approx(expected.loss, rel=1e-5)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert result.sums == pytest.approx(expected.sums, rel=1e-5)


@pytest.mark.parametrize(("world_size", "stage"), CASES)
def test_step_is_refused_on_every_rank_when_one_number_is_not_finite(found: Found, world_size: int, stage: int) -> None:
    refused = found[world_size][stage]["refused"]
    assert refused["applied"] == {"nan_gradient": False, "infinite_loss": False, "infinite_behaviour": False}
    assert refused["intact"]


@pytest.mark.parametrize(("world_size", "stage"), CASES)
def test_what_ranks_hold_has_the_digests_of_what_they_write(
    found: Found, folder: Path, world_size: int, stage: int
) -> None:
    held = found[world_size][stage]["held_state"]
    files = (folder / f"state_{world_size}_{stage}").glob("*.safetensors")
    written = {name: digest_of_tensor(name, tensor) for file in files for name, tensor in load_file(file).items()}
    assert held.digests == written
    assert held.num_updates == 3
    assert held.num_moves == 3
    exported = digest_of_folder(folder / f"export_{world_size}_{stage}", "float32")
    assert found[world_size][stage]["pushed_digest"] == exported


@pytest.mark.parametrize(("world_size", "stage"), CASES)
def test_weight_or_moment_that_is_not_finite_is_found_on_every_rank(found: Found, world_size: int, stage: int) -> None:
    where = {1: r"(model\.norm\.weight|optimizer state exp_avg 0) on rank 0", 2: "a tensor on another rank"}[world_size]
    weight, moment = found[world_size][stage]["flipped"]
    for said in (weight, moment):
        assert re.match(rf"the policy is not finite: {where} holds NaN or infinity\. Nothing was pushed", said)


@pytest.mark.parametrize(("world_size", "stage"), CASES)
def test_weights_agree_after_refused_steps_and_steps_with_too_few_trajectories(
    found: Found, world_size: int, stage: int
) -> None:
    result = found[world_size][stage]
    assert result["second"].applied
    assert result["few"].applied
    torch.testing.assert_close(flat(result["saved"]), flat(found[1][0]["saved"]), rtol=0, atol=2e-5)


@pytest.mark.parametrize(("world_size", "stage"), CASES)
def test_saved_state_resumes_bit_for_bit(found: Found, world_size: int, stage: int) -> None:
    assert found[world_size][stage]["loads_before_the_first_step"]
    assert found[world_size][stage]["loads"]
    assert found[world_size][stage]["resumes"]


@pytest.mark.parametrize("read_stage", STAGES)
@pytest.mark.parametrize("written_stage", STAGES)
@pytest.mark.parametrize(("written", "read"), [(2, 1), (1, 2), (2, 3)])  # over 3 ranks the parameters do not divide
def test_saved_state_resumes_on_another_number_of_ranks_in_any_stage(
    found: Found, resumed: Any, written: int, read: int, written_stage: int, read_stage: int
) -> None:
    uninterrupted, result = found[written][written_stage]["further"], resumed[written, read][read_stage][written_stage]
    assert result["losses"] == pytest.approx(uninterrupted["losses"], rel=1e-5)
    assert result["rates"] == uninterrupted["rates"]
    torch.testing.assert_close(flat(result["weights"]), flat(uninterrupted["weights"]), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("world_size", "stage"), CASES)
def test_saved_state_holds_every_parameter_whole_in_float32_and_nothing_pickled(
    found: Found, folder: Path, world_size: int, stage: int
) -> None:
    state = folder / f"state_{world_size}_{stage}"
    names = sorted(path.name for path in state.iterdir())
    assert names == ["state.json", *(f"state_{n:05d}.safetensors" for n in range(len(names) - 1))]
    assert len(names) > 3
    stored = {key: tensor for name in names[1:] for key, tensor in load_file(state / name).items()}
    saved = found[world_size][stage]["saved"]
    assert stored.keys() == {f"{key}/{name}" for key in ("weight", "exp_avg", "exp_avg_sq") for name in saved}
    assert all(torch.equal(stored[f"weight/{name}"], saved[name]) for name in saved)
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}


def test_state_of_other_parameters_is_refused_with_one_named(found: Found, folder: Path) -> None:
    assert found[2][3]["refused_state"] == (
        f"The state in {folder / 'state_2_3_other'} cannot be put into this policy: it and the policy differ in "
        "1 parameters, such as model.extra.weight. Resume with the policy.model that wrote it, or start a new run from "
        "the model folder of that checkpoint."
    )


@pytest.mark.parametrize(("world_size", "stage"), CASES)
def test_exported_folder_holds_the_weights_and_loads(found: Found, folder: Path, world_size: int, stage: int) -> None:
    exported = folder / f"export_{world_size}_{stage}"
    saved = found[world_size][stage]["saved"]
    on_disk = load_file(exported / "model.safetensors")
    assert on_disk.keys() == saved.keys()
    assert all(torch.equal(on_disk[name], saved[name]) for name in saved)
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert torch.equal(model.lm_head.weight, saved["model.embed_tokens.weight"])
    vocabulary = AutoTokenizer.from_pretrained(folder / "model").get_vocab()
    assert AutoTokenizer.from_pretrained(exported).get_vocab() == vocabulary


@pytest.mark.parametrize(("world_size", "stage"), CASES)
def test_fine_tuning_lowers_the_loss_alike_for_any_ranks_and_stage(found: Found, world_size: int, stage: int) -> None:
    losses = found[world_size][stage]["sft"]
    assert losses == pytest.approx(found[1][0]["sft"], rel=1e-3)
    assert losses[-1] < losses[0]
