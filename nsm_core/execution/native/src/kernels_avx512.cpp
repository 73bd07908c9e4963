// The kernels for one instruction set; build.py compiles each of these files with its own options.
#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif
#include "kernels.h"

namespace nsm {
#ifdef __AVX512VNNI__
namespace {
#include "vec_avx512.inc"
// One after the other: each uses those before it
#include "math.inc"
#include "matmul.inc"
#include "int8.inc"
#include "int4.inc"
#include "slots.inc"
#include "keyed.inc"
#include "attention.inc"

const Kernels KERNELS = {"avx512", BLOCK_TOKENS, pack, pack4, pack_half, embed, norm, quantise, swiglu, matmul, matmul_half, slots, keyed, attend, weigh};
}  // namespace

const Kernels* avx512_kernels() { return &KERNELS; }
#else
const Kernels* avx512_kernels() { return nullptr; }
#endif

}  // namespace nsm
