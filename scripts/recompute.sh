#!/usr/bin/env bash
# Runs a command in a temporary clone of HEAD and compares every CSV file it leaves with the committed one.
#   bash scripts/recompute.sh make repro            what a newcomer runs
#   bash scripts/recompute.sh dvc repro --force     what the paper shows, on synthetic images and texts
# The environment of VENV (default .venv) is used; PYTHONPATH makes it run the clone's code. The clone goes when the command ends.
set -euo pipefail
cd "$(dirname "$0")/.."

export VENV="${VENV:-$PWD/.venv}"
if ! git rev-parse --verify --quiet HEAD >/dev/null; then
  echo "recompute: there is no commit to compare with; this needs a git checkout" >&2
  exit 2
fi
if [ -n "$(git status --porcelain)" ]; then
  echo "recompute: uncommitted changes are not included; the clone has HEAD" >&2
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/featcal-recompute.XXXXXX")
trap 'rm -rf "$work"' EXIT
git clone --quiet . "$work/clone"
cp -r "$work/clone/results" "$work/committed"

(
  cd "$work/clone"
  export PYTHONPATH="$PWD" PATH="$VENV/bin:$PATH" DVC_NO_ANALYTICS=1 HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
  "$@"
)
PYTHONPATH="$PWD" "$VENV/bin/python" scripts/compare_results.py "$work/committed" "$work/clone/results"
