#!/usr/bin/env bash
# Chromium and its driver, with which the tests open the book's pages. Installs them with apt-get where it may.
# Without them the browser tests cannot run: an error when CI=true, a remark otherwise.
set -euo pipefail

missing() {
  command -v chromium >/dev/null || echo chromium
  command -v chromedriver >/dev/null || echo chromium-driver
}

wanted=$(missing)
[ -n "$wanted" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  # a failure is judged below, by what is there afterwards
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $wanted fonts-dejavu-core; } ||
    echo "apt-get could not install: $wanted" >&2
fi
wanted=$(missing)
[ -n "$wanted" ] || exit 0
echo "missing system packages:" $wanted "(the browser tests of the book need them)" >&2
[ "${CI:-}" != true ]
