#!/usr/bin/env bash
# Makes the secrets of a new cluster and prints them, for nodes that cannot get a join file.
#
#     deploy/containers/keys.sh secret NAME | kubectl apply -f -     # a Secret of Kubernetes
#     deploy/containers/keys.sh line                                 # one line, for SLUICE_KEYS in a container's environment
#
# The secrets give full access to the cluster, and are saved nowhere else. node.sh takes both forms. Run deploy/setup.sh first.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/../.."
umask 077

fail() { echo "keys: $1" >&2; exit 2; }

form=${1:-} name=${2:-}
[[ $form == line || $form == secret ]] || fail "give the form: secret NAME, or line."
[[ $form == line || $name =~ ^[a-z0-9]([a-z0-9-]*[a-z0-9])?$ ]] ||
    fail "secret ${name:-(none)} is not a name for Kubernetes. Use small letters, digits and hyphens."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
TMPDIR=$folder SLUICE_HOME=$folder/home .venv/bin/python -c '
from deploy.node.home import make_home, this_home
from shutil import copy

make_home(this_home(), is_joining=False)
for path in this_home().secret_files:
    # KubeRay expects the token of Ray under this name.
    copy(path, this_home().root.parent / {"ray_token": "auth_token"}.get(path.name, path.name))
'
cd "$folder"
mapfile -t files < <(find . -maxdepth 1 -type f -printf '%P\n' | sort)
if [[ $form == line ]]; then
    tar --create --gzip "${files[@]}" | base64 --wrap 0
    echo
    exit
fi
printf 'apiVersion: v1\nkind: Secret\nmetadata:\n  name: %s\ntype: Opaque\ndata:\n' "$name"
for file in "${files[@]}"; do
    printf '  %s: %s\n' "$file" "$(base64 --wrap 0 "$file")"
done
