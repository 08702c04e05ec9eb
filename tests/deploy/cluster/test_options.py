"""Options of start_cluster.sh: defaults, and one sentence for each that cannot be."""

import json
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from deploy.cluster.options import read_start_options
from deploy.cluster.ray_processes import ray_flags
from deploy.cluster.reuse import format_options
from deploy.cluster.services import Service, services_of, shared_retriever_url
from deploy.node.home import Home
from protocol.errors import SettingsError
from protocol.node.home import ClusterState
from protocol.waits import until


def test_default_is_a_head_on_loopback() -> None:
    options = read_start_options([])
    assert (options.address, options.node_ip, options.reward_scorer) == (None, "127.0.0.1", "exact_match")
    assert (options.ray_port, options.retriever_port, options.reward_port) == (6379, 8000, 8001)


def test_range_moves_every_port_that_has_no_option_of_its_own() -> None:
    moved = read_start_options(["--ports", "20000-20999", "--reward-port", "9001"])
    assert (moved.ray_port, moved.retriever_port, moved.reward_port) == (20006, 20007, 9001)
    again = read_start_options(["--ports", "30000-30999"], moved.to_remember())
    assert (again.ray_port, again.retriever_port, again.reward_port) == (30006, 30007, 30008)


def test_joining_node_takes_its_address_from_the_route_to_the_head() -> None:
    assert read_start_options(["--address", "127.0.0.1:6379"]).node_ip == "127.0.0.1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--retriever-port", "8001"],
            r"two services cannot share a port .*--retriever-port 8001, --reward-port 8001",
        ),
        (["--reward-port", "0"], "--reward-port 0 is not a port. Use 1 to 65535."),
        (["--ray-port", "70000"], "--ray-port 70000 is not a port. Use 1 to 65535."),
        (["--index-path", "x"], "--index-path needs the --corpus-path"),
        (["--corpus-path", "/nowhere.jsonl"], "/nowhere.jsonl is not a file"),
        (["--address", "head"], "--address head is not HOST:PORT"),
        (["--address", "fd00::1:6379"], "--address fd00::1:6379 is not HOST:PORT. Give the head's, such as"),
        (["--address", "[10.0.0.1]:6379"], r"--address \[10.0.0.1\]:6379 is not HOST:PORT"),
        (["--address", "[fd00::zz]:6379"], r"--address \[fd00::zz\]:6379 is not an IPv6 address"),
        (["--resources", "v100"], r"""--resources v100 is not a JSON object .* Give one such as '{"v100": 8}'"""),
        (["--resources", '{"v100": true}'], "is not a JSON object of whole numbers above 0"),
        (["--resources", '{"v100": Infinity}'], "is not a JSON object of whole numbers above 0"),
        (["--resources", '{"v100": 1e308}'], r"is not a JSON object of whole numbers above 0 and up to 1e\+09"),
        (["--resources", '{"v100": 0.5}'], "is not a JSON object of whole numbers above 0"),
        (["--resources", '{"node:10.0.0.1": 1}'], "--resources names node:10.0.0.1, which Ray counts by itself"),
        (["--resources", '{"v100": 0}'], "is not a JSON object of whole numbers above 0"),
        (["--resources", '{"v100,a100": 8}'], "has a name that is empty or has a comma"),
        (["--resources", '{"": 8}'], "has a name that is empty or has a comma"),
        (["--resources", '{"v100": 1, "GPU": 4}'], "--resources names GPU, which Ray counts by itself"),
        (["--address", "10.0.0.1:99999"], "--address 10.0.0.1:99999 is not HOST:PORT"),
        (["--start-timeout-s", "nan"], "--start-timeout-s nan is not a duration. Give seconds above 0"),
        (["--start-timeout-s", "0"], "--start-timeout-s 0 is not a duration"),
        (["--topk", "0"], "--topk 0 is below 1"),
        (["--ports", "20000"], "--ports 20000 is not FIRST-LAST. Give a range such as 20000-20999."),
        (["--ports", "20000-20100"], "--ports 20000-20100: expected at least 200 ports from 1024 to 65535"),
        (["--ports", "65400-65599"], "expected at least 200 ports from 1024 to 65535"),
        (
            ["--ports", "7000-8000", "--retriever-port", "8000"],
            "--retriever-port 8000 is one of --ports 7000-8000. Use a port outside the range.",
        ),
        (["--node-ip", "::1"], "--node-ip ::1 is an address that means nothing to other nodes. Give this node's"),
        (["--node-ip", "fe80::1%eth0"], "--node-ip fe80::1%eth0 is an address that means nothing to other nodes"),
        (["--node-ip", "::ffff:10.0.0.1"], "--node-ip ::ffff:10.0.0.1 is an address that means nothing to other nodes"),
        (["--node-ip", "0.0.0.0"], "--node-ip 0.0.0.0 is not the address of one machine"),  # noqa: S104  # refused
        (["--node-ip", "ff02::1"], "--node-ip ff02::1 is not the address of one machine"),
        (["--node-ip", "node7"], "--node-ip node7 is not an IP address"),
        (["--num-gpus", "-1"], "--num-gpus -1 is below 0"),
        (["--dashboard-port", "6379"], "two services cannot share a port .*--dashboard-port 6379"),
        (["--dashboard-port", "8265", "--address", "h:6379"], "--dashboard-port is the head's: this node joins one"),
        (["--dashboard-host", "0.0.0.0"], "--dashboard-host needs --dashboard-port"),  # noqa: S104  # what a user gives
        (["--dashboard-port", "8265", "--dashboard-host", "head"], "--dashboard-host head is not an IP address"),
        (["--reward-scorer", "exakt_match"], "--reward-scorer exakt_match is not known. Use one of code_tests, exact_"),
        (
            ["--reward-scorer", "reward_model"],
            "--reward-scorer reward_model needs a model: its folder, or its name on the hub. Give reward_model:MODEL",
        ),
        (["--wait-nodes", "-2"], "--wait-nodes -2 is below 0"),
    ],
)
def test_option_that_cannot_be_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_start_options(arguments)


