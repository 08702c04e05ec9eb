#!/usr/bin/env bash
# Makes .venv from the complete lock of this kind of machine. start_cluster.sh and test.sh call it first.
# A second run finds the stamp and returns at once. Needs Python 3.11, bash, a C++ compiler and a package index; no root.
# SLUICE_PYTHON names another Python 3.11; pip's settings (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf, ...) are respected.
# SLUICE_LOCK=cpu or gpu chooses the lock (images are built without a GPU); none keeps .venv as it is.
set -euo pipefail
umask "$(printf '%03o' $((0$(umask) | 02)))"  # other users may never write here
unset PYTHONHOME  # else .venv would use another Python's library
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

readonly PYTORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
readonly UV_PIN="uv==0.13.8"
readonly NVIDIA_DRIVER=580  # oldest for CUDA 13, of which requirements-gpu.lock has the packages
readonly LOG=.venv/setup.log
readonly PROBE='
import os, sys
base = sys._base_executable
if sys.version_info[:2] != (3, 11) or not os.access(base, os.X_OK):
    sys.exit(1)
print(base)'

main() {
    local kind needed_gib stamp
    kind=$(kind_of_machine)
    case $kind in
        cpu) needed_gib=6 ;;
        gpu) needed_gib=14 ;;
        none)
            [[ -x .venv/bin/python ]] || fail "SLUICE_LOCK=none, and $PWD/.venv is not there. Make it, or unset SLUICE_LOCK."
            return
            ;;
        *) fail "SLUICE_LOCK=$kind is not known. Use cpu, gpu or none, or unset it: then nvidia-smi is asked." ;;
    esac
    local lock=requirements-$kind.lock
    stamp="$lock $(cat "$lock" pyproject.toml | sha256sum | cut -d' ' -f1) $PWD"
    # LD_PRELOAD, which loads the engine's OpenMP, is split at both and cannot quote them.
    [[ $PWD != *[[:space:]:]* ]] ||
        fail "the path $PWD has a space or a colon, and the engine cannot run there. Move the checkout to a path without."
    is_ready "$stamp" && return
    check_other_lock "$lock"
    [[ $kind != gpu || -n ${SLUICE_LOCK:-} ]] || check_driver
    check_machine "$needed_gib"
    mkdir -p .venv 2>/dev/null || fail "$PWD cannot be written. Work in a clone of your own."
    # One set-up at a time; the next one finds the stamp. (.venv/.lock is uv's own: uv would wait for us.)
    exec 9>.venv/.setup-lock || fail "$PWD/.venv cannot be written. Work in a clone of your own."
    flock 9
    is_ready "$stamp" && return
    echo "setup: installing $lock into .venv (log: $LOG)"
    rm -f .venv/.stamp
    : >"$LOG"
    make_venv
    find_cache
    install_lock "$lock"
    echo "$stamp" >.venv/.stamp
    echo "setup: ready after $SECONDS s"
}

# The lock's kind: SLUICE_LOCK, else gpu where there is an NVIDIA GPU.
kind_of_machine() {
    local listed status=0
    if [[ -n ${SLUICE_LOCK:-} ]]; then
        echo "$SLUICE_LOCK"
    else
        listed=$(nvidia-smi -L 2>/dev/null) || status=$?
        if [[ $'\n'$listed == *$'\nGPU '* ]]; then
            echo gpu
        else
            echo cpu
            # 127: there is no nvidia-smi
            ((status == 0 || status == 127)) || echo "setup: nvidia-smi fails here (${listed%%$'\n'*}), so the packages" \
                "without CUDA are taken. Repair the driver, or set SLUICE_LOCK=gpu." >&2
        fi
    fi
}

is_ready() {
    [[ -x .venv/bin/python && -f .venv/.stamp && $(<.venv/.stamp) == "$1" ]]
}

# Nodes of another kind may share this checkout and its .venv: it is not replaced without a request.
check_other_lock() {
    local lock=$1 there
    [[ -z ${SLUICE_LOCK:-} && -f .venv/.stamp ]] || return 0
    there=$(cut -d' ' -f1 .venv/.stamp)
    [[ $there == "$lock" || ! -f $there ]] || fail "$PWD/.venv has $there, and this machine is one for $lock. Set" \
        "SLUICE_LOCK=$(kind_of "$there") to use it as it is, SLUICE_LOCK=$(kind_of "$lock") to have it replaced, for all machines" \
        "that share it."
}

