#!/usr/bin/env bash
# Sets up what is missing, then lint, format, types, import contract and all tests; the first that fails ends it.
# Arguments go to pytest: deploy/test.sh tests/protocol -k codec
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
deploy/setup.sh

scratch=$(mktemp -d "${TMPDIR:-/tmp}/sluice-test.XXXXXX")
# A cluster of the user's own is neither found nor touched: tests have a home and ports of their own.
export SLUICE_HOME="$scratch/home" PATH="$PWD/.venv/bin:$PATH"
# Two processes on two cores: more threads would only take turns.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Ray reads this when it is first imported, by whichever test that is: listen on loopback alone.
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 RAY_USAGE_STATS_ENABLED=0
cleanup() {
    python -m deploy.cluster stop >/dev/null || true
    rm -rf "$scratch"
}
trap cleanup EXIT

ruff check .
ruff format --check .
mypy
lint-imports
python -m pytest -q --durations=15 --basetemp "$scratch/pytest" "$@"