def test_ipv6_addresses_are_written_as_ray_compares_them() -> None:
    options = read_start_options(["--node-ip", "FD00:0:0:78::0001", "--ray-port", "7001"])
    assert (options.node_ip, options.ray_address) == ("fd00:0:0:78::1", "[fd00:0:0:78::1]:7001")
    assert shared_retriever_url(options) == "http://[fd00:0:0:78::1]:8000/retrieve"
    joining = read_start_options(["--address", "[FD00::0:1]:6379", "--node-ip", "fd00::2"])
    assert joining.address == "[fd00::1]:6379"
    assert read_start_options([], joining.to_remember()) == joining


def test_no_reward_starts_no_reward_server() -> None:
    assert read_start_options(["--no-reward"]).no_reward


def test_reward_model_is_served_from_a_whole_path_and_in_bfloat16_on_a_gpu_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rm").mkdir()
    monkeypatch.chdir(tmp_path)
    for model, gpus, served in (("rm", "", (str(tmp_path / "rm"), "float32")), ("a/b", "7", ("a/b", "bfloat16"))):
        monkeypatch.setenv("SLUICE_SERVICE_GPUS", gpus)
        options = read_start_options(["--reward-scorer", f"reward_model:{model}"])
        given = dict(pairwise(services_of(options, Home(tmp_path))["reward"].command))
        assert (given["--scorer"], given["--model"], given["--model-dtype"]) == ("reward_model", *served)


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert read_start_options(["--corpus-path", "corpus.jsonl"]).corpus_path == tmp_path / "corpus.jsonl"


