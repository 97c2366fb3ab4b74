#!/usr/bin/env bash
# Install steps of the container images, for Dockerfile and apptainer.def. `compiler`: Triton and torch.compile start one.
# `install SOURCES PREFIX [INDEX]`: wheels of all distributions in a virtual environment; INDEX is also searched for torch.
# Seen to fail: a step that is not one of them, sources without constraints.txt.
set -euo pipefail

compiler() {
  apt-get update
  apt-get install -y --no-install-recommends g++
  rm -rf /var/lib/apt/lists/*
}

install() {
  local sources=$1 prefix=$2 index=${3:-} work
  work=$(mktemp -d)
  export PIP_CACHE_DIR="$work/cache" PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
  python -m venv "$prefix"
  "$prefix/bin/pip" wheel -q --no-deps -w "$work/wheels" "$sources"/packages/* "$sources"/apps/*
  "$prefix/bin/pip" install -q -c "$sources/constraints.txt" ${index:+--extra-index-url "$index"} "$work"/wheels/*.whl
  rm -rf "$work"
  cp "$sources/apps/train/configs/debug.toml" "$prefix"
}

case ${1:-} in
  compiler|install) "$@" ;;
  *) echo "container.sh: ${1:-} is not a step: use compiler or install" >&2; exit 2 ;;
esac
