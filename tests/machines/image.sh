#!/usr/bin/env bash
# Builds the CPU image of deploy/containers where no image registry is in reach, and trains in it.
#
#     tests/machines/image.sh [FOLDER]
#
# debootstrap makes the base, of this machine's Debian mirror; it is given this machine's certificates and settings of pip,
# as an organisation's own base would have them. buildah builds on it and starts the image's command; in the same container
# a run of the quick start's settings, made short, trains three steps, the image's health check is asked, and SIGTERM ends it.
# Containers are changed roots here, with the machine's network and processes: what a runtime isolates is not tested.
# FOLDER keeps base, layers and image for the next time; else a temporary folder. 20 GB, ten minutes on two quiet cores.
# Needs root, buildah and debootstrap; where they are missing it says so and ends with 0.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly IMAGE=sluice:tested-cpu BASE=localhost/debian:tested CERTIFICATES=/etc/ssl/certs/ca-certificates.crt
say() { printf 'image: %5d s  %s\n' "$SECONDS" "$*"; }
fail() { say "failed: $*" >&2; exit 1; }

for needed in buildah debootstrap; do
    command -v "$needed" >/dev/null || { say "skipped: $needed is not installed"; exit 0; }
done
[[ $EUID == 0 ]] || { say "skipped: a changed root needs root"; exit 0; }

folder=${1:-$(mktemp -d /var/tmp/sluice-image.XXXXXX)}
mkdir -p "$folder"
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot TMPDIR=$folder
buildah() { command buildah --root "$folder/storage" --runroot "$folder/run" "$@"; }
started= container=
clean_up() {
    local status=$?
    trap - EXIT
    [[ -z $started ]] || kill "$started" 2>/dev/null || true
    [[ -z $container ]] || buildah rm "$container" >/dev/null 2>&1 || true
    ((${#given})) || rm -rf "$folder"
    exit "$status"
}
given=${1:-}
trap clean_up EXIT

# Of this machine's pip: what names an index or wheels; folders of them are seen in the build under the same path.
wheels=()
for path in $(python3 -m pip config list 2>/dev/null | grep -oE '(file://)?/[^ '"'"'"]+' | sed 's#^file://##; s#/simple/*$##') ${PIP_FIND_LINKS:-}; do
    [[ ! -d $path ]] || wheels+=(--volume "$path:$path:ro")
done

# Of the release itself: a machine's sources name others' packages too. Nothing where apt knows none: debootstrap has its own.
mirror() {
    apt-get indextargets --format '$(ORIGIN)|$(CODENAME)|$(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
        sed -n 's/^Debian|bookworm|//p' | head -1 || true
}

make_base() {
    local made
    [[ -d $folder/base/usr ]] || debootstrap --variant=minbase bookworm "$folder/base" \
        "$(mirror)" >"$folder/debootstrap.log" || fail "debootstrap: $(tail -n 1 "$folder/debootstrap.log")"
    made=$(buildah from scratch)
    buildah add --quiet "$made" "$folder/base" / >/dev/null
    [[ ! -e $CERTIFICATES ]] || buildah add --quiet "$made" "$CERTIFICATES" /certificates.crt >/dev/null
    [[ ! -e /etc/pip.conf ]] || buildah add --quiet "$made" /etc/pip.conf /etc/pip.conf >/dev/null
    buildah config --env SSL_CERT_FILE=/certificates.crt --env PIP_CERT=/certificates.crt \
        ${PIP_FIND_LINKS:+--env PIP_FIND_LINKS="$PIP_FIND_LINKS"} "$made"
    buildah commit --quiet --rm "$made" "$BASE" >/dev/null
}

below() { local child; for child in $(pgrep -P "$1"); do echo "$child"; below "$child"; done; }
first_process() { local each; for each in $(below "$started"); do [[ $(cat "/proc/$each/comm") != tini ]] || echo "$each"; done | head -1; }
# in_container CMD...: as the image's user, in its folder; what stands in VOLUME is the container's own.
in_container() { buildah run --user 1000 "$container" -- "$@"; }

buildah images --quiet "$BASE" >/dev/null 2>&1 || make_base
say "the base is there"
git ls-files -z | tar --null --files-from=- --create --file "$folder/checkout.tar"
rm -rf "$folder/checkout" && mkdir "$folder/checkout" && tar --extract --file "$folder/checkout.tar" --directory "$folder/checkout"
buildah build --format docker --layers "${wheels[@]}" --ignorefile "$folder/checkout/deploy/containers/Dockerfile.dockerignore" \
    --build-arg BASE="$BASE" --file "$folder/checkout/deploy/containers/Dockerfile" --tag "$IMAGE" "$folder/checkout" \
    >"$folder/build.log" 2>&1 || fail "the build, see $folder/build.log: $(grep -m1 -iE '^error' "$folder/build.log")"
say "built: $(buildah images --format '{{.Size}}' "$IMAGE")"

container=$(buildah from "$IMAGE")
mapfile -t command < <(buildah inspect --type image --format '{{range .Docker.Config.Entrypoint}}{{println .}}{{end}}' "$IMAGE" | sed '/^$/d')
health=$(buildah inspect --type image --format '{{range .Docker.Config.Healthcheck.Test}}{{.}} {{end}}' "$IMAGE")
in_container "${command[@]}" >"$folder/node.log" 2>&1 &
started=$!
until grep -q '^Running until' "$folder/node.log"; do
    kill -0 "$started" 2>/dev/null || fail "the image's command ended: $(tail -n 3 "$folder/node.log")"
    ((SECONDS < 1500)) || fail "the image's command is not ready: $(tail -n 3 "$folder/node.log")"
    sleep 1
done
say "the image's command runs a node"
# shellcheck disable=SC2086  # words of a command
in_container ${health#CMD } >"$folder/health.log" 2>&1 || fail "unhealthy: $(tail -n 1 "$folder/health.log")"
say "its health check is content"
in_container python -m learner.run --config quickstart --run.dir /sluice/runs --run.name tested --run.max_steps 3 \
    --policy.warm_start.max_steps 6 --eval.every_steps 0 >"$folder/learner.log" 2>&1 || fail "the run: $(tail -n 5 "$folder/learner.log")"
in_container python -m learner.audit /sluice/runs/tested >"$folder/audit.log" 2>&1 || fail "the audit: $(tail -n 3 "$folder/audit.log")"
say "$(tail -n 1 "$folder/audit.log")"
kill -TERM "$(first_process)"
wait "$started" && status=0 || status=$?
started=
((status == 0)) || fail "the image's command ended with $status after SIGTERM: $(tail -n 3 "$folder/node.log")"
say passed
