#!/usr/bin/env bash
# Runs every invariant and every threat at the full counts of their tables, laws on new examples, then the mutants, and keeps the log.
# Usage: hack/soak.sh ["INVARIANT ..." ...]    FIRST_SEED=n where seeds start
set -uo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = "--help" ]; then
  sed -n '2,3s/^# //p' "$0"
  exit 0
fi
export PYTHONPATH=tests
python=.venv/bin/python
first_seed=${FIRST_SEED:-0}
mkdir -p docs/evidence
log=docs/evidence/soak-$(date -u +%Y%m%dT%H%MZ).log
status=0

run() {
  echo "\$ $*" | tee -a "$log"
  # Progress lines end with a carriage return or go to stderr; only whole lines of stdout are evidence.
  "$@" | tee -a "$log"
  local code=${PIPESTATUS[0]}
  echo "exit status $code" | tee -a "$log"
  [ "$code" -eq 0 ] || status=1
}

{
  echo "commit $(git rev-parse --short HEAD), $(date -u +%FT%TZ)"
  echo "$(nproc) x $(sed -n 's/^model name[[:space:]]*: //p' /proc/cpuinfo | head -1), $(uname -sr), $($python -V)"
} | tee "$log"
# The invariants of one line share their process, because one campaign of simulated fleets proves the first three.
if [ $# -eq 0 ]; then
  set -- "I1 I2 I4" I3 I5 I6 I7 I8 I9 I10 I11
fi
for invariants in "$@"; do
  # shellcheck disable=SC2086  # Words, on purpose.
  run "$python" -m faults --full --first-seed "$first_seed" --only $invariants
done
run "$python" -m threats --full
run env KVSTRATA_HYPOTHESIS_PROFILE=soak "$python" -m pytest -q -n 2 tests/unit tests/contract tests/stateful
run "$python" -m checks.mutants
echo "log: $log"
exit "$status"
