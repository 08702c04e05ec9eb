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
        "N=32\ncase $BIG in\n  yes) N=64 ;;\nesac",
        "N=32\nif [ $BIG ]; then N+=0; fi",
        "N=(32 $(echo $(date)))",
        "N=32; ((N *= 2))",
        "N=32\n((N++))",
        "N=32\nlet N=N+1",
        "N=32\nread -r N < file",
        "N=32\nprintf -v N %s 5",
        "N=32\nunset N",
    ],
)
def test_a_value_that_a_condition_may_change_is_named(tmp_path: Path, script: str) -> None:
    status, text = migrate(tmp_path, f"{script}\n{VERL.replace('$more', '$more data.train_batch_size=$N')}")
    assert status == 1
    assert ": The script does not say its value: set learner.groups_per_step" in text
