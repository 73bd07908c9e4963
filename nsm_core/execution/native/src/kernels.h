// What a processor's variant of the kernels offers, and the plain values it takes. No standard library here: these headers are
// compiled for several instruction sets, and an inline function of a library must not end up in the wrong one.
#pragma once

#include <stdint.h>

namespace nsm {

constexpr int LANES = 16;
constexpr int MAX_HEAD_DIM = 256;
constexpr int MAX_SLOTS = 1024;

inline int tiles_of(int rows) { return (rows + LANES - 1) / LANES; }

// Products are shared out by groups of tiles, which the variants may pack together.
constexpr int GROUP = 4;

// int8 weights [rows, cols] with a scale for each row, packed: a tile is 16 rows by 4 columns at a time, so that one register
// holds what one instruction multiplies. Rows are padded to full tiles; cols is a multiple of 16.
//
// int4 weights are int8 ones on a grid: number * step + offset, with numbers of 4 bits, and a step in [1, MAX_STEP] and an offset
// for each row and INT4_GROUP inputs. No sum or offset leaves [-127, 127]. A tile's part of a group is its grid (16 steps, and 16
// middles, which are offset + MIDDLE * step) and 16 rows by 8 inputs a step, two numbers to a byte: inputs 0 to 3 below, 4 to 7
// above.
struct Matrix {
  const int8_t* weights;
  const float* scale;
  int rows, cols;
  bool is_int4;
};

constexpr int INT4_GROUP = 32, MAX_STEP = 16, MIDDLE = 8;
constexpr int INT4_GRID = 2 * LANES;  // bytes

inline int int4_groups(int cols) { return (cols + INT4_GROUP - 1) / INT4_GROUP; }
inline int64_t int4_tile_bytes(int cols) { return int64_t{cols} / 2 * LANES + int64_t{int4_groups(cols)} * INT4_GRID; }

// numbers [rows, cols] in [0, 15], one to a byte; steps and offsets [rows, int4_groups(cols)].
struct Int4Rows {
  const uint8_t *numbers, *steps;
  const int8_t* offsets;
};

// Scratch of a product: a group of tiles of int4 weights as int8 ones, or a variant's inputs or their sums.
inline int64_t panel_bytes(int cols) { return int64_t{GROUP} * LANES * cols; }

// fp16 weights [rows, cols] and fp32 bias; a tile is 16 rows by 1 column at a time; used in fp32.
struct HalfMatrix {
  const uint16_t* weights;
  const float* bias;
  int rows, cols;
};

// Tokens as int8, each with its own scale; `sum` of a token's bytes (a variant's `summed`) undoes what its products have too much.
struct Quantised {
  int8_t* values;
  float* scale;
  int32_t* sum;
  int stride;
};

constexpr int LINE = 64;  // bytes

// Running states are fp32, or fp16: then each number is rounded when a token has changed it.
struct Half {
  uint16_t bits;
};
inline int number_bytes(bool is_half) { return is_half ? sizeof(Half) : sizeof(float); }

// Memory that will be needed after a product, fetched while it is computed: rows of `row_bytes` each, [begin, end) of their bytes
// in order. A product of many tokens leaves the memory idle, and what comes after it waits for memory alone.
struct Ahead {
  const int8_t* const* rows;
  int64_t row_bytes, begin, end;

