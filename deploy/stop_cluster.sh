#!/usr/bin/env bash
# Ends every process of this node's cluster, and no other. It is not an error when none runs.
set -euo pipefail
unset PYTHONHOME  # else .venv would use another Python's library
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
if [[ ! -x $here/.venv/bin/python ]]; then
    echo "No Sluice cluster runs here."
    exit 0
fi
exec "$here/.venv/bin/python" -m deploy.cluster stop "$@"