def test_range_of_ports_is_rays_and_ours_and_remembered() -> None:
    options = read_start_options(["--ports", "20000-20999"])
    assert options.ports is not None
    assert options.ports.ours == "20505-20999"
    assert ray_flags(options) == (
        *("--node-manager-port", "20000", "--object-manager-port", "20001", "--dashboard-agent-listen-port", "20002"),
        *("--dashboard-agent-grpc-port", "20003", "--runtime-env-agent-port", "20004"),
        *("--metrics-export-port", "20005", "--min-worker-port", "20010", "--max-worker-port", "20504"),
    )
    assert options.ports.ray_client_port == 20009
    assert read_start_options([], options.to_remember()).ports == options.ports


def test_resources_are_rays_and_remembered() -> None:
    options = read_start_options(["--num-gpus", "8", "--num-cpus", "4", "--resources", '{"v100": 8}'])
    assert ray_flags(options) == ("--num-cpus", "4", "--num-gpus", "8", "--resources", '{"v100": 8}')
    assert ray_flags(read_start_options([], options.to_remember())) == ray_flags(options)
    assert ray_flags(read_start_options([])) == ()
    shown = read_start_options(["--dashboard-port", "8265"])
    assert ray_flags(shown) == ("--dashboard-port", "8265")
    reached = read_start_options(["--dashboard-host", "10.0.0.1"], shown.to_remember())
    assert ray_flags(reached) == ("--dashboard-port", "8265", "--dashboard-host", "10.0.0.1")


def test_resources_are_the_same_however_they_are_typed() -> None:
    first = read_start_options(["--resources", '{"b": 1, "v100": 8}'])
    again = read_start_options(["--resources", '{"v100":8.0,"b":1}'], first.to_remember())
    assert ray_flags(again) == ray_flags(first)


def test_what_one_start_is_to_do_is_not_remembered() -> None:
    options = read_start_options(["--block", "--wait-nodes", "3"])
    assert (options.block, options.wait_nodes) == (True, 3)
    again = read_start_options([], options.to_remember())
    assert (again.block, again.wait_nodes) == (False, 0)


def remembered(*arguments: str) -> dict[str, str | int | None]:
    return read_start_options(list(arguments)).to_remember()


