// How runners of both architectures cut a batch into pieces and lanes, and share them, or a piece's tokens, between threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <vector>

#include "team.h"

namespace nsm {

constexpr int TASKS_PER_THREAD = 4;  // small enough that a slow thread is not waited for long

// Rows of a lane (see over_lanes), at least: each lane goes through all weights.
constexpr int LEAST_LANE_ROWS = 2;
constexpr int LANE_TOKENS = 32;  // of a lane's piece; products of so many do not wait for memory

// Tokens of the pieces that threads read side by side, at least: each piece goes through all weights.
constexpr int LEAST_PIECE_TOKENS = 16;
constexpr int PIECE_UNIT = 4;  // tokens that products take together

// One row's tokens in a piece.
struct Span {
  int32_t row;
  int first, tokens;  // among the piece's tokens
  int begin;          // the row's tokens in the pieces before
};

// Tokens of a runner's `run` that pass the layers together; `first`: among all of its tokens.
struct Piece {
  std::vector<Span> spans;
  int first, tokens;
};

// Row rows[i] has counts[i] tokens; pieces of `piece_tokens`, the last one of fewer.
inline std::vector<Piece> cut_pieces(const int32_t* rows, const int32_t* counts, int num_rows, int piece_tokens) {
  std::vector<Piece> pieces;
  for (int i = 0, first = 0; i < num_rows; ++i)
    for (int begin = 0; begin < counts[i];) {
      if (pieces.empty() || pieces.back().tokens == piece_tokens) pieces.push_back({{}, first, 0});
      Piece& piece = pieces.back();
      const int some = std::min(counts[i] - begin, piece_tokens - piece.tokens);
      piece.spans.push_back({rows[i], piece.tokens, some, begin});
      piece.tokens += some;
      begin += some, first += some;
    }
  return pieces;
}

// Tokens of a piece that threads read side by side, at most LANE_TOKENS; 0: they share the work of a whole piece instead, since less than
// half of them would get one.
inline int side_by_side_tokens(int threads, int tokens) {
  const int fewest = (tokens + LANE_TOKENS - 1) / LANE_TOKENS, even = (fewest + threads - 1) / threads * threads;
  const int pieces = std::max(fewest, std::min(even, tokens / LEAST_PIECE_TOKENS));
  if (pieces < 2 || 2 * pieces < threads) return 0;
  const int each = (tokens + pieces - 1) / pieces;
  return (each + PIECE_UNIT - 1) / PIECE_UNIT * PIECE_UNIT;
}

// Pieces that several threads read side by side. A layer's states of a piece are those that the piece before left there, where both have
// tokens of one row. Threads take pieces in order, so the first one that is not done never waits.
class PieceOrder {
 public:
  PieceOrder(const std::vector<Piece>& pieces, int num_layers) : pieces_(pieces), num_layers_(num_layers), layers_(pieces.size()) {}

  // Returns when the piece before has left the states of this layer.
  void wait(int piece, int layer) {
    if (piece == 0 || pieces_[piece].spans.front().begin == 0) return;
    const std::atomic<int>& before = layers_[piece - 1];
    for (int look = 0; look < LOOKS; ++look, relax())
      if (before > layer) return;
    std::unique_lock<std::mutex> lock(mutex_);
    ++num_asleep_;
    changed_.wait(lock, [&] { return before > layer; });
    --num_asleep_;
  }
  // The piece's states of this layer, and of those before, are as it leaves them.
  void finish(int piece, int layer) {
    layers_[piece] = layer + 1;
    if (num_asleep_ == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }
  void finish(int piece) { finish(piece, num_layers_ - 1); }

 private:
  const std::vector<Piece>& pieces_;
  const int num_layers_;
  std::vector<std::atomic<int>> layers_;  // of each piece, that are finished
  std::atomic<int> num_asleep_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

// A piece's part of an order; without one it waits for none.
struct PieceTurn {
  PieceOrder* order = nullptr;
  int piece = 0;

  void wait(int layer) const {
    if (order != nullptr) order->wait(piece, layer);
  }
  void finish(int layer) const {
    if (order != nullptr) order->finish(piece, layer);
  }
};

// Calls task(runner, piece, turn) for each piece, on the runner of its thread. A thread is a part of a layer behind the one with the piece
// before; they meet nowhere else. Raises bad_alloc where a task does.
template <typename Runner, typename Task>
void side_by_side(Team& team, const std::vector<std::unique_ptr<Runner>>& runners, const std::vector<Piece>& pieces, int num_layers,
                  const Task& task) {
  PieceOrder order(pieces, num_layers);
  std::atomic<bool> has_memory{true};
  team.run_long(static_cast<int>(pieces.size()), [&](int number, int thread) {
    try {
      task(*runners[thread], pieces[number], PieceTurn{&order, number});
    } catch (const std::bad_alloc&) {  // which must not leave a thread, nor others waiting
      has_memory = false;
      order.finish(number);
    }
  });
  if (!has_memory) throw std::bad_alloc();
}

// Calls task(runner, piece, turn) for the pieces of all rows' tokens: side by side, or on `whole` one after the other.
template <typename Runner, typename Task>
void over_pieces(Team& team, Runner& whole, const std::vector<std::unique_ptr<Runner>>& runners, const int32_t* rows, const int32_t* counts,
                 int num_rows, int piece_tokens, int num_layers, const Task& task) {
  const int each = team.is_alone() ? 0 : side_by_side_tokens(team.size(), std::accumulate(counts, counts + num_rows, 0));
  const std::vector<Piece> pieces = cut_pieces(rows, counts, num_rows, each > 0 ? each : piece_tokens);
  if (each > 0) return side_by_side(team, runners, pieces, num_layers, task);
  for (const Piece& piece : pieces) task(whole, piece, PieceTurn{});
}

// Calls task(token, thread) for each token in [0, tokens).
template <typename Task>
void over_tokens(Team& team, int tokens, const Task& task) {
  const int groups = std::min(tokens, team.size() * TASKS_PER_THREAD);
  team.run(groups, [&](int group, int thread) {
    for (int token = group * tokens / groups; token < (group + 1) * tokens / groups; ++token) task(token, thread);
  });
}

// Calls task(runner, first, rows) for parts of the rows, each on a runner of one thread; with all rows and `whole` where less than half
// of the threads would get a part, and in a step of the caller alone. Threads that share every matrix all wait for memory at the states of
// each layer, and then all for arithmetic; runners that go through the layers on their own wait for it at different times, and none waits
// for the others before the end. Raises bad_alloc where a task does.
template <typename Runner, typename Task>
void over_lanes(Team& team, Runner& whole, const std::vector<std::unique_ptr<Runner>>& runners, int num_rows, const Task& task) {
  const int threads = static_cast<int>(runners.size()), lanes = std::min(threads, num_rows / LEAST_LANE_ROWS);
  if (lanes < 2 || 2 * lanes < threads || team.is_alone()) return task(whole, 0, num_rows);
  std::atomic<bool> has_memory{true};
  team.run_long(lanes, [&](int lane, int) {
    const int first = lane * num_rows / lanes;
    try {
      task(*runners[lane], first, (lane + 1) * num_rows / lanes - first);
    } catch (const std::bad_alloc&) {  // which must not leave a thread
      has_memory = false;
    }
  });
  if (!has_memory) throw std::bad_alloc();
}

}  // namespace nsm
