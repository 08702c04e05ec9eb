#!/usr/bin/env bash
# Sets up what is missing, then starts this node's part of a cluster: Ray, the retriever, the reward server, the fleet.
# A second call finds what is healthy and starts only what is not. --help lists the options.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$here/deploy/setup.sh"
exec "$here/.venv/bin/python" -m deploy.cluster start "$@"
