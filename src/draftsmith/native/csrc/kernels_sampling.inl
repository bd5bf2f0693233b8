// Weights of tokens: largest scores, exponentials, shares of the whole, and what others leave of them; part of
// kernels_common.inl.

namespace draftsmith {
namespace {

float maxima(const float* x, int64_t count, float* most) {
  static_assert(kParts == kLanes && kStretch % kLanes == 0);
  const float none = -__builtin_inff(), spoilt = __builtin_nanf("");
  Words strange{};
  Lanes all = Lanes{} + none;
  for (int64_t start = 0; start < count; start += kStretch, most += kLanes) {
    Lanes best = Lanes{} + none;
    int64_t i = start;
    const int64_t stop = start + kStretch < count ? start + kStretch : count;
    for (; i + kLanes <= stop; i += kLanes) {
      const Lanes some = lanes_at(x + i);
      best = larger(some, best);
      strange |= same_bits<Words>(some != some);
    }
    if (i < stop) {
      const Lanes some = lanes_at(Few<float>(x + i, stop - i, none).values);
      best = larger(some, best);
      strange |= same_bits<Words>(some != some);
    }
    put_lanes(best, most);
    all = larger(best, all);
  }
  bool found = false;
  for (int l = 0; l < kLanes; ++l) found |= strange[l] != 0;
  return found ? spoilt : largest_lane(all);
}

template <bool kDivides>
inline void weigh_by(const float* x, int64_t count, float temperature, float highest, float* weights, float* sums) {
  for (int64_t start = 0; start < count; start += kStretch) {
    const int64_t stop = start + kStretch < count ? start + kStretch : count;
    Lanes sum{};
    int64_t i = start;
    for (; i + kLanes <= stop; i += kLanes) {
      const Lanes some = exponential(kDivides ? lanes_at(x + i) / temperature - highest : lanes_at(x + i) - highest);
      put_lanes(some, weights + i), sum += some;
    }
    if (i < stop) {
      const int64_t left = stop - i;
      const Lanes some = exponential(few_at(x + i, left) / temperature - highest);
      for (int l = 0; l < left; ++l) weights[i + l] = some[l];
      sum += choose(numbers() < static_cast<uint32_t>(left), some, Lanes{});
    }
    *sums++ = sum_of(sum);
  }
}

void weigh(const float* x, int64_t count, float temperature, float highest, float* weights, float* sums) {
  if (temperature == 1)
    weigh_by<false>(x, count, temperature, highest, weights, sums);
  else
    weigh_by<true>(x, count, temperature, highest, weights, sums);
}

inline Doubles doubles_at(const float* values) { return converted<Doubles>(Register<Eight>::at(values)); }

inline double sum_of_doubles(Doubles a, Doubles b) {
  double sum = 0;
  for (int l = 0; l < 8; ++l) sum += a[l] + b[l];
  return sum;
}

void add_up(const float* weights, int64_t count, double* sums) {
  for (int64_t start = 0; start < count; start += kStretch) {
    const int64_t stop = start + kStretch < count ? start + kStretch : count;
    Doubles sum[4] = {};
    int64_t i = start;
    for (; i + 32 <= stop; i += 32)
      for (int part = 0; part < 4; ++part) sum[part] += doubles_at(weights + i + 8 * part);
    double all = sum_of_doubles(sum[0] + sum[1], sum[2] + sum[3]);
    for (; i < stop; ++i) all += static_cast<double>(weights[i]);
    *sums++ = all;
  }
}

void rest(const float* w, double w_scale, const float* q, double q_scale, int64_t count, double* to, double* sums) {
  for (int64_t start = 0; start < count; start += kStretch) {
    const int64_t stop = start + kStretch < count ? start + kStretch : count;
    Doubles sum[2] = {};
    int64_t i = start;
    for (; i + 16 <= stop; i += 16)
      for (int half = 0; half < 2; ++half) {
        const Doubles left = doubles_at(w + i + 8 * half) * w_scale - doubles_at(q + i + 8 * half) * q_scale;
        const Doubles some = Register<Doubles>::choose(left > 0.0, left, Doubles{});
        sum[half] += some;
        if (to != nullptr) Register<Doubles>::put(some, to + i + 8 * half);
      }
    double all = sum_of_doubles(sum[0], sum[1]);
    for (; i < stop; ++i) {
      const double left = static_cast<double>(w[i]) * w_scale - static_cast<double>(q[i]) * q_scale;
      const double some = left > 0 ? left : 0;
      all += some;
      if (to != nullptr) to[i] = some;
    }
    *sums++ = all;
  }
}

void share(float* weights, int64_t count, float factor, double* sums) {
  for (int64_t start = 0; start < count; start += kStretch) {
    const int64_t stop = start + kStretch < count ? start + kStretch : count;
    Doubles sum[2] = {};
    int64_t i = start;
    for (; i + kLanes <= stop; i += kLanes) {
      const Lanes some = lanes_at(weights + i);
      put_lanes(choose(some > 1e-30f, some * factor, Lanes{}), weights + i);
      for (int half = 0; half < 2; ++half) sum[half] += doubles_at(weights + i + 8 * half);
    }
    double all = sum_of_doubles(sum[0], sum[1]);
    for (; i < stop; ++i) all += weights[i] = weights[i] > 1e-30f ? weights[i] * factor : 0.0f;
    *sums++ = all;
  }
}

inline Words scramble(Words x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// The places of those of `count` tokens, numbered from `first` on, that are early: is_early(words, i) says of sixteen, of
// which i come before, and of whose words it gets the upper 24 bits, which a float holds.
template <class IsEarly>
inline int64_t early_by(int64_t count, uint32_t first, uint64_t key, const IsEarly& is_early, int32_t* places) {
  const Words low = Words{} + static_cast<uint32_t>(key), high = Words{} + static_cast<uint32_t>(key >> 32);
  Words tokens = numbers() + first;
  int64_t found = 0;
  for (int64_t i = 0; i < count; i += kLanes, tokens += static_cast<uint32_t>(kLanes)) {
    const Words words = scramble(scramble(tokens ^ low) + high) >> 8;
    for (uint32_t some = bits_of(is_early(same_bits<Ints>(words), i)); some != 0; some &= some - 1) {
      const int64_t place = i + __builtin_ctz(some);
      if (place < count) places[found++] = static_cast<int32_t>(place);
    }
  }
  return found;
}

int64_t early(const float* weights, int64_t count, uint32_t first, uint64_t key, float reach, int32_t* places) {
  const float most = reach * 0x1p24f;
  if (weights == nullptr) {
    const Ints bound = Ints{} + static_cast<int32_t>(most < 0x1p24f ? most : 0x1p24f);
    return early_by(count, first, key, [&](Ints words, int64_t) { return same_bits<Words>(words <= bound); }, places);
  }
  const Lanes bound = Lanes{} + most;
  const auto is_early = [&](Ints words, int64_t i) {
    const Lanes some = i + kLanes <= count ? lanes_at(weights + i) : few_at(weights + i, count - i);
    return same_bits<Words>(converted<Lanes>(words) <= some * bound);
  };
  return early_by(count, first, key, is_early, places);
}

}  // namespace
}  // namespace draftsmith
