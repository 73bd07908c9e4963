// The kernels for processors with AMX: those of AVX-512, with products on tile registers.
#if defined(__AMX_INT8__) && defined(__AVX512VNNI__)
#include <immintrin.h>
#endif
#include "kernels.h"

namespace nsm {
#if defined(__AMX_INT8__) && defined(__AVX512VNNI__)
namespace {
#include "vec_avx512.inc"
// One after the other: each uses those before it
#include "math.inc"
#include "matmul.inc"
#include "int8.inc"
#include "int4.inc"
#include "amx.inc"
#include "slots.inc"
#include "keyed.inc"
#include "attention.inc"

const Kernels KERNELS = {"amx", PAIR_TOKENS, pack, pack4, pack_half, embed, norm, quantise, swiglu, matmul_on_tiles, matmul_half, slots, keyed, attend, weigh};
}  // namespace

const Kernels* amx_kernels() { return &KERNELS; }
#else
const Kernels* amx_kernels() { return nullptr; }
#endif

}  // namespace nsm
