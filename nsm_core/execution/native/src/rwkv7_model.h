// An RWKV-7 model's weights as its kernels want them, and the machine that runs them on rows of states.
#pragma once

#include <initializer_list>

#include "model.h"
#include "rwkv7.h"

namespace nsm {

constexpr int32_t INT8_LARGE = 3, INT4_LARGE = 4;

// Mirrored by `Rwkv7Shape` in rwkv7/library.py.
struct Rwkv7Shape {
  int32_t vocab_size, width, num_layers, head_size, hidden;
  int32_t decay_rank, rate_rank, value_rank, gate_rank;
  int32_t large;  // numbers of the large matrices: of `Numbers`, INT8_LARGE or INT4_LARGE; small ones are fp16 beside both, else fp32
  float norm_eps, head_eps;

  // Tokens are rounded to int8 before they meet large matrices.
  bool is_rounded() const { return large == INT8_LARGE || large == INT4_LARGE; }
};

// What a layer is made of; the numbers are those of `Rwkv7Part` in rwkv7/library.py.
enum Rwkv7Part : int32_t {
  RECEPTANCE, KEY, VALUE, OUTPUT, CHANNEL_KEY, CHANNEL_VALUE, HEAD,       // large matrices
  DECAY_IN, DECAY_OUT, RATE_IN, RATE_OUT, VALUE_IN, VALUE_OUT, GATE_IN, GATE_OUT,  // small ones
  NUM_MATRICES,
  FIRST_NORM = NUM_MATRICES, FIRST_NORM_BIAS, TIME_NORM, TIME_NORM_BIAS, CHANNEL_NORM, CHANNEL_NORM_BIAS, LAST_NORM, LAST_NORM_BIAS,
  TIME_SHIFT, CHANNEL_SHIFT,  // [6, width] of r, w, k, v, a and g; [width]
  REMOVAL_KEY, KEY_RATE, BONUS, HEAD_NORM, HEAD_NORM_BIAS,
  NUM_RWKV7_PARTS
};

// A matrix in one of five packings: `weights` are int8 or int4 with a scale, int8 column by column (see ColumnKernels), fp16 with a
// bias, or a FloatMatrix with one.
struct Rwkv7Matrix {
  enum Kind { INT8, COLUMNS, INT4, HALF, FLOAT } kind = FLOAT;
  Numbers numbers = Numbers::FP32;  // of FLOAT
  int rows = 0, cols = 0;
  int8_t* weights = nullptr;
  Buffer<float> by_row;  // scale or bias
};

struct Rwkv7Weights {
  Rwkv7Matrix matrices[NUM_MATRICES];
  Buffer<float> floats[NUM_RWKV7_PARTS];
};

class Rwkv7Model {
 public:
  Rwkv7Model(const Rwkv7Shape& shape, const Kernels& kernels, const Rwkv7Kernels& own);
  // Each part once; threads may set several parts at a time. False: the part does not have this size. `scale` [rows] of int8 weights.
  bool set_int8(int layer, int part, const int8_t* weights, const float* scale, int rows, int cols);
  bool set_int4(int layer, int part, const Int4Rows& weights, const float* scale, int rows, int cols);
  // Weights in the numbers that `shape.large` asks for; `bias` [rows], or null.
  bool set_matrix(int layer, int part, const void* weights, const float* bias, int rows, int cols);
  bool set_floats(int layer, int part, const float* values, int count);
  // After all parts; false: one is missing.
  bool seal() const;

  const Rwkv7Shape shape;
  const Kernels& kernels;
  const Rwkv7Kernels& own;
  std::vector<Rwkv7Weights> layers;  // those that belong to no layer are the first one's

  bool is_rounded() const { return shape.is_rounded(); }
  int num_heads() const { return shape.width / shape.head_size; }
  const Rwkv7Matrix& matrix(int layer, int part) const { return layers[layer].matrices[part]; }
  const float* floats(int layer, int part) const { return layers[layer].floats[part].get(); }
  // The channel mix's second matrix lies column by column: half of its inputs are zero, or more.
  bool has_columns() const { return shape.large == INT8_LARGE && own.columns != nullptr; }

 private:
  size_t part_bytes(int layer, int part) const;
  size_t all_bytes() const;
  Rwkv7Matrix* place(int layer, int part, int rows, int cols);
  Arena arena_;
};

class Rwkv7Runner {
 public:
  // Of each layer the first row's state, and the floats from row to row; `positions` [rows].
  struct States {
    int64_t* positions;
    std::vector<float*> time_shifts, channel_shifts, matrices;
    std::vector<int64_t> time_strides, channel_strides, matrix_strides;
  };

  Rwkv7Runner(const Rwkv7Model& model, States states, int num_threads, int piece_tokens);
  // Row rows[i] reads counts[i] tokens, whose embeddings are `embedded` [sum of counts, width]; hidden alike. One token of each of
  // several rows is read in lanes: see pieces.h.
  void run(const int32_t* rows, const int32_t* counts, int num_rows, const float* embedded, float* hidden);
  void logits(const float* hidden, int tokens, float* out);

 private:
  // A product of all tokens of a piece; where both inputs are null there is none.
  struct Product {
    const Rwkv7Matrix* matrix;
    const float* x;        // [tokens, x_stride]; unused for int8 and int4
    int x_stride;
    const Quantised* bytes;  // unused for fp16 and fp32
    float* y;
    int stride;
    bool is_added;
    int tokens;
  };

  // All rows in pieces, one after the other with the threads of this runner, or side by side.
  void read(const int32_t* rows, const int32_t* counts, int num_rows, const float* embedded, float* hidden);
  // Of all tokens of the run the embeddings and hidden vectors.
  void run_piece(const Piece& piece, const float* embedded, float* hidden, const PieceTurn& turn);
  void time_mix(int layer, const std::vector<Span>& spans, int tokens);
  void read_heads(int layer, const std::vector<Span>& spans);
  void channel_mix(int layer, const std::vector<Span>& spans, int tokens);
  void norm_all(int layer, int part, const float* x, int tokens, float* out);
  // Calls task(token, its normalised vector, that of the token before).
  template <typename Task>
  void over_shifted(const std::vector<Span>& spans, const std::vector<float*>& shifts, const std::vector<int64_t>& strides, int layer,
                    int tokens, const Task& task);
  void multiply(std::initializer_list<Product> products);
  void multiply_tiles(const Product& product, int first, int last, int thread);

  const Rwkv7Model& model_;
  const States states_;
  Team team_;
  std::vector<std::unique_ptr<Rwkv7Runner>> lanes_;  // as many as threads, if there are several
  const int piece_tokens_;
  bool is_rounded_;
  int64_t panel_bytes_;  // of a thread
  Buffer<float> x_, normed_, mixed_[6], r_, k_, v_, first_value_, inner_[4], outer_[4], read_, hidden_, scratch_, two_;
  Buffer<int8_t> bytes_[4], panels_;
  Buffer<float> scales_[4];
  Buffer<int32_t> sums_[4];
  Quantised quantised_[4];  // of r, k and v, or of one width; the last: of the channel mix's inner tokens, two rows each
  Buffer<int32_t> places_;
  Buffer<uint8_t> nonzero_;
  Buffer<int> run_ends_;
  std::vector<NonzeroInputs> nonzero_inputs_;  // of each token of a piece, where the model has columns
  std::vector<const float*> before_;  // of each token of a piece, the normalised token before
};

}  // namespace nsm
