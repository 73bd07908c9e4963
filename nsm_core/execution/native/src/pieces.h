// How runners of both architectures cut a batch into pieces, and share a piece's tokens between threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "team.h"

namespace nsm {

constexpr int TASKS_PER_THREAD = 4;  // small enough that a slow thread is not waited for long

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

}  // namespace nsm
