// Whether steps are faster on several threads than on one.
#pragma once

#include <array>

namespace nsm {

// Found by trying both, now and then: on a busy machine, or where a step is short, several threads are often no faster. Steps of about as
// many tokens have a finding of their own.
class Sharing {
 public:
  // Of the next step, of so many tokens (at least 1); `record` follows.
  bool is_next_shared(int tokens);
  void record(int tokens, double seconds);

 private:
  enum class Trial { NONE, ALONE, SHARED };
  struct Finding {
    Trial trial = Trial::NONE;   // of the next step
    double gain = 0.2;           // logarithm of how much faster several threads are, of the last trials
    int steps_left = 4, pause = 1;  // to the next trial, and from it to the one after it
    double alone_seconds = 0.0;  // a token, of the trial that runs
  };

  void conclude(Finding& finding, double gain);
  Finding& of(int tokens);

  std::array<Finding, 16> findings_;  // the first: 1 token, then to 3, 7, 15 ...
};

}  // namespace nsm
