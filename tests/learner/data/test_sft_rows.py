"""Rows for supervised fine-tuning: what of them is learnt, and how a bad line is named."""

import copy
import json
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import AddedToken, processors
from transformers import AutoTokenizer

from learner.data.prompt_rows import each_row
from learner.data.prompts import Prompt
from learner.data.sft_forms import BadRowError
from learner.data.sft_rows import RowEncoder, SftRow, load_rows
from learner.run.checks.preflight import check_warm_start
from protocol.errors import SettingsError
from protocol.settings.settings import Settings
from tests.fakes.tiny_models import make_tiny_model
from tests.fakes.tokenizer_families import tokenizer_of

TEMPLATE = (
    "{% for t in tools or [] %}<t>{{ t.name }}.{% endfor %}"
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}.{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("sft") / "model", tied=True, hidden_size=32, max_positions=40)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def load(tmp_path: Path, model: Path, *lines: object) -> list[SftRow]:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return load_rows(path, model)


def learnt(row: SftRow, model: Path) -> list[tuple[str, float]]:
    """Return the row's text in runs of one weight."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    runs: list[tuple[str, float]] = []
    for token, weight in zip(row.tokens.tolist(), row.weights.tolist(), strict=True):
        text = tokenizer.decode([token])
        if runs and runs[-1][1] == weight:
            runs[-1] = (runs[-1][0] + text, weight)
        else:
            runs.append((text, weight))
    return runs


def test_answer_that_the_template_ends_as_generation_config_says_gets_no_second_end(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", tied=True, hidden_size=32, max_positions=40)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("<|eom|>", special=False, normalized=False)])
    tokenizer.chat_template = TEMPLATE.replace("}}.{%", "}}<|eom|>{%")
    tokenizer.save_pretrained(folder)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eom|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    chat = {"messages": [_ASKED, _SAID]}
    for row in load(tmp_path, folder, chat, {"prompt": [_ASKED], "response": "w"}):
        assert learnt(row, folder) == [("<u>q<|eom|><a>", 0.0), ("w<|eom|>", 1.0)]


def test_segments_count_as_weighted(tmp_path: Path, model: Path) -> None:
    segments = [{"text": "ab", "weight": 0}, {"text": "<search>c", "weight": 1.0}, {"text": "d", "weight": 0.5}]
    (row,) = load(tmp_path, model, {"segments": segments})
    assert learnt(row, model) == [("ab", 0.0), ("<search>c", 1.0), ("d", 0.5)]
    assert len(row.tokens) == 5


_ASKED = {"role": "user", "content": "q"}
_SAID = {"role": "assistant", "content": "w"}
_ANSWERED = [("<u>q.<a>", 0.0), ("w.<eos>", 1.0)]
_TWICE = [("<u>q.<a>", 0.0), ("w.", 1.0), ("<u>e.<a>", 0.0), ("r.<eos>", 1.0)]
FORMS = [
    ({"prompt": "2+2=", "response": "4"}, [("2+2=", 0.0), ("4<eos>", 1.0)]),
    ({"prompt": "2+2=", "completion": "4"}, [("2+2=", 0.0), ("4<eos>", 1.0)]),
    ({"input": "2+2=", "output": "4"}, [("2+2=", 0.0), ("4<eos>", 1.0)]),
    ({"prompt": [_ASKED], "response": "yo"}, [("<u>q.<a>", 0.0), ("yo.<eos>", 1.0)]),
    ({"prompt": [_ASKED], "completion": [_SAID]}, _ANSWERED),
    (  # answers of the prompt are no part of the completion
        {"prompt": [_ASKED, _SAID, _ASKED], "completion": [_SAID]},
        [("<u>q.<a>w.<u>q.<a>", 0.0), ("w.<eos>", 1.0)],
    ),
    (
        {"messages": [_ASKED, _SAID, {"role": "user", "content": "e"}, {"role": "assistant", "content": "r"}]},
        _TWICE,
    ),
    ({"messages": [_ASKED, {**_SAID, "loss": False}, _ASKED, _SAID]}, [("<u>q.<a>w.<u>q.<a>", 0.0), ("w.<eos>", 1.0)]),
    ({"messages": [_ASKED, {**_SAID, "loss_scale": 0.5}]}, [("<u>q.<a>", 0.0), ("w.<eos>", 0.5)]),
    ({"messages": [_ASKED, _SAID], "tools": '[{"name": "f"}]'}, [("<t>f.<u>q.<a>", 0.0), ("w.<eos>", 1.0)]),
    ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "w"}]}, _ANSWERED),
    (
        {"system": "z", "conversations": [{"from": "observation", "value": "q"}, {"from": "gpt", "value": "w"}]},
        [("<s>z.<t>q.<a>", 0.0), ("w.<eos>", 1.0)],
    ),
    (
        {"conversations": [_ASKED, {**_SAID, "loss": False}, _ASKED, {**_SAID, "loss_scale": 1.0}]},
        [("<u>q.<a>w.<u>q.<a>", 0.0), ("w.<eos>", 1.0)],
    ),
    ({"messages": [_SAID, _ASKED, _SAID]}, [("<a>", 0.0), ("w.", 1.0), ("<u>q.<a>", 0.0), ("w.<eos>", 1.0)]),
    ({"prompt": "2+2=", "response": "4<eos>"}, [("2+2=", 0.0), ("4<eos>", 1.0)]),
    ({"instruction": "q", "output": "w"}, _ANSWERED),
    ({"instruction": "e", "input": "", "output": "r", "history": [["q", "w"]]}, _TWICE),
    ({"instruction": "q", "input": "e", "output": "w", "system": "z"}, [("<s>z.<u>q\ne.<a>", 0.0), ("w.<eos>", 1.0)]),
    ({"text": "abc"}, [("a", 0.0), ("bc<eos>", 1.0)]),
]


@pytest.mark.parametrize(("row", "expected"), FORMS, ids=str)
def test_each_form_learns_its_answers(
    tmp_path: Path, model: Path, row: object, expected: list[tuple[str, float]]
) -> None:
    assert learnt(load(tmp_path, model, row)[0], model) == expected


@pytest.mark.parametrize(
    ("columns", "ids", "weights"),
    [
        ({}, [5, 6, 7, 8], [0, 1, 1, 1]),
        ({"labels": [-100, -100, 7, 8]}, [5, 6, 7, 8], [0, 0, 1, 1]),
        ({"completion_mask": [0, 1, 1, 0]}, [5, 6, 7, 8], [0, 1, 1, 0]),
        ({"loss_mask": [0, 0, 1, 1]}, [5, 6, 7, 8], [0, 0, 1, 1]),
        ({"attention_mask": [0, 1, 1, 1], "labels": [-100, -100, 7, 8]}, [6, 7, 8], [0, 1, 1]),
    ],
)
def test_token_ids_are_taken_as_they_are_without_padding(
    tmp_path: Path, model: Path, columns: dict[str, object], ids: list[int], weights: list[float]
) -> None:
    (row,) = load(tmp_path, model, {"input_ids": [5, 6, 7, 8], **columns})
    assert (row.tokens.tolist(), row.weights.tolist()) == (ids, weights)


def test_parquet_gives_the_rows_of_jsonl(tmp_path: Path, model: Path) -> None:
    rows = [{"messages": [_ASKED, _SAID], "tools": None}, {"prompt": "2+2=", "completion": "4"}]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict.fromkeys(rows[1]) | rows[0], rows[1]]), path)
    assert [learnt(row, model) for row in load_rows(path, model)] == [_ANSWERED, [("2+2=", 0.0), ("4<eos>", 1.0)]]


@pytest.mark.parametrize("column", ["messages", "input", "dialog"])
def test_parquet_adds_no_argument_of_other_rows(tmp_path: Path, column: str) -> None:
    calls = [[{"function": {"name": "f", "arguments": each}}] for each in ({"city": "Paris"}, {"days": 3})]
    rows = [{column: [_ASKED, {"role": "assistant", "tool_calls": each}]} for each in calls]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    read = [row.content[column][1]["tool_calls"] for row in each_row(tmp_path / "rows.parquet")]
    assert read == calls


def test_forms_are_named_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"prompt": "a", "completion": "b"}\n{"text": "a"}\n')
    settings = Settings.model_validate({"policy": {"warm_start": {"data": str(path)}}})
    assert check_warm_start(settings) == "policy.warm_start.data has 2 rows of text, 1 row of prompt + completion."


def test_first_token_is_never_learnt(tmp_path: Path, model: Path) -> None:
    (row,) = load(tmp_path, model, {"segments": [{"text": "abc", "weight": 1}]})
    assert row.weights.tolist() == [0.0, 1.0, 1.0]


@pytest.fixture(scope="module")
def model_with_bos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose tokenizer puts BOS before every text, as those of Llama, Gemma and Mistral do."""
    folder = make_tiny_model(tmp_path_factory.mktemp("bos") / "model", tied=True, hidden_size=32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"bos_token": "<bos>", "pad_token": "<eos>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>",  # of the prefix alone a row takes anything
        special_tokens=[("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)],
    )
    tokenizer.chat_template = "<bos>" + TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "2+2=", "response": "4"}, [("<bos>2+2=", 0.0), ("4<eos>", 1.0)]),
        ({"segments": [{"text": "ab", "weight": 0}, {"text": "c", "weight": 1}]}, [("<bos>ab", 0.0), ("c", 1.0)]),
        ({"segments": [{"text": "ab", "weight": 1}, {"text": "c", "weight": 1}]}, [("<bos>", 0.0), ("abc", 1.0)]),
        ({"segments": [{"text": "<bos>ab", "weight": 0}, {"text": "c", "weight": 1}]}, [("<bos>ab", 0.0), ("c", 1.0)]),
        ({"prompt": [{"role": "user", "content": "q"}], "response": "w"}, [("<bos><u>q.<a>", 0.0), ("w.<eos>", 1.0)]),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "w"}]},
            [("<bos><u>q.<a>", 0.0), ("w.<eos>", 1.0)],
        ),
    ],
)
def test_row_begins_with_bos_once_as_a_rollout_does(
    tmp_path: Path, model_with_bos: Path, row: object, expected: list[tuple[str, float]]
) -> None:
    assert learnt(load(tmp_path, model_with_bos, row)[0], model_with_bos) == expected


