// The kernels for one instruction set; build.py compiles each of these files with its own options.
#ifdef __AVX2__
#include <immintrin.h>
#endif
#include "kernels.h"

namespace nsm {
#ifdef __AVX2__
namespace {
#include "vec_avx2.inc"
// One after the other: each uses those before it
#include "math.inc"
#include "matmul.inc"
#include "bytes.inc"
#include "numbers.inc"
#include "slots.inc"
#include "keyed.inc"
#include "attention.inc"

const Kernels KERNELS = {"avx2", BLOCK_TOKENS, pack, pack4, pack_half, embed, norm, quantise, swiglu, matmul_numbers, matmul_half, slots, keyed, attend, weigh};
}  // namespace

const Kernels* avx2_kernels() { return &KERNELS; }
#else
const Kernels* avx2_kernels() { return nullptr; }
#endif

}  // namespace nsm
