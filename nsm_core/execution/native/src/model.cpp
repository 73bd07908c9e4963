#include "model.h"

#include <algorithm>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace nsm {

namespace {

constexpr size_t HUGE_PAGE = size_t{2} << 20;
constexpr int COLLAPSE = 25;  // MADV_COLLAPSE of Linux 6.1, which older headers lack: at once, not when the system comes to it

// Of a model, or of a const one; null: no matrix has this number.
template <typename AnyModel>
auto* matrix_at(AnyModel& model, int layer, int part) {
  return part == EMBEDDING ? &model.embedding
         : part == PROJECT ? &model.layers[layer].project
         : part == OUT     ? &model.layers[layer].out
         : part == UP      ? &model.layers[layer].up
         : part == DOWN    ? &model.layers[layer].down
                           : nullptr;
}

// Of all matrices, packed: a multiple of a cache line each, as a tile is.
size_t matrix_bytes(const Shape& shape, const int32_t* kinds) {
  const auto packed = [&](int rows, int cols) { return packed_bytes(rows, cols, shape.is_int4 != 0); };
  const int d = shape.d_model;
  size_t bytes = packed(shape.vocab_size, d);
  for (int i = 0; i < shape.num_layers; ++i) {
    const Kind kind = static_cast<Kind>(kinds[i]);
    bytes += packed(shape.projected_width(kind), d) + packed(d, shape.mixed_width(kind)) + packed(2 * shape.mlp_hidden, d) +
             packed(d, shape.mlp_hidden) + sizeof(uint16_t) * packed_bytes(shape.routing_rows(kind), d, false);
  }
  return bytes;
}

}  // namespace

size_t packed_bytes(int rows, int cols, bool is_int4) {
  const size_t tile = is_int4 ? static_cast<size_t>(int4_tile_bytes(cols)) : static_cast<size_t>(LANES) * cols;
  return (tiles_of(rows) * tile + LINE - 1) / LINE * LINE;
}

int Shape::projected_width(Kind kind) const {
  switch (kind) {
    case KEYED:
      return heads * (slots + 2 * slot_width);
    case ATTENTION:
      return d_model + 2 * kv_heads * head_dim();
    default:
      return 4 * d_model;
  }
}

int Shape::routing_rows(Kind kind) const {
  switch (kind) {
    case KEYED:
      return 2 * heads;
    case ATTENTION:
      return 0;
    default:
      return heads * slots + (is_softmax_router ? heads : 0);
  }
}

int64_t Shape::memory_numbers(Kind kind) const {
  if (kind == ATTENTION) return 0;
  return int64_t{heads} * slots * (kind == KEYED ? slot_width : 2 * head_dim());
}

void prefer_huge_pages(void* memory, size_t bytes, bool now) {
#if defined(__linux__)
  char* first = static_cast<char*>(memory);
  char* begin = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(first) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
  if (begin + HUGE_PAGE > first + bytes) return;
  const size_t whole = static_cast<size_t>(first + bytes - begin) / HUGE_PAGE * HUGE_PAGE;
  madvise(begin, whole, MADV_HUGEPAGE);
  if (now) madvise(begin, whole, COLLAPSE);
#endif
}

Arena::Arena(size_t bytes) {
  left_ = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  next_ = static_cast<int8_t*>(std::aligned_alloc(HUGE_PAGE, left_));
  if (next_ == nullptr) throw std::bad_alloc();
  memory_.reset(next_);
  prefer_huge_pages(next_, left_, true);
}

int8_t* Arena::take(size_t bytes) {
  if (left_ < bytes) return nullptr;
  int8_t* taken = next_;
  next_ += bytes;
  left_ -= bytes;
  return taken;
}

Model::Model(const Shape& given, const int32_t* kinds, const int32_t* windows, const Kernels& chosen)
    : shape(given), kernels(chosen), head_dim(given.head_dim()), layers(given.num_layers), arena_(matrix_bytes(given, kinds)) {
  for (int i = 0; i < shape.num_layers; ++i) {
    layers[i].kind = static_cast<Kind>(kinds[i]);
    layers[i].window = windows[i];
  }
}

// Memory for a matrix, whose scale is taken over; null: the model holds other numbers, or the matrix is larger than the shape says.
int8_t* Model::place(int layer, int part, bool is_int4, const float* scale, int rows, int cols) {
  PackedMatrix* target = matrix_at(*this, layer, part);
  if (target == nullptr || is_int4 != (shape.is_int4 != 0) || rows < 1 || cols < LANES || cols % LANES != 0) return nullptr;
  int8_t* packed = arena_.take(packed_bytes(rows, cols, is_int4));
  if (packed == nullptr) return nullptr;
  target->scale = Buffer<float>(static_cast<size_t>(tiles_of(rows)) * LANES);
  std::copy(scale, scale + rows, target->scale.get());
  target->view = {packed, target->scale.get(), rows, cols, is_int4};
  return packed;
}

bool Model::set_matrix(int layer, int part, const int8_t* weights, const float* scale, int rows, int cols) {
  int8_t* packed = place(layer, part, false, scale, rows, cols);
  if (packed == nullptr) return false;
  kernels.pack(weights, rows, cols, packed);
  return true;
}

