#!/usr/bin/env bash
# Sets up what is missing, then starts this node's part of a cluster: Ray, the retriever, the reward server, the fleet.
# A second call finds what is healthy and starts only what is not. --help lists the options.
set -euo pipefail
unset PYTHONHOME  # another Python's library would be taken for that of .venv
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
umask "$(printf '%03o' $((0$(umask) | 02)))"  # whatever the user's is, strangers write nothing of a cluster's
"$here/deploy/setup.sh"
exec "$here/.venv/bin/python" -m deploy.cluster start "$@"
