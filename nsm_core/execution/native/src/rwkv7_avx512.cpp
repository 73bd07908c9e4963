// RWKV-7's kernels for one instruction set, as kernels_avx512.cpp has the others.
#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif
#include "rwkv7.h"

namespace nsm {
#ifdef __AVX512VNNI__
namespace {
#include "vec_avx512.inc"
// One after the other: each uses those before it
#include "math.inc"
#include "matmul.inc"
#include "rwkv7.inc"

constexpr Rwkv7Kernels RWKV7_KERNELS = rwkv7_kernels(nullptr);
}  // namespace

const Rwkv7Kernels* avx512_rwkv7_kernels() { return &RWKV7_KERNELS; }
#else
const Rwkv7Kernels* avx512_rwkv7_kernels() { return nullptr; }
#endif

}  // namespace nsm
