// A model's weights as the kernels want them, and the machine that runs them on rows of states.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "kernels.h"
#include "pieces.h"
#include "team.h"

namespace nsm {

// The kernels of this name; null where this processor cannot run them.
const Kernels* kernels_named(const char* name);

// Zeroed memory on cache lines.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t count) : count_(count) {
    const size_t bytes = (count * sizeof(T) + 127) / 64 * 64;  // one line more: loads of full lanes may pass the end
    data_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
    if (!data_) throw std::bad_alloc();
    __builtin_memset(data_.get(), 0, bytes);
  }
  T* get() const { return data_.get(); }
  size_t size() const { return count_; }

 private:
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };
  std::unique_ptr<T, Free> data_;
  size_t count_ = 0;
};

// Of a matrix in a model's memory.
size_t packed_bytes(int rows, int cols, bool is_int4);

// Memory comes on huge pages where the system has them; `now`: also what is in use already, and at once.
void prefer_huge_pages(void* memory, size_t bytes, bool now);

// Memory for weights, on huge pages where the system has them: a step at one token streams through all of it, and small pages
// cost it a tenth of its time. Freed as a whole.
class Arena {
 public:
  explicit Arena(size_t bytes);
  // nullptr: what was reserved is used up.
  int8_t* take(size_t bytes);

 private:
  struct Free {
    void operator()(int8_t* data) const { std::free(data); }
  };
  std::unique_ptr<int8_t, Free> memory_;
  int8_t* next_;
  size_t left_;
};

// Mirrored by `Kind` in library.py.
enum Kind : int32_t { SLOTS, ATTENTION, KEYED };

// Mirrored by `Shape` in library.py.
struct Shape {
  int32_t vocab_size, d_model, num_layers, heads, slots, top_k, taps, mlp_hidden, kv_heads;
  int32_t is_softmax_router;
  int32_t slot_width;  // of keyed slots
  int32_t is_int4;     // its matrices; else int8
  float taper, eps;

  int head_dim() const { return d_model / heads; }
  // What a layer of a kind has, in numbers: of a token after its first projection, before its last, and after the router; and of
  // the memory that its heads write to.
  int projected_width(Kind kind) const;
  int mixed_width(Kind kind) const { return kind == KEYED ? heads * slot_width : d_model; }
  int routing_rows(Kind kind) const;
  int64_t memory_numbers(Kind kind) const;
};

// What a layer is made of; the numbers are those of `Part` in library.py.
enum Part : int32_t {
  PROJECT, OUT, UP, DOWN, EMBEDDING,                               // int8 matrices
  ROUTER,                                                          // fp16 matrix, its bias: ROUTER_BIAS
  ROUTER_BIAS, MIXER_NORM, MLP_NORM, FINAL_NORM, OUT_NORM, CONV,   // fp32
  READ_SCALE, SELECTION_BIAS, TIMESCALE, ROTARY,                   // fp32; ROTARY: fp64 frequencies
  READ_TAPS, WRITE_TAPS, SKIP,                                     // fp32, of keyed slots; the taps of their values: CONV
  NUM_PARTS
};

struct PackedMatrix {
  Buffer<float> scale;
  Matrix view{};
};

struct Layer {
  Kind kind = SLOTS;
  int window = 0;  // of attention
  PackedMatrix project, out, up, down;
  uint16_t* router = nullptr;
  HalfMatrix routing{};
  Buffer<float> parts[NUM_PARTS];
  SlotLayer slots{};
  KeyedLayer keyed{};
  AttentionLayer attention{};
};

class Model {
 public:
  Model(const Shape& shape, const int32_t* kinds, const int32_t* windows, const Kernels& kernels);
  // False: the part does not have this size.
  bool set_matrix(int layer, int part, const int8_t* weights, const float* scale, int rows, int cols);
  bool set_matrix4(int layer, int part, const Int4Rows& weights, const float* scale, int rows, int cols);
  bool set_router(int layer, const uint16_t* weights, int rows, int cols);
  bool set_floats(int layer, int part, const float* values, int count);
  bool set_rotary(const double* frequencies, int count);
  // After all parts; false: one is missing.
  bool seal();
  // Rows of a matrix in fp32: out [count, columns]; false: it has no such matrix, or not these rows.
  bool get_rows(int layer, int part, const int64_t* rows, int count, float* out) const;

