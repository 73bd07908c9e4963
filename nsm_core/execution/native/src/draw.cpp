#include "draw.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace nsm {
namespace {

// 8 exponent bits and 3 mantissa bits: 8 buckets to each factor of two, for weights in [0, 1]
constexpr int BUCKET_SHIFT = 20, NUM_BUCKETS = (0x3f800000 >> BUCKET_SHIFT) + 1;
constexpr int BLOCK = 64;

int bucket_of(float weight) {
  int32_t bits;  // of floats that are not negative the order of the bit patterns is that of the values
  std::memcpy(&bits, &weight, sizeof bits);
  return bits >> BUCKET_SHIFT;
}

// Keeps weights from the largest downwards until their measure reaches `wanted`, of equal ones those of the lowest ids; the
// others become 0. The histogram finds the bucket of the last one, so that only this one is sorted.
template <typename Measure>
void keep_fewest(std::vector<float>& weights, const std::vector<double>& sums, double wanted, const Measure& measure) {
  double above = 0.0;
  int last = NUM_BUCKETS - 1;
  for (; last > 0 && above + sums[last] < wanted; --last) above += sums[last];
  std::vector<float> members;
  for (float weight : weights)
    if (bucket_of(weight) == last) members.push_back(weight);
  if (members.empty()) return;
  std::sort(members.begin(), members.end(), [](float a, float b) { return a > b; });
  size_t kept = 0;
  while (kept < members.size()) {
    above += measure(members[kept++]);
    if (above >= wanted) break;
  }
  const float threshold = members[kept - 1];
  const auto first_equal = std::find(members.begin(), members.end(), threshold);
  int64_t equal_left = members.begin() + static_cast<int64_t>(kept) - first_equal;
  for (float& weight : weights)
    if (weight < threshold || (weight == threshold && equal_left-- <= 0)) weight = 0.0f;
}

template <typename Measure>
std::vector<double> histogram(const std::vector<float>& weights, const Measure& measure) {
  std::vector<double> sums(NUM_BUCKETS, 0.0);
  for (float weight : weights) sums[bucket_of(weight)] += measure(weight);
  return sums;
}

void keep_wanted(std::vector<float>& weights, uint64_t top_k, const Parts& parts) {
  const auto one = [](float) { return 1.0; };
  const auto itself = [](float weight) { return static_cast<double>(weight); };
  if (top_k > 0 && top_k < weights.size()) keep_fewest(weights, histogram(weights, one), static_cast<double>(top_k), one);
  if (parts.top_p < 1.0) {
    const std::vector<double> sums = histogram(weights, itself);
    double total = 0.0;
    for (int bucket = NUM_BUCKETS - 1; bucket >= 0; --bucket) total += sums[bucket];
    keep_fewest(weights, sums, parts.top_p * total, itself);
  }
  if (parts.min_p > 0.0) {
    const float least = static_cast<float>(parts.min_p) * *std::max_element(weights.begin(), weights.end());
    for (float& weight : weights)
      if (weight < least) weight = 0.0f;
  }
}

double sum_of(const float* weights, size_t n) {
  double sums[4] = {};
  for (size_t i = 0; i < n; ++i) sums[i % 4] += weights[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// The first id whose cumulative weight exceeds u times the total: blocks are passed over as wholes.
int find(const std::vector<float>& weights, double u) {
  const size_t n = weights.size();
  double total = 0.0;
  for (size_t at = 0; at < n; at += BLOCK) total += sum_of(&weights[at], std::min<size_t>(BLOCK, n - at));
  const double target = std::min(u * total, std::nextafter(total, 0.0));
  double reached = 0.0;
  int last_drawable = 0;
  for (size_t at = 0; at < n; at += BLOCK) {
    const size_t end = std::min<size_t>(at + BLOCK, n);
    const double whole = reached + sum_of(&weights[at], end - at);
    if (whole <= target) {
      reached = whole;
      continue;
    }
    double inside = reached;
    for (size_t i = at; i < end; ++i) {
      inside += weights[i];
      if (weights[i] > 0.0f) last_drawable = static_cast<int>(i);
      if (inside > target) return static_cast<int>(i);
    }
    return last_drawable;  // the block's two sums round apart
  }
  return last_drawable;
}

}  // namespace

double uniform(const Wholes& place) {
  // Philox4x64-10 (Salmon et al. 2011)
  using Wide = unsigned __int128;
  uint64_t c0 = place.position + 1, c1 = c0 == 0, c2 = 0, c3 = 0, k0 = place.seed, k1 = place.choice_index;
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B97F4A7C15u, k1 += 0xBB67AE8584CAA73Bu) {
    const Wide a = Wide{0xD2E7470EE14C6C93u} * c0, b = Wide{0xCA5A826395121157u} * c2;
    c0 = static_cast<uint64_t>(b >> 64) ^ c1 ^ k0;
    c1 = static_cast<uint64_t>(b);
    c2 = static_cast<uint64_t>(a >> 64) ^ c3 ^ k1;
    c3 = static_cast<uint64_t>(a);
  }
  return static_cast<double>(c0 >> 11) * 0x1p-53;
}

void mask(float* logits, int n, const int32_t* words, int num_words) {
  constexpr int BITS = 32;
  for (int at = 0; at < n; at += BITS) {
    const uint32_t allowed = at / BITS < num_words ? static_cast<uint32_t>(words[at / BITS]) : 0u;
    if (allowed == 0xffffffffu) continue;
    const int end = std::min(BITS, n - at);
    for (int i = 0; i < end; ++i)
      if ((allowed >> i & 1u) == 0u) logits[at + i] = -std::numeric_limits<float>::infinity();
  }
}

int draw(const Kernels& kernels, const float* logits, int n, const Wholes& wholes, const Parts& parts, std::vector<float>& weights) {
  weights.resize(n);
  // The smallest normal number stands for a temperature that fp32 cannot hold
  kernels.weigh(logits, n, std::max(static_cast<float>(parts.temperature), 1.17549435e-38f), weights.data());
  keep_wanted(weights, wholes.top_k, parts);
  return find(weights, uniform(wholes));
}

}  // namespace nsm
