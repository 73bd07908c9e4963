// The functions that Python calls (library.py declares them again). None of them throws; what cannot be made is null.

#include <cstring>

#if defined(__linux__) && defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "decode.h"
#include "draw.h"
#include "guarded.h"
#include "model.h"

using nsm::guarded;
using nsm::Kernels;
using nsm::kernels_named;
using nsm::Model;
using nsm::Runner;
using nsm::Shape;

namespace {

constexpr int NUM_VARIANTS = 4;

bool supports_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

// Linux gives a process the tile registers when it asks, unless a thread's signal stack is too small for them.
bool supports_amx() {
#if defined(__linux__) && defined(__x86_64__)
  constexpr unsigned TILES = 1u << 24, INT8 = 1u << 25;  // in EDX of leaf 7
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;        // ARCH_REQ_XCOMP_PERM, which older headers lack
  unsigned a, b, c, d;
  if (!supports_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return (d & TILES) != 0 && (d & INT8) != 0 && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
  return false;
#endif
}

bool supports_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

const Kernels* kernels_at(int index) {
  switch (index) {
    case 0: {
      static const bool has_tiles = supports_amx();
      return has_tiles ? nsm::amx_kernels() : nullptr;
    }
    case 1:
      return supports_avx512() ? nsm::avx512_kernels() : nullptr;
    case 2:
      return supports_avx2() ? nsm::avx2_kernels() : nullptr;
    default:
      return nsm::portable_kernels();
  }
}

}  // namespace

const Kernels* nsm::kernels_named(const char* name) {
  for (int index = 0; index < NUM_VARIANTS; ++index) {
    const Kernels* kernels = kernels_at(index);
    if (kernels != nullptr && std::strcmp(kernels->name, name) == 0) return kernels;
  }
  return nullptr;
}

extern "C" {

// The variants in falling order of speed; null where this processor cannot run one. index in [0, NUM_VARIANTS).
const char* nsm_kernels(int index) {
  const Kernels* kernels = kernels_at(index);
  return kernels == nullptr ? nullptr : kernels->name;
}

// kinds [num_layers]: see Kind; windows [num_layers]: of attention layers.
void* nsm_model_new(const Shape* shape, const int32_t* kinds, const int32_t* windows, const char* kernels) {
  const Kernels* chosen = kernels_named(kernels);
  if (chosen == nullptr) return nullptr;
  return guarded<void*>(nullptr, [&] { return new Model(*shape, kinds, windows, *chosen); });
}

int nsm_model_set_matrix(void* model, int layer, int part, const int8_t* weights, const float* scale, int rows, int cols) {
  return guarded(0, [&] { return static_cast<Model*>(model)->set_matrix(layer, part, weights, scale, rows, cols); });
}

// numbers, steps, offsets: see Int4Rows; scale [rows].
int nsm_model_set_matrix4(void* model, int layer, int part, const uint8_t* numbers, const uint8_t* steps, const int8_t* offsets,
                          const float* scale, int rows, int cols) {
  return guarded(0, [&] { return static_cast<Model*>(model)->set_matrix4(layer, part, {numbers, steps, offsets}, scale, rows, cols); });
}

int nsm_model_set_router(void* model, int layer, const uint16_t* weights, int rows, int cols) {
  return guarded(0, [&] { return static_cast<Model*>(model)->set_router(layer, weights, rows, cols); });
}

int nsm_model_set_floats(void* model, int layer, int part, const float* values, int count) {
  return guarded(0, [&] { return static_cast<Model*>(model)->set_floats(layer, part, values, count); });
}

int nsm_model_set_rotary(void* model, const double* frequencies, int count) {
  return guarded(0, [&] { return static_cast<Model*>(model)->set_rotary(frequencies, count); });
}

int nsm_model_seal(void* model) { return static_cast<Model*>(model)->seal(); }

// Rows [count] of a matrix as fp32: out [count, columns]. 0: there is no such matrix, or it has no such row.
int nsm_model_get_rows(const void* model, int layer, int part, const int64_t* rows, int count, float* out) {
  return static_cast<const Model*>(model)->get_rows(layer, part, rows, count, out);
}

void nsm_model_free(void* model) { delete static_cast<Model*>(model); }

// Of states, which steps go through as they do through weights. The system gives the memory of a row when it is used.
void nsm_prefer_huge_pages(void* memory, int64_t bytes) { nsm::prefer_huge_pages(memory, static_cast<size_t>(bytes), false); }

// memory, tails [num_layers]: the first row's slots or ring, and the convolution's tail (null where there is none); strides from row
// to row, of memory in bytes, of tails in floats. is_half: slots and rings are fp16. The model must outlive the runner.
void* nsm_runner_new(const void* model, int64_t* positions, char* const* memory, const int64_t* memory_strides,
                     float* const* tails, const int64_t* tail_strides, int is_half, int num_threads, int piece_tokens) {
  const Model& weights = *static_cast<const Model*>(model);
  const int count = weights.shape.num_layers;
  return guarded<void*>(nullptr, [&] {
    return new Runner(weights,
                      {positions, {memory, memory + count}, {tails, tails + count}, {memory_strides, memory_strides + count},
                       {tail_strides, tail_strides + count}, is_half != 0},
                      num_threads, piece_tokens);
  });
}

// Row rows[i] reads counts[i] of the ids; hidden [sum of counts, d]. 1; 0: an id that the vocabulary does not have, nothing was
// read; -1: no memory.
int nsm_run(void* runner, int vocab_size, const int32_t* rows, const int32_t* counts, int num_rows, const int32_t* ids,
            int num_ids, float* hidden) {
  for (int i = 0; i < num_ids; ++i)
    if (ids[i] < 0 || ids[i] >= vocab_size) return 0;
  return guarded(-1, [&] {
    static_cast<Runner*>(runner)->run(rows, counts, num_rows, ids, hidden);
    return 1;
  });
}

// hidden [tokens, d] -> out [tokens, vocabulary]. 0: no memory.
int nsm_logits(void* runner, const float* hidden, int tokens, float* out) {
  return guarded(0, [&] {
    static_cast<Runner*>(runner)->logits(hidden, tokens, out);
    return 1;
  });
}

// See decode.h. Rounds made; 0: an id that the vocabulary does not have, nothing was read; -1: no memory.
int nsm_decode(void* runner, const nsm::Slice* slice) {
  Runner& machine = *static_cast<Runner*>(runner);
  for (int i = 0; i < slice->num_rows; ++i)
    if (slice->ids[i] < 0 || slice->ids[i] >= machine.vocab_size()) return 0;
  return guarded(-1, [&] { return nsm::decode(machine, *slice); });
}

// Draws a token of each of the rows indices [num_rows] of logits [..., n]; wholes and parts [num_rows]: see draw.h.
// Row i of `words` [num_rows, num_words] is of logits row indices[i].
void nsm_mask(float* logits, int n, const int64_t* indices, int num_rows, const int32_t* words, int num_words) {
  for (int i = 0; i < num_rows; ++i) nsm::mask(logits + indices[i] * n, n, words + static_cast<int64_t>(i) * num_words, num_words);
}

int nsm_draw(const char* kernels, const float* logits, int n, const int64_t* indices, int num_rows, const nsm::Wholes* wholes,
             const nsm::Parts* parts, int64_t* out) {
  const Kernels* chosen = kernels_named(kernels);
  if (chosen == nullptr) return 0;
  return guarded(0, [&] {
    std::vector<float> weights;
    for (int i = 0; i < num_rows; ++i) out[i] = nsm::draw(*chosen, logits + indices[i] * n, n, wholes[i], parts[i], weights);
    return 1;
  });
}

void nsm_runner_free(void* runner) { delete static_cast<Runner*>(runner); }

}  // extern "C"
