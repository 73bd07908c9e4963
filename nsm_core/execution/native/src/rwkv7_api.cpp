// The functions for RWKV-7 that Python calls (rwkv7/library.py declares them again). None of them throws; what cannot be made is null.

#include <cstring>

#include "guarded.h"
#include "rwkv7_model.h"

using nsm::guarded;
using nsm::Kernels;
using nsm::Rwkv7Kernels;
using nsm::Rwkv7Model;
using nsm::Rwkv7Runner;
using nsm::Rwkv7Shape;

namespace {

const Rwkv7Kernels* own_kernels(const char* name) {
  if (std::strcmp(name, "amx") == 0 || std::strcmp(name, "avx512") == 0) return nsm::avx512_rwkv7_kernels();
  if (std::strcmp(name, "avx2") == 0) return nsm::avx2_rwkv7_kernels();
  return nsm::portable_rwkv7_kernels();
}

}  // namespace

extern "C" {

void* nsm_rwkv7_model_new(const Rwkv7Shape* shape, const char* name) {
  const Kernels* kernels = nsm::kernels_named(name);  // null where this processor cannot run them
  if (kernels == nullptr) return nullptr;
  return guarded<void*>(nullptr, [&] { return new Rwkv7Model(*shape, *kernels, *own_kernels(name)); });
}

int nsm_rwkv7_set_int8(void* model, int layer, int part, const int8_t* weights, const float* scale, int rows, int cols) {
  return guarded(0, [&] { return static_cast<Rwkv7Model*>(model)->set_int8(layer, part, weights, scale, rows, cols); });
}

// numbers, steps, offsets: see Int4Rows.
int nsm_rwkv7_set_int4(void* model, int layer, int part, const uint8_t* numbers, const uint8_t* steps, const int8_t* offsets,
                       const float* scale, int rows, int cols) {
  return guarded(0, [&] { return static_cast<Rwkv7Model*>(model)->set_int4(layer, part, {numbers, steps, offsets}, scale, rows, cols); });
}

// weights: fp16 in an int8 or int4 model, else as the shape says of large ones and fp32 of small ones; bias [rows], or null: none.
int nsm_rwkv7_set_matrix(void* model, int layer, int part, const void* weights, const float* bias, int rows, int cols) {
  return guarded(0, [&] { return static_cast<Rwkv7Model*>(model)->set_matrix(layer, part, weights, bias, rows, cols); });
}

int nsm_rwkv7_set_floats(void* model, int layer, int part, const float* values, int count) {
  return guarded(0, [&] { return static_cast<Rwkv7Model*>(model)->set_floats(layer, part, values, count); });
}

int nsm_rwkv7_seal(const void* model) { return static_cast<const Rwkv7Model*>(model)->seal(); }

void nsm_rwkv7_model_free(void* model) { delete static_cast<Rwkv7Model*>(model); }

// states, strides [3, num_layers]: the first row's token before the time mix, before the channel mix, and matrices; floats from row
// to row. The model must outlive the runner.
void* nsm_rwkv7_runner_new(const void* model, int64_t* positions, float* const* states, const int64_t* strides, int num_threads,
                           int piece_tokens) {
  const Rwkv7Model& weights = *static_cast<const Rwkv7Model*>(model);
  const int count = weights.shape.num_layers;
  const auto part = [count](auto* values, int index) { return std::vector(values + index * count, values + (index + 1) * count); };
  return guarded<void*>(nullptr, [&] {
    return new Rwkv7Runner(weights,
                           {positions, part(states, 0), part(states, 1), part(states, 2), part(strides, 0), part(strides, 1),
                            part(strides, 2)},
                           num_threads, piece_tokens);
  });
}

// Row rows[i] reads counts[i] tokens; embedded and hidden [sum of counts, width]. 0: no memory.
int nsm_rwkv7_run(void* runner, const int32_t* rows, const int32_t* counts, int num_rows, const float* embedded, float* hidden) {
  return guarded(0, [&] {
    static_cast<Rwkv7Runner*>(runner)->run(rows, counts, num_rows, embedded, hidden);
    return 1;
  });
}

// hidden [tokens, width] -> out [tokens, vocabulary]. 0: no memory.
int nsm_rwkv7_logits(void* runner, const float* hidden, int tokens, float* out) {
  return guarded(0, [&] {
    static_cast<Rwkv7Runner*>(runner)->logits(hidden, tokens, out);
    return 1;
  });
}

void nsm_rwkv7_runner_free(void* runner) { delete static_cast<Rwkv7Runner*>(runner); }

}  // extern "C"
