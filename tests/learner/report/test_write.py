"""The report of runs in every state, from folders that the coordinator's own classes wrote."""

import base64
import hashlib
import html
import json
import re
import sqlite3
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path

import pytest

from learner.ledger.ledger import Ledger
from learner.report.facts import read_run
from learner.report.recorded_lines import read_lines
from learner.report.samples import read_groups
from learner.report.write import main, write_comparison, write_report
from protocol.errors import OperatorError
from tests.learner.report.recorded_run import record_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "short"
    folder.mkdir()
    record_run(folder, num_steps=3)
    return folder


def _page(folder: Path) -> str:
    return write_report(folder, folder.parent / "model").read_text(encoding="utf-8")


def _text(page: str) -> str:
    """Return what a reader sees, white space made single."""
    return " ".join(re.sub(r"<(style|script).*?</\1>|<[^>]+>", " ", page, flags=re.DOTALL).split())


class _Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]


def test_report_says_what_the_warm_start_had_reached_and_what_rl_added(folder: Path) -> None:
    text = _text(_page(folder))
    assert "sampled at temperature 1 0.500 ± 0.500 1.000 ± 0.000 +0.500" in text
    assert "greedy 1.000 ± 0.000 1.000 ± 0.000 +0.000" in text
    assert "after the warm start, before RL after 3 steps of RL" in text


def test_report_answers_four_questions_and_each_has_its_section(folder: Path) -> None:
    page = _page(folder)
    assert re.findall(r'<h2 id="(\w+)">(.*?)</h2>', page) == [
        ("learning", "Is it learning?"),
        ("healthy", "Is it healthy?"),
        ("says", "What does it say?"),
        ("slow", "Why is it slow?"),
    ]
    answers = _text(page[page.index('<div class="answers">') : page.index("<h2 id=")])
    assert answers == (
        "Is it learning? Not shown: held-out score (greedy) 1.000 → 1.000, less than two standard errors. "
        "Is it healthy? No alarm. 1 of 1 figures are in their usual range. "
        "What does it say? Greedy answers: 1 of 2 better, 0 worse. "
        "Why is it slow? 62% of the last 3 steps was training: add ranks, or raise learner.micro_batch_tokens."
    )


