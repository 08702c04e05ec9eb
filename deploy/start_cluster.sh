#!/usr/bin/env bash
# `sluice start` of a checkout: sets up .venv first. A second call starts only what is not healthy. --help lists the options.
set -euo pipefail
unset PYTHONHOME  # else .venv would use another Python's library
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
"$here/deploy/setup.sh"
exec "$here/.venv/bin/python" -m deploy.cluster start "$@"
