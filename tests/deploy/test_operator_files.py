"""What operators are given beside the scripts: manifests, images, units. Their tools check them in `tests/machines`."""

import base64
import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from deploy.cluster.options import read_start_options

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = [*sorted((DEPLOY / "kubernetes").glob("*.yaml")), *sorted((DEPLOY / "dstack").glob("*.yml"))]
IMAGES = sorted((DEPLOY / "containers").glob("*Dockerfile"))


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text("utf-8")) if document]


def ray_cluster() -> dict[str, Any]:
    found = documents(DEPLOY / "kubernetes" / "raycluster.yaml")
    return next(each for each in found if each["kind"] == "RayCluster")


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each group of pods of the RayCluster, and the spec of its pods."""
    cluster = ray_cluster()
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        yield group.get("groupName", "head"), group["template"]["spec"]


@pytest.mark.parametrize(
    "path", [path for path in [*MANIFESTS, *IMAGES] if path.name != "rayjob.yaml"], ids=lambda path: path.name
)
def test_every_image_is_named_with_a_version(path: Path) -> None:
    text = path.read_text("utf-8")
    images = re.findall(r"^\s*(?:- )?image: (\S+)", text, re.M) + re.findall(r"^ARG BASE=(\S+)", text, re.M)
    assert images
    assert [image for image in images if ":" not in image or image.endswith(":latest")] == []


@pytest.mark.parametrize("path", [*MANIFESTS, *IMAGES], ids=lambda path: path.name)
def test_every_file_of_the_checkout_that_is_used_is_there(path: Path) -> None:
    used = re.findall(
        r"(?<![\w/.])(?:/opt/sluice/)?((?:deploy|requirements|pyproject)[\w./-]*\.(?:sh|py|lock|toml))",
        path.read_text("utf-8"),
    )
    assert [name for name in used if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("job", [1, 9_999, 40_000, 40_500, 123_456])
def test_ray_of_a_slurm_job_is_outside_of_the_ports_that_documents_name(job: int) -> None:
    script = (DEPLOY / "slurm" / "run.sbatch").read_text("utf-8")
    (assigned,) = re.findall(r"^ray_port=.*$", script, re.M)
    (ports,) = set(re.findall(r"--ports (\d+-\d+)", (DEPLOY.parent / "docs" / "do" / "operate.md").read_text("utf-8")))
    evaluated = subprocess.run(
        ["/bin/bash", "-c", f'{assigned}\necho "$ray_port"'],
        env={"SLURM_JOB_ID": str(job)},
        capture_output=True,
        text=True,
        check=True,
    )
    read_start_options(["--ports", ports, "--ray-port", evaluated.stdout.strip()])


def test_pods_give_start_cluster_options_that_it_knows() -> None:
    for group, pod in pods():
        (container,) = pod["containers"]
        options = [str(argument) for argument in container["args"] if argument != "$(FQ_RAY_IP)"]
        options = [option.replace("$(NODE_IP)", "10.0.0.1") for option in options]
        told = read_start_options([*options, "--node-ip", "10.0.0.1", "--block"])
        assert told.num_gpus == (0 if group == "head" else 8)
        assert told.dashboard_host == ("10.0.0.1" if group == "head" else None)


def test_job_of_kubernetes_gives_the_cluster_a_run_that_it_can_start() -> None:
    (job,) = documents(DEPLOY / "kubernetes" / "rayjob.yaml")
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": ray_cluster()["metadata"]["name"]}
    python, dash_m, module, *options = job["spec"]["entrypoint"].split()
    assert (python, dash_m, module) == ("/opt/sluice/.venv/bin/python", "-m", "learner.run")
    (container,) = dict(pods())["head"]["containers"]
    mounts = tuple(f"{mount['mountPath']}/" for mount in container["volumeMounts"] if mount["name"] == "shared")
    assert options[::2] == ["--config", "--run.dir", "--run.drain_s"]
    assert all(path.startswith(mounts) for path in options[1:4:2])


def test_every_pod_has_probes_limits_shared_memory_and_the_clusters_keys() -> None:
    for _, pod in pods():
        (container,) = pod["containers"]
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
        assert container["resources"]["limits"] == container["resources"]["requests"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"  # noqa: S108  # of the pod
        assert mounts["/sluice/keys"]["secret"] == {"secretName": "sluice-keys", "defaultMode": 0o440}
        named = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert named["SLUICE_KEYS"] == "/sluice/keys"
        # What is mounted is root's, whoever may write there; a home has to be its user's own, and node.sh makes it.
        home = PurePosixPath(str(named["SLUICE_HOME"]))
        assert (str(home) in mounts, mounts[str(home.parent)]) == (False, {"emptyDir": {}, "name": "home"})


def test_pod_has_as_long_to_stop_as_a_stop_waits_for_the_run() -> None:
    waits = dict(pods())["head"]["terminationGracePeriodSeconds"]
    unit = (DEPLOY / "systemd" / "sluice.service").read_text("utf-8")
    assert waits >= 1800
    assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) >= 1800


@pytest.mark.parametrize(
    "path", [*MANIFESTS, IMAGES[0], DEPLOY / "systemd" / "sluice.service"], ids=lambda path: path.name
)
def test_run_gives_a_step_up_only_shortly_before_its_node_has_to_stop(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(re.findall(r"-m learner\.run\s", text)) == text.count("--run.drain_s 1500") > 0


@pytest.mark.parametrize(("rank", "told"), [("0", "python -m learner.run"), ("1", "deploy/containers/node.sh worker")])
def test_stop_of_a_task_of_dstack_reaches_what_it_runs(tmp_path: Path, rank: str, told: str) -> None:
    (task,) = documents(DEPLOY / "dstack" / "sluice.dstack.yml")
    stays = 'trap "echo told $0 $*; exit" TERM; echo "$NODE_IP $0 $*"; for i in $(seq 100); do sleep 0.1; done'
    for name in ("bin/python", "deploy/containers/node.sh"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"#!/bin/bash\n[[ $* != *wait-nodes* ]] || exit 0\n{stays}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "bin" / "ip").write_text(
        '#!/bin/bash\n[[ $* != *10.0.0.1* ]] || echo "10.0.0.1 dev ib0 src 10.0.0.7 uid 0"\n'
    )
    (tmp_path / "bin" / "ip").chmod(0o755)
    with subprocess.Popen(
        ["sh", "-c", " && ".join(task["commands"])],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "DSTACK_NODE_RANK": rank,
            "DSTACK_NODES_NUM": "2",
            "DSTACK_MASTER_NODE_IP": "10.0.0.1",
        },
    ) as shell:
        assert shell.stdout is not None
        while told not in (line := shell.stdout.readline()):
            assert shell.poll() is None
        assert line.startswith("10.0.0.1 " if rank == "0" else "10.0.0.7 ")
        shell.terminate()
        status = shell.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)  # the head's node.sh
        heard = [line for line in shell.stdout if line.startswith("told") and told in line]
    assert (status, len(heard)) == (0, 1)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder with node.sh, and a start_cluster.sh that tells what it was given."""
    (tmp_path / "deploy" / "containers").mkdir(parents=True)
    shutil.copy(DEPLOY / "containers" / "node.sh", tmp_path / "deploy" / "containers")
    start = tmp_path / "deploy" / "start_cluster.sh"
    start.write_text('#!/usr/bin/env bash\necho "$*"; [[ -z ${SLUICE_KEYS:-} ]]\n', encoding="utf-8")
    start.chmod(0o755)
    return tmp_path


