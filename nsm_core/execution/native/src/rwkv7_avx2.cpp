// RWKV-7's kernels for one instruction set, as kernels_avx2.cpp has the others.
#ifdef __AVX2__
#include <immintrin.h>
#endif
#include "rwkv7.h"

namespace nsm {
#ifdef __AVX2__
namespace {
#include "vec_avx2.inc"
// One after the other: each uses those before it
#include "math.inc"
#include "matmul.inc"
#include "rwkv7.inc"
#include "columns.inc"

constexpr Rwkv7Kernels RWKV7_KERNELS = rwkv7_kernels(&COLUMN_KERNELS);
}  // namespace

const Rwkv7Kernels* avx2_rwkv7_kernels() { return &RWKV7_KERNELS; }
#else
const Rwkv7Kernels* avx2_rwkv7_kernels() { return nullptr; }
#endif

}  // namespace nsm
