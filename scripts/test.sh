#!/usr/bin/env bash
# Sets up, builds and runs every check, from nothing, on a machine like CI's (Debian 12, 2 cores, no terminal).
#   scripts/test.sh            all steps
#   scripts/test.sh --quick    without the sanitizer builds
# Stops at the first step that fails, and names it. Logs: build/logs/. The last line is "N passed, N failed": the
# tests that ctest ran, over all builds.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

LOGS=$ROOT/build/logs
JOBS=$(nproc)
quick=no
case ${1:-} in
  "") ;;
  --quick) quick=yes ;;
  *) die "unknown argument $1; allowed: --quick" ;;
esac

passed=0 failed=0 skipped=0 current="set-up"
summary() {
  local status=$?
  if [ "$status" != 0 ]; then
    printf 'FAILED  %s\n' "$current"
    [ "$failed" -gt 0 ] || failed=1  # a step that is no test failed, or a test program did not start
  fi
  printf '\n%d passed, %d failed%s\n' "$passed" "$failed" "$([ "$skipped" = 0 ] || printf ', %d skipped' "$skipped")"
}
trap summary EXIT

# Runs one step and prints one line for it.
step() {  # step NAME COMMAND...
  local start=$SECONDS
  current=$1
  shift
  logged "$LOGS/$current.log" "$@" || return 1
  printf 'ok  %4d s  %s\n' $((SECONDS - start)) "$current"
}

# A step that runs ctest; adds its numbers to the totals, also when it fails.
tests() {  # tests NAME COMMAND...
  local start=$SECONDS log total bad=0 skip status=0
  current=$1
  log=$LOGS/$current.log
  shift
  logged "$log" "$@" || status=1
  total=$(sed -nE 's/.* tests failed out of ([0-9]+).*/\1/p' "$log" | tail -n 1)
  bad=$(sed -nE 's/.*, ([0-9]+) tests? failed out of .*/\1/p' "$log" | tail -n 1)
  skip=$(grep -c '\*\*\*Skipped' "$log" || true)
  passed=$((passed + ${total:-0} - ${bad:-0} - skip)) failed=$((failed + ${bad:-0})) skipped=$((skipped + skip))
  [ "$status" = 0 ] || return 1
  [ "${total:-0}" -gt 0 ] || die "$current ran no test"
  printf 'ok  %4d s  %s: %d tests\n' $((SECONDS - start)) "$current" "$total"
  # gtest prints the place, then the reason.
  [ "$skip" = 0 ] || grep -hA1 ': Skipped$' "build/${current#test-}/Testing/Temporary/LastTest.log" |
    grep -v ': Skipped$\|^--$' | sort | uniq -c | sed -E 's/^ *([0-9]+) /            \1 skipped: /' || true
}

check_format() {
  if ! clang-format-14 --version 2>/dev/null | grep -q 'version 14\.'; then
    echo "clang-format 14 is not installed; not checked"
    return
  fi
  git -c safe.directory='*' ls-files -z '*.h' '*.cc' | xargs -0 clang-format-14 --dry-run --Werror
}

build() {  # build PRESET CMAKE-ARGS...
  cmake --preset "$@" && cmake --build --preset "$1" -j "$JOBS"
}

# A program of a user: only what `cmake --install` put into a prefix.
build_examples() {
  rm -rf build/prefix build/examples
  cmake --install build/release --prefix "$ROOT/build/prefix" &&
    cmake -S examples -B build/examples -G Ninja -DCMAKE_PREFIX_PATH="$ROOT/build/prefix" &&
    cmake --build build/examples
}

# ThreadSanitizer of GCC 12 does not start where the kernel randomises addresses by more than 28 bits.
fixed_addresses() {
  if [ "$(cat /proc/sys/vm/mmap_rnd_bits 2>/dev/null || echo 28)" -gt 28 ]; then setarch -R "$@"; else "$@"; fi
}

scripts/setup.sh
use_ccache
export PALU_TEST_MODEL=$MODEL CTEST_PARALLEL_LEVEL=$JOBS

step includes scripts/check_includes.py
step docs scripts/check_docs.py
step format check_format
# -Wrestrict is wrong about std::string in GCC 12 (its bug 105651).
step build-release build release -DCMAKE_COMPILE_WARNING_AS_ERROR=ON -DCMAKE_CXX_FLAGS=-Wno-restrict
tests test-release ctest --preset release
step build-examples build_examples
tests test-examples ctest --test-dir build/examples --output-on-failure
if [ "$quick" = no ]; then
  step build-asan build asan
  tests test-asan ctest --preset asan
  step build-tsan build tsan
  tests test-tsan fixed_addresses ctest --preset tsan
fi
