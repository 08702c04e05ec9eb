"""Whole runs with what users bring, by settings alone: real commands on a real cluster, read back from their folders.

Runs of one model folder share a warm engine; they stand together here, because another engine takes half a minute.
"""

import json
import re

import pytest

from tests.fakes.http_servers import ScriptedServer
from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import Bring, Ran, each_trained_once, run, score
from tests.learner.test_metrics_names import documented

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


# -- supervised fine-tuning alone ------------------------------------------------------------------------------------


def test_a_warm_start_alone_needs_no_prompts_no_reward_service_and_no_server(cluster: FlowCluster, user: Bring) -> None:
    rows = user.folder / "sft.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "response": " 2"}\n', encoding="utf-8")
    before = [server.pid for server in cluster.actors("RolloutServer")]  # warm ones of another test's run
    ran = run(
        cluster,
        user,
        "supervised",
        run__max_steps=0,
        policy__warm_start__data=str(rows),
        policy__warm_start__max_steps=2,
        policy__warm_start__rows_per_step=1,
        data__train="",
        data__eval=None,
        rewards__endpoints=[{"name": "mine", "url": "http://127.0.0.1:9/nobody"}],
    )
    assert (ran.left.folder / "checkpoints" / "step_000000" / "model" / "config.json").is_file()
    assert [server.pid for server in cluster.actors("RolloutServer")] == before
    assert (ran.left.folder / "report.html").is_file()


# -- a user's model, prompts and reward service -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(cluster: FlowCluster, user: Bring) -> Ran:
    return run(cluster, user, "plain", eval__every_steps=2, learner__checkpoint_every_steps=2)


def test_a_trained_model_is_scored_on_several_sets_without_training(
    cluster: FlowCluster, user: Bring, plain: Ran
) -> None:
    model = plain.left.folder / "checkpoints" / "latest" / "model"
    _, config, *_ = user.options("scored")
    command = cluster.evaluate(
        *(str(model), str(user.folder / "held_out.jsonl"), f"again={user.folder / 'held_out.jsonl'}"),
        *("--samples", "2", "--name", "scored", "--dir", str(user.folder / "runs"), "--config", config, "--json"),
        *("--rewards.endpoints", json.dumps([{"name": "mine", "url": user.reward_url}])),
    )
    assert command.returncode == 0, command.stdout + command.stderr
    scores = json.loads(command.stdout.splitlines()[-1])
    assert set(scores) == {"held_out", "again"}
    assert {"reward", "reward_error", "greedy", "pass@1", "pass@2", "majority@2"} <= set(scores["again"])
    assert scores["held_out"]["greedy"] == scores["again"]["greedy"]
    folder = user.folder / "runs" / "scored"
    answers = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert len(answers) == 2 * 4 * 3
    assert all(answer["prompt"] and answer["label"] and "response" in answer for answer in answers)
    assert not list((folder / "checkpoints").glob("step_*"))
    before = [line["eval/held_out/greedy"] for line in plain.left.metrics if "eval/held_out/greedy" in line]
    assert scores["held_out"]["greedy"] == pytest.approx(before[-1], abs=1e-6)


def test_every_prompt_of_a_run_is_trained_once_and_none_is_outstanding(plain: Ran) -> None:
    assert plain.left.states == {"trained": 6}
    assert plain.left.trained == each_trained_once(3)
    assert plain.left.most_often_trained == 1


def as_told(key: str) -> str:
    """Return a key as metrics.md tells it: of any set, any k, with or without its error."""
    return re.sub(r"@\d+$", "@k", re.sub(r"^eval/held_out/", "eval/SET/", key).removesuffix("_error"))


def test_metrics_have_every_key_that_tools_rely_on_in_every_step(plain: Ran) -> None:
    lines = [line for line in plain.left.metrics if line["step"] > 0]

    assert [line["step"] for line in lines] == [1, 2, 3]
    written = {as_told(key) for line in lines for key in line if not key.startswith("reward/part/")}
    assert written <= documented()
    usual = {key for key in documented(only_unconditional=True) if not re.match("eval/|reward/part/", key)}
    assert [usual - line.keys() for line in lines] == [set(), set(), set()]
    assert all(type(value) in (int, float) for line in lines for value in line.values())


