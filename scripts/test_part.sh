#!/usr/bin/env bash
# Runs pytest on one part of the tests (make test): a line of progress now and then, and the report without the passed tests at the end.
#   bash scripts/test_part.sh PATH [pytest's options]
report=$(mktemp)
trap 'kill $tests $lines 2>/dev/null; rm -f "$report"' EXIT

progress() {
  local now last=
  while sleep 20 >/dev/null 2>&1; do
    now=$(grep -oE '\[ *[0-9]+%\]$' "$report" | tail -n 1)
    [ "$now" = "$last" ] || echo "$1 $now"
    last=$now
  done
}

echo "$1 started"
python -m pytest -vv "$@" >"$report" 2>&1 &  # with -q in pyproject.toml: a line for each test
tests=$!
progress "$1" &
lines=$!
wait "$tests"
code=$?
kill "$lines"
wait "$lines" 2>/dev/null
tests= lines=
printf '\n'
echo "pytest $*"
grep -vE ' PASSED +\[ *[0-9]+%\]$' "$report"
exit "$code"
