#include "sharing.h"

#include <algorithm>
#include <cmath>

namespace nsm {
namespace {

constexpr double LEAST_GAIN = 0.05;   // several threads cost more CPU time than one
constexpr double MOST_NOTED = 0.7;    // of one trial, as a logarithm: any step may meet another program
constexpr double NEWEST_PART = 0.25;  // of a finding
constexpr int LONGEST_PAUSE = 64;     // steps

bool is_worth(double gain) { return gain > LEAST_GAIN; }

}  // namespace

Sharing::Finding& Sharing::of(int tokens) {
  int index = 0;
  while (tokens > 1 && index + 1 < static_cast<int>(findings_.size())) tokens /= 2, ++index;
  return findings_[index];
}

bool Sharing::is_next_shared(int tokens) {
  Finding& finding = of(tokens);
  if (finding.trial == Trial::NONE && --finding.steps_left < 0) finding.trial = Trial::ALONE;
  return finding.trial == Trial::NONE ? is_worth(finding.gain) : finding.trial == Trial::SHARED;
}

void Sharing::record(int tokens, double seconds) {
  Finding& finding = of(tokens);
  const double each = std::max(seconds, 1e-9) / tokens;
  if (finding.trial == Trial::ALONE) {
    finding.alone_seconds = each;
    finding.trial = Trial::SHARED;
  } else if (finding.trial == Trial::SHARED) {
    finding.trial = Trial::NONE;
    conclude(finding, std::log(finding.alone_seconds / each));
  }
}

// Trials that change nothing become rare.
void Sharing::conclude(Finding& finding, double gain) {
  const bool was_worth = is_worth(finding.gain);
  finding.gain += NEWEST_PART * (std::clamp(gain, -MOST_NOTED, MOST_NOTED) - finding.gain);
  finding.pause = is_worth(finding.gain) == was_worth ? std::min(2 * finding.pause, LONGEST_PAUSE) : 1;
  finding.steps_left = finding.pause;
}

}  // namespace nsm
