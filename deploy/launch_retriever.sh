#!/usr/bin/env bash
# Starts the retriever of this node in the foreground; runs on every node that hosts a rollout server.
# All arguments go to `python -m retriever.serve`; see its --help. start_cluster.sh --retriever-script replaces it by a
# user's own script.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[[ -f pyproject.toml ]] || python=python  # installed: the environment that started the cluster is first on PATH
if ! command -v "$python" >/dev/null; then
    echo "retriever: $PWD/$python is missing. Run deploy/setup.sh first." >&2
    exit 1
fi
# A search takes a fraction of a millisecond; more threads would take cores from the rollout servers.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$python" -m retriever.serve "$@"