def test_metrics_have_the_evaluations_before_the_first_and_after_the_last_step(plain: Ran) -> None:
    evaluated = {line["step"]: line for line in plain.left.metrics if "eval/held_out/reward" in line}

    assert {0, 3} <= evaluated.keys()
    assert all("eval/held_out/greedy" in line for line in evaluated.values())


def test_rewards_in_the_ledger_are_the_users(plain: Ran, rewards: ScriptedServer) -> None:
    given = {answer for received in rewards.received["fast"] for answer in score(received).body["rewards"]}
    found = {reward for (reward,) in plain.left.rows("SELECT reward FROM trajectories")}

    assert len(found) > 1
    assert found <= given


def test_a_reward_service_gets_prompt_and_label_of_the_users_rows(plain: Ran, rewards: ScriptedServer) -> None:
    body = rewards.received["fast"][-1].body

    assert sorted(body) == ["labels", "num_turns", "prompts", "query", "responses"]
    assert re.fullmatch(r"[hp]\d+ \+ \d+ =", body["prompts"][0])
    assert body["query"][0].startswith(body["prompts"][0])
    assert body["labels"][0].isdigit()


def test_the_report_opens_without_a_network(plain: Ran) -> None:
    text = (plain.left.folder / "report.html").read_text(encoding="utf-8")

    assert "</html>" in text
    assert re.findall(r"""(?:src|href|action)\s*=\s*["']?\s*(?:https?:)?//""", text) == []
    assert re.findall(r"@import|url\(\s*[\"']?(?:https?:)?//", text) == []


def test_the_last_checkpoint_is_latest_when_the_run_ends(plain: Ran) -> None:
    assert plain.left.folder.joinpath("checkpoints", "latest").resolve().name == "step_000003"


def test_only_the_newest_checkpoints_are_kept_and_latest_is_the_last_step(plain: Ran) -> None:
    folders = plain.left.folder / "checkpoints"

    assert sorted(path.name for path in folders.iterdir()) == ["latest", "step_000002", "step_000003"]
    assert (folders / "latest").resolve().name == "step_000003"


# -- staleness --------------------------------------------------------------------------------------------------------


def test_no_trajectory_is_staler_than_one_step_when_one_is_allowed(plain: Ran) -> None:
    assert len(plain.left.staleness) == 24
    assert max(plain.left.staleness) == 1


# -- several ranks ----------------------------------------------------------------------------------------------------


# PPO: a critic, a reference in host memory, and two mini-batches times two epochs of updates in each step.
PPO: dict[str, object] = {
    "learner__recipe": "ppo",
    "learner__num_mini_batches": 2,
    "learner__num_epochs": 2,
    "kl__target": 0.01,
    "reference__offload": True,
    "policy__old_logprobs": "recompute",
}


@pytest.fixture(scope="module")
def zero3(cluster: FlowCluster, user: Bring, plain: Ran) -> Ran:
    """A second run: the server of `plain` is warm."""
    return run(cluster, user, "zero3", learner__num_ranks=2, learner__zero_stage=3, **PPO)


def test_a_second_run_is_served_by_the_server_that_is_there(zero3: Ran, cluster: FlowCluster) -> None:
    (server,) = cluster.actors("RolloutServer")
    assert server.create_time() < zero3.started_at


def test_two_ranks_with_zero_3_train_every_prompt_once_and_export_the_model(zero3: Ran, user: Bring) -> None:
    from transformers import AutoModelForCausalLM

    start, trained = (
        AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
        for folder in (user.model, zero3.left.folder / "checkpoints" / "latest" / "model")
    )

    assert zero3.left.states == {"trained": 6}
    assert zero3.left.trained == each_trained_once(3)
    assert start.shape == trained.shape
    # Adam moves every weight that has a gradient by about the learning rate, 1e-3, in each of twelve updates.
    assert 1e-4 < (start - trained).abs().max().item() < 2e-2
    assert {line["policy/num_updates"] for line in zero3.left.metrics if line["step"]} == {4}
    assert {"critic/loss", "policy/kl_reference"} <= zero3.left.metrics[-1].keys()