kind_of() {
    local name=${1#requirements-}
    echo "${name%.lock}"
}

check_driver() {
    local driver
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || return 0
    driver=${driver%%$'\n'*}
    [[ $driver =~ ^[0-9]+[.] ]] && ((${driver%%.*} < NVIDIA_DRIVER)) || return 0
    fail "the NVIDIA driver is $driver, and CUDA 13 needs $NVIDIA_DRIVER or newer. Update it, or set SLUICE_LOCK=gpu where" \
        "NVIDIA's cuda-compat package is installed, or SLUICE_LOCK=cpu to use no GPU."
}

check_machine() {
    local needed_gib=$1 free_kib
    find_python
    "$python" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        fail "$python has no C headers (Python.h), which DeepSpeed compiles against. Install them (Debian: python3.11-dev)."
    command -v g++ >/dev/null || fail "a C++ compiler is needed, and g++ is not on PATH. Install it (Debian: g++)."
    free_kib=$(df -Pk . | awk 'NR == 2 {print $4}')
    if ((free_kib < needed_gib * 1024 * 1024)); then
        fail "$PWD has $((free_kib / 1024 / 1024)) GiB free, and the packages need $needed_gib GiB. Free some space."
    fi
}

# Sets `python`: the user's choice, else the one of .venv, else the first on PATH.
find_python() {
    local candidate
    local -a candidates=(.venv/bin/python python3.11 python3 python)
    [[ -z ${SLUICE_PYTHON:-} ]] || candidates=("$SLUICE_PYTHON")
    python=
    for candidate in "${candidates[@]}"; do
        # The real path: a new virtual environment replaces the link in .venv.
        if python=$("$candidate" -c "$PROBE" 2>/dev/null); then
            return
        fi
    done
    [[ -z ${SLUICE_PYTHON:-} ]] ||
        fail "SLUICE_PYTHON=$SLUICE_PYTHON is $(version_of "$SLUICE_PYTHON"); Python 3.11 is needed. Name one, or unset it."
    fail "Python 3.11 is needed; found $(version_of python3). Install it (where no package has it: uv python install 3.11), or" \
        "name it in SLUICE_PYTHON."
}

version_of() {
    "$1" --version 2>/dev/null || echo "none"
}

make_venv() {
    local -a options=()
    uv=$(command -v uv || true)
    [[ -z $uv ]] || options=(--without-pip)
    # Checked before .venv changes: a half-made virtual environment is useless.
    if ! "$python" -c 'import venv' 2>>"$LOG" || { [[ -z $uv ]] && ! "$python" -c 'import ensurepip' 2>>"$LOG"; }; then
        fail "$python cannot make a virtual environment. Install its venv module (Debian: python3.11-venv)."
    fi
    # A moved or half-made venv is refreshed in place; fitting packages stay.
    if ! "$python" -m venv "${options[@]}" .venv >>"$LOG" 2>&1; then
        fail "$python cannot make a virtual environment (see $LOG). Install its venv module (Debian: python3.11-venv)."
    fi
    if [[ -z $uv ]]; then
        uv=.venv/bin/uv
        export PIP_DISABLE_PIP_VERSION_CHECK=1
        [[ -x $uv ]] || .venv/bin/python -m pip install --quiet "$UV_PIN" >>"$LOG" 2>&1 || fail "$(explain_log)"
    fi
    # pip's settings become uv's: a company's mirror is usually configured for pip only.
    local line
    while IFS= read -r line; do
        export "${line?}"
    done < <("$python" deploy/pip_settings.py)
    # As pip does: the best version of all indices, not the first index with the name.
    export UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}"
}

# uv's cache is in the home folder; a container's arbitrary user may have none that is writable.
find_cache() {
    local cache=${UV_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/uv}
    if ! { mkdir -p "$cache" && [[ -w $cache ]]; } 2>/dev/null; then
        export UV_CACHE_DIR=$PWD/.venv/.uv-cache
        echo "setup: $cache cannot be written; packages are kept in $UV_CACHE_DIR"
    fi
}

install_lock() {
    local lock=$1
    local -a index=()
    if [[ $lock == requirements-cpu.lock ]] && ! knows_torch; then
        index=(--index "$PYTORCH_CPU_INDEX")
    fi
    # --no-deps: the lock is complete, without packages that text models on CPUs do not need.
    install --no-deps "${index[@]}" --requirement "$lock"
    # The project itself, in place: vLLM finds Sluice's weight-transfer engine through its entry point.
    install --no-deps --no-build-isolation --editable .
    [[ $lock != requirements-gpu.lock ]] || check_build
}

# Another index may have a build of the same version without CUDA.
check_build() {
    local cuda
    cuda=$(.venv/bin/python -c 'import torch; print(torch.version.cuda)' 2>>"$LOG") || return 0
    [[ $cuda != None ]] || fail "the index gave a torch without CUDA for $lock. Unset PIP_FIND_LINKS, PIP_INDEX_URL and" \
        "PIP_EXTRA_INDEX_URL or name an index with CUDA builds, remove .venv and run this again."
}

knows_torch() {
    "$uv" pip install --python .venv/bin/python --no-deps --dry-run --quiet "$(grep '^torch==' requirements-cpu.lock)" \
        >>"$LOG" 2>&1
}

install() {
    "$uv" pip install --python .venv/bin/python --quiet "$@" >>"$LOG" 2>&1 || fail "$(explain_log)"
}

explain_log() {
    if grep -qiE 'no space left' "$LOG"; then
        echo "the disk is full. Free some space and run this again."
    elif grep -qiE 'dns|connect|timed out|sending request|unreachable|temporary failure' "$LOG"; then
        echo "the package index is out of reach (see $LOG). Check the network, or name a mirror in PIP_INDEX_URL."
    elif grep -qiE 'permission denied|read-only file system' "$LOG"; then
        echo "$PWD/.venv cannot be written. Work in a clone of your own."
    else
        echo "the packages could not be installed; $PWD/$LOG says why: $(grep -m1 -iE 'error|because|not' "$LOG" | tr -s ' ')"
    fi
}

fail() {
    echo "setup: $*" >&2
    exit 1
}

main "$@"