def test_template_that_begins_an_answer_in_another_way_is_refused(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "forgetful"
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content if loop.last else '-' }}{% endfor %}"
    shutil.copytree(model, folder)
    tokenizer.save_pretrained(folder)
    with pytest.raises(SettingsError, match=r"messages\[1\]: the model's chat template begins a whole answer in"):
        load(tmp_path, folder, {"messages": [_ASKED, _SAID]})


def test_both_answers_of_a_pair_follow_one_bos_and_end_with_eos(model_with_bos: Path) -> None:
    pair = RowEncoder(model_with_bos, "preferences").encode({"prompt": "2+2=", "chosen": "4", "rejected": "5"})
    expected = [[("<bos>2+2=", 0.0), (f"{answer}<eos>", 1.0)] for answer in (4, 5)]
    assert [learnt(row, model_with_bos) for row in pair] == expected


def _ids(*ids: int) -> dict[str, list[int]]:
    return {"input_ids": [*ids], "loss_mask": [0] * (len(ids) - 1) + [1]}


@pytest.mark.parametrize("form", ["preferences", "reward_pairs"])
@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        (_ids(5, 6, 8), _ids(5, 7, 9)),
        (_ids(5, 6, 8), _ids(5, 9)),
        (
            [{"role": "system", "content": "s"}, _ASKED, _SAID],
            [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}, _SAID],
        ),
    ],
)
def test_pair_of_answers_to_two_prompts_is_refused(model: Path, form: str, chosen: object, rejected: object) -> None:
    with pytest.raises(BadRowError, match="answers to two prompts: the tokens before the learnt ones differ"):
        RowEncoder(model, form).encode({"chosen": chosen, "rejected": rejected})


