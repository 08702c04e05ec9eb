#!/usr/bin/env bash
# Sets up .venv, then runs lint, format, types, import contracts and all tests; the first failure ends it.
# Arguments go to pytest: deploy/test.sh tests/protocol -k codec
# Without arguments the tests run in three lanes in parallel: tests with the mark `stack` mostly wait for a cluster; all
# others keep a core busy, in two lanes of lower priority and of about the same length. A failed test is repeated once,
# because a busy machine may stop a process for seconds. The last line counts tests that passed at the second try; more
# than three of them are a failure.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
deploy/setup.sh

scratch=$(mktemp -d "${TMPDIR:-/tmp}/sluice-test.XXXXXX")
# Tests have their own home and ports: they never touch the user's cluster.
export SLUICE_HOME="$scratch/home" PATH="$PWD/.venv/bin:$PATH"
# Two processes on two cores: more threads do not help.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# A rank without servers uses both cores, which the lanes share: threads that spin at a barrier cost ten times the work.
export OMP_WAIT_POLICY=passive
# One cache for the homes of all lanes: vLLM inspects a class of models once, for 8 s of a core.
export VLLM_CACHE_ROOT="$scratch/vllm"
# Ray reads this at its first import: listen on loopback only.
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 RAY_USAGE_STATS_ENABLED=0
# With it, each of hundreds of processes would compile all its imports.
unset PYTHONDONTWRITEBYTECODE
units=()
cleanup() {
    kill "${units[@]}" 2>/dev/null || true
    SLUICE_HOME="$scratch/home" python -m deploy.cluster stop >/dev/null || true
    rm -rf "$scratch"
}
trap cleanup EXIT

# pytest, in a process that exits without Python's clean-up. It was a driver of Ray, the front of vLLM engines and a rank
# of gloo groups, and their threads crash during the clean-up: 176 passed tests ended in a segmentation fault.
LANE='
import os, sys, pytest
status = pytest.main(sys.argv[1:])
sys.stdout.flush(), sys.stderr.flush()
os._exit(status)'

# lane NAME ARGUMENTS: becomes pytest, with its own home and temporary folder.
lane() {
    local name=$1
    shift
    SLUICE_HOME="$scratch/home-$name" exec python -X faulthandler -c "$LANE" -q --durations=15 --basetemp "$scratch/$name" \
        --junitxml "$scratch/$name.xml" --reruns 1 --reruns-delay 5 -raR "$@"
}

# Counts the lanes' results from NAME.xml and NAME.log.
COUNT='
import sys, xml.etree.ElementTree as xml
from pathlib import Path
lanes = [Path(path) for path in sys.argv[1:]]
suites = [next(xml.parse(lane.with_suffix(".xml")).iter("testsuite")) for lane in lanes]
total, failed, errors, skipped = (sum(int(s.get(key)) for s in suites) for key in ("tests", "failures", "errors", "skipped"))
lines = [line for lane in lanes for line in lane.with_suffix(".log").read_text(errors="replace").splitlines()]
again = len({line for line in lines if line.startswith("PASSED tests/")})  # only tests that ran twice have such a line
second = f" ({again} at the second try)" if again else ""
print(f"{total - failed - errors - skipped} passed{second}, {failed + errors} failed, {skipped} skipped")
sys.exit("more than 3 tests needed a second try" if again > 3 else 0)'

ruff check .
ruff format --check .
mypy
lint-imports
if (($#)); then
    python -m pytest -q --durations=15 --basetemp "$scratch/pytest" "$@"
    exit
fi
# unit_lane NAME PATH...: starts a lane of the tests that start no cluster.
unit_lane() {
    lane "$@" -m "not stack or ranks" >"$scratch/$1.log" 2>&1 &
    units+=($!)
    renice -n 5 "$!" >/dev/null || true
}
models=(tests/learner tests/textbook tests/flow tests/rollout/engine)
unit_lane models "${models[@]}"
unit_lane others "${models[@]/#/--ignore=}" tests
status=0
# Only their files: to collect all tests takes 20 s of a core.
mapfile -t stack < <(grep -rl --include="test_*.py" "mark\.stack" tests | sort)
lane stack -m "stack and not ranks" "${stack[@]}" | tee "$scratch/stack.log" || status=$?
for unit in "${units[@]}"; do wait "$unit" || status=$?; done
units=()
echo "== tests that start no cluster =="
cat "$scratch/models.log" "$scratch/others.log"
python -c "$COUNT" "$scratch"/{models,others,stack} || status=$?
exit "$status"
