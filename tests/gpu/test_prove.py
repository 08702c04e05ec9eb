"""The proof for GPUs, run whole where there is none: its parts on the CPU in their small form, and what it says."""

import re
import subprocess
import sys

import pytest
import torch

_ALONE = "attention,learner_step,digest,speed,ipc,turns,order,noise,lora_turns"


def test_every_part_that_has_a_cpu_form_holds_on_the_cpu() -> None:
    ended = run("--device", "cpu", "--short", "--only", _ALONE)
    last = ended.stdout.splitlines()[-1]
    assert last == "prove device=cpu checked=9 failed=0 unchecked=0 holds=yes", ended.stdout + ended.stderr[-3000:]
    assert ended.returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_each_part_says_that_it_was_not_checked_and_nothing_is_claimed() -> None:
    ended = run()
    head, *parts, said, last = ended.stdout.splitlines()
    assert head.endswith(", no GPU")
    assert len(parts) == 17
    assert all(re.search(r"  not checked  .*: that needs \d GPUs?, ", part) for part in parts), ended.stdout
    assert said.startswith("prove: nothing was checked here, so nothing holds. ")
    assert last == "prove device=cuda checked=0 failed=0 unchecked=17 holds=no"
    assert ended.returncode == 1


def test_unknown_part_is_refused_with_the_names_of_all() -> None:
    ended = run("--only", "attention,tension")
    assert "--only names tension; parts: attention, learner_step," in ended.stdout
    assert ended.returncode == 2


def test_device_of_another_name_is_refused_where_its_parts_would_be_said_to_fail() -> None:
    ended = run("--device", "cuda:0")
    assert ended.stdout == "prove: --device is cuda:0; give one of cuda, cpu, and CUDA_VISIBLE_DEVICES for one GPU\n"
    assert ended.returncode == 2


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu.prove", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
