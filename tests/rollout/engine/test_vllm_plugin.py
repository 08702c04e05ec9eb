"""What vLLM's processes ask of Linux, and how their ends are told."""

import os
import platform
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from protocol.node.home import sluice_home
from rollout.engine.start import vllm_environment
from rollout.engine.vllm_plugin import allow_matrix_tiles, describe_endings, register


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86-64")
def test_leave_for_matrix_tiles_is_asked_of_linux() -> None:
    calls: list[tuple[int, ...]] = []
    allow_matrix_tiles(lambda *numbers: calls.append(numbers) or 0)  # type: ignore[func-returns-value]

    assert calls == [(158, 0x1023, 18)]


def test_a_refusal_of_matrix_tiles_is_no_error() -> None:
    allow_matrix_tiles()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-4, "EngineCore died by SIGILL"),
        (-99, "EngineCore died by signal 99"),
        (1, "EngineCore ended with exit status 1"),
    ],
)
def test_end_of_a_process_is_told(code: int, text: str) -> None:
    assert describe_endings([SimpleNamespace(name="EngineCore", exitcode=code)]) == text


def test_processes_that_live_are_not_told_of() -> None:
    dead, alive = SimpleNamespace(name="a", exitcode=0), SimpleNamespace(name="b", exitcode=None)
    assert describe_endings([alive, dead]) == "a ended with exit status 0"


def test_plugin_has_a_process_of_vllms_tell_what_killed_it() -> None:
    script = (
        "import multiprocessing, os, signal\n"
        "def child():\n"
        "    from rollout.engine.vllm_plugin import prepare_process\n"
        "    prepare_process()\n"
        "    os.kill(os.getpid(), signal.SIGILL)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('fork')\n"
        "    process = context.Process(target=child)\n"
        "    process.start(); process.join()\n"
        "    raise SystemExit(-process.exitcode)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=os.getcwd())

    assert ended.returncode == signal.SIGILL
    assert "Fatal Python error: Illegal instruction" in ended.stderr


def test_attention_in_float32_multiplies_in_float32_on_a_gpu() -> None:
    environments = [vllm_environment("a/model", dtype, on_cpus=False) for dtype in ("float32", "bfloat16")]
    assert [environment.get("TRITON_F32_DEFAULT") for environment in environments] == ["ieee", None]


@pytest.mark.parametrize("on_cpus", [True, False])
def test_compiled_kernels_are_kept_below_sluices_home(on_cpus: bool) -> None:
    environment = vllm_environment("a/model", on_cpus=on_cpus)
    for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"):
        assert environment[name].startswith(f"{sluice_home()}/cache/")


@pytest.mark.parametrize("first", [0, 16])
@pytest.mark.parametrize("is_flat", [True, False])
def test_heads_are_rotated_on_cpus_as_by_the_formula(first: int, is_flat: bool) -> None:
    register()
    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(64, 64, 32, 10_000, is_neox_style=False, dtype=torch.float32)
    positions, key = torch.arange(8), torch.randn(8, 2, 64)
    query = torch.randn(8, 4 * 64 + first)[:, first:] if is_flat else torch.randn(8, 4, first + 64)[..., first:]
    if is_flat:
        key = key.flatten(1)
    expected = rotary.forward_native(positions, query.clone(), key.clone())

    rotated = rotary.forward_cpu(positions, query, key)

    assert torch.allclose(rotated[0], expected[0], atol=1e-6)
    assert torch.allclose(rotated[1], expected[1], atol=1e-6)
    assert torch.equal(query, rotated[0])  # in place, as vLLM's kernels
