"""DeepSpeed for real: ranks in processes of their own, ZeRO 0, 2 and 3, one start of each world."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from protocol.weights.digest import digest_of_tensor
from tests.fakes.model_digest import digest_of_folder
from tests.fakes.tiny_models import make_tiny_model
from tests.fakes.warm_process import run_warm
from tests.learner.models import policy_ranks
from tests.learner.models.small_policy import flat, same, trajectories

pytestmark = [pytest.mark.stack, pytest.mark.ranks]
STAGES = (0, 2, 3)
CASES = [(world_size, stage) for world_size in policy_ranks.TRAINING for stage in STAGES]
Found = dict[int, dict[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    make_tiny_model(folder / "model", tied=True, hidden_size=64)
    return folder


@pytest.fixture(scope="module")
def ended(folder: Path) -> Path:
    """Return the folder, once policy_ranks has written into it what it found."""
    done = run_warm("tests.learner.models.policy_ranks", str(folder), timeout=280)
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


@pytest.fixture(scope="module")
def found(ended: Path) -> Found:
    """Return [ranks][ZeRO stage] -> what rank 0 found while it trained."""
    return {world_size: load(ended / f"ranks_{world_size}.pt") for world_size in policy_ranks.TRAINING}


@pytest.fixture(scope="module")
def resumed(ended: Path, found: Found) -> dict[tuple[int, int], dict[int, dict[int, dict[str, Any]]]]:
    """Return [writer's ranks, reader's ranks] -> [reader's stage][writer's stage] -> what going on gave."""
    in_this_start = {(1, 2): {stage: found[2][stage]["resumed_from_1"] for stage in STAGES}}
    return in_this_start | {(2, read): load(ended / f"resumed_{read}.pt") for read in policy_ranks.RESUMING}


def load(path: Path) -> dict[int, dict[Any, Any]]:
    result: dict[int, dict[Any, Any]] = torch.load(path, weights_only=False)
    return result


@pytest.fixture(scope="module")
def plain_gradient(folder: Path) -> torch.Tensor:
    """Return the step's gradient, clipped to norm 1: one trajectory at a time, transformers alone, float64."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64, attn_implementation="sdpa")
    samples = trajectories()
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens).long()[None]
        mask = torch.from_numpy(sample.loss_mask)[1:]
        logprobs = model(input_ids=tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0][mask]
        ratio = (logprobs - torch.from_numpy(sample.behaviour_logprobs)[1:][mask]).exp()
        (-(ratio * sample.advantage).sum() / sum(int(s.loss_mask.sum()) for s in samples)).backward()
    gradient = flat({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return gradient / max(1.0, float(gradient.norm()))


@pytest.mark.parametrize("world_size", policy_ranks.TRAINING)
def test_a_start_in_stage_3_never_moves_the_whole_model_to_a_card(found: Found, world_size: int) -> None:
    assert sum(found[world_size][3]["moved"]) == 0
    # The others hold it whole anyway: the count sees it.
    assert sum(found[world_size][2]["moved"]) >= sum(w.numel() for w in found[world_size][2]["weights"].values())


def test_weights_gathered_within_a_node_train_as_those_of_all_nodes(found: Found) -> None:
    weights, num_kept = found[2][3]["within_nodes"]
    assert same(weights, found[2][3]["weights"])
    assert num_kept == sum(weight.numel() for weight in weights.values()) / 2  # what a plan counts


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
def test_digests_in_memory_equal_those_of_the_files(found: Found, folder: Path, world_size: int, stage: int) -> None:
    files = (folder / f"state_{world_size}_{stage}").glob("*.safetensors")
    written = {name: digest_of_tensor(name, tensor) for file in files for name, tensor in load_file(file).items()}
    assert found[world_size][stage]["digests"] == written
    assert found[world_size][stage]["mismatch"] is None
    exported = digest_of_folder(folder / f"export_{world_size}_{stage}")
    assert found[world_size][stage]["pushed_digests"] == {exported}


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
def test_reference_is_the_policy_that_it_was_read_or_copied_from_and_is_shared_in_stage_3(
    found: Found, world_size: int, stage: int
) -> None:
    differences, share = found[world_size][stage]["reference"]
    assert max(differences) < 1e-5
    assert share == pytest.approx(1 / world_size if stage == 3 else 1, rel=1e-3)


@pytest.mark.parametrize(("world_size", "stage"), CASES)
def test_fine_tuning_lowers_the_loss_alike_for_any_ranks_and_stage(found: Found, world_size: int, stage: int) -> None:
    losses = found[world_size][stage]["sft"]
    assert losses == pytest.approx(found[1][0]["sft"], rel=1e-3)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("world_size", "stage"), CASES)
def test_a_policy_that_was_moved_off_its_device_and_back_trains_on_as_if_it_had_stayed(
    found: Found, world_size: int, stage: int
) -> None:
    numbers = sum(weight.numel() for weight in found[world_size][stage]["saved"].values())
    # float32: the weights, and AdamW's two moments with, where they are apart, the master weights
    state = {0: 12, 2: 4 + 12 / world_size, 3: 16 / world_size}[stage] * numbers
    parked = found[world_size][stage]["parked"]
    assert parked["left"] == 0
    assert parked["away"] + parked["mapped"] >= state
    assert found[world_size][stage]["trains_on"]
