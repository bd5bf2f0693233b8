// Where a number lies among sums of weights: how a draw becomes a token.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "rules.h"

namespace draftsmith {

inline int64_t stretches_of(int64_t vocabulary) { return (vocabulary + kStretch - 1) / kStretch; }

// Finds where sums pass `target`: the stretch, and in `below` the sum before it.
inline int64_t stretch_at(const double* sums, int64_t count, double target, double& below) {
  int64_t stretch = 0;
  for (; stretch + 1 < count && below + sums[stretch] <= target; ++stretch) below += sums[stretch];
  return stretch;
}
inline int64_t stretch_at(const std::vector<double>& sums, double target, double& below) {
  return stretch_at(sums.data(), static_cast<int64_t>(sums.size()), target, below);
}

// The place of the weights from `first` on at which their sum, `below` at the beginning, passes the target, if both ends
// of its share lie further from the target than `doubt`. Only before the very first one is nothing for certain.
template <class Weights>
int64_t token_at(const Weights& weights, int64_t first, int64_t count, double below, double target, double doubt) {
  for (int64_t i = first; i < count; ++i) {
    const double above = below + static_cast<double>(weights[i]);
    if (above > target) return (i == 0 || target - below > doubt) && above - target > doubt ? i : kUndecided;
    below = above;
  }
  return kUndecided;
}

}  // namespace draftsmith
