#!/usr/bin/env bash
# Runs pytest on one part of the tests (make test): a line of progress now and then, and the whole report at the end.
#   bash scripts/test_part.sh PATH [pytest's options]
report=$(mktemp)
trap 'kill $tests $lines 2>/dev/null; rm -f "$report"' EXIT

progress() {
  local now last=
  while sleep 20 >/dev/null 2>&1; do
    now=$(grep -o '\[ *[0-9]*%\]' "$report" | tail -n 1)
    [ "$now" = "$last" ] || echo "$1 $now"
    last=$now
  done
}

echo "$1 started"
python -m pytest "$@" >"$report" 2>&1 &
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
cat "$report"
exit "$code"
