// The rules of a request, as native operators know them: what they change in the logits of a row, and what they remember.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

namespace draftsmith {

constexpr int64_t kUndecided = -1;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Of a sum of weights by `weigh`, against the same sum of PyTorch's exponentials: 3e-7 for the exponential, 1e-7 for
// PyTorch's own, 12e-7 for the sum of a stretch.
constexpr double kRough = 2e-6;

// The history of one slot: how often each token was generated, whether it is in the prompt, and the tokens of which one
// or the other holds, each once.
struct Past {
  const bool* prompted = nullptr;
  const int32_t* counts = nullptr;
  const int32_t* seen = nullptr;
  int64_t seen_count = 0;
};

struct Rules {
  double temperature, top_p, min_p;
  float repetition, presence, frequency;
  int64_t top_k;

  bool penalises() const { return repetition != 1 || presence != 0 || frequency != 0; }
  bool filters() const { return top_k > 0 || top_p < 1 || min_p > 0; }
};

// At least how many partial sums PyTorch adds up side by side on this processor, as Python says at loading.
inline std::atomic<int64_t>& pytorch_lanes() {
  static std::atomic<int64_t> lanes{4};
  return lanes;
}

struct BiasEntry {
  int64_t token;
  float value;
};

struct Candidate {
  float score;  // the logit divided by the temperature
  int32_t token;
};

}  // namespace draftsmith
