#include "decode.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <vector>

namespace nsm {
namespace {

bool is_finite(const float* logits, int n) {
  constexpr uint32_t EXPONENT = 0x7f800000u;  // all of its bits are set in infinities and NaN alone
  int bad = 0;
  for (int i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, logits + i, sizeof bits);
    bad |= (bits & EXPONENT) == EXPONENT;
  }
  return bad == 0;
}

// Of equal ones the first.
int largest(const float* logits, int n) { return static_cast<int>(std::max_element(logits, logits + n) - logits); }

int64_t choose(const Kernels& kernels, const float* logits, int n, const Choice& choice) {
  if (!is_finite(logits, n)) return NOT_FINITE;
  if (choice.parts.temperature == 0.0) return largest(logits, n);
  thread_local std::vector<float> weights;
  return draw(kernels, logits, n, choice.wholes, choice.parts, weights);
}

// One token of each of the rows [first, first + count), to tokens [count]. Raises bad_alloc.
void decode_rows(Runner& runner, const Slice& slice, const int32_t* ones, int first, int count, int64_t* tokens) {
  const int n = runner.vocab_size();
  float *hidden = slice.hidden + int64_t{first} * runner.width(), *logits = slice.logits + int64_t{first} * n;
  runner.run(slice.rows + first, ones, count, slice.ids + first, hidden);
  runner.logits(hidden, count, logits);
  std::atomic<bool> has_memory{true};
  runner.share(count, [&](int row, int) {
    try {
      tokens[row] = choose(runner.kernels(), logits + int64_t{row} * n, n, slice.choices[first + row]);
    } catch (const std::bad_alloc&) {
      has_memory = false;
    }
  });
  if (!has_memory) throw std::bad_alloc();
}

// Takes the round's tokens as the next inputs. True: a row needs the caller.
bool ends(const Slice& slice, const int64_t* tokens) {
  bool is_over = false;
  const int32_t* end_ids = slice.end_ids;
  for (int row = 0; row < slice.num_rows; ++row) {
    const int32_t* last = end_ids + slice.num_end_ids[row];
    is_over |= tokens[row] == NOT_FINITE || std::find(end_ids, last, tokens[row]) != last;
    end_ids = last;
    slice.ids[row] = static_cast<int32_t>(tokens[row]);
    ++slice.choices[row].wholes.position;
  }
  return is_over;
}

}  // namespace

int decode(Runner& runner, const Slice& slice) {
  using Clock = std::chrono::steady_clock;
  const std::vector<int32_t> ones(slice.num_rows, 1);
  const Clock::time_point began = Clock::now();
  for (int round = 0;;) {
    int64_t* tokens = slice.tokens + static_cast<int64_t>(round) * slice.num_rows;
    runner.step(slice.num_rows, [&] {
      runner.over_lanes(slice.num_rows, [&](Runner& lane, int first, int count) {
        decode_rows(lane, slice, ones.data(), first, count, tokens + first);
      });
    });
    ++round;
    if (ends(slice, tokens) || round == slice.most_rounds || __atomic_load_n(slice.interrupt, __ATOMIC_RELAXED) != 0) return round;
    const double spent = std::chrono::duration<double>(Clock::now() - began).count();
    if (spent * (round + 1) > slice.seconds * round) return round;  // the next one would end after the time
  }
}

}  // namespace nsm
