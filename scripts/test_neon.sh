#!/usr/bin/env bash
# Tests the NEON kernels on an x86 machine: a cross build of the kernel tests, run under qemu. Not part of test.sh, as
# it needs packages of a second architecture (Debian 12, as root):
#   dpkg --add-architecture arm64 && apt-get update
#   apt-get install g++-aarch64-linux-gnu libhwy-dev:arm64 qemu-user-static libgtest-dev
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

CXX=aarch64-linux-gnu-g++ SYSROOT=/usr/aarch64-linux-gnu LIBS=/usr/lib/aarch64-linux-gnu
GTEST=/usr/src/googletest/googletest OUT=$ROOT/build/neon
for tool in "$CXX" qemu-aarch64-static; do
  command -v "$tool" >/dev/null || die "$tool is missing; the head of $0 says what to install"
done
[ -e "$LIBS/libhwy.so.1" ] || die "$LIBS/libhwy.so.1 is missing; the head of $0 says what to install"

mkdir -p "$OUT/include"
ln -sfn /usr/include/hwy "$OUT/include/hwy"  # headers only: the rest of /usr/include is this machine's
compile() {  # compile SOURCE
  "$CXX" -std=c++20 -O2 -I"$ROOT/src" -I"$ROOT/include" -I"$OUT/include" -I"$GTEST/include" -I"$GTEST" \
    -c "$1" -o "$OUT/$(basename "$1").o"
}
export -f compile
export CXX ROOT OUT GTEST
printf '%s\0' "$ROOT"/src/kernels/*.cc "$ROOT/src/codec/page_plan.cc" "$GTEST/src/gtest-all.cc" "$GTEST/src/gtest_main.cc" \
  "$ROOT/tests/kernels_test.cc" | xargs -0 -n 1 -P "$(nproc)" bash -c 'compile "$0"'
"$CXX" "$OUT"/*.o -o "$OUT/kernels_test" -L"$LIBS" -l:libhwy.so.1 -lpthread
# Death tests start their own program again, which the emulator does not pass on.
qemu-aarch64-static -L "$SYSROOT" -E LD_LIBRARY_PATH="$LIBS:$SYSROOT/lib" "$OUT/kernels_test" --gtest_filter='-Dispatch.Env*'
