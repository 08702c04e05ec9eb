#!/usr/bin/env bash
# Sets up what is missing, then starts this node's part of a cluster: Ray, the retriever, the reward server, the fleet.
# A second call finds what is healthy and starts only what is not. --help lists the options.
set -euo pipefail
unset PYTHONHOME  # another Python's library would be taken for that of .venv
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
umask "$(printf '%03o' $((0$(umask) | 02)))"  # whatever the user's is, strangers write nothing of a cluster's
"$here/deploy/setup.sh" </dev/null  # standard input may hold a code for --join
# Servers, ranks and agents are open sockets of the processes that start here, which take this limit over.
readonly MANY_FILES=65536 FEW_FILES=8192
if [[ $(ulimit -Sn) != unlimited ]] && (($(ulimit -Sn) < MANY_FILES)); then
    ulimit -Sn "$MANY_FILES" 2>/dev/null || ulimit -Sn "$(ulimit -Hn)"
    (($(ulimit -Sn) >= FEW_FILES)) || echo "start_cluster: a process may open $(ulimit -Sn) files here (ulimit -Hn);" \
        "hundreds of servers or agents need $MANY_FILES. Raise LimitNOFILE, docker's --ulimit nofile or limits.conf." >&2
fi
exec "$here/.venv/bin/python" -m deploy.cluster start "$@"
