#!/usr/bin/env bash
# A container's part of a cluster, in the foreground: `node.sh head OPTIONS` or `node.sh worker HEAD OPTIONS`.
#
# OPTIONS go to start_cluster.sh. HEAD is the head's name or address. From the environment:
#   NODE_IP      this container's address for the others
#   SLUICE_KEYS  the cluster's secrets, from keys.sh: the folder of a mounted Secret, or the line
#   SLUICE_HOME  folder for the secrets and all other files of this node; it may end with the container
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/../.."
readonly RAY_PORT=6379 HEAD_S=900

fail() { echo "node: $1" >&2; exit 2; }

role=${1:-}
[[ $role == head || $role == worker ]] || fail "the role is ${role:-not given}. Give head, or worker and the head's address."
shift
: "${NODE_IP:?is not set. Give this container\'s address for the others}"
: "${SLUICE_KEYS:?is not set. deploy/containers/keys.sh makes the secrets}"
: "${SLUICE_HOME:?is not set. Give a folder that this user may write}"

# A Secret's files are links that the group may read; ours must be readable by their owner only.
umask 077
mkdir -p "$SLUICE_HOME/keys"
if [[ -d $SLUICE_KEYS ]]; then
    from=$SLUICE_KEYS
else
    from=$(mktemp -d)
    base64 --decode <<<"$SLUICE_KEYS" 2>/dev/null | tar --extract --gzip --directory "$from" 2>/dev/null ||
        fail "SLUICE_KEYS is neither a folder nor a line from deploy/containers/keys.sh."
fi
for path in "$from"/*; do
    case ${path##*/} in
        auth_token) install -m 600 "$path" "$SLUICE_HOME/ray_token" ;;
        *.pub | *.sec) install -m 600 "$path" "$SLUICE_HOME/keys/" ;;
        *) install -m 600 "$path" "$SLUICE_HOME/" ;;
    esac
done
[[ $from == "$SLUICE_KEYS" ]] || rm -rf "$from"
unset SLUICE_KEYS
umask 022

if [[ $role == head ]]; then
    exec deploy/start_cluster.sh --node-ip "$NODE_IP" --ray-port "$RAY_PORT" --block "$@"
fi
head=${1:-}
[[ -n $head && $head != --* ]] || fail "a worker needs the head's address: worker HEAD."
shift
until (exec 3<>"/dev/tcp/$head/$RAY_PORT") 2>/dev/null; do
    ((SECONDS < HEAD_S)) || fail "the head did not listen at $head:$RAY_PORT within $HEAD_S s. See its own log."
    sleep 2
done
[[ $head != *:* ]] || head="[$head]"  # IPv6
exec deploy/start_cluster.sh --address "$head:$RAY_PORT" --node-ip "$NODE_IP" --block "$@"
