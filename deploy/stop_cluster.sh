#!/usr/bin/env bash
# Ends everything of this node's cluster, and nothing else. Fine when nothing runs.
set -euo pipefail
unset PYTHONHOME  # another Python's library would be taken for that of .venv
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
if [[ ! -x $here/.venv/bin/python ]]; then
    echo "No Sluice cluster runs here."
    exit 0
fi
exec "$here/.venv/bin/python" -m deploy.cluster stop "$@"