def test_option_that_is_not_given_is_what_it_was_before(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").touch()
    corpus = str(tmp_path / "corpus.jsonl")
    first = read_start_options(["--ray-port", "7001", "--corpus-path", corpus, "--index-path", "x", "--open-retriever"])
    again = read_start_options([], first.to_remember())
    assert again == first
    assert read_start_options(["--ray-port", "7002"], first.to_remember()).retriever_port == first.retriever_port
    assert read_start_options(["--ray-port", "7002"], first.to_remember()).ray_port == 7002


def test_defaults_forget_what_was_given_before() -> None:
    assert read_start_options(["--defaults"], remembered("--ray-port", "7001")) == read_start_options([])
    assert read_start_options(["--defaults", "--topk", "5"], remembered("--topk", "4")).topk == 5


def test_waiting_time_is_of_one_start_alone() -> None:
    assert read_start_options([], remembered("--start-timeout-s", "5")).start_timeout_s == 300.0
    assert read_start_options([], {"start_timeout_s": 5.0}).start_timeout_s == 300.0


def test_index_of_another_corpus_is_not_kept(tmp_path: Path) -> None:
    for name in ("one.jsonl", "two.jsonl"):
        (tmp_path / name).touch()
    before = remembered("--corpus-path", str(tmp_path / "one.jsonl"), "--index-path", str(tmp_path / "index"))
    assert read_start_options(["--corpus-path", str(tmp_path / "two.jsonl")], before).index_path is None


def test_scorer_that_is_given_takes_the_place_of_no_reward_before_and_the_other_way_round() -> None:
    assert read_start_options([], remembered("--no-reward")).no_reward
    assert not read_start_options(["--reward-scorer", "exact_match"], remembered("--no-reward")).no_reward
    assert read_start_options(["--no-reward"], remembered("--reward-scorer", "exact_match")).no_reward
    assert read_start_options([], remembered("--no-reward")).to_remember() == remembered("--no-reward")


def test_node_that_joins_another_head_takes_its_address_anew() -> None:
    before = remembered("--node-ip", "127.0.0.9")
    joined = read_start_options(["--address", "127.0.0.1:7001"], before)
    assert (joined.node_ip, joined.ray_address) == ("127.0.0.1", "127.0.0.1:7001")
    assert read_start_options([], joined.to_remember()) == joined


def test_node_that_was_a_head_joins_without_what_only_a_head_has() -> None:
    before = remembered("--dashboard-port", "8265", "--dashboard-host", "127.0.0.9")
    joined = read_start_options(["--address", "127.0.0.1:7001"], before)
    assert (joined.address, joined.dashboard_port, joined.dashboard_host) == ("127.0.0.1:7001", None, None)


def test_node_that_joins_has_no_port_of_the_head() -> None:
    joined = read_start_options(["--address", "127.0.0.1:7001", "--ports", "6000-7000", "--reward-port", "5999"])
    assert joined.ports is not None
    assert 6379 in joined.ports


def test_option_that_this_code_does_not_know_is_passed_over() -> None:
    assert read_start_options([], {"from_a_later_version": 3}) == read_start_options([])


@pytest.mark.parametrize("typed", [(), ("--open-retriever",), ("--no-reward",), ("--topk", "1", "--ray-port", "7000")])
def test_options_as_they_are_told_to_the_operator_can_be_typed_and_mean_the_same(typed: tuple[str, ...]) -> None:
    options = read_start_options(typed)
    # By way of cluster.json, where the next start finds them.
    kept = TypeAdapter(ClusterState.model_fields["options"].annotation).validate_json(json.dumps(options.to_remember()))
    assert read_start_options(shlex.split(format_options(kept))) == options


def test_path_with_a_space_is_told_quoted(tmp_path: Path) -> None:
    corpus = tmp_path / "my corpus.jsonl"
    corpus.touch()
    options = read_start_options(["--corpus-path", str(corpus)])
    assert read_start_options(shlex.split(format_options(options.to_remember()))) == options


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ([], None),
        (["--node-ip", "10.0.0.5"], "http://10.0.0.5:8000/retrieve"),
        (["--node-ip", "10.0.0.5", "--retriever-port", "8010"], "http://10.0.0.5:8010/retrieve"),
        (["--node-ip", "10.0.0.5", "--open-retriever"], None),
        (["--node-ip", "10.0.0.5", "--retriever-script", __file__], None),
    ],
)
def test_retriever_listens_for_other_nodes_where_they_are_told_to_ask(
    tmp_path: Path, given: list[str], url: str | None
) -> None:
    options = read_start_options(given)
    retriever = services_of(options, Home(tmp_path))["retriever"]
    command = retriever.command
    assert retriever.is_bundled == ("--retriever-script" not in given)
    assert shared_retriever_url(options) == url
    assert ("--also-on" in command) == (url is not None)
    if url is not None:
        assert command[command.index("--also-on") + 1] == given[1]


def test_number_of_threads_that_the_user_set_reaches_the_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    home.logs.mkdir()
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    record = Service("echo", "", ("bash", "-c", "echo $OMP_NUM_THREADS"), "", tmp_path).launch(home)
    assert any(Path(record.log).read_text() == "7\n" for _ in until(10.0, poll_s=0.01))


@pytest.mark.parametrize(
    ("is_bundled", "for_services", "seen"),
    [(True, None, ""), (True, "3", "3"), (False, None, "0,1"), (False, "3", "0,1")],
)
def test_a_bundled_service_sees_only_the_gpus_that_are_set_aside_for_it(
    tmp_path: Path, is_bundled: bool, for_services: str | None, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    home.logs.mkdir()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    if for_services is not None:
        monkeypatch.setenv("SLUICE_SERVICE_GPUS", for_services)
    command = ("bash", "-c", "echo [$CUDA_VISIBLE_DEVICES]")
    record = Service("echo", "", command, "", tmp_path, is_bundled=is_bundled).launch(home)
    assert any(Path(record.log).read_text() == f"[{seen}]\n" for _ in until(10.0, poll_s=0.01))