def test_blank_lines_are_no_rows_and_keep_the_count(tmp_path: Path, model: Path) -> None:
    good = {"prompt": "a", "response": "b"}
    with pytest.raises(SettingsError, match="line 4 is not JSON"):
        load(tmp_path, model, good, "", good, "{")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", " is a list, expected an object"),
        ({"question": "x"}, ": has the keys ['question'], expected one of these: segments, messages, conversations,"),
        ({"chosen": "a", "rejected": "b"}, ": has the column 'chosen': it compares answers"),
        ({"prompt": "a", "completion": "b", "label": False}, ": has a label that is true or false"),
        ({"prompt": "a", "completion": "b", "label": 0}, ": has a label that is true or false"),
        ({"messages": [_ASKED, {**_SAID, "loss": "false"}]}, ": messages[1].loss is 'false', expected true or false"),
        ({"messages": [_ASKED, {**_SAID, "train": 2}]}, ": messages[1].train is 2, expected true or false"),
        (
            {"messages": [_ASKED, {**_SAID, "reasoning_content": "so"}]},
            ": messages[1].reasoning_content: the model's chat template leaves out 'so'. Remove it",
        ),
        (
            {"messages": [_ASKED, {**_SAID, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
            ": messages[1].tool_calls: the model's chat template leaves out 'f'",
        ),
        (
            {"messages": [_ASKED, {**_SAID, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            ": messages[1].tool_calls has the arguments '{', which are not JSON",
        ),
        ({"input_ids": [5, 6], "position_ids": [0, 0]}, ": has the column position_ids, which is not read and would"),
        ({"prompt": "a", "response": "b", "system_prompt": "c"}, ": has the column system_prompt, which this form"),
        ({"prompt": "a", "response": "b", "history": [["x", "y"]]}, ": has the column history, which this form"),
        ({"input": "a", "output": "b", "prompt": "c"}, ": has the column prompt, which this form does not read"),
        ({"prompt": "a", "response": "b", "tools": [{}]}, ": has tools, which a text in prompt cannot name"),
        ({"instruction": "a", "input": 7, "output": "b"}, ": input is 7, expected a string"),
        ({"messages": [_ASKED, {**_SAID, "trainable": False}]}, ": messages[1] has trainable, which is not read."),
        ({"text": "\ud83d"}, ": has '\\ud83d', half of a character"),
        ({"input_ids": [5, 2**40]}, ": has the token 1099511627776, expected numbers of tokens"),
        ({"segments": [{"text": "a", "weight": 10**400}]}, ": segments[0].weight is 1000000"),
        ({"text": 1}, ": text is 1, expected a string"),
        ({"prompt": "a", "completion": [_SAID]}, ": completion is [{'role': 'assistant', 'content': 'w'}], expected"),
        (
            {"conversations": [{"from": "bot", "value": "a"}]},
            ": conversations[0].from is 'bot', expected one of",
        ),
        ({"instruction": 1, "output": "a"}, ": instruction + output[0].content is 1, expected a string"),
        (
            {"instruction": "a", "output": "b", "history": [["a"]]},
            ": history is [['a']], expected a list of",
        ),
        ({"messages": [_ASKED, {**_SAID, "loss_scale": "x"}]}, ": messages[1].loss_scale is 'x', expected a number"),
        ({"messages": [_ASKED, _SAID], "tools": "{"}, ": tools is a string but not JSON"),
        ({"input_ids": [5, 6], "labels": [5]}, ": labels has 1 numbers, and input_ids has 2"),
        ({"input_ids": [5, 6], "labels": [-100, 7]}, ": labels[1] is 7, expected -100 or input_ids[1]"),
        ({"input_ids": [5, 99999]}, ": has the token 99999, and the model has"),
        ({"segments": 3}, ": segments is not a list"),
        ({"segments": [{"text": 1, "weight": 1}]}, ": segments[0].text is 1, expected a string"),
        ({"segments": [{"text": "a", "weight": -1}]}, ": segments[0].weight is -1, expected a number of at least 0"),
        (
            '{"segments": [{"text": "a", "weight": NaN}]}',
            ": segments[0].weight is nan, expected a number",
        ),
        (
            {"segments": [{"text": "abc", "weight": 0}]},
            ": has no token with a weight above 0: there is nothing",
        ),
        ({"segments": []}, ": has no text"),
        ({"messages": [_ASKED, {**_SAID, "loss": False}]}, ": has no message to learn: each one of the assistant has"),
        ({"prompt": "a", "response": 3}, ": response is 3, expected a string"),
        ({"messages": [{"content": "a"}]}, ": messages[0] has no role"),
        ({"messages": [{"role": "user", "content": "a"}]}, ": has no message of the role assistant"),
        ({"messages": [{"role": "user", "content": 1}]}, ": messages[0].content is 1, expected a string"),
        ({"prompt": "a" * 41, "response": "b"}, ": has 43 tokens, and the model has 40 positions. Shorten it"),
    ],
)
def test_bad_line_is_refused_with_its_number(tmp_path: Path, model: Path, line: object, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, model, {"prompt": "a", "response": "b"}, line)
    assert f"rows.jsonl line 2{message}" in str(caught.value)


def test_labelled_row_is_followed_by_its_prompt_with_another_rows_answer(model: Path) -> None:
    other = Prompt("u", "", None, {"prompt": "?", "completion": "xyz" + 40 * " w", "label": False})
    encoder = RowEncoder(model, "unpaired")
    with pytest.raises(BadRowError, match="the model has 40 positions"):
        encoder.encode(other.columns)
    other.columns["completion"] = "xyz" + 15 * " w"
    row, mismatched = encoder.encode({"prompt": "q" + 20 * "-", "completion": "a", "label": True}, lambda: other)
    assert (row.reward, mismatched.reward) == (1.0, 0.0)
    assert learnt(row, model)[-1][0].startswith("a")
    (before, unlearnt), (answer, weight) = learnt(mismatched, model)
    assert (before, unlearnt, weight) == (learnt(row, model)[0][0], 0.0, 1.0)
    assert answer.startswith("xyz w")
    assert len(mismatched.tokens) == 40


def test_pair_of_a_reward_model_ends_with_the_end_token_and_has_its_margin(model: Path) -> None:
    encoder = RowEncoder(model, "reward_pairs")
    end = AutoTokenizer.from_pretrained(model).eos_token_id
    row = {"prompt": [_ASKED], "chosen": [_SAID], "rejected": [{"role": "assistant", "content": "x"}], "margin": 0.5}
    chosen, rejected = encoder.encode(row)
    assert (chosen.reward, rejected.reward) == (1.5, -1.0)
    assert [each.tokens.tolist().index(end) for each in (chosen, rejected)] == [len(chosen.tokens) - 1] * 2
    (before, _) = RowEncoder(model, "preferences").encode(row)
    assert chosen.tokens.tolist() == before.tokens.tolist()
    (text, _) = encoder.encode({"prompt": "q", "chosen": "a", "rejected": "b"})
    assert text.tokens[-2:].tolist() != [end, end]
    with pytest.raises(BadRowError, match="margin is 'wide', expected a number"):
        encoder.encode({**row, "margin": "wide"})


def test_pair_of_a_reward_model_ends_as_a_served_text_does(tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(tokenizer_of("gemma"))
    tokenizer.eos_token = "<eos>"  # its template ends turns with "<end_of_turn>\n"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    row = {"prompt": [_ASKED], "chosen": [_SAID], "rejected": [{"role": "assistant", "content": "x"}]}
    for each in RowEncoder(tmp_path, "reward_pairs").encode(row):
        assert tokenizer.convert_ids_to_tokens(each.tokens[-2:]) == ["<end_of_turn>", "<eos>"]


def test_file_without_rows_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(SettingsError, match=r"rows\.jsonl has no rows"):
        load(tmp_path, model, "")


def test_missing_file_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(SettingsError, match=r"missing\.jsonl cannot be read: No such file or directory"):
        load_rows(tmp_path / "missing.jsonl", model)


def test_tokenizer_with_code_of_its_own_is_used_when_that_is_trusted(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", tied=True, hidden_size=32, num_layers=1)
    code = (
        "from transformers import PreTrainedTokenizerFast\n\n\nclass OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    (folder / "own.py").write_text(code)
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "tokenizer_class": "OwnTokenizer"}
    path.write_text(json.dumps({**config, "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2=", "response": "4"}')
    (row,) = load_rows(tmp_path / "rows.jsonl", folder, trust_remote_code=True)
    assert len(row.tokens) == 6
