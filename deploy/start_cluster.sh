#!/usr/bin/env bash
# Sets up .venv, then starts this node's part of a cluster: Ray, the retriever, the reward server, the fleet.
# A second call starts only the parts that are not healthy. --help lists the options.
set -euo pipefail
unset PYTHONHOME  # else .venv would use another Python's library
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
umask "$(printf '%03o' $((0$(umask) | 02)))"  # other users may never write a cluster's files
"$here/deploy/setup.sh"
# Each server, rank and agent is several open sockets. The processes started here inherit this limit.
readonly MANY_FILES=65536 FEW_FILES=8192
if [[ $(ulimit -Sn) != unlimited ]] && (($(ulimit -Sn) < MANY_FILES)); then
    ulimit -Sn "$MANY_FILES" 2>/dev/null || ulimit -Sn "$(ulimit -Hn)"
    (($(ulimit -Sn) >= FEW_FILES)) || echo "start_cluster: a process may open $(ulimit -Sn) files here (ulimit -Hn);" \
        "hundreds of servers or agents need $MANY_FILES. Raise LimitNOFILE, docker's --ulimit nofile or limits.conf." >&2
fi
exec "$here/.venv/bin/python" -m deploy.cluster start "$@"
