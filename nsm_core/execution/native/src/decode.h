// Several tokens of several rows in one call: steps, logits and draws until somebody is needed who is not here.
#pragma once

#include <cstdint>

#include "draw.h"
#include "model.h"

namespace nsm {

// Of one row; mirrored by `pack_sampling_params` of nsm_core/sampling/device.py. Temperature 0: the largest logit.
struct Choice {
  Wholes wholes;
  Parts parts;
};

constexpr int64_t NOT_FINITE = -1;  // nsm_core/sampling/result.py

struct Slice {
  const int32_t* rows;     // [num_rows]
  int32_t* ids;            // [num_rows], what each row reads first; scratch
  Choice* choices;         // [num_rows], of the first token; positions are advanced
  const int32_t* end_ids;  // one row's after the other's
  const int32_t* num_end_ids;  // [num_rows]
  int num_rows, most_rounds;
  double seconds;
  const int32_t* interrupt;  // another thread's: not 0 when somebody waits
  float *hidden, *logits;    // scratch [num_rows, d], [num_rows, vocabulary]
  int64_t* tokens;           // out [most_rounds, num_rows]
};

// Rounds made, at least one. The last one is the first in which a row draws one of its end ids or has logits that are not
// finite, or after which somebody waits, or the next would end too late.
int decode(Runner& runner, const Slice& slice);

}  // namespace nsm
