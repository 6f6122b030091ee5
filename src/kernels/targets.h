// File: targets.h - which SIMD targets are compiled, and how a source file hands its functions to
// the dispatcher.
//
// Every .cc of this folder with vector code is compiled once per target (hwy/foreach_target.h).
// Include this file before any Highway header. A target's functions live in a namespace of its own
// (N_AVX2, ...); the file ends with
//     PALU_EXPORT_KERNELS(AddScore)
// which defines `bool AddScore(int64_t target, KernelTable&)` over them.
#ifndef PALU_SRC_KERNELS_TARGETS_H_
#define PALU_SRC_KERNELS_TARGETS_H_

#ifdef HWY_TARGETS
#error "Include kernels/targets.h before Highway, which reads the choice of targets once"
#endif
// The others would add compile time, not speed. (SVE has no arrays of vectors, which the kernels
// need.)
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
// Ice Lake and later, Zen 4 and later: AVX-512 with products of four bytes (VNNI).
#define HWY_WANT_AVX3_DL 1

#include <cstdint>

#include "kernels/kernels.h"

// Targets without vectors have no vector code: on such a CPU the reference is used.
#define PALU_IS_SIMD(target) (((target) & (HWY_SCALAR | HWY_EMU128)) == 0)
#define PALU_IS_AVX512(target) (((target) & (HWY_AVX3 | HWY_AVX3_DL)) != 0)

// Fills in the functions of `target`; false if it was not compiled.
#define PALU_EXPORT_KERNELS(NAME)                 \
  bool NAME(int64_t target, KernelTable& table) { \
    void (*add)(KernelTable&) = nullptr;          \
    switch (target) {                             \
      case HWY_AVX3_DL:                           \
        add = HWY_CHOOSE_AVX3_DL(NAME##Target);   \
        break;                                    \
      case HWY_AVX3:                              \
        add = HWY_CHOOSE_AVX3(NAME##Target);      \
        break;                                    \
      case HWY_AVX2:                              \
        add = HWY_CHOOSE_AVX2(NAME##Target);      \
        break;                                    \
      case HWY_SSE4:                              \
        add = HWY_CHOOSE_SSE4(NAME##Target);      \
        break;                                    \
      case HWY_NEON:                              \
        add = HWY_CHOOSE_NEON(NAME##Target);      \
        break;                                    \
    }                                             \
    if (add != nullptr) add(table);               \
    return add != nullptr;                        \
  }

namespace palu {

bool AddScore(int64_t target, KernelTable& table);
bool AddAccumulate(int64_t target, KernelTable& table);
bool AddWaves(int64_t target, KernelTable& table);
bool AddDecode(int64_t target, KernelTable& table);
bool AddEncode(int64_t target, KernelTable& table);
bool AddGemm(int64_t target, KernelTable& table);
bool AddProject(int64_t target, KernelTable& table);
bool AddVectorOps(int64_t target, KernelTable& table);

}  // namespace palu

#endif  // PALU_SRC_KERNELS_TARGETS_H_
