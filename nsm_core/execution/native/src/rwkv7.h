// RWKV-7 (nsm_core/rwkv7): what a processor's variant of its kernels offers. No standard library here, as in kernels.h.
#pragma once

#include "kernels.h"

namespace nsm {

enum class Numbers : int32_t { FP32, BF16, FP16 };

// Weights [rows, cols] as the file has them and fp32 bias [rows], packed as a HalfMatrix is; used in fp32.
struct FloatMatrix {
  const void* weights;
  Numbers numbers;
  const float* bias;
  int rows, cols;
};

struct Rwkv7Layer {
  int width, head_size;
  bool is_first;    // its values are those that the other layers mix into theirs
  float head_eps;
  const float* removal_key;  // [width], like the others
  const float* key_rate;
  const float* bonus;
  const float* head_gain;
  const float* head_bias;
};

// Consecutive tokens of one text for one head; all [tokens, width], at the first token's row.
struct Rwkv7Work {
  int head, tokens;
  const float *r, *k, *v;
  const float *decay, *rate, *gate;  // the small networks' outputs, before the sigmoids of decay and rate
  const float* value_mix;            // before its sigmoid; unused in the first layer
  float* first_value;                // written in the first layer, read in the others
  float* state;                      // [head_size keys, head_size values] of this head, advanced in place
  float* out;
  const float* next_state;  // that comes after this one: fetched during the last token; null: none
};

// Runs of the columns that are not zero in both of a token's rows of int8 (see quantise_twice).
enum NonzeroRun { FINE_POSITIVE, FINE_NEGATIVE, FINE_ALONE, NONZERO_RUNS };  // FINE_ALONE: the first row is zero

constexpr int COLUMN_BLOCK = 512;  // columns whose runs stand together
inline int column_blocks(int cols) { return (cols + COLUMN_BLOCK - 1) / COLUMN_BLOCK; }

// A token's inputs without those that are zero. Each run of a block has whole fours of columns, filled up with zeros.
struct NonzeroInputs {
  int32_t* places;        // LINE * column; [nonzero_room(columns)], like the next two
  uint8_t *rough, *fine;  // sizes
  int* ends;              // [blocks, NONZERO_RUNS]
  float rough_scale, fine_scale;
};

// Where the run begins that follows one with this end: columns are written 8 at a time, of which some are too many.
inline int run_after(int end) { return end + 8; }
inline int nonzero_room(int cols) { return cols + column_blocks(cols) * NONZERO_RUNS * 12; }

// Products that pass over inputs that are zero, of weights [rows, cols] that lie column by column.
struct ColumnKernels {
  int64_t (*bytes)(int rows, int cols);
  void (*pack)(const int8_t* weights, int rows, int cols, int8_t* packed);
  // Of a token's two rows, `token` and `second`.
  void (*gather)(const Quantised& x, int width, int token, int second, NonzeroInputs& out);
  // y += both products, of the tiles [first, last), `first` the first of a group.
  void (*multiply)(const Matrix& matrix, const NonzeroInputs* x, int tokens, int first, int last, float* y, int stride);
};

struct Rwkv7Kernels {
  void (*pack_float)(const void* weights, Numbers numbers, int rows, int cols, void* packed);
  void (*matmul_float)(const FloatMatrix& matrix, const float* x, int x_stride, int tokens, int first, int last, float* y, int stride,
                       bool is_added);
  void (*layer_norm)(const float* x, const float* gain, const float* bias, int width, float eps, float* out);
  // out = x + (before - x) * share
  void (*shift)(const float* x, const float* before, const float* share, int width, float* out);
  void (*tanh)(float* x, int n);
  void (*sigmoid)(float* x, int n);
  void (*relu_squared)(float* x, int n);
  // x as two rows of int8, `token` and `second`: the second holds what the first leaves over, in steps 254 times as fine.
  void (*quantise_twice)(const float* x, int width, float* scratch, const Quantised& out, int token, int second);
  // y += both
  void (*add_two)(const float* first, const float* second, int width, float* y);
  void (*heads)(const Rwkv7Layer& layer, const Rwkv7Work& work);
  const ColumnKernels* columns;  // null: products of all inputs are faster
};

// Null where the processor (or the compiler's target) lacks the instructions.
const Rwkv7Kernels* avx512_rwkv7_kernels();
const Rwkv7Kernels* avx2_rwkv7_kernels();
const Rwkv7Kernels* portable_rwkv7_kernels();

}  // namespace nsm
