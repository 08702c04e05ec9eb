"""`sluice migrate` on the variables of a script, as a shell sets them."""

from pathlib import Path

import pytest

from protocol.settings.loader import load_settings
from tests.deploy.migrate.verl_command import VERL, migrate


@pytest.mark.parametrize(
    ("script", "words", "groups", "epochs"),
    [
        ("A=(data.train_batch_size=32)\nA+=(\n  trainer.total_epochs=2 # passes\n)", '"${A[@]}"', 32, 2),
        ("declare -a A=(data.train_batch_size=32 trainer.total_epochs=2)", "${A[*]}", 32, 2),
        ('A="data.train_batch_size=32"\nA+=" trainer.total_epochs=2"', "$A", 32, 2),
        ('A=(trainer.total_epochs=2)\nN=32\nA=("${A[@]}" data.train_batch_size=$N)\nN=64', '"${A[@]}"', 32, 2),
        ('A=(\n  data.train_batch_size=32 data.seed="(7)"\n  trainer.total_epochs=2)', '"${A[@]}"', 32, 2),
        ("export A=\"\n  data.train_batch_size=32 data.seed='7'\n  trainer.total_epochs=2\"", "$A", 32, 2),
        ("N=32; export E=2 M=1", "data.train_batch_size=$N trainer.total_epochs=$E", 32, 2),
        ("N=32\nif true; then X=1; fi\nE=2", "data.train_batch_size=$N trainer.total_epochs=$E", 32, 2),
        ("", "data.train_batch_size='${oc.env:GONE,32}' trainer.total_epochs=2", 32, 2),
        ("N=32\nsmall() {\n  N=1\n}", "data.train_batch_size=$N trainer.total_epochs=2", 32, 2),
        ("function large { N=32; }\nN=1\nlarge", "data.train_batch_size=$N trainer.total_epochs=2", 32, 2),
        (': "${N:=32}"\nE=2\n: ${E:=9}', "data.train_batch_size=$N trainer.total_epochs=$E", 32, 2),
        ("", "data.train_batch_size=$'32' trainer.total_epochs=2", 32, 2),
    ],
)
def test_variables_of_a_script_have_the_values_that_a_shell_gives_them(
    tmp_path: Path, script: str, words: str, groups: int, epochs: int
) -> None:
    text = VERL.replace("data.train_batch_size=$(((8 + 8) * 4))", "").replace("trainer.total_epochs=3", "")
    assert migrate(tmp_path, f"{script}\n{text.replace('$more', f'$more {words}')}")[0] == 0
    settings = load_settings(tmp_path / "new.yaml", [])
    assert (settings.learner.groups_per_step, settings.run.max_epochs) == (groups, epochs)


@pytest.mark.parametrize(
    "script",
    [
        "N=32\nif [ $BIG ]; then\n  N=64\nfi",
        "N=32\n[ $BIG ] && N=64",
        "N=32\n[ $BIG ] && { N=64; }",
        "N=32\ncase $BIG in\n  yes) N=64 ;;\nesac",
        "N=32\nif [ $BIG ]; then N+=0; fi",
        "N=(32 $(echo $(date)))",
        "N=32; ((N *= 2))",
        "N=32\n((N++))",
        "N=32\nlet N=N+1",
        "N=32\nread -r N < file",
        "N=32\nprintf -v N %s 5",
        "N=32\nunset N",
        "N=32\nfor N in 1 2; do",
        "N=32\nmapfile -t N < file",
        "N=32\nset_it() { N=1; }\nif true; then\n  set_it\nfi",
    ],
)
def test_a_value_that_a_condition_may_change_is_named(tmp_path: Path, script: str) -> None:
    status, text = migrate(tmp_path, f"{script}\n{VERL.replace('$more', '$more data.train_batch_size=$N')}")
    assert status == 1
    assert ": The script does not say its value: set learner.groups_per_step" in text


@pytest.mark.parametrize("end", ["\\\n    # trainer.seed=7 \\", "\\  # passes", "\\ "])
def test_a_remark_that_ends_a_command_is_named(tmp_path: Path, end: str) -> None:
    script = VERL.replace("trainer.total_epochs=3", f"trainer.total_epochs=3 {end}\n    data.seed=5")
    status, text = migrate(tmp_path, script)
    assert (status, load_settings(tmp_path / "new.yaml", []).run.max_epochs) == (1, 3)
    assert "#   remark in the command: A shell ends the command there; here all of it is converted\n" in text
    assert "#   data.seed 5: " in text


def test_a_remark_behind_the_last_option_ends_nothing(tmp_path: Path) -> None:
    script = VERL.replace("$more $@ 2>&1 | tee log", "$more \\\n    # trainer.seed=7\necho done")
    assert migrate(tmp_path, script)[0] == 0
    array = "A=(data.train_batch_size=32 \\\n  # trainer.seed=7 \\\n  trainer.total_epochs=2)\n"
    assert migrate(tmp_path, array + VERL.replace("$more", '$more "${A[@]}"'))[0] == 0


def test_a_command_that_is_only_named_is_not_converted(tmp_path: Path) -> None:
    named = "echo 'Starting verl.trainer.main_ppo'\npkill -f verl.trainer.main_ppo\n"
    assert migrate(tmp_path, named + VERL.replace("PYTHONUNBUFFERED=1", "echo start &&"))[0] == 0
    assert load_settings(tmp_path / "new.yaml", []).policy.model == "/models/small"


def test_a_variable_that_grows_from_the_environment_stays_small(tmp_path: Path) -> None:
    grows = "".join(f"export LIBRARIES=/opt/{part}:$LIBRARIES\n" for part in range(6))
    assert migrate(tmp_path, grows + VERL)[0] == 0
    status, text = migrate(tmp_path, grows + VERL.replace("$more", "$more trainer.default_local_dir=$LIBRARIES"))
    assert (status, len(text) < 20_000) == (1, True)


@pytest.mark.parametrize(
    ("count", "ranks", "sentence"),
    [
        ("$N", 4, "num_processes 4"),
        ('"${N}"', 4, "num_processes 4"),
        ("$SLURM_GPUS", 1, "num_processes $SLURM_GPUS: The script does not say its value: set learner.num_ranks"),
        ("gpu", 1, "num_processes gpu: It is not a number; 1 is written"),
    ],
)
def test_processes_of_a_launcher_are_read_or_named(tmp_path: Path, count: str, ranks: int, sentence: str) -> None:
    rows = "data.train_files=rows.parquet model.path=/models/small data.train_batch_size=64"
    status, text = migrate(
        tmp_path, f"N=4\ntorchrun --nnodes=1 --nproc_per_node={count} -m verl.trainer.fsdp_sft_trainer {rows}\n"
    )
    assert (status, load_settings(tmp_path / "new.yaml", []).learner.num_ranks) == (int(ranks == 1), ranks)
    assert sentence in text


def test_words_that_only_a_shell_knows_are_no_value_of_an_option(tmp_path: Path) -> None:
    options = "--pretrain /models/small --dataset rows.jsonl --seed 7 $EXTRA_ARGS --packing_samples ${MORE[@]}"
    status, text = migrate(tmp_path, f"deepspeed --module openrlhf.cli.train_rm {options}\n")
    assert (status, load_settings(tmp_path / "new.yaml", []).run.seed) == (1, 7)
    for word in ("$EXTRA_ARGS", "${MORE[@]}"):
        assert f"#   {word}: Only a running shell knows these words\n" in text
