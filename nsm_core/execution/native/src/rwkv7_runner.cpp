#include <algorithm>
#include <numeric>

#include "rwkv7_model.h"

namespace nsm {
namespace {

enum Input { R, W, K, V, A, G, NUM_INPUTS };  // the order of TIME_SHIFT
enum Small { DECAY, RATE, VALUE_MIX, GATE, NUM_SMALL };
enum Bytes { BYTES_R, BYTES_K, BYTES_V, BYTES_HIDDEN, NUM_BYTES };

int padded(int count) { return tiles_of(count) * LANES; }

}  // namespace

Rwkv7Runner::Rwkv7Runner(const Rwkv7Model& model, States states, int num_threads, int piece_tokens)
    : model_(model), states_(std::move(states)), team_(num_threads), piece_tokens_(piece_tokens), is_rounded_(model.is_rounded()) {
  const Rwkv7Shape& shape = model.shape;
  const size_t tokens = piece_tokens, floats = tokens * shape.width;
  for (Buffer<float>* buffer : {&x_, &normed_, &r_, &k_, &v_, &first_value_, &read_}) *buffer = Buffer<float>(floats);
  for (Buffer<float>& buffer : mixed_) buffer = Buffer<float>(floats);
  const int ranks[NUM_SMALL] = {shape.decay_rank, shape.rate_rank, shape.value_rank, shape.gate_rank};
  for (int i = 0; i < NUM_SMALL; ++i) {
    inner_[i] = Buffer<float>(tokens * padded(ranks[i]));
    outer_[i] = Buffer<float>(floats);
  }
  hidden_ = Buffer<float>(tokens * shape.hidden);
  if (is_rounded_) {
    scratch_ = Buffer<float>(static_cast<size_t>(num_threads) * shape.hidden);
    if (!model.has_columns()) two_ = Buffer<float>(2 * floats);
    for (int i = 0; i < NUM_BYTES; ++i) {
      const size_t rows = i == BYTES_HIDDEN ? 2 * tokens : tokens;
      const int width = i == BYTES_HIDDEN ? shape.hidden : shape.width;
      bytes_[i] = Buffer<int8_t>(rows * width);
      scales_[i] = Buffer<float>(rows);
      sums_[i] = Buffer<int32_t>(rows);
      quantised_[i] = {bytes_[i].get(), scales_[i].get(), sums_[i].get(), width};
    }
  }
  panel_bytes_ = is_rounded_ ? panel_bytes(std::max(shape.width, shape.hidden)) : 0;
  panels_ = Buffer<int8_t>(static_cast<size_t>(num_threads) * panel_bytes_);
  before_.resize(tokens);
  if (model.has_columns()) {
    const size_t room = nonzero_room(shape.hidden);
    places_ = Buffer<int32_t>(tokens * room);
    nonzero_ = Buffer<uint8_t>(2 * tokens * room);
    const size_t runs = static_cast<size_t>(column_blocks(shape.hidden)) * NONZERO_RUNS;
    run_ends_ = Buffer<int>(tokens * runs);
    for (size_t token = 0; token < tokens; ++token) {
      uint8_t* rough = nonzero_.get() + 2 * token * room;
      nonzero_inputs_.push_back({places_.get() + token * room, rough, rough + room, run_ends_.get() + token * runs, 0.0f, 0.0f});
    }
  }
  for (int lane = 0; num_threads > 1 && lane < num_threads; ++lane)
    lanes_.emplace_back(new Rwkv7Runner(model, states_, 1, LANE_TOKENS));
}

void Rwkv7Runner::run(const int32_t* rows, const int32_t* counts, int num_rows, const float* embedded, float* hidden) {
  const int tokens = std::accumulate(counts, counts + num_rows, 0);
  team_.step(tokens, [&] {
    if (tokens > num_rows) return read(rows, counts, num_rows, embedded, hidden);
    over_lanes(team_, *this, lanes_, num_rows, [&](Rwkv7Runner& runner, int first, int count) {
      const int64_t place = int64_t{first} * model_.shape.width;
      runner.read(rows + first, counts + first, count, embedded + place, hidden + place);
    });
  });
}

void Rwkv7Runner::read(const int32_t* rows, const int32_t* counts, int num_rows, const float* embedded, float* hidden) {
  over_pieces(team_, *this, lanes_, rows, counts, num_rows, piece_tokens_, model_.shape.num_layers,
              [&](Rwkv7Runner& runner, const Piece& piece, const PieceTurn& turn) { runner.run_piece(piece, embedded, hidden, turn); });
  for (int i = 0; i < num_rows; ++i) states_.positions[rows[i]] += counts[i];
}

void Rwkv7Runner::multiply_tiles(const Product& product, int first, int last, int thread) {
  const Rwkv7Matrix& matrix = *product.matrix;
  switch (matrix.kind) {
    case Rwkv7Matrix::COLUMNS:
      model_.own.columns->multiply({matrix.weights, matrix.by_row.get(), matrix.rows, matrix.cols, false}, nonzero_inputs_.data(),
                                   product.tokens, first, last, product.y, product.stride);
      break;
    case Rwkv7Matrix::INT8:
    case Rwkv7Matrix::INT4:
      model_.kernels.matmul({matrix.weights, matrix.by_row.get(), matrix.rows, matrix.cols, matrix.kind == Rwkv7Matrix::INT4}, *product.bytes,
                            product.tokens, first, last, product.y, product.stride, product.is_added, Ahead{},
                            panels_.get() + thread * panel_bytes_);
      break;
    case Rwkv7Matrix::HALF:
      model_.kernels.matmul_half({reinterpret_cast<const uint16_t*>(matrix.weights), matrix.by_row.get(), matrix.rows, matrix.cols},
                                 product.x, product.x_stride, product.tokens, first, last, product.y, product.stride, Ahead{});
      break;
    case Rwkv7Matrix::FLOAT:
      model_.own.matmul_float({matrix.weights, matrix.numbers, matrix.by_row.get(), matrix.rows, matrix.cols}, product.x,
                              product.x_stride, product.tokens, first, last, product.y, product.stride, product.is_added);
  }
}

// All of them as one job: threads meet once, not after each. Each has as many parts as threads: a part arranges all inputs anew.
void Rwkv7Runner::multiply(std::initializer_list<Product> products) {
  const auto parts_of = [&](const Product& product) { return std::min((tiles_of(product.matrix->rows) + GROUP - 1) / GROUP, team_.size()); };
  int total = 0;
  for (const Product& product : products) total += parts_of(product);
  team_.run(total, [&](int part, int thread) {
    for (const Product& product : products) {
      const int parts = parts_of(product);
      if (part < parts) {
        const int tiles = tiles_of(product.matrix->rows), groups = (tiles + GROUP - 1) / GROUP;
        multiply_tiles(product, part * groups / parts * GROUP, std::min(tiles, (part + 1) * groups / parts * GROUP), thread);
        return;
      }
      part -= parts;
    }
  });
}

void Rwkv7Runner::norm_all(int layer, int part, const float* x, int tokens, float* out) {
  const int d = model_.shape.width;
  const float *gain = model_.floats(layer, part), *bias = model_.floats(layer, part + 1);
  over_tokens(team_, tokens, [&](int token, int) {
    const int64_t first = static_cast<int64_t>(token) * d;
    model_.own.layer_norm(x + first, gain, bias, d, model_.shape.norm_eps, out + first);
  });
}

template <typename Task>
void Rwkv7Runner::over_shifted(const std::vector<Span>& spans, const std::vector<float*>& shifts, const std::vector<int64_t>& strides,
                               int layer, int tokens, const Task& task) {
  const int d = model_.shape.width;
  const auto kept = [&](const Span& span) { return shifts[layer] + span.row * strides[layer]; };
  for (const Span& span : spans)
    for (int i = 0; i < span.tokens; ++i)
      before_[span.first + i] = i == 0 ? kept(span) : normed_.get() + static_cast<int64_t>(span.first + i - 1) * d;
  over_tokens(team_, tokens, [&](int token, int thread) {
    task(token, thread, normed_.get() + static_cast<int64_t>(token) * d, before_[token]);
  });
  for (const Span& span : spans) {
    const float* last = normed_.get() + static_cast<int64_t>(span.first + span.tokens - 1) * d;
    std::copy(last, last + d, kept(span));
  }
}

void Rwkv7Runner::run_piece(const Piece& piece, const float* embedded, float* hidden, const PieceTurn& turn) {
  const int64_t place = int64_t{piece.first} * model_.shape.width;
  norm_all(0, FIRST_NORM, embedded + place, piece.tokens, x_.get());
  for (int layer = 0; layer < model_.shape.num_layers; ++layer) {
    norm_all(layer, TIME_NORM, x_.get(), piece.tokens, normed_.get());
    turn.wait(layer);
    time_mix(layer, piece.spans, piece.tokens);
    norm_all(layer, CHANNEL_NORM, x_.get(), piece.tokens, normed_.get());
    channel_mix(layer, piece.spans, piece.tokens);
    turn.finish(layer);
  }
  norm_all(0, LAST_NORM, x_.get(), piece.tokens, hidden + place);
}

void Rwkv7Runner::time_mix(int layer, const std::vector<Span>& spans, int tokens) {
  const Rwkv7Shape& shape = model_.shape;
  const int d = shape.width;
  const float* shares = model_.floats(layer, TIME_SHIFT);
  over_shifted(spans, states_.time_shifts, states_.time_strides, layer, tokens, [&](int token, int, const float* x, const float* before) {
    for (int i = 0; i < NUM_INPUTS; ++i)
      model_.own.shift(x, before, shares + static_cast<int64_t>(i) * d, d, mixed_[i].get() + static_cast<int64_t>(token) * d);
    if (!is_rounded_) return;
    model_.kernels.quantise(mixed_[R].get() + static_cast<int64_t>(token) * d, d, quantised_[BYTES_R], token);
    model_.kernels.quantise(mixed_[K].get() + static_cast<int64_t>(token) * d, d, quantised_[BYTES_K], token);
    model_.kernels.quantise(mixed_[V].get() + static_cast<int64_t>(token) * d, d, quantised_[BYTES_V], token);
  });
  const auto large = [&](int part, Input input, Bytes bytes, Buffer<float>& y) {
    return Product{&model_.matrix(layer, part), mixed_[input].get(), d, &quantised_[bytes], y.get(), d, false, tokens};
  };
  const auto inner = [&](int part, Input input, Small small) {
    const Rwkv7Matrix& matrix = model_.matrix(layer, part);
    return Product{&matrix, mixed_[input].get(), d, nullptr, inner_[small].get(), padded(matrix.rows), false, tokens};
  };
  const auto outer = [&](int part, Small small) {
    const Rwkv7Matrix& matrix = model_.matrix(layer, part);
    return Product{&matrix, inner_[small].get(), padded(matrix.cols), nullptr, outer_[small].get(), d, false, tokens};
  };
  // The first layer's matrices of the value residual have no rows: no work
  multiply({large(RECEPTANCE, R, BYTES_R, r_), large(KEY, K, BYTES_K, k_), large(VALUE, V, BYTES_V, v_), inner(DECAY_IN, W, DECAY),
            inner(RATE_IN, A, RATE), inner(VALUE_IN, V, VALUE_MIX), inner(GATE_IN, G, GATE)});
  over_tokens(team_, tokens, [&](int token, int) {
    const int decay = padded(shape.decay_rank), gate = padded(shape.gate_rank);
    model_.own.tanh(inner_[DECAY].get() + static_cast<int64_t>(token) * decay, decay);
    model_.own.sigmoid(inner_[GATE].get() + static_cast<int64_t>(token) * gate, gate);
  });
  multiply({outer(DECAY_OUT, DECAY), outer(RATE_OUT, RATE), outer(VALUE_OUT, VALUE_MIX), outer(GATE_OUT, GATE)});
  read_heads(layer, spans);
  if (is_rounded_)
    over_tokens(team_, tokens, [&](int token, int) {
      model_.kernels.quantise(read_.get() + static_cast<int64_t>(token) * d, d, quantised_[BYTES_R], token);
    });
  multiply({{&model_.matrix(layer, OUTPUT), read_.get(), d, &quantised_[BYTES_R], x_.get(), d, true, tokens}});
}

void Rwkv7Runner::read_heads(int layer, const std::vector<Span>& spans) {
  const Rwkv7Shape& shape = model_.shape;
  const int heads = model_.num_heads(), size = shape.head_size;
  const auto floats = [&](int part) { return model_.floats(layer, part); };
  const Rwkv7Layer own = {shape.width, size, layer == 0, shape.head_eps, floats(REMOVAL_KEY), floats(KEY_RATE), floats(BONUS),
                          floats(HEAD_NORM), floats(HEAD_NORM_BIAS)};
  const int count = static_cast<int>(spans.size()) * heads;
  const auto state_of = [&](int task) -> float* {
    if (task == count) return nullptr;
    return states_.matrices[layer] + spans[task / heads].row * states_.matrix_strides[layer] + static_cast<int64_t>(task % heads) * size * size;
  };
  team_.run(count, [&](int task, int) {
    const Span& span = spans[task / heads];
    const int head = task % heads;
    const int64_t first = static_cast<int64_t>(span.first) * shape.width;
    model_.own.heads(own, {head, span.tokens, r_.get() + first, k_.get() + first, v_.get() + first, outer_[DECAY].get() + first,
                           outer_[RATE].get() + first, outer_[GATE].get() + first, outer_[VALUE_MIX].get() + first,
                           first_value_.get() + first, state_of(task), read_.get() + first, state_of(task + 1)});
  });
}

void Rwkv7Runner::channel_mix(int layer, const std::vector<Span>& spans, int tokens) {
  const int d = model_.shape.width, hidden = model_.shape.hidden;
  const bool has_columns = model_.has_columns();
  over_shifted(spans, states_.channel_shifts, states_.channel_strides, layer, tokens,
               [&](int token, int, const float* x, const float* before) {
                 float* mixed = mixed_[K].get() + static_cast<int64_t>(token) * d;
                 model_.own.shift(x, before, model_.floats(layer, CHANNEL_SHIFT), d, mixed);
                 if (is_rounded_) model_.kernels.quantise(mixed, d, quantised_[BYTES_K], token);
               });
  multiply({{&model_.matrix(layer, CHANNEL_KEY), mixed_[K].get(), d, &quantised_[BYTES_K], hidden_.get(), hidden, false, tokens}});
  over_tokens(team_, tokens, [&](int token, int thread) {
    float* inner = hidden_.get() + static_cast<int64_t>(token) * hidden;
    model_.own.relu_squared(inner, hidden);
    // A square has a few large numbers and many small ones: in one row of int8 the small ones would vanish
    if (is_rounded_)
      model_.own.quantise_twice(inner, hidden, scratch_.get() + static_cast<int64_t>(thread) * hidden, quantised_[BYTES_HIDDEN],
                                token, tokens + token);
    if (has_columns) model_.own.columns->gather(quantised_[BYTES_HIDDEN], hidden, token, tokens + token, nonzero_inputs_[token]);
  });
  const Rwkv7Matrix& value = model_.matrix(layer, CHANNEL_VALUE);
  if (!is_rounded_ || has_columns) {
    multiply({{&value, hidden_.get(), hidden, nullptr, x_.get(), d, true, tokens}});
    return;
  }
  multiply({{&value, nullptr, 0, &quantised_[BYTES_HIDDEN], two_.get(), d, false, 2 * tokens}});
  over_tokens(team_, tokens, [&](int token, int) {
    const int64_t place = static_cast<int64_t>(token) * d;
    model_.own.add_two(two_.get() + place, two_.get() + static_cast<int64_t>(tokens) * d + place, d, x_.get() + place);
  });
}

void Rwkv7Runner::logits(const float* hidden, int tokens, float* out) {
  const int d = model_.shape.width, vocab = model_.shape.vocab_size;
  for (int first = 0; first < tokens; first += piece_tokens_) {
    const int some = std::min(piece_tokens_, tokens - first);
    const float* part = hidden + static_cast<int64_t>(first) * d;
    if (is_rounded_)
      over_tokens(team_, some, [&](int token, int) {
        model_.kernels.quantise(part + static_cast<int64_t>(token) * d, d, quantised_[BYTES_R], token);
      });
    multiply({{&model_.matrix(0, HEAD), part, d, &quantised_[BYTES_R], out + static_cast<int64_t>(first) * vocab, vocab, false, some}});
  }
}

}  // namespace nsm
