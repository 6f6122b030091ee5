# Shared by the scripts here; sourced, not run.
# shellcheck shell=bash
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
DEPS=$ROOT/.deps
PYTHON=$([ -x /usr/bin/python3 ] && echo /usr/bin/python3 || echo python3)
VENV=$DEPS/venv
MODEL=${PALU_MODEL:-$DEPS/models/SmolLM2-135M-Instruct.Q4_1.gguf}
cd "$ROOT"

# One prefix for all messages, so that they stand out from compiler output.
say() { printf 'palu: %s\n' "$*"; }
die() {
  printf 'palu: error: %s\n' "$*" >&2
  exit 1
}

# Runs a command with its output in a log; shows the end of the log when it fails.
logged() {  # logged LOG COMMAND...
  local log=$1
  shift
  mkdir -p "$(dirname "$log")"
  if ! "$@" >"$log" 2>&1 </dev/null; then
    printf 'palu: failed: %s\npalu: last lines of %s:\n' "$*" "${log#"$ROOT"/}" >&2
    tail -n 40 "$log" >&2
    return 1
  fi
}

# Makes .deps and keeps a second script out of it until this one ends: two would write the same files.
lock_deps() {
  mkdir -p "$DEPS"
  command -v flock >/dev/null || return 0
  exec 9>"$DEPS/lock"
  flock -n 9 || { say "waiting for another set-up to end" && flock 9; }
}

make_venv() {
  [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1 && return
  rm -rf "$VENV"
  logged "$DEPS/venv.log" "$PYTHON" -m venv "$VENV"
}

pip_() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

# Object files are found again after a fresh clone: paths are cached relative to the checkout.
export CCACHE_BASEDIR=$ROOT CCACHE_NOHASHDIR=1
use_ccache() {
  command -v ccache >/dev/null || return 0
  export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
}
