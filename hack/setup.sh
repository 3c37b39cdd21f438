#!/usr/bin/env bash
# Makes .venv from the hash-pinned requirement files and installs the Debian packages that tests and demo use.
# Idempotent: a stamp of the requirement files' digests makes a second run cost nothing. As root it installs
# Debian packages itself, otherwise it says which ones are missing.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
stamp=.venv/kvfleet-setup.sha256
# command:package
needed=(redis-server:redis-server prometheus:prometheus promtool:prometheus fio:fio openssl:openssl)

say() { printf '\033[2m[setup]\033[0m %s\n' "$*" >&2; }

die() {
  say "$*"
  exit 1
}

missing_packages() {
  local pair
  for pair in "${needed[@]}"; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || echo "${pair##*:}"
  done | sort -u
}

install_packages() {
  local packages
  packages=$(missing_packages | tr '\n' ' ')
  [ -n "$packages" ] || return 0
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    die "missing programs; install these Debian packages and run again: sudo apt-get install -y $packages"
  fi
  say "installing Debian packages: $packages"
  # Debian starts the services it installs; kvfleet starts its own servers, on ports of its own.
  printf '#!/bin/sh\nexit 101\n' >/tmp/kvfleet-policy-rc.d && chmod 755 /tmp/kvfleet-policy-rc.d
  [ -e /usr/sbin/policy-rc.d ] || { cp /tmp/kvfleet-policy-rc.d /usr/sbin/policy-rc.d && trap 'rm -f /usr/sbin/policy-rc.d' EXIT; }
  DEBIAN_FRONTEND=noninteractive apt-get -qq update
  # shellcheck disable=SC2086  # A list of names.
  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $packages >/dev/null
}

digest() { cat requirements/dev.txt requirements/nixl.txt pyproject.toml hack/setup.sh | sha256sum | cut -d' ' -f1; }

make_venv() {
  "$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' ||
    die "Python 3.11 or 3.12 is needed, $python is $("$python" -V 2>&1); set PYTHON=/path/to/python3.11"
  say "making .venv ($("$python" -V))"
  rm -rf .venv
  "$python" -m venv .venv || die "python3-venv is missing: sudo apt-get install -y python3-venv"
  # uv alone first, with its pinned hashes, then everything else through it.
  awk '/^uv==/{on=1} on{print} on&&!/\\$/{exit}' requirements/dev.txt >.venv/uv.txt
  .venv/bin/python -m pip --quiet --disable-pip-version-check install --require-hashes -r .venv/uv.txt
  say "installing $(grep -c '==' requirements/dev.txt) pinned packages (torch brings CUDA libraries: 5 GB, minutes on a slow line)"
  .venv/bin/uv pip install --python .venv/bin/python --require-hashes -r requirements/dev.txt
  .venv/bin/uv pip install --python .venv/bin/python --require-hashes --no-deps -r requirements/nixl.txt
  .venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation -e .
}

install_packages
if [ "$(cat $stamp 2>/dev/null)" != "$(digest)" ]; then
  make_venv
  digest >$stamp
  say "ready"
fi
.venv/bin/python hack/native_build.py # Sources change more often than requirements.
