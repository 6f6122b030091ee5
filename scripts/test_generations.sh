#!/usr/bin/env bash
# Runs the test of the plug-in's ABI against older llama.cpp releases, one per generation of ggml's internal structs
# (docs/ggml_abi.md), each taken from PyPI and compiled into build/generations. The plug-in is compiled once, with the
# headers of the pinned llama.cpp; only the program that loads it is compiled against the older one. Not part of
# test.sh: it downloads 50 to 75 MB and compiles 1 to 5 minutes per release.
#
#   scripts/test_generations.sh                    all releases of the table below, ggml's libraries alone
#   scripts/test_generations.sh 0.3.16             one of them
#   TARGETS="llama llama-server" scripts/test_generations.sh 0.3.16   also compiles what this names, in bin/ of the build
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
use_ccache

OUT=$ROOT/build/generations
JOBS=${JOBS:-2}
NEWEST=$DEPS/llama  # the pinned release: its headers make the plug-in

# Generation, llama-cpp-python, hash of its source package, options of cmake. The last is the pinned release again, with
# its backends as libraries of their own, as llama.cpp's own binaries have them, and threads of its own.
TABLE="
2025-07 0.3.16 34ed0f9bd9431af045bb63d9324ae620ad0536653740e9bb163a2e1fcb973be6
2025-09 0.3.20 70f01b7d915d31c617dc66610a332cb2d51cde84c8b152d09a352206323616f5
2026-04 0.3.34 d849d286d808284f1d3ec1bd6875572430d29d1f9574a010232caa4e9cef0e35
2026-08 0.3.35 1139dbb54509074b70893fab8554e3b079aa9f4d312058ce4018ef0019e3de12
2026-08 0.3.36 832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e -DGGML_BACKEND_DL=ON -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF
"

fetch() {  # fetch VERSION HASH: the sources, in $OUT/VERSION/source
  local version=$1 hash=$2 folder=$OUT/$1
  [ -d "$folder/source" ] && return
  mkdir -p "$folder"
  say "llama-cpp-python $version: downloading"
  echo "llama-cpp-python==$version --hash=sha256:$hash" >"$folder/pinned.txt"
  logged "$folder/download.log" pip_ download --no-deps --no-build-isolation --no-binary llama-cpp-python \
    -d "$folder" -r "$folder/pinned.txt"
  rm -rf "$folder/source.part"
  mkdir "$folder/source.part"
  tar xf "$folder"/llama_cpp_python-*.tar.gz -C "$folder/source.part" --strip-components=1
  mv "$folder/source.part/vendor/llama.cpp" "$folder/source"
  rm -rf "$folder/source.part" "$folder"/llama_cpp_python-*.tar.gz
}

build() {  # build VERSION CMAKE_ARGS...: libggml and what TARGETS names
  local folder=$OUT/$1 target tools=OFF
  [ -z "${TARGETS:-}" ] || tools=ON
  local targets=(--target ggml --target ggml-cpu)
  for target in ${TARGETS:-}; do targets+=(--target "$target"); done
  say "llama-cpp-python $1: compiling (log: ${folder#"$ROOT"/}/build.log)"
  # The ceiling keeps llama.cpp's version stamp from reading this repository's commit.
  GIT_CEILING_DIRECTORIES=$OUT logged "$folder/configure.log" nice -n 10 cmake -G Ninja -S "$folder/source" \
    -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_COMMON=$tools -DLLAMA_BUILD_TOOLS=$tools -DLLAMA_BUILD_SERVER=$tools "${@:2}"
  logged "$folder/build.log" nice -n 10 cmake --build "$folder/build" -j "$JOBS" "${targets[@]}"
}

FLAGS=(-std=c++20 -O1 -fPIC -I"$ROOT/adapters")
compile_plugin() {
  nice -n 10 g++ "${FLAGS[@]}" -fvisibility=hidden -shared -I"$NEWEST/include" "$ROOT"/adapters/ggml/abi*.cc \
    "$ROOT/tests/ggml/abi_test_plugin.cc" -o "$OUT/abi_test_plugin.so" -ldl
}

# The test, and Python, which loads ggml without making its names global.
run_tests() {  # run_tests GENERATION VERSION
  local folder=$OUT/$2 lib=$OUT/$2/build/bin
  nice -n 10 g++ "${FLAGS[@]}" -I"$folder/source/ggml/include" -DPALU_ABI_TEST_PLUGIN='""' "$ROOT"/adapters/ggml/abi*.cc \
    "$ROOT/tests/ggml/abi_test.cc" -o "$folder/abi_test" -L"$lib" -lggml -lggml-base -lgtest -lgtest_main \
    -ldl -Wl,-rpath,"$lib" || return 1
  # Started where backends that are libraries are looked for.
  (cd "$lib" && PALU_ABI_TEST_PLUGIN=$OUT/abi_test_plugin.so PALU_ABI_TEST_GENERATION=$1 logged "$folder/test.log" \
    "$folder/abi_test") || return 1
  grep -E '^\[  PASSED' "$folder/test.log" | sed "s/^/  /"
  (cd "$lib" && "$PYTHON" - "$lib/libggml.so" "$OUT/abi_test_plugin.so") <<'PY'
import ctypes, sys
ggml, plugin = ctypes.CDLL(sys.argv[1]), ctypes.CDLL(sys.argv[2])
ggml.ggml_backend_load.restype = ctypes.c_void_p
if ggml.ggml_backend_dev_count() == 0:
    ggml.ggml_backend_load_all()
plugin.palu_test_error.restype = plugin.palu_test_generation.restype = ctypes.c_char_p
if not ggml.ggml_backend_load(sys.argv[2].encode()):
    sys.exit("  from Python: " + plugin.palu_test_error().decode())
print("  from Python:", plugin.palu_test_generation().decode())
PY
}

[ -e "$NEWEST/include/ggml.h" ] || die "no llama.cpp in .deps/llama: run scripts/setup.sh"
make_venv
mkdir -p "$OUT"
compile_plugin
failed=0
while read -r generation version hash options; do
  [ -n "$generation" ] || continue
  [ $# = 0 ] || [[ " $* " == *" $version "* ]] || continue
  fetch "$version" "$hash"
  # shellcheck disable=SC2086
  build "$version" $options
  say "generation $generation, llama-cpp-python $version:"
  run_tests "$generation" "$version" || { say "FAILED"; failed=1; }
done <<<"$TABLE"
exit $failed
