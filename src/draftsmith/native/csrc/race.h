// The token that arrives first where each is as fast as it weighs: race in verify/noise.py.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "noise.h"
#include "rules.h"

namespace draftsmith {

// When each token would arrive if it weighed one.
class Race {
 public:
  static constexpr double kSoonest = 0x1p-54;  // nobody's time is below it

  Race(int64_t seed, int64_t position, Stream stream)
      : first_(hash(seed, position, stream, 1)), second_(hash(seed, position, stream, 2)) {}

  double time(int64_t token) const {
    const uint64_t bits = (static_cast<uint64_t>(word(token, first_)) << 21) | (word(token, second_) >> 11);
    return -std::log1p(-(static_cast<double>(bits) + 0.5) * 0x1p-53);
  }

  // No later than `time`.
  double soonest(int64_t token) const { return word(token, first_) * 0x1p-32; }

  // Tells the kernels by which words tokens may be left out: see `early` there.
  uint64_t key() const { return first_; }

 private:
  static uint32_t scramble(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
  }
  static uint32_t word(int64_t token, uint64_t key) {
    return scramble(scramble(static_cast<uint32_t>(token) ^ static_cast<uint32_t>(key)) +
                    static_cast<uint32_t>(key >> 32));
  }

  uint64_t first_, second_;
};

// Who arrives first, and when the next one does, as far as that is less than `near` times as late.
struct First {
  double time = kInfinity, next = kInfinity;
  int64_t token = kUndecided, next_token = kUndecided;
  double near = 1.001;

  void offer(double other, int64_t its_token) {
    if (other < time || (other == time && its_token < token))
      next = time, next_token = token, time = other, token = its_token;
    else if (other < next)
      next = other, next_token = its_token;
  }

  // Takes in what others have found among other tokens.
  void take(const First& other) {
    if (other.token == kUndecided) return;
    offer(other.time, other.token);
    next = std::min(next, other.next);
  }

  // Whether times that are off by so much, in relation to themselves, cannot change who is the first.
  bool is_sure(double doubt) const { return next == static_cast<double>(kInfinity) || next - time > doubt * next; }

  // Takes in some tokens that arrive before `reach`, of which `ids` says who they are.
  void look(const Race& race, const float* weights, const int64_t* ids, int64_t count, double reach) {
    for (int64_t i = 0; i < count; ++i) {
      const double weight = weights[i];
      if (weight > 0 && race.soonest(ids[i]) <= std::min(reach, time * near) * weight)
        offer(race.time(ids[i]) / weight, i);
    }
  }

  // Takes in the tokens from `begin` to `end` that arrive before `reach`.
  void look(const Race& race, const float* weights, int64_t begin, int64_t end, double reach) {
    for (int64_t start = begin; start < end; start += kStretch)
      look_at_stretch(race, weights + start, start, std::min(kStretch, end - start), reach);
  }

  // The same for the tokens of a stretch, the first of which is `start` and weighs weights[0].
  void look_at_stretch(const Race& race, const float* weights, int64_t start, int64_t count, double reach) {
    int32_t early[kStretch];
    const double bound = std::min(reach, time * near);
    const int64_t found = kernels().early(weights, count, static_cast<uint32_t>(start), race.key(),
                                          static_cast<float>(bound * 1.0001), early);
    for (int64_t i = 0; i < found; ++i) {
      const double weight = weights[early[i]];
      if (weight > 0) offer(race.time(start + early[i]) / weight, start + early[i]);
    }
  }

  // The same where none of them weighs more than `most`, and weight(token) is only asked for those that come into question.
  template <class Weight>
  void look_at_few(const Race& race, int64_t start, int64_t count, double most, double reach, const Weight& weight) {
    int32_t early[kStretch];
    const int64_t found = kernels().early(nullptr, count, static_cast<uint32_t>(start), race.key(),
                                          static_cast<float>(std::min(reach, time * near) * most * 1.0001), early);
    for (int64_t i = 0; i < found; ++i) {
      const int64_t token = start + early[i];
      const double own = weight(token);
      if (own > 0 && race.soonest(token) <= std::min(reach, time * near) * own) offer(race.time(token) / own, token);
    }
  }
};

// Those who arrive first, as many as are wanted, in their order; of those who arrive together, the lower first.
struct Arrivals {
  double* times;  // (wanted), and so are the tokens
  int64_t* tokens;
  int64_t wanted, found = 0;

  double last() const { return found < wanted ? kInfinity : times[wanted - 1]; }

  void offer(double time, int64_t token) {
    int64_t place = found < wanted ? found++ : wanted - 1;
    for (; place > 0 && (time < times[place - 1] || (time == times[place - 1] && token < tokens[place - 1])); --place)
      times[place] = times[place - 1], tokens[place] = tokens[place - 1];
    times[place] = time, tokens[place] = token;
  }

  // Takes in some tokens; `ids` says who they are, or is null where they are the vocabulary.
  void look(const Race& race, const float* weights, const int64_t* ids, int64_t count) {
    int32_t early[kStretch];
    for (int64_t start = 0; start < count; start += kStretch) {
      const int64_t some = std::min(kStretch, count - start);
      int64_t few = some;
      if (ids == nullptr)
        few = kernels().early(weights + start, some, static_cast<uint32_t>(start), race.key(),
                              static_cast<float>(last() * 1.0001), early);
      for (int64_t i = 0; i < few; ++i) {
        const int64_t at = start + (ids == nullptr ? early[i] : i), token = ids == nullptr ? at : ids[at];
        const double weight = weights[at];
        if (!(weight > 0) || race.soonest(token) > last() * weight) continue;
        const double time = race.time(token) / weight;
        if (time < last()) offer(time, at);
      }
    }
  }
};

}  // namespace draftsmith