  const Shape shape;
  const Kernels& kernels;
  const int head_dim;
  std::vector<Layer> layers;
  PackedMatrix embedding;
  Buffer<float> final_norm;
  std::vector<double> frequencies;


 private:
  Arena arena_;
  int8_t* place(int layer, int part, bool is_int4, const float* scale, int rows, int cols);
  size_t floats_of(const Layer& layer, int part) const;
  bool is_complete(const Layer& layer) const;
};

// Where a head's slots are, and its row's tail.
struct HeadPlace {
  char* state;
  float* tail;
};

class Runner {
 public:
  // `positions` [rows]; slots and rings: for each layer the first row's state, nullptr where the layer has none.
  struct States {
    int64_t* positions;
    std::vector<char*> memory;  // slots or ring
    std::vector<float*> tails;  // of the convolution
    std::vector<int64_t> memory_strides, tail_strides;  // bytes, and floats, from row to row
    bool is_half;  // slots and rings: see kernels.h
  };

  Runner(const Model& model, const States& states, int num_threads, int piece_tokens);
  // Row rows[i] reads counts[i] tokens; hidden [sum of counts, d].
  void run(const int32_t* rows, const int32_t* counts, int num_rows, const int32_t* ids, float* hidden);
  void logits(const float* hidden, int tokens, float* out);
  // Calls task(index, thread) for each index in [0, count), on all threads.
  template <typename Task>
  void share(int count, const Task& task) {
    team_.run(count, task);
  }
  // See Team.
  template <typename Work>
  void step(int tokens, const Work& work) {
    team_.step(tokens, work);
  }
  // See pieces.h.
  template <typename Task>
  void over_lanes(int num_rows, const Task& task) {
    nsm::over_lanes(team_, *this, lanes_, num_rows, task);
  }
  int vocab_size() const { return model_.shape.vocab_size; }
  int width() const { return model_.shape.d_model; }
  const Kernels& kernels() const { return model_.kernels; }

 private:
  Runner(const Model& model, const States& states, int num_threads, int piece_tokens, int64_t most_ahead);
  // All rows in pieces, one after the other with the threads of this runner, or side by side.
  void read(const int32_t* rows, const int32_t* counts, int num_rows, const int32_t* ids, float* hidden);
  // Of all tokens of the run the ids and hidden vectors.
  void run_piece(const Piece& piece, const int32_t* ids, float* hidden, const PieceTurn& turn);
  void start(const std::vector<Span>& spans, const int32_t* ids, int tokens);
  void mix(int index, const std::vector<Span>& spans, int tokens, const PieceTurn& turn);
  void mix_states(int index, const std::vector<Span>& spans);
  void mix_slots(int index, const std::vector<Span>& spans);
  void mix_keyed(int index, const std::vector<Span>& spans);
  void mix_attention(int index, const std::vector<Span>& spans);
  template <typename Task>
  void over_heads(int index, const std::vector<Span>& spans, const Task& task);
  void feed_forward(const Layer& layer, int tokens);
  void look_ahead(int index, const std::vector<Span>& spans);
  template <typename Task>
  void over_groups(int rows, int steps, int tokens, const Task& task);
  void multiply(const Matrix& matrix, const Quantised& x, int tokens, float* y, int stride, bool is_added);
  void norm_and_quantise(const float* gain, int tokens);

  const Model& model_;
  const States states_;
  Team team_;
  std::vector<std::unique_ptr<Runner>> lanes_;  // as many as threads, if there are several
  const int piece_tokens_;
  const int64_t most_ahead_;
  int routing_stride_, score_floats_, keyed_floats_;
  int64_t panel_bytes_;  // of a thread
  Buffer<float> x_, normed_, projected_, routing_, mixed_, up_, scratch_, cos_, sin_, scores_, keyed_;
  Buffer<int8_t> bytes_, panels_;
  Buffer<float> scale_;
  Buffer<int32_t> sum_;
  Quantised quantised_;
  std::vector<int64_t> positions_;  // of each token of the piece
  std::vector<const int8_t*> ahead_rows_;
  Ahead ahead_{};  // the states that slots are written to next
};

}  // namespace nsm