def test_report_of_demonstrations_compares_the_held_out_loss_and_less_is_better(tmp_path: Path) -> None:
    lines = [{"step": max(1, at), "eval/step": at, "eval/held_out/loss": loss} for at, loss in ((0, 6.0), (4, 5.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report(tmp_path, None).read_text(encoding="utf-8")
    assert "before training step 4 change held-out loss 6.000 5.000 -1.000" in _text(page)
    assert re.search(r'"x":\[0,1,4\],.*"values":\[6.0,null,5.0\]', page)  # the line of step 1 has the score before it
    assert "Is it learning? Perhaps: held-out loss 6.000 → 5.000, without a standard error." in _text(page)
    assert '<td class="">-1.000</td>' in page  # green is above two standard errors alone


def test_report_compares_no_loss_from_before_other_rows_or_another_loss(tmp_path: Path) -> None:
    since = {"eval/held_out/since": 3.0}
    changed = ((1, 9.0, {}), (2, 8.0, {}), (3, 0.5, since), (4, 0.4, since))
    lines = [{"step": step, "eval/held_out/loss": loss, **more} for step, loss, more in changed]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = _text(write_report(tmp_path, None).read_text(encoding="utf-8"))
    assert "Is it learning? Perhaps: held-out loss 0.500 → 0.400, without a standard error." in text
    assert "Steps before 3 had other held-out rows or another loss: they are not compared." in text


def test_report_shows_the_same_held_out_prompt_first_and_last_with_its_label(folder: Path) -> None:
    text = _text(_page(folder))
    assert "better label: right a reward 0 → 1 Question a? step 0 guess step 3 &lt;b&gt;found&lt;/b&gt;" in text


def test_report_shows_a_whole_group_best_first(folder: Path) -> None:
    group = _text(_page(folder)).split("Step 3, mean reward 0.5")[1]
    assert re.findall(r"reward (\d), ended by answer, 43 tokens, staleness (\d)", group) == [
        *(("1", "1"), ("1", "1")),
        *(("0", "0"), ("0", "0")),
    ]


def test_report_names_the_weights_that_an_evaluation_scored_when_a_later_step_reports_it(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"eval/policy_version": 3', '"eval/policy_version": 2'))
    assert "before RL after 2 steps of RL" in _text(_page(folder))


@pytest.mark.parametrize("since", ["eval/rewards_since", "eval/held_out/since"])
def test_report_compares_no_scores_of_different_reward_endpoints_or_sets(folder: Path, since: str) -> None:
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[2] |= {"eval/step": 2, "eval/policy_version": 2, "eval/held_out/reward": 0.25, since: 2}
    lines[3] |= {since: 2}
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = _text(_page(folder))
    assert "temperature 1 0.250 1.000 ± 0.000 +0.750" in text
    assert "Steps before 2 had other reward endpoints or another held-out set: they are not compared." in text


def test_report_compares_a_set_that_a_resume_brought_with_itself(folder: Path) -> None:
    metrics, evaluations = folder / "metrics.jsonl", folder / "evaluations.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[0] = {key.replace("held_out", "old"): value for key, value in lines[0].items()}
    lines[2] |= {"eval/step": 2, "eval/policy_version": 2, "eval/held_out/reward": 0.25}
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers = [json.loads(line) for line in evaluations.read_text().splitlines()]
    answers = [answer | ({"set": "old"} if answer["step"] == 0 else {}) for answer in answers]
    answers.insert(2, answers[0] | {"step": 2, "set": "held_out", "response": "second guess"})
    evaluations.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    text = _text(_page(folder))
    assert "temperature 1 0.250 1.000 ± 0.000 +0.750" in text
    assert "better label: right a reward 0 → 1 Question a? step 2 second guess step 3" in text


def test_report_has_error_size_and_temperature_of_the_first_set_among_several(folder: Path) -> None:
    settings = folder / "settings.yaml"
    sets = "  sets:\n  - {name: aime, data: a.jsonl, temperature: 0.6}"
    settings.write_text(settings.read_text().replace("  sets: []", sets))
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines = [{key.replace("held_out", "aime"): value for key, value in line.items()} for line in lines]
    lines[0] |= {"eval/aime/reward_error": 0.125}
    lines[-1] |= {"eval/aime/reward_error": 0.25, "eval/aime/num_prompts": 30}
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = _text(_page(folder))
    assert "temperature 0.6 0.500 ± 0.125 1.000 ± 0.250 +0.500" in text  # its own, not the training's
    assert "30 held-out prompts; ± is one standard error over prompts." in text


def test_report_loads_nothing_and_runs_our_two_scripts_alone_whatever_a_trajectory_holds(folder: Path) -> None:
    page = _page(folder)
    tags = _Tags(page)
    assert not {"link", "img", "iframe", "object"} & set(tags.tags)
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    policy = re.search(r"script-src([^;\"]*)", page)
    assert policy is not None
    assert html.unescape(policy[1]).split() == [f"'sha256-{digest}'" for digest in digests]
    assert len(digests) == 2
    assert not {"src", "onload", "onclick"} & set(tags.attributes)
    assert set(re.findall(r'href="(.)', page)) == {"#"}
    assert "&lt;script&gt;alert(1)&lt;/script&gt; code BY" in page
    assert "reward: &lt;i&gt;timeout&lt;/i&gt;" in page


def test_report_sets_prompt_model_and_observation_apart(folder: Path) -> None:
    page = _page(folder)
    assert '<div class="text mono prompt">What is the code of &lt;b&gt;Belarus&lt;/b&gt;?</div>' in page
    pieces = re.findall(r'<span class="piece (\w+)">(.*?)</span>', page)[:3]
    assert pieces == [
        ("model", "&lt;search&gt;Belarus&lt;/search&gt;"),
        ("observation", "&lt;script&gt;alert(1)&lt;/script&gt; code BY"),
        ("model", "&lt;answer&gt;BY&lt;/answer&gt;"),
    ]


def test_report_lists_skipped_prompts_and_changed_settings_first(folder: Path) -> None:
    page = _page(folder)
    assert "1 reward: &lt;i&gt;timeout&lt;/i&gt;" in _text(page)
    changed, defaults = page.split("differ from their default")[1].split("have their default")
    assert "<tr><td>run.max_steps</td><td>3</td></tr>" in changed
    assert "<tr><td>learner.lr</td>" in defaults


def test_report_shows_no_password_of_a_url(folder: Path) -> None:
    page = _page(folder)
    assert "http://***@127.0.0.1:9/rows" in page
    assert "secret" not in page


def test_report_flags_a_staleness_above_what_was_allowed(folder: Path) -> None:
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        db.execute("UPDATE trajectories SET staleness = 5 WHERE step = 3")
    db.close()
    assert '<div class="alarm"><small>largest staleness trained</small><b>5 (allowed 1)</b></div>' in _page(folder)


def test_report_counts_no_trajectory_of_a_step_that_was_not_applied(folder: Path) -> None:
    assert "trajectories trained 24" in _text(_page(folder))
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        db.execute("UPDATE trajectories SET step = NULL, staleness = NULL WHERE step = 3")
    db.close()
    assert "trajectories trained 16" in _text(_page(folder))


def test_report_of_an_empty_file_alone_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    text = _text(write_report(tmp_path, None).read_text(encoding="utf-8"))
    for name in ("settings.yaml", "ledger.sqlite", "samples.jsonl"):
        assert f"{name} is missing" in text
    assert "0 steps recorded." in text


def test_report_of_a_run_without_a_step_has_its_settings_and_prompts(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    folder.mkdir()
    record_run(folder, num_steps=0)
    text = _text(write_report(folder, None).read_text(encoding="utf-8"))
    assert "metrics.jsonl is missing: no step had ended when the run stopped." in text
    assert "No held-out evaluation is on record" in text
    assert "skipped 1" in text


def test_report_of_a_killed_run_leaves_out_the_lines_that_were_cut_off(folder: Path) -> None:
    for name in ("metrics.jsonl", "samples.jsonl"):
        path = folder / name
        path.write_text(path.read_text()[:-20])
    text = _text(_page(folder))
    assert "metrics.jsonl has 1 broken line(s), left out" in text
    assert "samples.jsonl has a broken line, left out" in text
    assert "Not complete: it is at step 2 of 3." in text
    assert "There is one evaluation only: the gain from RL was not measured." in text


def test_report_reads_the_ledger_of_a_run_that_still_writes_it(folder: Path) -> None:
    with sqlite3.connect(folder / "ledger.sqlite", isolation_level=None) as db:
        db.execute("INSERT INTO events VALUES (1.0, 'failed', 'x')")
        assert (folder / "ledger.sqlite-wal").exists()
        page = _page(folder)
    db.close()
    assert "Events: failed 1." in page


def test_report_says_when_a_ledger_is_damaged(folder: Path) -> None:
    (folder / "ledger.sqlite").write_bytes(b"no database" * 100)
    assert "ledger.sqlite cannot be read (file is not a database)" in _page(folder)


def test_report_shows_token_ids_when_the_tokenizer_is_not_there(folder: Path) -> None:
    page = write_report(folder, folder / "nowhere").read_text(encoding="utf-8")
    first = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    assert "tokenizer.json is not there: trajectories are shown as token ids." in page
    assert f'<div class="text mono prompt">{first["tokens"][0]} {first["tokens"][1]} ' in page


def test_steps_taken_again_after_a_resume_count_once(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "policy_version": 2, "policy/loss": 9.0}\n')
    run = read_run(folder)
    assert [line["step"] for line in run.lines] == [0, 1, 2]
    assert (run.lines[-1]["policy/loss"], run.num_redone) == (9.0, 2)


def test_samples_of_a_step_that_was_taken_again_are_shown_once(folder: Path) -> None:
    path = folder / "samples.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    newest = [json.loads(line) for line in lines if json.loads(line)["step"] == 3]
    with path.open("a") as file:
        file.writelines(json.dumps(line | {"start": line["start"] + 9}) + "\n" for line in newest)
    groups = read_groups(path, folder.parent / "model", [])
    assert [(group.step, len(group.samples)) for group in groups] == [(1, 4), (3, 4)]
    assert read_lines(path)[-4:] == [line | {"start": line["start"] + 9} for line in newest]
    assert len(read_lines(path)) == len(lines)


def test_comparison_has_the_scores_the_settings_that_differ_and_both_curves(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = folder.parent / "longer"
    other.mkdir()
    record_run(other, num_steps=5, group_size=2)
    assert main([str(folder), str(other)]) == 0
    path = folder.parent / "short_longer.html"
    assert capsys.readouterr().out == f"{path}\n"
    text = _text(path.read_text(encoding="utf-8"))
    assert "short 3 eval/held_out/reward 0.500 ± 0.500 1.000 ± 0.000 1.000 ± 0.000 3 1.000" in text
    assert "setting short longer run.max_steps 3 5 rollout.group_size 4 2 Curves" in text
    assert re.findall(r'"label":"(\w+)"', path.read_text())[:2] == ["short", "longer"]


def test_comparison_of_runs_on_rows_has_their_held_out_losses_of_which_the_least_is_best(tmp_path: Path) -> None:
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        lines = [{"step": max(1, at), "eval/step": at, "eval/held_out/loss": 6.0 + at} for at in (0, 4)]
        (tmp_path / run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_comparison([tmp_path / "a", tmp_path / "b"]).read_text(encoding="utf-8")
    assert "a 4 eval/held_out/loss 6.000 10.000 6.000 0" in _text(page)
    assert "<h3>Held-out loss</h3>" in page


@pytest.mark.parametrize("since", ["eval/rewards_since", "eval/held_out/since"])
def test_comparison_leaves_out_scores_of_other_reward_endpoints_or_sets(
    folder: Path, capsys: pytest.CaptureFixture[str], since: str
) -> None:
    (other := folder.parent / "other").mkdir()
    record_run(other, num_steps=3)
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[0] |= {"eval/held_out/reward": 7.0}
    lines[2] |= {"eval/step": 2, "eval/policy_version": 2, "eval/held_out/reward": 0.25, since: 2}
    lines[3] |= {since: 2}
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([str(folder), str(other)]) == 0
    text = _text(Path(capsys.readouterr().out.strip()).read_text(encoding="utf-8"))
    assert "short 3 eval/held_out/reward 0.250 1.000 ± 0.000 1.000 ± 0.000 3 1.000" in text


def test_training_rewards_of_earlier_reward_endpoints_are_not_compared(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (other := folder.parent / "other").mkdir()
    record_run(other, num_steps=1)
    rewards = {1: 90.0, 2: 0.5, 3: 0.75}
    lines = [{"step": step, "reward/mean": reward} for step, reward in rewards.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ledger = Ledger(folder / "ledger.sqlite")  # resumed at step 2 with another scorer
    for source, first in (("old", 1), ("new", 2)):
        ledger.begin_rewards(source, "", first, first)
    ledger.close()
    text = _text(_page(folder))
    assert "training reward 0.500 0.750 +0.250" in text
    assert "Steps before 2 had other reward endpoints: they are not compared." in text
    assert main([str(folder), str(other)]) == 0
    text = _text(Path(capsys.readouterr().out.strip()).read_text(encoding="utf-8"))
    assert "short 3 reward/mean 0.500 0.750 0.750 3" in text


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["gone"], "gone is not a folder. Give a run's folder, such as runs/NAME."),
        (["."], "is not a run's folder: it has none of settings.yaml, metrics.jsonl"),
        (["short", "short/../short"], "A run is given twice."),
    ],
)
def test_report_command_refuses_what_is_no_run(
    folder: Path, capsys: pytest.CaptureFixture[str], given: list[str], reason: str
) -> None:
    assert main([str(folder.parent / name) for name in given]) == 1
    assert reason in capsys.readouterr().err
    assert not (folder.parent / "report.html").exists()


def test_report_of_a_checkpoint_is_refused_and_leaves_it_as_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = folder / "checkpoints" / "step_000002"
    checkpoint.mkdir(parents=True)
    for name in ("ledger.sqlite", "MANIFEST.json"):
        (checkpoint / name).touch()
    assert main([str(checkpoint)]) == 1
    assert capsys.readouterr().err == f"{checkpoint} is a checkpoint. Give its run's folder, {folder}.\n"
    assert not (checkpoint / "report.html").exists()


def test_report_that_cannot_be_written_is_an_operator_error(folder: Path) -> None:
    (folder / "report.html").mkdir()
    with pytest.raises(OperatorError, match=r"report\.html cannot be written: Is a directory\."):
        write_report(folder, None)


def test_report_holds_no_more_of_the_samples_than_it_shows(folder: Path) -> None:
    path = folder / "samples.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    num = line["num_prompt_tokens"]
    long = {"tokens": [*line["tokens"][:num], *[5] * 2000], "loss_mask": [0] * num + [1] * 2000}
    with path.open("w") as file:
        for step in range(1, 2001):
            file.write(json.dumps({**line, **long, "step": step, "group": f"g{step}"}) + "\n")
    tracemalloc.start()
    groups = read_groups(path, folder.parent / "model", [])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [group.step for group in groups] == [1, 401, 801, 1200, 1600, 2000]
    assert peak < path.stat().st_size / 4