bool Model::set_matrix4(int layer, int part, const Int4Rows& weights, const float* scale, int rows, int cols) {
  int8_t* packed = place(layer, part, true, scale, rows, cols);
  if (packed == nullptr) return false;
  kernels.pack4(weights, rows, cols, packed);
  return true;
}

bool Model::get_rows(int layer, int part, const int64_t* rows, int count, float* out) const {
  const PackedMatrix* matrix = matrix_at(*this, layer, part);
  if (matrix == nullptr) return false;
  const Matrix& view = matrix->view;
  for (int i = 0; i < count; ++i)
    if (rows[i] < 0 || rows[i] >= view.rows) return false;
  for (int i = 0; i < count; ++i) kernels.embed(view, static_cast<int>(rows[i]), 1.0f, out + static_cast<size_t>(i) * view.cols);
  return true;
}

bool Model::set_router(int index, const uint16_t* weights, int rows, int cols) {
  Layer& layer = layers[index];
  if (rows != shape.routing_rows(layer.kind) || rows < 1 || cols != shape.d_model) return false;
  layer.router = reinterpret_cast<uint16_t*>(arena_.take(sizeof(uint16_t) * tiles_of(rows) * LANES * cols));
  if (layer.router == nullptr) return false;
  kernels.pack_half(weights, rows, cols, layer.router);
  return true;
}

size_t Model::floats_of(const Layer& layer, int part) const {
  const size_t d = shape.d_model, slots = static_cast<size_t>(shape.heads) * shape.slots;
  const size_t mixed = shape.mixed_width(layer.kind);
  const bool is_keyed = layer.kind == KEYED, is_attention = layer.kind == ATTENTION;
  switch (part) {
    case MIXER_NORM:
    case MLP_NORM:
      return d;
    case READ_SCALE:
      return is_keyed ? 0 : shape.heads;
    case OUT_NORM:
      return is_attention ? 0 : mixed;
    case CONV:
      return is_attention ? 0 : shape.taps * (is_keyed ? mixed : 3 * d);
    case ROUTER_BIAS:
      return shape.routing_rows(layer.kind);
    case SELECTION_BIAS:
    case TIMESCALE:
      return layer.kind == SLOTS && shape.is_softmax_router ? slots : 0;
    case READ_TAPS:
    case WRITE_TAPS:
      return is_keyed ? shape.taps * slots : 0;
    case SKIP:
      return is_keyed ? mixed : 0;
    default:
      return 0;
  }
}

bool Model::set_floats(int index, int part, const float* values, int count) {
  if (part == FINAL_NORM) {
    if (count != shape.d_model) return false;
    final_norm = Buffer<float>(count);
    std::copy(values, values + count, final_norm.get());
    return true;
  }
  Layer& layer = layers[index];
  if (part < 0 || part >= NUM_PARTS || count < 1 || static_cast<size_t>(count) != floats_of(layer, part)) return false;
  layer.parts[part] = Buffer<float>(tiles_of(count) * LANES);
  std::copy(values, values + count, layer.parts[part].get());
  return true;
}

bool Model::set_rotary(const double* values, int count) {
  frequencies.assign(values, values + count);
  return count == head_dim / 2;
}

bool Model::is_complete(const Layer& layer) const {
  const int d = shape.d_model, hidden = shape.mlp_hidden;
  const auto fits = [](const PackedMatrix& matrix, int rows, int cols) {
    return matrix.view.rows == rows && matrix.view.cols == cols;
  };
  for (int part = 0; part < NUM_PARTS; ++part)
    if (floats_of(layer, part) > 0 && layer.parts[part].get() == nullptr) return false;
  if (layer.kind == ATTENTION ? frequencies.empty() : layer.router == nullptr) return false;
  return fits(layer.project, shape.projected_width(layer.kind), d) && fits(layer.out, d, shape.mixed_width(layer.kind)) &&
         fits(layer.up, 2 * hidden, d) && fits(layer.down, d, hidden);
}

bool Model::seal() {
  if (embedding.view.rows != shape.vocab_size || embedding.view.cols != shape.d_model || !final_norm.get()) return false;
  for (Layer& layer : layers) {
    if (!is_complete(layer)) return false;
    const auto part = [&layer](int which) { return layer.parts[which].get(); };
    layer.routing = {layer.router, part(ROUTER_BIAS), shape.routing_rows(layer.kind), shape.d_model};
    layer.slots = {shape.d_model, head_dim, shape.slots, shape.taps, shape.top_k, shape.is_softmax_router != 0, shape.taper,
                   shape.eps, part(CONV), part(READ_SCALE), part(OUT_NORM), part(SELECTION_BIAS), part(TIMESCALE), shape.heads};
    layer.keyed = {shape.heads, shape.slots, shape.slot_width, shape.taps, shape.eps, part(READ_TAPS), part(WRITE_TAPS),
                   part(CONV), part(OUT_NORM), part(SKIP)};
    layer.attention = {shape.d_model, head_dim, shape.heads, shape.kv_heads, layer.window, shape.eps, part(READ_SCALE)};
  }
  return true;
}

}  // namespace nsm
