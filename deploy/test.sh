#!/usr/bin/env bash
# Sets up what is missing, then lint, format, types, import contract and all tests; the first that fails ends it.
# Arguments go to pytest: deploy/test.sh tests/protocol -k codec
# Without arguments the tests run in two lanes side by side, which take about as long: those with the mark `stack` wait
# for a cluster or an engine most of the time; all others, those with the mark `ranks` among them, keep a core busy.
# There a test that fails is run once more, as a machine may give a process no time for seconds: the last line counts
# those that passed at the second try, the lanes name them, and more than three of them are a failure.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
deploy/setup.sh

scratch=$(mktemp -d "${TMPDIR:-/tmp}/sluice-test.XXXXXX")
# A cluster of the user's own is neither found nor touched: tests have a home and ports of their own.
export SLUICE_HOME="$scratch/home" PATH="$PWD/.venv/bin:$PATH"
# Two processes on two cores: more threads would only take turns.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Ray reads this when it is first imported, by whichever test that is: listen on loopback alone.
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 RAY_USAGE_STATS_ENABLED=0
# Where this is set, each of hundreds of processes compiles all that it imports.
unset PYTHONDONTWRITEBYTECODE
unit=
cleanup() {
    [[ -z $unit ]] || kill "$unit" 2>/dev/null || true
    SLUICE_HOME="$scratch/home" python -m deploy.cluster stop >/dev/null || true
    rm -rf "$scratch"
}
trap cleanup EXIT

# pytest, whose process ends when it has reported. It has been a driver of Ray, the front of vLLM engines and a rank of
# gloo groups: their threads outlive what Python takes apart at its end, and 176 tests that had passed ended in a
# segmentation fault there. Ray ends its own workers so. What dies before says where.
LANE='
import os, sys, pytest
status = pytest.main(sys.argv[1:])
sys.stdout.flush(), sys.stderr.flush()
os._exit(status)'

# NAME and pytest's arguments: one lane, with a home and a temporary folder of its own.
lane() {
    local name=$1
    shift
    SLUICE_HOME="$scratch/home-$name" python -X faulthandler -c "$LANE" -q --durations=15 --basetemp "$scratch/$name" \
        --junitxml "$scratch/$name.xml" --reruns 1 --reruns-delay 5 -raR "$@"
}

# Counts what the lanes did, from what pytest wrote of each: NAME.xml and NAME.log.
COUNT='
import sys, xml.etree.ElementTree as xml
from pathlib import Path
lanes = [Path(path) for path in sys.argv[1:]]
suites = [next(xml.parse(lane.with_suffix(".xml")).iter("testsuite")) for lane in lanes]
total, failed, errors, skipped = (sum(int(s.get(key)) for s in suites) for key in ("tests", "failures", "errors", "skipped"))
lines = [line for lane in lanes for line in lane.with_suffix(".log").read_text(errors="replace").splitlines()]
again = len({line for line in lines if line.startswith("PASSED tests/")})  # only tests that ran twice are named so
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
lane unit -m "not stack or ranks" >"$scratch/unit.log" 2>&1 &
unit=$!
status=0
lane stack -m "stack and not ranks" | tee "$scratch/stack.log" || status=$?
wait "$unit" || status=$?
unit=
echo "== tests that start no cluster =="
cat "$scratch/unit.log"
python -c "$COUNT" "$scratch/unit" "$scratch/stack" || status=$?
exit "$status"
