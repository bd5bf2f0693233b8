// The logits of one node as they were given, bf16 or fp32, read as fp32.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace draftsmith {

class Scores {
 public:
  Scores() = default;
  explicit Scores(const float* values) : wide_(values) {}
  explicit Scores(const bf16* values) : narrow_(values) {}

  float operator[](int64_t i) const { return wide_ != nullptr ? wide_[i] : widen(narrow_[i]); }

  // Gives those from `begin` to `end`, a stretch at a time, to work(stretch, first, count, values): so they are in the
  // nearest cache, and no row of them is ever written. `begin` is the first of a stretch.
  template <class Work>
  void by_stretches(int64_t begin, int64_t end, const Work& work) const {
    alignas(64) float widened[kStretch];
    for (int64_t first = begin; first < end; first += kStretch) {
      const int64_t count = end - first < kStretch ? end - first : kStretch;
      if (wide_ == nullptr) kernels().widen_row(narrow_ + first, count, widened);
      work(first / kStretch, first, count, wide_ != nullptr ? wide_ + first : widened);
    }
  }

 private:
  const float* wide_ = nullptr;
  const bf16* narrow_ = nullptr;
};

}  // namespace draftsmith
