"""Which prompts a run uses: unusable ones are left out, up to a share; a resume leaves out the same ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from learner.checkpoint.manifest import Checkpoint
from learner.coordinator.process import held_out_sets
from learner.data.prompt_reading import Refusal
from learner.data.prompts import Prompt
from learner.disk.run_folder import read_skipped
from learner.models.settings import policy_settings
from learner.run.checks.preflight import resolve_rows
from learner.run.checks.prompt_checks import TrainPrompts, check_held_out, read_train_prompts, settings_of_epochs
from learner.run.checks.prompt_judge import PromptJudge, end_notices
from learner.run.start import RunStart
from protocol.errors import OperatorError, SettingsError
from protocol.settings.settings import Settings
from tests.fakes.full_disk import WHY, full_disk
from tests.fakes.tiny_models import make_tiny_model

_TOO_LONG = "line 3 has 300 tokens; rollout.max_context_tokens = 256 less rollout.max_response_tokens = 24 leaves 232."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer makes a token of each byte."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", tied=True)


def settings(path: Path, share: float = 0.3, held_out: Path | None = None) -> Settings:
    return Settings.model_validate(
        {
            "data": {"train": str(path), "max_skipped_share": share, "eval": str(held_out) if held_out else None},
            "rollout": {"max_context_tokens": 256, "max_response_tokens": 24},
        }
    )


def rows(path: Path, *lengths: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": "x" * length, "label": "y"}) + "\n" for length in lengths))
    return path


def new(tmp_path: Path) -> RunStart:
    return RunStart(tmp_path / "runs" / "a", None)


def resumed(tmp_path: Path) -> RunStart:
    folder = tmp_path / "runs" / "a"
    at = Checkpoint(folder / "checkpoints" / "step_000001", step=1, policy_version=1, run_id="a", model_digest="")
    return RunStart(folder, at)


def read(tmp_path: Path, model: Path, start: RunStart, share: float = 0.3) -> TrainPrompts:
    return read_train_prompts(settings(tmp_path / "train.jsonl", share), model, start)


@pytest.mark.parametrize(("epochs", "steps"), [(1, 2), (1.5, 3), (2, 3)])
def test_epochs_become_steps_over_the_usable_rows_which_are_read_once(
    tmp_path: Path, model: Path, epochs: float, steps: int
) -> None:
    path = rows(tmp_path / "train.jsonl", 5, 232, 300, 1)
    given = settings(path).model_dump() | {"run": {"max_epochs": epochs}}
    given["learner"] |= {"groups_per_step": 2}
    found, judged = settings_of_epochs(Settings.model_validate(given), model)
    assert (found.run.max_steps, found.run.max_epochs) == (steps, None)
    path.unlink()
    assert len(read_train_prompts(found, model, new(tmp_path), judged).index) == 3


def test_prompt_that_is_too_long_is_left_out_and_told(tmp_path: Path, model: Path) -> None:
    path = rows(tmp_path / "train.jsonl", 5, 232, 300, 1)
    found = read(tmp_path, model, new(tmp_path))
    assert found.index.numbers.tolist() == [1, 2, 4]
    assert found.notice is not None
    assert found.notice.startswith(f"1 of 4 rows of {path} are left out: {_TOO_LONG}")


@pytest.mark.parametrize(
    ("environment", "tools", "is_told"),
    [
        ("single_turn", [{"type": "function", "function": {"name": "add"}}], True),
        ("tools", '[{"name": "add"}]', True),
        ("my.py:Own", [{"name": "add"}], False),
        ("single_turn", [], False),
    ],
)
def test_tools_of_rows_that_the_environment_does_not_show_are_told(
    tmp_path: Path, model: Path, environment: str, tools: object, is_told: bool
) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"prompt": "2 + 2", "label": "4", "tools": tools}) + "\n")
    given = settings(path)
    given = given.model_copy(update={"rollout": given.rollout.model_copy(update={"environment": environment})})
    notice = read_train_prompts(given, model, new(tmp_path)).notice or ""
    held_out = given.model_copy(update={"data": given.data.model_copy(update={"train": "-", "eval": str(path)})})
    said = f"{path} has the column tools, which rollout.environment = {environment} does not give to the chat template"
    for each in (notice, " ".join(check_held_out(held_out, model).notices)):
        assert (said in each) is is_told


def test_more_than_the_allowed_share_is_refused(tmp_path: Path, model: Path) -> None:
    path = rows(tmp_path / "train.jsonl", 5, 232, 300, 1)
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, model, new(tmp_path), share=0.2)
    assert str(caught.value).startswith(
        f"data: 1 of 4 rows of {path} cannot be used, more than data.max_skipped_share = 0.2 allows. "
        f"The first, line 3, {_TOO_LONG.removeprefix('line 3 ')}"
    )


def test_exactly_the_allowed_share_is_left_out(tmp_path: Path, model: Path) -> None:
    rows(tmp_path / "train.jsonl", *[300] * 29, *[1] * 71)  # 0.29 * 100 is 28.999999999999996
    assert len(read(tmp_path, model, new(tmp_path), share=0.29).index) == 71


def test_run_without_any_usable_row_is_refused_whatever_may_be_left_out(tmp_path: Path, model: Path) -> None:
    rows(tmp_path / "train.jsonl", 300, 300)
    with pytest.raises(SettingsError, match=r"data: none of the 2 rows of .* can be used\. The first, line 1, has 300"):
        read(tmp_path, model, new(tmp_path), share=1.0)


def test_resume_leaves_out_what_the_run_began_without(tmp_path: Path, model: Path) -> None:
    rows(tmp_path / "train.jsonl", 5, 232, 300, 1)
    began = read(tmp_path, model, new(tmp_path))
    folder = tmp_path / "runs" / "a"
    began.save(folder)
    # Wider now, so that the row would fit: the run's accounts are of the others.
    wide = settings(tmp_path / "train.jsonl")
    wide = wide.model_copy(update={"rollout": wide.rollout.model_copy(update={"max_context_tokens": 1024})})
    goes_on = read_train_prompts(wide, model, resumed(tmp_path))
    assert goes_on.index.digest() == began.index.digest()
    assert goes_on.skipped == began.skipped == tuple(read_skipped(folder))


def test_resume_that_would_leave_out_others_is_refused(tmp_path: Path, model: Path) -> None:
    rows(tmp_path / "train.jsonl", 5, 232, 300, 1)
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, model, resumed(tmp_path))
    assert _TOO_LONG in str(caught.value)
    assert "This run began with 1 of 4 rows that are unusable now." in str(caught.value)
    assert "max_skipped_share" not in str(caught.value)  # 1 of 4 is less than it


def test_new_start_that_leaves_nothing_out_forgets_the_earlier_record(tmp_path: Path, model: Path) -> None:
    rows(tmp_path / "train.jsonl", 5, 300, 1, 1)
    read(tmp_path, model, new(tmp_path)).save(tmp_path / "runs" / "a")
    rows(tmp_path / "train.jsonl", 5, 1)
    read(tmp_path, model, new(tmp_path)).save(tmp_path / "runs" / "a")
    assert read_skipped(tmp_path / "runs" / "a") == []


def test_full_disk_is_said_in_a_sentence(tmp_path: Path, model: Path) -> None:
    rows(tmp_path / "train.jsonl", 5, 1)
    prompts = read(tmp_path, model, new(tmp_path))
    with pytest.raises(OperatorError, match=f"cannot be written: {WHY}. Free the disk"), full_disk():
        prompts.save(tmp_path / "runs" / "a")


def test_held_out_row_that_cannot_be_used_is_refused(tmp_path: Path, model: Path) -> None:
    train, held_out = rows(tmp_path / "train.jsonl", 1), rows(tmp_path / "held_out.jsonl", 1, 2, 300)
    with pytest.raises(SettingsError, match=r"held_out\.jsonl line 3 has 300 tokens"):
        check_held_out(settings(train, held_out=held_out), model)


def test_prompt_of_exactly_the_room_fits_and_one_token_more_does_not(tmp_path: Path, model: Path) -> None:
    with PromptJudge(model, settings(tmp_path / "train.jsonl")) as judge:
        verdicts = judge([Prompt("a", "x" * length, "", {}) for length in (232, 233)])
    assert verdicts[0] is None
    assert verdicts[1] is not None
    assert verdicts[1].reason.startswith("has 233 tokens;")


def test_prompt_of_any_length_is_used_if_its_beginning_is_cut(tmp_path: Path, model: Path) -> None:
    given = settings(tmp_path / "train.jsonl")
    given = given.model_copy(update={"rollout": given.rollout.model_copy(update={"truncate_left": True})})
    with PromptJudge(model, given) as judge:
        assert judge([Prompt("a", "x" * 233, "", {})]) == [None]


def test_chat_is_measured_by_its_template_and_what_that_refuses_is_left_out(tmp_path: Path, model: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
        "{% elif m.role != 'developer' %}{{ '<' + m.role + '>' + m.content }}{% endif %}{% endfor %}"
    )
    with_template = tmp_path / "chatty"
    with_template.mkdir()
    for path in model.iterdir():
        (with_template / path.name).symlink_to(path)
    (with_template / "chat_template.jinja").write_text(template)

    def chat(role: str, length: int) -> Prompt:
        return Prompt("a", [{"role": role, "content": "x" * length}], "", {})

    picture = Prompt("a", [{"role": "user", "content": [{"type": "image"}]}], "", {})
    with PromptJudge(with_template, settings(tmp_path / "train.jsonl")) as judge:
        first = judge([chat("user", 226), chat("user", 227), chat("system", 1), picture, chat("developer", 2)])
        # The template is known by now: the short one is not rendered, the long one is.
        second = judge([chat("user", 1), chat("user", 227)])
    assert first[0] is None
    assert first[1] is not None
    assert first[1].reason.startswith("has 233 tokens;")
    assert first[2] == Refusal("cannot be rendered by the tokenizer of policy.model: no system role")
    assert first[3] is not None
    assert first[3].reason.endswith("message 1 has the part {'type': 'image'}: only texts can be read here")
    assert first[4] == Refusal("has a message of the role 'developer': the chat template leaves out 'xx'")
    assert second == [None, first[1]]


@pytest.mark.parametrize("objective", ["grpo", "sft", "reward_model"])
def test_template_that_ends_an_answer_where_generation_does_not_end_is_told(tmp_path: Path, objective: str) -> None:
    folder, path = make_tiny_model(tmp_path / "base", tied=True), tmp_path / "train.jsonl"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = (  # ChatML, which base models of Qwen2.5 have too
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    eos, end = tokenizer.convert_tokens_to_ids(["<eos>", "<|im_end|>"])
    asked, said = [{"role": "user", "content": "q"}], {"role": "assistant", "content": "a"}
    chat: dict[str, object] = {"prompt": asked, "label": "a"}
    text: dict[str, object] = {"prompt": "q", "label": "a"}
    if objective == "sft":
        chat, text = {"messages": [*asked, said]}, {"prompt": "q", "completion": "a"}
    elif objective == "reward_model":
        chat, text = ({"prompt": one["prompt"], "chosen": "b", "rejected": "c"} for one in (chat, text))

    def notice(row: object, ends: object, stop: str = "") -> str:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        path.write_text(json.dumps(row) + "\n")
        of_rows = {} if objective == "grpo" else {"objective": objective}
        given = {"data": {"train": str(path)}, "sampling": {"stop": [stop] if stop else []}, **of_rows}
        return str(read_train_prompts(Settings.model_validate(given), folder, new(tmp_path)).notice)

    cure = f'"eos_token_id": [{eos}, {end}] in {folder / "generation_config.json"}.'
    told = notice(chat, eos)
    if objective == "reward_model":
        assert "eos_token_id" not in told  # it does not generate
        return
    assert "ends an answer with '<|im_end|>', and generation does not end there, only at '<eos>':" in told
    assert told.endswith(f"Set {cure}")
    assert "eos_token_id" not in notice(text, eos)
    if objective == "grpo":
        assert notice(chat, eos, stop="<|im_end|>") == "None"
    for ends in ([eos, end], end):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        assert end_notices(folder, False, stops=[]) == []


def with_data(settings: Settings, **data: object) -> Settings:
    return settings.model_copy(update={"data": settings.data.model_copy(update=data)})


def test_prompts_longer_than_is_wanted_are_left_out_however_many(tmp_path: Path, model: Path) -> None:
    path = rows(tmp_path / "train.jsonl", 5, 100, 101, 102, 99)
    wanted = with_data(settings(path, share=0.0), max_prompt_tokens=100)
    found = read_train_prompts(wanted, model, new(tmp_path))
    assert [row.number for row in found.skipped] == [3, 4]
    assert found.notice is not None
    assert "line 3 has 101 tokens, more than data.max_prompt_tokens = 100." in found.notice
    check_held_out(with_data(wanted, eval=str(path)), model)  # the figure is of all held-out prompts


@pytest.mark.parametrize(("train", "held_out"), [("data", "data/b.jsonl"), ("data/*.jsonl", "c.jsonl")])
def test_held_out_rows_of_the_training_files_are_counted(
    tmp_path: Path, model: Path, train: str, held_out: str
) -> None:
    """A folder or a pattern that takes the held-out file too, or another file with equal rows."""
    (tmp_path / "data").mkdir()
    rows(tmp_path / "data" / "a.jsonl", 5, 6)
    rows(tmp_path / "data" / "b.jsonl", 7, 8, 9)
    given = settings(tmp_path / train, held_out=rows(tmp_path / held_out, 7, 8, 9))
    given = given.model_copy(update={"eval": given.eval.model_copy(update={"every_steps": 5, "num_prompts": 2})})
    index = read_train_prompts(given, model, new(tmp_path)).index
    (notice,) = check_held_out(given, model, index).notices
    assert notice.startswith(f"2 of the 2 rows of {tmp_path / held_out} are in data.train too: their scores are of")
    rows(tmp_path / held_out, 70, 80, 90)
    assert check_held_out(given, model, index).notices == []


def test_limit_of_training_prompts_leaves_held_out_sets_whole(tmp_path: Path, model: Path) -> None:
    path = rows(tmp_path / "held_out.jsonl", 5, 6, 7, 300)
    limited = with_data(settings(path, held_out=path), max_prompts=2)
    assert [len(one.prompts) for one in held_out_sets(limited)] == [4]
    with pytest.raises(SettingsError, match=r"held_out\.jsonl line 4 has 300 tokens"):
        check_held_out(limited, model)


def test_prompts_too_long_for_the_context_count_beside_those_longer_than_is_wanted(tmp_path: Path, model: Path) -> None:
    path = rows(tmp_path / "train.jsonl", 5, 101, 300, 5)
    with pytest.raises(SettingsError, match=r"data: 1 of 4 rows .* The first, line 3, has 300 tokens;"):
        read_train_prompts(with_data(settings(path, share=0.2), max_prompt_tokens=100), model, new(tmp_path))


def test_overlong_prompt_refuses_the_run_when_told_to(tmp_path: Path, model: Path) -> None:
    path = rows(tmp_path / "train.jsonl", *[5] * 50, 101)
    refusing = with_data(settings(path), max_prompt_tokens=100, overlong="refuse")
    with pytest.raises(SettingsError, match=r"line 51 has 101 tokens.* With data\.overlong = skip such rows are left"):
        read_train_prompts(refusing, model, new(tmp_path))


def test_limit_counts_usable_rows_and_reads_no_further(tmp_path: Path, model: Path) -> None:
    path = rows(tmp_path / "train.jsonl", 5, 300, 6, 7, 8)
    with path.open("a") as file:
        file.write("no json\n")
    found = read_train_prompts(with_data(settings(path, share=0.5), max_prompts=2), model, new(tmp_path))
    assert found.index.numbers.tolist() == [1, 3]
    assert [row.number for row in found.skipped] == [2]


@pytest.mark.parametrize("held_out", [False, True])
def test_kto_without_another_row_is_refused(tmp_path: Path, model: Path, held_out: bool) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "q", "completion": "a", "label": true}\n')
    of_rows = Settings.model_validate({"objective": "kto", "data": {"train": str(path), "eval": str(path)}})
    name = "eval" if held_out else "train"
    with pytest.raises(SettingsError, match=rf"data.{name} has one row to use, and objective = kto needs another"):
        check_held_out(of_rows, model) if held_out else read_train_prompts(of_rows, model, new(tmp_path))


def test_models_of_a_run_on_rows_are_checked_at_its_longest_row(tmp_path: Path, model: Path) -> None:
    data = {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "eval.jsonl")}
    for path, length in zip(data.values(), (700, 900), strict=True):
        Path(path).write_text(json.dumps({"text": "x" * length}) + "\n")
    of_rows = Settings.model_validate({"objective": "sft", "data": data})
    longest = max(read_train_prompts(of_rows, model, new(tmp_path)).longest, check_held_out(of_rows, model).longest)
    assert policy_settings(resolve_rows(of_rows, model, longest), model).max_tokens == longest == 901


def test_demonstrations_that_cannot_be_learnt_are_named_with_their_lines(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "rows.jsonl"
    bad: list[tuple[object, str]] = [
        ({"question": "?"}, "has the keys ['question'], expected one of these: segments, messages,"),
        (
            {"messages": [{"role": "assistant", "content": "a"}]},
            "has chat messages, and the model has no chat template",
        ),
        ({"segments": [{"text": "ab", "weight": 0.5}]}, "has the weight 0.5, and this objective takes 0 or 1."),
        ({"input_ids": [1, 99999]}, "has the token 99999, and the model has"),
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in ({"text": "abc"}, *(row for row, _ in bad))))
    of_rows = Settings.model_validate({"objective": "sft", "data": {"train": str(path), "max_skipped_share": 0.8}})
    left_out = read_train_prompts(of_rows, model, new(tmp_path)).skipped
    assert [row.number for row in left_out] == [2, 3, 4, 5]
    for row, (_, problem) in zip(left_out, bad, strict=True):
        assert row.reason.startswith(problem)
    with pytest.raises(SettingsError, match=r"line 2, has the keys \['question'\]"):
        read_train_prompts(with_data(of_rows, max_skipped_share=0.0), model, new(tmp_path))


def test_process_of_a_tokenizer_ends_with_a_command_that_is_killed() -> None:
    code = (
        "import os, time\nfrom learner.run.checks.prompt_judge import tokenizer_process\n"
        "child = tokenizer_process()\nprint(child.submit(os.getpid).result(), flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert int(command.stdout.readline())
        command.kill()
        assert command.communicate(timeout=30) == (b"", None)  # the end of the output, which the process has too