def node(checkout: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", str(checkout / "deploy" / "containers" / "node.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": os.environ["PATH"], "NODE_IP": "10.0.0.7", "SLUICE_HOME": str(checkout / "home"), **environment},
    )


def keys(*form: str) -> str:
    script = DEPLOY / "containers" / "keys.sh"
    return subprocess.run(["bash", str(script), *form], capture_output=True, text=True, timeout=60, check=True).stdout


def private_files(home: Path) -> dict[str, bytes]:
    """Return the files of a home by name; each must be its owner's alone."""
    files = {str(path.relative_to(home)): path for path in sorted(home.rglob("*")) if path.is_file()}
    assert [name for name, path in files.items() if path.stat().st_mode & 0o077] == []
    return {name: path.read_bytes() for name, path in files.items()}


SECRETS = ["keys/coordinator.pub", "keys/coordinator.sec", "keys/peer.pub", "keys/peer.sec", "ray_token", "token"]


def test_head_gets_the_keys_of_a_secret_of_kubernetes(checkout: Path) -> None:
    secret = yaml.safe_load(keys("secret", "sluice-keys"))
    assert (secret["kind"], secret["metadata"]) == ("Secret", {"name": "sluice-keys"})
    mounted, hidden = checkout / "mounted", checkout / "mounted" / "..data"
    hidden.mkdir(parents=True)
    for name, value in secret["data"].items():
        (hidden / name).write_bytes(base64.b64decode(value))
        (mounted / name).symlink_to(f"..data/{name}")
    done = node(checkout, "head", "--num-gpus", "0", SLUICE_KEYS=str(mounted))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "--node-ip 10.0.0.7 --ray-port 6379 --block --num-gpus 0\n"
    found = private_files(checkout / "home")
    assert list(found) == SECRETS
    assert found["ray_token"] == base64.b64decode(secret["data"]["auth_token"])


def test_line_of_keys_is_taken_from_the_environment_and_not_handed_on(checkout: Path) -> None:
    done = node(checkout, "head", SLUICE_KEYS=keys("line").strip())
    assert done.returncode == 0, done.stderr
    assert list(private_files(checkout / "home")) == SECRETS


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ((), {}, "node: the role is not given. Give head, or worker and the head's address."),
        (("driver",), {}, "node: the role is driver. Give head, or worker and the head's address."),
        (("head",), {}, "SLUICE_KEYS: is not set. deploy/containers/keys.sh makes the secrets"),
        (("head",), {"SLUICE_KEYS": "?"}, "node: SLUICE_KEYS is neither a folder nor a line from"),
        (("worker", "--block"), {"SLUICE_KEYS": "/"}, "node: a worker needs the head's address: worker HEAD."),
    ],
)
def test_wrong_use_of_a_node_is_said(
    checkout: Path, arguments: tuple[str, ...], environment: dict[str, str], said: str
) -> None:
    if environment.get("SLUICE_KEYS") == "/":
        environment = {"SLUICE_KEYS": str(checkout / "empty")}
        (checkout / "empty").mkdir()
        (checkout / "empty" / "token").touch()
    refused = node(checkout, *arguments, **environment)
    assert refused.returncode != 0
    assert said in refused.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_unit_is_what_systemd_takes(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "sluice.service").read_text("utf-8")
    unit = tmp_path / "sluice.service"
    unit.write_text(text.replace("/opt/sluice", str(ROOT)), encoding="utf-8")
    checked = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert [line for line in checked.stderr.splitlines() if "sluice" in line] == []
