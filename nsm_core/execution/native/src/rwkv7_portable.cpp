// RWKV-7's kernels for one instruction set, as kernels_portable.cpp has the others.
#include "rwkv7.h"

namespace nsm {
namespace {
#include "vec_portable.inc"
// One after the other: each uses those before it
#include "math.inc"
#include "matmul.inc"
#include "rwkv7.inc"

constexpr Rwkv7Kernels RWKV7_KERNELS = rwkv7_kernels(nullptr);
}  // namespace

const Rwkv7Kernels* portable_rwkv7_kernels() { return &RWKV7_KERNELS; }

}  // namespace nsm
