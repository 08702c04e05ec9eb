"""A resume with other reward endpoints: the operator is told, and what depends on earlier rewards starts again."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from learner.coordinator.changes import answers_origin
from protocol.errors import OperatorError
from protocol.node.home import write_cluster
from protocol.settings.run_spec import TOOL_LIST
from rewards.service import RewardService
from rewards.user_function import digest_of
from tests.fakes.cluster_state import cluster_state
from tests.fakes.http_servers import free_address, serving
from tests.learner.coordinator.coordinator_script import Script, settings_of

EM = {"name": "em", "url": "http://127.0.0.1:1/em"}
F1 = {"name": "f1", "url": "http://127.0.0.1:1/f1", "weight": 0}


def scored_by(*endpoints: dict[str, Any]) -> dict[str, Any]:
    return {"rewards": {"endpoints": list(endpoints)}}


def test_ledger_names_the_endpoints_of_every_start(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(**scored_by(EM)))
    script.train(1)
    script = script.resume(1, **scored_by(EM, F1))
    assert script.rows("SELECT from_step, value FROM terms WHERE name = 'endpoints' ORDER BY from_step") == [
        (1, "em http://127.0.0.1:1/em weight 1; sum"),
        (2, "em http://127.0.0.1:1/em weight 1, f1 http://127.0.0.1:1/f1 weight 0; sum"),
    ]


@pytest.mark.parametrize(
    ("changed", "is_other"),
    [
        (scored_by(EM), False),
        (scored_by(EM, F1), False),
        (scored_by({**EM, "timeout_s": 5}), False),
        (scored_by({**EM, "weight": 2}), True),
        (scored_by({**EM, "weight": 0}), True),
        (scored_by({**EM, "url": "http://127.0.0.1:2/em"}), True),
        ({"rewards": {"endpoints": [EM], "combine": "mean"}}, True),
        ({**scored_by(EM), "rollout": {"environment": "search"}}, True),
    ],
)
def test_operator_is_told_when_other_endpoints_decide_the_reward(
    tmp_path: Path, changed: dict[str, Any], is_other: bool
) -> None:
    script = Script(tmp_path, settings_of(**scored_by(EM)))
    script.train(1)
    notices = script.resume(1, **changed).coordinator.status().notices
    assert [text.startswith("Rewards come from") for text in notices] == [True] * is_other


def test_operator_is_told_when_endpoints_without_weight_replace_the_clusters_own_service(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of())
    script.train(1)
    notices = script.resume(1, **scored_by(F1)).coordinator.status().notices
    assert [text.split(" from step")[0] for text in notices] == ["Rewards come from the environment alone; sum"]


@pytest.mark.parametrize(
    ("changed", "reasons"),
    [
        ({**scored_by({**EM, "weight": 2})}, ["endpoints"]),
        ({**scored_by(EM), "rollout": {"temperature": 0.5}}, ["settings"]),
        ({**scored_by(EM), "rollout": {"group_size": 4}}, ["settings"]),
        ({**scored_by(EM), "sampling": {"stop": ["x"]}}, ["settings"]),
        ({**scored_by(EM), "rollout": {"num_servers": 2}}, []),
    ],
)
def test_sample_of_an_earlier_start_is_not_trained_under_other_endpoints_or_sampling(
    tmp_path: Path, changed: dict[str, Any], reasons: list[str]
) -> None:
    script = Script(tmp_path, settings_of(**scored_by(EM)))
    (lease, *_) = script.demand()
    late = script.trajectory("s1", lease, 0)
    script = script.resume(0, **changed)
    assert script.send_trajectory("s1", late).outcome == ("unknown" if reasons else "accepted")
    assert script.rows("SELECT reason FROM waste") == [(reason,) for reason in reasons]


def test_operator_is_told_once_when_a_file_of_the_users_code_was_edited(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from helper import half\n\ndef loss(): ...")
    (file := tmp_path / "helper.py").write_text("import mine")
    sections = {"learner": {"loss": f"{tmp_path}/mine.py:loss"}, "rollout": {"environment": f"{tmp_path}/mine.py:Env"}}
    script = Script(tmp_path, settings_of(**sections))
    file.write_text("import mine  # edited")
    script = script.resume(0, **sections)
    assert script.coordinator.status().notices == (
        f"{file} has changed since the last start: steps from 1 on use it as it is now.",
    )
    assert script.resume(0, **sections).coordinator.status().notices == ()


def test_edited_file_of_an_mcp_servers_command_is_said_and_earlier_samples_are_not_trained(tmp_path: Path) -> None:
    (file := tmp_path / "tools.py").write_text("tools")
    server = {"name": "mine", "command": ["python", "tools.py", "--port"], "folder": str(tmp_path)}
    sections = {"rollout": {"environment": "tools"}, "tools": {"mcp": [server]}}
    script = Script(tmp_path, settings_of(**sections))
    (lease, *_) = script.demand()
    late = script.trajectory("s1", lease, 0)
    file.write_text("other tools")
    script = script.resume(0, **sections)
    assert script.coordinator.status().notices == (
        f"{file} has changed since the last start: steps from 1 on use it as it is now.",
    )
    assert script.send_trajectory("s1", late).outcome == "unknown"


def test_operator_is_told_once_when_a_scorer_has_changed_and_its_earlier_scores_are_not_trained(tmp_path: Path) -> None:
    scorer: Any = SimpleNamespace(digest="before")
    with serving(RewardService(scorer, "f.py").app()) as address:
        given = scored_by({"name": "mine", "url": f"{address}/score"}, {**EM, "url": f"{free_address()}/none"})
        script = Script(tmp_path, settings_of(**given)).resume(0, **given)
        assert script.coordinator.status().notices == ()
        (lease, *_) = script.demand()
        earlier = [script.trajectory("s1", lease, index) for index in (0, 1)]
        script = script.resume(0, **given)
        assert script.send_trajectory("s1", earlier[0]).outcome == "accepted"
        scorer.digest = "after"
        script = script.resume(0, **given)
        (notice,) = script.coordinator.status().notices
        assert notice.startswith(f"The scorer behind {address}/score has changed since the last start")
        assert script.send_trajectory("s1", earlier[1]).outcome == "unknown"
        assert script.resume(0, **given).coordinator.status().notices == ()


def test_operator_is_told_of_a_scorer_whose_files_are_newer_than_its_code(tmp_path: Path) -> None:
    (file := tmp_path / "reward.py").write_text("first")
    scorer: Any = SimpleNamespace(digest=digest_of([file]), files=(str(file),))
    with serving(RewardService(scorer, "reward.py").app()) as address:
        given = scored_by({"name": "mine", "url": f"{address}/score"})
        script = Script(tmp_path, settings_of(**given))
        assert script.coordinator.status().notices == ()
        file.write_text("second")
        (notice,) = script.resume(0, **given).coordinator.status().notices
    assert notice.startswith(f"The scorer behind {address}/score scores by code that is older than its files")


def test_operator_is_told_when_a_data_file_that_a_scorers_code_names_has_changed(tmp_path: Path) -> None:
    (file := tmp_path / "reward.py").write_text("TABLE = 'weights.json'")
    (table := tmp_path / "weights.json").write_text("1.0")
    scorer: Any = SimpleNamespace(digest=digest_of([file]), files=(str(file),))
    with serving(RewardService(scorer, "reward.py").app()) as address:
        given = scored_by({"name": "mine", "url": f"{address}/score"})
        script = Script(tmp_path, settings_of(**given)).resume(0, **given)
        assert script.coordinator.status().notices == ()
        table.write_text("0.25")
        script = script.resume(0, **given)
        (notice,) = script.coordinator.status().notices
        assert notice.startswith(f"Data files that are named by the code of the scorer behind {address}/score have cha")
        assert script.resume(0, **given).coordinator.status().notices == ()


def test_operator_is_told_when_the_clusters_own_service_has_another_scorer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path))
    own: Any = SimpleNamespace(digest="exact_match")
    with serving(RewardService(own, "exact_match").app()) as address:
        write_cluster(cluster_state(reward_url=f"{address}/"))
        script = Script(tmp_path, settings_of()).resume(0)
        assert script.coordinator.status().notices == ()
    own.digest = "math_answer"
    with serving(RewardService(own, "math_answer").app()) as address:  # the cluster has another port now
        write_cluster(cluster_state(reward_url=f"{address}/"))
        (notice,) = script.resume(0).coordinator.status().notices
    assert notice.startswith("The scorer of the cluster has changed since the last start: steps from 1 on use it")


def test_answers_of_another_model_dtype_tool_list_or_scorer_have_another_origin(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "chat_template.jinja").write_text("template")
    scorer: Any = SimpleNamespace(digest="before")
    with serving(RewardService(scorer, "f.py").app()) as address:
        given = scored_by({**EM, "url": f"{address}/em"})
        first = answers_origin(settings_of(**given), 2, tmp_path, {})
        assert answers_origin(settings_of(**given), 2, tmp_path, {}) == first
        others = [
            answers_origin(settings_of(**given), 3, tmp_path, {}),
            answers_origin(settings_of(**given, policy={"dtype": "float32"}), 2, tmp_path, {}),
            answers_origin(settings_of(**given), 2, tmp_path, {TOOL_LIST: "a1"}),
            answers_origin(settings_of(**given), 2, tmp_path, {TOOL_LIST: "b2"}),
        ]
        scorer.digest = "after"
        others.append(answers_origin(settings_of(**given), 2, tmp_path, {}))
    assert len({first.sampled_by, *(other.sampled_by for other in others)}) == 6
    assert {other.weights for other in others} == {first.weights}
    for name, content in (("chat_template.jinja", "edited"), ("model.safetensors", "trained")):
        (tmp_path / name).write_text(content)
        others.append(answers_origin(settings_of(**given), 2, tmp_path, {}))
    assert len({other.weights for other in others}) == 3


def test_scorer_that_does_not_say_in_time_what_it_is_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with socket.create_server(("127.0.0.1", 0)) as listener:  # takes connections, answers none
        given = scored_by({**EM, "url": f"http://127.0.0.1:{listener.getsockname()[1]}/em"})
        with ThreadPoolExecutor(1) as threads:  # both wait for five seconds
            origin = threads.submit(answers_origin, settings_of(**given), 2, tmp_path, {})
            (notice,) = Script(tmp_path, settings_of(**given)).coordinator.status().notices
            with pytest.raises(OperatorError, match=r"The scorer behind .*/em did not answer GET /health within 5 s"):
                origin.result()
        assert notice.endswith("/em did not answer GET /health within 5 s: whether it changed is not known.")


@pytest.mark.parametrize("is_from_step_0", [False, True])
def test_sample_of_a_start_that_the_restored_ledger_does_not_know_is_not_trained(
    tmp_path: Path, is_from_step_0: bool
) -> None:
    """A start with other endpoints ends before its first checkpoint; servers keep its results for the next start."""
    script = Script(tmp_path, settings_of(**scored_by(EM)))
    script.ledger.begin_copy(tmp_path / "checkpoint.sqlite").make()
    script = script.resume(0, **scored_by({**EM, "weight": 2}))
    (lease, *_) = script.demand()
    late = script.trajectory("s1", lease, 0)
    script.ledger.close()
    (tmp_path / "ledger.sqlite").unlink()
    if not is_from_step_0:
        (tmp_path / "checkpoint.sqlite").rename(tmp_path / "ledger.sqlite")
    script = Script(tmp_path, settings_of(**scored_by(EM)))
    script.demand()
    assert script.send_trajectory("s1", late).outcome == "unknown"
    assert script.rows("SELECT reason FROM waste") == [("lineage" if is_from_step_0 else "endpoints",)]


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_scores_of_a_scorers_earlier_code_are_not_compared(tmp_path: Path, weight: float) -> None:
    scorer: Any = SimpleNamespace(digest="before")
    sections = {"eval": {"every_steps": 1, "num_prompts": 1, "samples": 1}, "data": {"eval": "held_out.jsonl"}}
    with serving(RewardService(scorer, "f.py").app()) as address:
        settings = settings_of(**sections, **scored_by({"name": "f", "url": f"{address}/f", "weight": weight}))
        Script(tmp_path, settings, num_held_out=1).ledger.close()
        scorer.digest = "after"
        script = Script(tmp_path, settings, num_held_out=1)
    for lease in script.demand(num_groups=1):
        script.finish("s1", lease)
    script.advance()
    assert script.metrics()[0].get("eval/rewards_since") == (1 if weight else None)
    assert script.coordinator.status().notices[0].endswith("curriculum start again.") is bool(weight)


def test_evaluation_after_the_change_says_since_when_its_endpoints_score(tmp_path: Path) -> None:
    sections = {"eval": {"every_steps": 1, "num_prompts": 1, "samples": 1}, "data": {"eval": "held_out.jsonl"}}
    script = Script(tmp_path, settings_of(**sections, **scored_by(EM)), num_held_out=1)
    script.ledger.close()
    script = Script(tmp_path, settings_of(**sections, **scored_by({**EM, "weight": 2})), num_held_out=1)
    script.demand_and_finish(num_groups=1)
    script.advance()
    assert script.metrics()[0]["eval/rewards_since"] == 1


def test_curriculum_does_not_go_by_scores_of_earlier_endpoints(tmp_path: Path) -> None:
    sections = {"data": {"curriculum": {"easy": 0.9, "every": 4}}}
    script = Script(tmp_path, settings_of(**sections, **scored_by(EM)), num_prompts=2)
    script.train(1, reward=1.0)
    script = script.resume(1, **sections, **scored_by({**EM, "weight": 2}))
    assert [lease.group for lease in script.demand(version=1)] != []
    assert script.rows("SELECT COUNT(*) FROM prompts WHERE state = 'skipped'") == [(0,)]
