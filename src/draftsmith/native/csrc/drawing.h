// Guesses drawn from what a drafter scores: the same noise, and as good as the same numbers, as Draws in
// drafters/draws.py.
//
// q is what the guesses are really drawn from: shares in fp32, divided by their sum in float64. Whoever verifies the guesses
// reads the very same numbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "noise.h"
#include "packed.h"
#include "race.h"
#include "sums.h"

namespace draftsmith {

// What the scores of greedy rows are divided by where others share the target's noise; drafters/draws.py says so.
constexpr float kNoNoise = 1e-4f;
// Nobody arrives later than so many times the mean time until the first arrival, but for one race in 10^10.
constexpr double kLate = 25;
// Among so many first arrivals it is told how likely each is, and the logarithm for tokens that have no share at all.
constexpr int64_t kCompared = 8;
constexpr float kNever = -1e4f;

// The scores of one node, which become q in their own memory. A thread does a part of the stretches in each of both
// passes, and what all have done in one is known before the other.
struct Shares {
  float* q;  // (V)
  int64_t vocabulary;
  float temperature;
  float* rough;  // of every stretch: the sum of its weights, and then in float64 that of its shares
  double* sums;

  // Turns the scores of some stretches into weights; `highest` is the largest of all. Where no score is finite, nothing
  // has a share.
  void weigh(int64_t first, int64_t last, float highest) const {
    const int64_t begin = first * kStretch, count = std::min(last * kStretch, vocabulary) - begin;
    if (count <= 0) return;
    const float top = highest / temperature;
    if (std::isfinite(top)) return kernels().weigh(q + begin, count, temperature, top, q + begin, rough + first);
    std::fill_n(q + begin, count, 0.0f), std::fill(rough + first, rough + last, 0.0f);
  }

  // Turns the weights of some stretches into shares.
  void share(int64_t first, int64_t last) const {
    const int64_t begin = first * kStretch, count = std::min(last * kStretch, vocabulary) - begin;
    if (count <= 0) return;
    double all = 0;
    for (int64_t s = 0; s < stretches_of(vocabulary); ++s) all += static_cast<double>(rough[s]);
    const bool any = all > 0 && std::isfinite(all);
    kernels().share(q + begin, count, any ? static_cast<float>(1 / all) : 0.0f, sums + first);
  }

  // The place of the token that arrives first; where none has a share, the last. `ids` says who they are, or is null where
  // they are the vocabulary. A greedy row, whose temperature is kNoNoise, has the likeliest, the first of equals.
  int64_t first(const Race& race, const int64_t* ids = nullptr) const {
    if (temperature <= kNoNoise) return std::max_element(q, q + vocabulary) - q;
    double all = 0;
    for (int64_t s = 0; s < stretches_of(vocabulary); ++s) all += sums[s];
    First found;
    for (const double reach : {kLate / all, static_cast<double>(kInfinity)}) {
      found = {};
      ids == nullptr ? found.look(race, q, int64_t{0}, vocabulary, reach) : found.look(race, q, ids, vocabulary, reach);
      if (found.time <= reach) break;  // otherwise one who was left out may be sooner
    }
    return found.token == kUndecided ? vocabulary - 1 : found.token;
  }

  // The same token of the vocabulary, with when the next one arrives as far as it is less than `near` times as late.
  First first_two(const Race& race, double near) const {
    First found;
    found.near = near;
    found.look(race, q, int64_t{0}, vocabulary, kInfinity);
    if (found.token == kUndecided) found.token = vocabulary - 1;
    return found;
  }

  // Finds so many children in the order in which they arrive, and the logarithms of how likely each is to be the first for
  // somebody else with much the same shares; `memory` is for kCompared times and tokens, or as many as there are children.
  // Where fewer arrive, those follow that have no share.
  void arrive(const Race& race, const int64_t* ids, int64_t children, Arrivals memory, float* scores,
              int64_t* to) const {
    memory.wanted = std::min(std::max(children, kCompared), vocabulary);
    memory.look(race, q, ids, vocabulary);
    double rate = 0;
    for (int64_t i = 0; i < memory.found; ++i) rate += 1 / memory.times[i];
    for (int64_t c = 0, next = 0; c < children; ++c) {
      if (c < memory.found) {
        scores[c] = static_cast<float>(-std::log(memory.times[c] * rate)), to[c] = memory.tokens[c];
        continue;
      }
      while (std::find(to, to + c, next) != to + c) ++next;
      scores[c] = kNever, to[c] = next;
    }
  }

  // Draws so many children, each without those before it, by noise(k); where q has none left, the last token.
  template <class Noise>
  void draw(int64_t children, const Noise& noise, int64_t* to) const {
    for (int64_t k = 0; k < children; ++k) {
      const auto is_drawn = [&](int64_t token) { return std::find(to, to + k, token) != to + k; };
      const int64_t stretches = stretches_of(vocabulary);
      if (k > 0) {  // what was drawn last leaves its stretch
        const int64_t stretch = to[k - 1] / kStretch;
        sums[stretch] = 0;
        for (int64_t i = stretch * kStretch; i < std::min((stretch + 1) * kStretch, vocabulary); ++i)
          if (!is_drawn(i)) sums[stretch] += static_cast<double>(q[i]);
      }
      double all = 0, below = 0;
      for (int64_t s = 0; s < stretches; ++s) all += sums[s];
      const double target = noise(k) * all;
      const int64_t stretch = stretch_at(sums, stretches, target, below);
      int64_t token = vocabulary - 1;
      // Sums in another order may end a little lower: then the last token that has a share is drawn.
      for (int64_t i = stretch * kStretch; i < vocabulary && below <= target; ++i)
        if (q[i] > 0 && !is_drawn(i)) token = i, below += static_cast<double>(q[i]);
      to[k] = token;
    }
  }
};

// Turns the scores of rows into shares, shares(r) being those of row r, by a team that has just written them: highest holds
// the largest score of every row in each thread's part (threads, rows). Rows that are not drawn are left alone. The team
// meets at the end.
template <class Rows, class Drawn>
void settle(const Team& team, int64_t rows, int64_t vocabulary, const float* highest, const Rows& shares,
            const Drawn& is_drawn) {
  team.barrier();
  const auto [first, last] = team.share(stretches_of(vocabulary));
  for (int64_t r = 0; r < rows; ++r) {
    if (!is_drawn(r)) continue;
    float most = -kInfinity;
    for (int64_t t = 0; t < team.size; ++t) most = std::max(most, highest[t * rows + r]);
    shares(r).weigh(first, last, most);
  }
  team.barrier();
  for (int64_t r = 0; r < rows; ++r)
    if (is_drawn(r)) shares(r).share(first, last);
  team.barrier();
}

template <class Rows>
void settle(const Team& team, int64_t rows, int64_t vocabulary, const float* highest, const Rows& shares) {
  settle(team, rows, vocabulary, highest, shares, [](int64_t) { return true; });
}

}  // namespace draftsmith
