// The kernels for one instruction set; build.py compiles each of these files with its own options.
#include "kernels.h"

namespace nsm {
namespace {
#include "vec_portable.inc"
// One after the other: each uses those before it
#include "math.inc"
#include "matmul.inc"
#include "int8.inc"
#include "int4.inc"
#include "slots.inc"
#include "keyed.inc"
#include "attention.inc"

const Kernels KERNELS = {"portable", BLOCK_TOKENS, pack, pack4, pack_half, embed, norm, quantise, swiglu, matmul, matmul_half, slots, keyed, attend, weigh};
}  // namespace

const Kernels* portable_kernels() { return &KERNELS; }

}  // namespace nsm
