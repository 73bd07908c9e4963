// How runners of both architectures cut a batch into pieces and lanes, and share a piece's tokens between threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "team.h"

namespace nsm {

constexpr int TASKS_PER_THREAD = 4;  // small enough that a slow thread is not waited for long

// Rows of a lane (see over_lanes), at least: each lane goes through all weights.
constexpr int LEAST_LANE_ROWS = 2;
constexpr int LANE_TOKENS = 32;  // of a lane's piece; products of so many do not wait for memory

// One row's tokens in a batch of a runner's `run`.
struct Span {
  int32_t row;
  int first, tokens;  // among the piece's tokens
};

// Calls run_piece(spans, tokens) for each piece of at most `piece_tokens`; row rows[i] has counts[i] tokens.
template <typename RunPiece>
void over_pieces(const int32_t* rows, const int32_t* counts, int num_rows, int piece_tokens, const RunPiece& run_piece) {
  std::vector<Span> spans;
  int filled = 0;
  const auto flush = [&] {
    run_piece(spans, filled);
    spans.clear();
    filled = 0;
  };
  for (int i = 0; i < num_rows; ++i)
    for (int left = counts[i]; left > 0;) {
      const int some = std::min(left, piece_tokens - filled);
      spans.push_back({rows[i], filled, some});
      filled += some;
      left -= some;
      if (filled == piece_tokens) flush();
    }
  if (filled > 0) flush();
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
