#!/usr/bin/env bash
# Ends everything of this node's cluster, and nothing else. Fine when nothing runs.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ ! -x $here/.venv/bin/python ]]; then
    echo "No Sluice cluster runs here."
    exit 0
fi
exec "$here/.venv/bin/python" -m deploy.cluster stop "$@"
