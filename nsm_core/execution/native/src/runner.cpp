#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "model.h"

namespace nsm {
namespace {

constexpr int64_t MIB = int64_t{1} << 20;

// Bytes that are fetched early: they have to stay in a cache meanwhile. That is the last one, which `sharing` runners fill together,
// or a large second one, half of which weights need: processors that have it put hardly anything into the last one that leaves it
// unused.
int64_t most_ahead(int sharing) {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  const int64_t second_level = sysconf(_SC_LEVEL2_CACHE_SIZE);
#else
  const int64_t second_level = 0;
#endif
  return second_level > MIB ? second_level / 2 : 16 * MIB / sharing;
}

// The most that any layer of the model has of something.
template <typename Width>
int most_of(const Model& model, const Width& width) {
  int most = 0;
  for (const Layer& layer : model.layers) most = std::max(most, width(layer));
  return most;
}

int mixed_width_of(const Model& model) {
  return most_of(model, [&](const Layer& layer) { return model.shape.mixed_width(layer.kind); });
}

// Of what products take.
int widest(const Model& model) { return std::max({model.shape.d_model, model.shape.mlp_hidden, mixed_width_of(model)}); }

int score_floats_of(const Model& model) {
  const int stride = most_of(model, [](const Layer& layer) { return score_stride(layer.window); });
  return stride * (model.shape.heads / std::max(1, model.shape.kv_heads));
}

int keyed_floats_of(const Model& model, int piece_tokens) {
  const int of_tokens = piece_tokens * keyed_scratch(model.shape.slots, model.shape.slot_width);
  const int all = of_tokens + model.shape.slots * MAX_KEYED_COLUMNS;
  return most_of(model, [&](const Layer& layer) { return layer.kind == KEYED ? all : 0; });
}

}  // namespace

Runner::Runner(const Model& model, const States& states, int num_threads, int piece_tokens)
    : Runner(model, states, num_threads, piece_tokens, most_ahead(1)) {
  for (int lane = 0; num_threads > 1 && lane < num_threads; ++lane)
    lanes_.emplace_back(new Runner(model, states, 1, LANE_TOKENS, most_ahead(num_threads)));
}

Runner::Runner(const Model& model, const States& states, int num_threads, int piece_tokens, int64_t most_ahead)
    : model_(model), states_(states), team_(num_threads), piece_tokens_(piece_tokens), most_ahead_(most_ahead) {
  const Shape& shape = model.shape;
  const size_t tokens = piece_tokens, d = shape.d_model, threads = num_threads;
  routing_stride_ = most_of(model, [&](const Layer& layer) { return tiles_of(shape.routing_rows(layer.kind)) * LANES; });
  score_floats_ = score_floats_of(model);
  keyed_floats_ = keyed_floats_of(model, piece_tokens);
  const size_t projected = most_of(model, [&](const Layer& layer) { return shape.projected_width(layer.kind); });
  x_ = Buffer<float>(tokens * d);
  normed_ = Buffer<float>(tokens * d);
  projected_ = Buffer<float>(tokens * projected);
  routing_ = Buffer<float>(tokens * routing_stride_);
  mixed_ = Buffer<float>(tokens * mixed_width_of(model));
  up_ = Buffer<float>(tokens * 2 * shape.mlp_hidden);
  scratch_ = Buffer<float>(threads * shape.mlp_hidden);
  cos_ = Buffer<float>(tokens * model.head_dim / 2);
  sin_ = Buffer<float>(tokens * model.head_dim / 2);
  scores_ = Buffer<float>(threads * score_floats_);
  keyed_ = Buffer<float>(threads * keyed_floats_);
  bytes_ = Buffer<int8_t>(tokens * widest(model));
  panel_bytes_ = panel_bytes(widest(model));
  panels_ = Buffer<int8_t>(threads * static_cast<size_t>(panel_bytes_));
  scale_ = Buffer<float>(tokens);
  sum_ = Buffer<int32_t>(tokens);
  quantised_ = {bytes_.get(), scale_.get(), sum_.get(), widest(model)};
  positions_.resize(tokens);
}

void Runner::run(const int32_t* rows, const int32_t* counts, int num_rows, const int32_t* ids, float* hidden) {
  const int tokens = std::accumulate(counts, counts + num_rows, 0);
  team_.step(tokens, [&] {
    if (tokens > num_rows) return read(rows, counts, num_rows, ids, hidden);
    over_lanes(num_rows, [&](Runner& runner, int first, int count) {
      runner.read(rows + first, counts + first, count, ids + first, hidden + int64_t{first} * model_.shape.d_model);
    });
  });
}

void Runner::read(const int32_t* rows, const int32_t* counts, int num_rows, const int32_t* ids, float* hidden) {
  over_pieces(team_, *this, lanes_, rows, counts, num_rows, piece_tokens_, model_.shape.num_layers,
              [&](Runner& runner, const Piece& piece, const PieceTurn& turn) { runner.run_piece(piece, ids, hidden, turn); });
  for (int i = 0; i < num_rows; ++i) states_.positions[rows[i]] += counts[i];
}

// Calls task(first tile, last tile, thread) for groups of tiles; counts what they fetch. As many parts as threads: each arranges all
// inputs anew, which took a quarter of the time of prompts with four parts a thread.
template <typename Task>
void Runner::over_groups(int rows, int steps, int tokens, const Task& task) {
  const int tiles = tiles_of(rows), groups = (tiles + GROUP - 1) / GROUP;
  const int parts = std::min(groups, team_.size());
  team_.run(parts, [&](int part, int thread) {
    task(part * groups / parts * GROUP, std::min(tiles, (part + 1) * groups / parts * GROUP), thread);
  });
  const int blocks = (tokens + model_.kernels.block_tokens - 1) / model_.kernels.block_tokens;
  ahead_.begin += int64_t{LINE} * groups * blocks * steps;
}

void Runner::multiply(const Matrix& matrix, const Quantised& x, int tokens, float* y, int stride, bool is_added) {
  over_groups(matrix.rows, matrix.cols / 4, tokens, [&](int first, int last, int thread) {
    model_.kernels.matmul(matrix, x, tokens, first, last, y, stride, is_added, ahead_, panels_.get() + thread * panel_bytes_);
  });
}

// The slots that are written to next are those of the next layer that has any, of the first one in the step to come.
void Runner::look_ahead(int index, const std::vector<Span>& spans) {
  do index = (index + 1) % model_.shape.num_layers;
  while (model_.layers[index].kind == ATTENTION);
  ahead_rows_.clear();
  for (const Span& span : spans)
    ahead_rows_.push_back(reinterpret_cast<const int8_t*>(states_.memory[index] + span.row * states_.memory_strides[index]));
  const int64_t row_bytes = model_.shape.memory_numbers(model_.layers[index].kind) * number_bytes(states_.is_half);
  ahead_ = {ahead_rows_.data(), row_bytes, 0, std::min<int64_t>(row_bytes * static_cast<int64_t>(spans.size()), most_ahead_)};
}

void Runner::norm_and_quantise(const float* gain, int tokens) {
  const int d = model_.shape.d_model;
  over_tokens(team_, tokens, [&](int token, int) {
    float* normed = normed_.get() + static_cast<int64_t>(token) * d;
    model_.kernels.norm(x_.get() + static_cast<int64_t>(token) * d, gain, d, model_.shape.eps, normed);
    model_.kernels.quantise(normed, d, quantised_, token);
  });
}

void Runner::run_piece(const Piece& piece, const int32_t* ids, float* hidden, const PieceTurn& turn) {
  const std::vector<Span>& spans = piece.spans;
  const int d = model_.shape.d_model, tokens = piece.tokens;
  start(spans, ids + piece.first, tokens);
  for (int index = 0; index < model_.shape.num_layers; ++index) {
    const Layer& layer = model_.layers[index];
    norm_and_quantise(layer.parts[MIXER_NORM].get(), tokens);
    mix(index, spans, tokens, turn);
    const int width = model_.shape.mixed_width(layer.kind);
    over_tokens(team_, tokens, [&](int token, int) {
      model_.kernels.quantise(mixed_.get() + static_cast<int64_t>(token) * width, width, quantised_, token);
    });
    multiply(layer.out.view, quantised_, tokens, x_.get(), d, true);
    feed_forward(layer, tokens);
  }
  float* out = hidden + static_cast<int64_t>(piece.first) * d;
  over_tokens(team_, tokens, [&](int token, int) {
    const int64_t first = static_cast<int64_t>(token) * d;
    model_.kernels.norm(x_.get() + first, model_.final_norm.get(), d, model_.shape.eps, out + first);
  });
}

void Runner::start(const std::vector<Span>& spans, const int32_t* ids, int tokens) {
  const int d = model_.shape.d_model, half = model_.head_dim / 2;
  for (const Span& span : spans)
    for (int i = 0; i < span.tokens; ++i) positions_[span.first + i] = states_.positions[span.row] + span.begin + i;
  const float factor = std::sqrt(static_cast<float>(d));
  over_tokens(team_, tokens, [&](int token, int) {
    model_.kernels.embed(model_.embedding.view, ids[token], factor, x_.get() + static_cast<int64_t>(token) * d);
    // Angles in fp64: sessions may be millions of tokens long
    for (size_t i = 0; i < model_.frequencies.size(); ++i) {
      const double angle = static_cast<double>(positions_[token]) * model_.frequencies[i];
      cos_.get()[static_cast<int64_t>(token) * half + i] = static_cast<float>(std::cos(angle));
      sin_.get()[static_cast<int64_t>(token) * half + i] = static_cast<float>(std::sin(angle));
    }
  });
}

void Runner::mix(int index, const std::vector<Span>& spans, int tokens, const PieceTurn& turn) {
  const Layer& layer = model_.layers[index];
  multiply(layer.project.view, quantised_, tokens, projected_.get(), model_.shape.projected_width(layer.kind), false);
  if (layer.kind != ATTENTION) {
    const int d = model_.shape.d_model;
    over_groups(layer.routing.rows, d, tokens, [&](int first, int last, int) {
      model_.kernels.matmul_half(layer.routing, normed_.get(), d, tokens, first, last, routing_.get(), routing_stride_, ahead_);
    });
  }
  turn.wait(index);
  mix_states(index, spans);
  turn.finish(index);
}

void Runner::mix_states(int index, const std::vector<Span>& spans) {
  switch (model_.layers[index].kind) {
    case ATTENTION:
      return mix_attention(index, spans);
    case KEYED:
      mix_keyed(index, spans);
      break;
    case SLOTS:
      mix_slots(index, spans);
  }
  look_ahead(index, spans);
}

// Calls task(span, head, place, next place, thread) for each head of each span. The next place has no state after the last one.
template <typename Task>
void Runner::over_heads(int index, const std::vector<Span>& spans, const Task& task) {
  const int heads = model_.shape.heads, count = static_cast<int>(spans.size()) * heads;
  const int64_t head_bytes = model_.shape.memory_numbers(model_.layers[index].kind) / heads * number_bytes(states_.is_half);
  const auto place_of = [&](int number) -> HeadPlace {
    if (number == count) return {nullptr, nullptr};
    const int32_t row = spans[number / heads].row;
    return {states_.memory[index] + row * states_.memory_strides[index] + number % heads * head_bytes,
            states_.tails[index] + row * states_.tail_strides[index]};
  };
  team_.run(count, [&](int number, int thread) {
    task(spans[number / heads], number % heads, place_of(number), place_of(number + 1), thread);
  });
}

void Runner::mix_slots(int index, const std::vector<Span>& spans) {
  const int64_t d = model_.shape.d_model;
  over_heads(index, spans, [&](const Span& span, int head, const HeadPlace& place, const HeadPlace& next, int) {
    const float* next_tail = next.tail == nullptr ? nullptr : next.tail + (head + 1) % model_.shape.heads * model_.head_dim;
    model_.kernels.slots(model_.layers[index].slots,
                         {head, span.tokens, projected_.get() + span.first * 4 * d, routing_.get() + int64_t{span.first} * routing_stride_,
                          routing_stride_, place.tail, place.state, states_.is_half, mixed_.get() + span.first * d, next.state, next_tail});
  });
}

void Runner::mix_keyed(int index, const std::vector<Span>& spans) {
  const Shape& shape = model_.shape;
  over_heads(index, spans, [&](const Span& span, int head, const HeadPlace& place, const HeadPlace& next, int thread) {
    const int64_t first = span.first;
    float* scratch = keyed_.get() + int64_t{thread} * keyed_floats_;
    model_.kernels.keyed(model_.layers[index].keyed,
                         {head, span.tokens, projected_.get() + first * shape.projected_width(KEYED),
                          routing_.get() + first * routing_stride_, routing_stride_, place.tail, place.state, states_.is_half, scratch,
                          scratch + keyed_floats_ - shape.slots * MAX_KEYED_COLUMNS,
                          mixed_.get() + first * shape.mixed_width(KEYED), next.state});
  });
}

void Runner::mix_attention(int index, const std::vector<Span>& spans) {
  const Layer& layer = model_.layers[index];
  const int d = model_.shape.d_model, K = model_.head_dim, kv_heads = model_.shape.kv_heads, half = K / 2;
  const int width = model_.shape.projected_width(ATTENTION);
  team_.run(static_cast<int>(spans.size()) * kv_heads, [&](int task, int thread) {
    const Span& span = spans[task / kv_heads];
    const int head = task % kv_heads;
    const int64_t first = span.first;
    const int64_t head_bytes = int64_t{2} * layer.window * K * number_bytes(states_.is_half);
    char* ring = states_.memory[index] + span.row * states_.memory_strides[index];
    model_.kernels.attend(layer.attention, {head, span.tokens, positions_[first], projected_.get() + first * width,
                                            cos_.get() + first * half, sin_.get() + first * half,
                                            ring + head * head_bytes, states_.is_half,
                                            scores_.get() + static_cast<int64_t>(thread) * score_floats_, mixed_.get() + first * d});
  });
}

void Runner::feed_forward(const Layer& layer, int tokens) {
  const int hidden = model_.shape.mlp_hidden;
  norm_and_quantise(layer.parts[MLP_NORM].get(), tokens);
  multiply(layer.up.view, quantised_, tokens, up_.get(), 2 * hidden, false);
  over_tokens(team_, tokens, [&](int token, int thread) {
    model_.kernels.swiglu(up_.get() + static_cast<int64_t>(token) * 2 * hidden, hidden,
                          scratch_.get() + static_cast<int64_t>(thread) * hidden, quantised_, token);
  });
  multiply(layer.down.view, quantised_, tokens, x_.get(), model_.shape.d_model, true);
}

void Runner::logits(const float* hidden, int tokens, float* out) {
  const int d = model_.shape.d_model, vocab = model_.shape.vocab_size;
  for (int first = 0; first < tokens; first += piece_tokens_) {
    const int some = std::min(piece_tokens_, tokens - first);
    const float* part = hidden + static_cast<int64_t>(first) * d;
    over_tokens(team_, some, [&](int token, int) {
      model_.kernels.quantise(part + static_cast<int64_t>(token) * d, d, quantised_, token);
    });
    multiply(model_.embedding.view, quantised_, some, out + static_cast<int64_t>(first) * vocab, vocab, false);
  }
}

}  // namespace nsm