  // Null where there is nothing more.
  const int8_t* at(int64_t offset) const {
    const int64_t place = begin + offset;
    return place < end ? rows[place / row_bytes] + place % row_bytes : nullptr;
  }
};

struct SlotLayer {
  int d_model, head_dim, slots, taps, top_k;
  bool is_softmax_router;
  float taper, eps;
  const float* conv;            // [taps, 3d]
  const float* scale;           // [heads], of the read logits
  const float* gain;            // [d], of the output norm
  const float* selection_bias;  // [heads, slots]; softmax router only
  const float* timescale;       // [heads, slots]; softmax router only
  int heads;
};

// Consecutive tokens of one text for one head; the first token's rows.
struct SlotWork {
  int head, tokens;
  const float* projected;  // [tokens, 4d]: q, k, v, gate
  const float* routing;    // [tokens, routing_stride]: logits [heads, slots], strengths [heads]
  int routing_stride;
  float* tail;        // [taps-1, 3d], before the tokens; this head's channels are advanced in place
  void* state;        // [slots, 2 head_dim], advanced in place
  bool is_half;       // the state's numbers; else fp32
  float* out;         // [tokens, d]
  // The state that comes after this one and its head's channels of the tail: fetched meanwhile; null: none
  const void* next_state;
  const float* next_tail;
};

// Keyed slots. A head's route has `slots` channels, its values have `width`.
struct KeyedLayer {
  int heads, slots, width, taps;
  float eps;
  const float* read_taps;   // [taps, heads * slots], of routes that are read
  const float* write_taps;  // the same of routes that are written
  const float* value_taps;  // [taps, heads * width]
  const float* gain;        // [heads * width], of the output norm
  const float* skip;        // [heads * width], of the values that pass beside the slots
};

// Consecutive tokens of one text for one head; the first token's rows.
struct KeyedWork {
  int head, tokens;
  const float* projected;  // [tokens, heads (slots + 2 width)]: routes, values, gate
  const float* rates;      // [tokens, rates_stride], before their activation: strengths [heads], decays [heads]
  int rates_stride;
  float* tail;     // [taps-1, heads (slots + width)], before the tokens; this head's channels are advanced in place
  void* state;     // [slots, width], advanced in place
  bool is_half;    // see SlotWork
  float* scratch;  // [tokens, keyed_scratch(slots, width)]
  float* columns;  // scratch [slots, MAX_KEYED_COLUMNS]
  float* out;      // [tokens, heads * width]
  const void* next_state;  // see SlotWork
};

constexpr int MAX_KEYED_COLUMNS = 4 * LANES;  // of values that a variant takes together

inline int keyed_scratch(int slots, int width) { return (2 * tiles_of(slots) + tiles_of(width) + 1) * LANES; }

struct AttentionLayer {
  int d_model, head_dim, heads, kv_heads, window;
  float eps;
  const float* scale;  // [heads], of the queries
};

struct AttentionWork {
  int kv_head, tokens;
  int64_t position;        // of the first token
  const float* projected;  // [tokens, d + 2 kv_heads head_dim]
  const float* cos;        // [tokens, head_dim / 2]
  const float* sin;
  void* ring;     // [2, window, head_dim] of this key-value head, advanced in place
  bool is_half;   // see SlotWork
  float* scores;  // scratch [heads of a group, score_stride(window)]
  float* out;     // [tokens, d]
};

inline int score_stride(int window) { return tiles_of(window) * LANES; }

struct Kernels {
  const char* name;
  int block_tokens;  // a product takes at most so many tokens at a time
  void (*pack)(const int8_t* weights, int rows, int cols, int8_t* packed);
  void (*pack4)(const Int4Rows& weights, int rows, int cols, int8_t* packed);
  void (*pack_half)(const uint16_t* weights, int rows, int cols, uint16_t* packed);
  // The row of a packed matrix in fp32, times `factor`.
  void (*embed)(const Matrix& matrix, int row, float factor, float* out);
  // RMSNorm with gain; both results of it.
  void (*norm)(const float* x, const float* gain, int width, float eps, float* out);
  void (*quantise)(const float* x, int width, const Quantised& out, int token);
  // silu(gate) * value of [gate, value], quantised; `scratch` [hidden].
  void (*swiglu)(const float* up, int hidden, float* scratch, const Quantised& out, int token);
  // Outputs of the tiles [first, last) for all tokens, `first` the first of a group; `is_added`: on top of what y holds.
  // panel [panel_bytes(cols)]: scratch.
  void (*matmul)(const Matrix& matrix, const Quantised& x, int tokens, int first, int last, float* y, int stride, bool is_added,
                 const Ahead& ahead, int8_t* panel);
  void (*matmul_half)(const HalfMatrix& matrix, const float* x, int x_stride, int tokens, int first, int last, float* y, int stride,
                      const Ahead& ahead);
  void (*slots)(const SlotLayer& layer, const SlotWork& work);
  void (*keyed)(const KeyedLayer& layer, const KeyedWork& work);
  void (*attend)(const AttentionLayer& layer, const AttentionWork& work);
  // exp((x - max) / temperature) of x [n], 0 where fp32 has no normal number for it.
  void (*weigh)(const float* x, int n, float temperature, float* out);
};

// Null where the processor (or the compiler's target) lacks the instructions.
const Kernels* amx_kernels();
const Kernels* avx512_kernels();
const Kernels* avx2_kernels();
const Kernels* portable_kernels();

}  // namespace nsm
