// One token from a row of logits: nsm_core/sampling/sampler.py, steps 4 to 6, tells what is meant.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace nsm {

// Mirrored by the arrays of draw.py.
struct Wholes {
  uint64_t seed, choice_index, position, top_k;  // top_k 0: all
};
struct Parts {
  double temperature, top_p, min_p;
};

// The uniform number in [0, 1) of this place: nsm_core/sampling/rng.py.
double uniform(const Wholes& place);

// Logits [n] of tokens whose bit in `words` is not set become minus infinity: nsm_core/sampling/masks.py.
void mask(float* logits, int n, const int32_t* words, int num_words);

// logits [n], finite or minus infinity; `weights` is scratch.
int draw(const Kernels& kernels, const float* logits, int n, const Wholes& wholes, const Parts& parts, std::vector<float>& weights);

}  // namespace nsm
