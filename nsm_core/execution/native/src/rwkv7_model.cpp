#include "rwkv7_model.h"

#include <algorithm>
#include <cstring>

namespace nsm {
namespace {

struct Size {
  int rows, cols;
};

// Of a matrix; no rows: no layer of this number has it.
Size size_of(const Rwkv7Shape& shape, int layer, int part) {
  const int d = shape.width;
  switch (part) {
    case RECEPTANCE:
    case KEY:
    case VALUE:
    case OUTPUT:
      return {d, d};
    case CHANNEL_KEY:
      return {shape.hidden, d};
    case CHANNEL_VALUE:
      return {d, shape.hidden};
    case HEAD:
      return {layer == 0 ? shape.vocab_size : 0, d};
    case DECAY_IN:
      return {shape.decay_rank, d};
    case DECAY_OUT:
      return {d, shape.decay_rank};
    case RATE_IN:
      return {shape.rate_rank, d};
    case RATE_OUT:
      return {d, shape.rate_rank};
    case VALUE_IN:
      return {layer == 0 ? 0 : shape.value_rank, d};
    case VALUE_OUT:
      return {layer == 0 ? 0 : d, shape.value_rank};
    case GATE_IN:
      return {shape.gate_rank, d};
    case GATE_OUT:
      return {d, shape.gate_rank};
    default:
      return {0, 0};
  }
}

bool is_large(int part) { return part <= HEAD; }

int count_of(const Rwkv7Shape& shape, int layer, int part) {
  switch (part) {
    case FIRST_NORM:
    case FIRST_NORM_BIAS:
    case LAST_NORM:
    case LAST_NORM_BIAS:
      return layer == 0 ? shape.width : 0;
    case TIME_SHIFT:
      return 6 * shape.width;
    default:
      return part >= FIRST_NORM && part < NUM_RWKV7_PARTS ? shape.width : 0;
  }
}

size_t number_bytes(const Rwkv7Shape& shape, int part) {
  if (shape.is_rounded()) return is_large(part) ? 1 : sizeof(uint16_t);
  return is_large(part) && shape.large != static_cast<int32_t>(Numbers::FP32) ? sizeof(uint16_t) : sizeof(float);
}

}  // namespace

size_t Rwkv7Model::part_bytes(int layer, int part) const {
  const Size size = size_of(shape, layer, part);
  if (part == CHANNEL_VALUE && has_columns()) return own.columns->bytes(size.rows, size.cols);
  return number_bytes(shape, part) * packed_bytes(size.rows, size.cols, shape.large == INT4_LARGE && is_large(part));
}

size_t Rwkv7Model::all_bytes() const {
  size_t bytes = 0;
  for (int layer = 0; layer < shape.num_layers; ++layer)
    for (int part = 0; part < NUM_MATRICES; ++part) bytes += part_bytes(layer, part);
  return bytes;
}

Rwkv7Model::Rwkv7Model(const Rwkv7Shape& given, const Kernels& chosen, const Rwkv7Kernels& chosen_own)
    : shape(given), kernels(chosen), own(chosen_own), layers(given.num_layers), arena_(all_bytes()) {
  for (int layer = 0; layer < shape.num_layers; ++layer)
    for (int part = 0; part < NUM_MATRICES; ++part)
      layers[layer].matrices[part].weights = arena_.take(part_bytes(layer, part));
}

// Null: the part has another size.
Rwkv7Matrix* Rwkv7Model::place(int layer, int part, int rows, int cols) {
  if (layer < 0 || layer >= shape.num_layers || part < 0 || part >= NUM_MATRICES) return nullptr;
  const Size size = size_of(shape, layer, part);
  if (rows < 1 || rows != size.rows || cols != size.cols) return nullptr;
  Rwkv7Matrix& matrix = layers[layer].matrices[part];
  matrix.rows = rows, matrix.cols = cols;
  matrix.by_row = Buffer<float>(static_cast<size_t>(tiles_of(rows)) * LANES);
  return &matrix;
}

bool Rwkv7Model::set_int8(int layer, int part, const int8_t* weights, const float* scale, int rows, int cols) {
  if (shape.large != INT8_LARGE || !is_large(part)) return false;
  Rwkv7Matrix* matrix = place(layer, part, rows, cols);
  if (matrix == nullptr) return false;
  const bool is_by_columns = part == CHANNEL_VALUE && has_columns();
  matrix->kind = is_by_columns ? Rwkv7Matrix::COLUMNS : Rwkv7Matrix::INT8;
  (is_by_columns ? own.columns->pack : kernels.pack)(weights, rows, cols, matrix->weights);
  std::copy(scale, scale + rows, matrix->by_row.get());
  return true;
}

bool Rwkv7Model::set_int4(int layer, int part, const Int4Rows& weights, const float* scale, int rows, int cols) {
  if (shape.large != INT4_LARGE || !is_large(part)) return false;
  Rwkv7Matrix* matrix = place(layer, part, rows, cols);
  if (matrix == nullptr) return false;
  matrix->kind = Rwkv7Matrix::INT4;
  kernels.pack4(weights, rows, cols, matrix->weights);
  std::copy(scale, scale + rows, matrix->by_row.get());
  return true;
}

bool Rwkv7Model::set_matrix(int layer, int part, const void* weights, const float* bias, int rows, int cols) {
  if (is_rounded() && is_large(part)) return false;
  Rwkv7Matrix* matrix = place(layer, part, rows, cols);
  if (matrix == nullptr) return false;
  matrix->kind = is_rounded() ? Rwkv7Matrix::HALF : Rwkv7Matrix::FLOAT;
  matrix->numbers = is_rounded() || !is_large(part) ? Numbers::FP32 : static_cast<Numbers>(shape.large);
  if (is_rounded())
    kernels.pack_half(static_cast<const uint16_t*>(weights), rows, cols, reinterpret_cast<uint16_t*>(matrix->weights));
  else
    own.pack_float(weights, matrix->numbers, rows, cols, matrix->weights);
  if (bias != nullptr) std::copy(bias, bias + rows, matrix->by_row.get());
  return true;
}

bool Rwkv7Model::set_floats(int layer, int part, const float* values, int count) {
  if (layer < 0 || layer >= shape.num_layers || count < 1 || count != count_of(shape, layer, part)) return false;
  layers[layer].floats[part] = Buffer<float>(count);
  std::copy(values, values + count, layers[layer].floats[part].get());
  return true;
}

bool Rwkv7Model::seal() const {
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    for (int part = 0; part < NUM_MATRICES; ++part)
      if (size_of(shape, layer, part).rows > 0 && matrix(layer, part).rows == 0) return false;
    for (int part = FIRST_NORM; part < NUM_RWKV7_PARTS; ++part)
      if (count_of(shape, layer, part) > 0 && floats(layer, part) == nullptr) return false;
  }
  return true;
}

}  // namespace nsm
