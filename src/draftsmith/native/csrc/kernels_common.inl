// Loops over sixteen lanes in plain C++, compiled once for every instruction set by the file that includes this one.
// Everything is internal to that file: code for one processor must never be linked in the place of another's.
// No standard header may come in after the instruction set is chosen, for the same reason.

#include "kernels_lanes.inl"

namespace draftsmith {
namespace {

constexpr int64_t kLineBytes = 64;  // of packed weights: some inputs of every output of a panel

inline Words words_at(const bf16* values) {
#if defined(DRAFTSMITH_AVX512)  // for this single instruction, or two, compilers would take several
  return reinterpret_cast<Words>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values))));
#elif defined(DRAFTSMITH_AVX2)
  const auto eight = [](const bf16* from) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return reinterpret_cast<Words::Half>(words);
  };
  return {eight(values), eight(values + 8)};
#else
  return converted<Words>(Register<Halves>::at(values));
#endif
}
inline Lanes widen_lanes(const bf16* values) { return same_bits<Lanes>(words_at(values) << 16); }
// The bits of numbers rounded to bf16, as `narrow` rounds them, in the upper halves; the lower ones mean nothing.
[[maybe_unused]] inline Words rounded_bits(Lanes x) {
  const Words bits = same_bits<Words>(x), rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return choose(x == x, rounded, bits | 0x400000u);
}
// As `narrow`. Where one instruction does it, numbers below 1.2e-38 become 0, as in its products.
inline Halves narrow_lanes(Lanes x) {
#ifdef DRAFTSMITH_BF16
  return reinterpret_cast<Halves>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x)));
#else
  return converted<Halves>(rounded_bits(x) >> 16);
#endif
}
inline void put_narrow(Lanes x, bf16* to) { Register<Halves>::put(narrow_lanes(x), to); }
inline Lanes lanes_through_bf16(Lanes x) {
#ifdef DRAFTSMITH_BF16
  bf16 narrowed[kLanes];
  put_narrow(x, narrowed);
  return widen_lanes(narrowed);
#else
  return same_bits<Lanes>(rounded_bits(x) & 0xffff0000u);
#endif
}

// a · b + c, rounded once where the file that includes this one says how.
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
#ifdef DRAFTSMITH_MULTIPLY_ADD
  return DRAFTSMITH_MULTIPLY_ADD(a, b, c);
#else
  return a * b + c;
#endif
}

// e^x, relative error below 3e-7; x is taken to be at least -87 and at most 88. NaN stays NaN.
inline Lanes exponential(Lanes x) {
#ifdef DRAFTSMITH_AVX512
  // 2^(n / 16 + r) by a table of the sixteenths, in half the instructions: entry i is the bits of 2^(i / 16), less i where
  // n's lower bits come in with the exponent.
  alignas(64) static const uint32_t kSixteenths[kLanes] = {
      0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532, 0x3f75fed7, 0x3f75583f,
      0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c, 0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d,
  };
  const __m512 magic = _mm512_set1_ps(12582912.0f);
  // Of two of which one is no number, these instructions return the second.
  const __m512 least = _mm512_max_ps(_mm512_set1_ps(-87.0f), reinterpret_cast<__m512>(x));
  const __m512 power = _mm512_min_ps(_mm512_set1_ps(88.0f), least);
  const __m512 shifted = _mm512_fmadd_ps(power, _mm512_set1_ps(16 * 1.44269504088896341f), magic);
  const __m512 whole = _mm512_sub_ps(shifted, magic);
  const __m512 most = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f / 16), power);
  const __m512 rest = _mm512_fmadd_ps(whole, _mm512_set1_ps(2.12194440e-4f / 16), most);
  const __m512 one = _mm512_set1_ps(1.0f);
  __m512 value = _mm512_fmadd_ps(rest, _mm512_set1_ps(1.0f / 6), _mm512_set1_ps(0.5f));
  value = _mm512_fmadd_ps(_mm512_fmadd_ps(value, rest, one), rest, one);
  const __m512i n = _mm512_castps_si512(shifted);
  const __m512i table = _mm512_permutexvar_epi32(n, _mm512_load_si512(kSixteenths));
  const __m512 scale = _mm512_castsi512_ps(_mm512_add_epi32(table, _mm512_slli_epi32(n, 19)));
  return reinterpret_cast<Lanes>(_mm512_mul_ps(value, scale));
#else
  const Lanes low = Lanes{} - 87.0f, high = Lanes{} + 88.0f, magic = Lanes{} + 12582912.0f;
  x = choose(x < low, low, choose(x > high, high, x));
  const Lanes shifted = multiply_add(x, Lanes{} + 1.44269504088896341f, magic);  // the low bits: a whole number
  const Lanes whole = shifted - magic;
  const Lanes rest = multiply_add(whole, Lanes{} + 2.12194440e-4f, multiply_add(whole, Lanes{} - 0.693359375f, x));
  Lanes value = Lanes{} + 1.9875691500e-4f;
  value = multiply_add(value, rest, Lanes{} + 1.3981999507e-3f);
  value = multiply_add(value, rest, Lanes{} + 8.3334519073e-3f);
  value = multiply_add(value, rest, Lanes{} + 4.1665795894e-2f);
  value = multiply_add(value, rest, Lanes{} + 1.6666665459e-1f);
  value = multiply_add(value, rest, Lanes{} + 5.0000001201e-1f);
  value = multiply_add(value * rest, rest, rest) + 1.0f;
  return value * same_bits<Lanes>((same_bits<Words>(shifted) - 0x4b400000u + 127u) << 23);
#endif
}

// The first values of sixteen, the others being `fill`.
template <class T>
struct Few {
  alignas(64) T values[kLanes];
  Few(const T* from, int64_t count, T fill) {
    for (int l = 0; l < kLanes; ++l) values[l] = l < count ? from[l] : fill;
  }
};

// The last values of a row, fewer than sixteen: as the others, so that it makes no difference where a row is divided.
inline Lanes few_at(const float* values, int64_t count) { return lanes_at(Few<float>(values, count, 0).values); }
inline Lanes widen_few(const bf16* values, int64_t count) { return widen_lanes(Few<bf16>(values, count, 0).values); }
inline void put_few(Lanes x, int64_t count, bf16* to) {
  bf16 narrowed[kLanes];
  put_narrow(x, narrowed);
  __builtin_memcpy(to, narrowed, count * sizeof(bf16));
}

// NaN is left out behind the first lane.
inline float largest_lane(Lanes lanes) {
  float all[kLanes];
  put_lanes(lanes, all);
  for (int l = 1; l < kLanes; ++l) all[0] = all[l] > all[0] ? all[l] : all[0];
  return all[0];
}

inline float sum_of(Lanes lanes) {
  float total[kLanes];
  put_lanes(lanes, total);
  for (int l = 0; l < 8; ++l) total[l] += total[l + 8];
  for (int l = 0; l < 4; ++l) total[l] += total[l + 4];
  return (total[0] + total[2]) + (total[1] + total[3]);
}

// The largest of value(0) … value(count - 1), which there has to be at least one of.
template <class Value>
inline int16_t largest_of(int64_t count, const Value& value) {
  constexpr int kMany = 2 * kLanes;
  int16_t most[kMany];
  for (int l = 0; l < kMany; ++l) most[l] = value(l < count ? l : 0);
  int64_t i = 0;
  for (; i + kMany <= count; i += kMany)
    for (int l = 0; l < kMany; ++l) most[l] = value(i + l) > most[l] ? value(i + l) : most[l];
  for (int l = 0; i + l < count; ++l) most[l] = value(i + l) > most[l] ? value(i + l) : most[l];
  for (int l = 1; l < kMany; ++l) most[0] = most[l] > most[0] ? most[l] : most[0];
  return most[0];
}

inline float dot(const bf16* a, const bf16* b, int64_t width) {
  Lanes sums{};
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) sums += widen_lanes(a + d) * widen_lanes(b + d);
  if (d < width) sums += widen_few(a + d, width - d) * widen_few(b + d, width - d);
  return sum_of(sums);
}

inline float sum_of_squares(const float* x, int64_t count) {
  Lanes sums{};
  int64_t d = 0;
  for (; d + kLanes <= count; d += kLanes) sums += lanes_at(x + d) * lanes_at(x + d);
  if (d < count) sums += few_at(x + d, count - d) * few_at(x + d, count - d);
  return sum_of(sums);
}

void narrow_row(const float* values, int64_t count, bf16* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) put_narrow(lanes_at(values + i), to + i);
  if (i < count) put_few(few_at(values + i, count - i), count - i, to + i);
}

void add_row(const float* values, int64_t count, bf16* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    put_narrow(widen_lanes(to + i) + lanes_through_bf16(lanes_at(values + i)), to + i);
  if (i == count) return;
  const Lanes added = lanes_through_bf16(few_at(values + i, count - i));
  put_few(widen_few(to + i, count - i) + added, count - i, to + i);
}

float round_row(const float* values, int64_t count, float* to) {
  Lanes most = Lanes{} - __builtin_inff();
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Lanes rounded = lanes_through_bf16(lanes_at(values + i));
    put_lanes(rounded, to + i);
    most = larger(rounded, most);
  }
  const Lanes rounded = lanes_through_bf16(lanes_at(Few<float>(values + i, count - i, -__builtin_inff()).values));
  for (int l = 0; i + l < count; ++l) to[i + l] = rounded[l];
  return largest_lane(larger(rounded, most));
}

// The nearest whole number, ties to even, of a small x.
inline int8_t whole(float x) {
  union { float f; uint32_t u; } shifted{x + 12582912.0f};  // the low bits: a whole number
  return static_cast<int8_t>(shifted.u);
}

float quantise(const bf16* x, int64_t count, int8_t* to) {
  // Magnitudes of bf16 are ordered like their bits, NaN last.
  const int16_t largest = largest_of(count, [&](int64_t k) { return static_cast<int16_t>(x[k] & 0x7fff); });
  if (largest >= 0x7f80) return __builtin_nanf("");
  const float most = widen(static_cast<bf16>(largest)), inverse = largest > 0 ? 127 / most : 0;
  if (__builtin_isfinite(inverse))
    for (int64_t k = 0; k < count; ++k) to[k] = whole(widen(x[k]) * inverse);
  else  // the row is so small that its inverse has no number
    for (int64_t k = 0; k < count; ++k) to[k] = whole(widen(x[k]) / most * 127);
  return most / 127;
}

void rotate(const bf16* head, const float* cosines, const float* sines, int64_t half, bf16* to) {
  // `to` may be `head` itself: a turn reads and writes the same two places.
  const auto sum = [](Lanes x, Lanes by, Lanes y, Lanes times) {
    return lanes_through_bf16(x * by) + lanes_through_bf16(y * times);
  };
  int64_t d = 0;
  for (; d + kLanes <= half; d += kLanes) {
    const Lanes low = widen_lanes(head + d), high = widen_lanes(head + half + d);
    const Lanes cosine = lanes_at(cosines + d), sine = lanes_at(sines + d);
    put_narrow(sum(low, cosine, -high, sine), to + d);
    put_narrow(sum(high, cosine, low, sine), to + half + d);
  }
  const int64_t left = half - d;
  if (left == 0) return;
  const Lanes low = widen_few(head + d, left), high = widen_few(head + half + d, left);
  const Lanes cosine = few_at(cosines + d, left), sine = few_at(sines + d, left);
  put_few(sum(low, cosine, -high, sine), left, to + d);
  put_few(sum(high, cosine, low, sine), left, to + half + d);
}

void rms_norm(const bf16* x, const bf16* weight, int64_t width, float epsilon, bf16* out) {
  const float scale = 1.0f / __builtin_sqrtf(dot(x, x, width) / static_cast<float>(width) + epsilon);
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes)
    put_narrow(lanes_through_bf16(widen_lanes(x + d) * scale) * widen_lanes(weight + d), out + d);
  if (d == width) return;
  const Lanes last = lanes_through_bf16(widen_few(x + d, width - d) * scale);
  put_few(last * widen_few(weight + d, width - d), width - d, out + d);
}

inline Lanes gated(Lanes gate, Lanes up) {
  const Lanes g = lanes_through_bf16(gate);
  return lanes_through_bf16(g / (1.0f + exponential(-g))) * lanes_through_bf16(up);
}

void silu_times(const float* gate, const float* up, int64_t count, bf16* out) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) put_narrow(gated(lanes_at(gate + i), lanes_at(up + i)), out + i);
  if (i < count) put_few(gated(few_at(gate + i, count - i), few_at(up + i, count - i)), count - i, out + i);
}

// x · Φ(x), by a formula for erf with an absolute error below 2e-7 (Abramowitz and Stegun, 7.1.26).
inline Lanes gelu(Lanes x) {
  const Lanes z = choose(x < 0.0f, -x, x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * z);
  const Lanes series =
      ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
  const Lanes tail = 0.5f * series * exponential(-z * z);
  return x * choose(x < 0.0f, tail, 1.0f - tail);
}

void widen_row(const bf16* x, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) put_lanes(widen_lanes(x + i), to + i);
  for (; i < count; ++i) to[i] = widen(x[i]);
}

void activate(const bf16* projected, const bf16* token, float ratio, const float* scale, const float* shift,
              int64_t width, float epsilon, int64_t first, int64_t last, float* mixed, bf16* out) {
  widen_row(projected, width, mixed);
  if (token != nullptr) {
    const auto sum = [&](Lanes x, Lanes of_token) { return lanes_through_bf16(x + lanes_through_bf16(ratio * of_token)); };
    int64_t d = 0;
    for (; d + kLanes <= width; d += kLanes) put_lanes(sum(lanes_at(mixed + d), widen_lanes(token + d)), mixed + d);
    const Lanes few = sum(few_at(mixed + d, width - d), widen_few(token + d, width - d));
    for (int l = 0; d + l < width; ++l) mixed[d + l] = few[l];
  }
  const float inverse = 1.0f / __builtin_sqrtf(sum_of_squares(mixed, width) / static_cast<float>(width) + epsilon);
  const auto some = [&](Lanes x, Lanes by, Lanes plus) { return gelu(lanes_through_bf16(x * inverse * by + plus)); };
  int64_t d = first;
  for (; d + kLanes <= last; d += kLanes)
    put_narrow(some(lanes_at(mixed + d), lanes_at(scale + d), lanes_at(shift + d)), out + d);
  if (d >= last) return;
  const int64_t left = last - d;
  put_few(some(few_at(mixed + d, left), few_at(scale + d, left), few_at(shift + d, left)), left, out + d);
}

float sum_exponentials(const float* x, int64_t count, float highest) {
  Lanes sums{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sums += exponential(lanes_at(x + i) - highest);
  if (i < count) {
    const int64_t left = count - i;
    sums += choose(numbers() < static_cast<uint32_t>(left), exponential(few_at(x + i, left) - highest), Lanes{});
  }
  return sum_of(sums);
}

int64_t argmax(const bf16* x, int64_t count) {
  // Ordered like the numbers they stand for: the magnitude with its sign; NaN comes last.
  constexpr int64_t kBlock = 512;
  int16_t best = -0x8000;
  int64_t best_block = 0;
  const auto key = [](bf16 bits) -> int16_t {
    const int16_t magnitude = static_cast<int16_t>(bits & 0x7fff), sign = static_cast<int16_t>(bits) >> 15;
    const int16_t ordered = static_cast<int16_t>((magnitude ^ sign) - sign);
    return magnitude > 0x7f80 ? int16_t{0x7fff} : ordered;
  };
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t stop = start + kBlock < count ? start + kBlock : count;
    const int16_t most = largest_of(stop - start, [&](int64_t i) { return key(x[start + i]); });
    if (most > best) best = most, best_block = start;
  }
  int64_t i = best_block;
  while (i + 1 < count && key(x[i]) != best) ++i;
  return i;
}

bool all_finite(const bf16* x, int64_t count) {
  Words none{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Words exponents = same_bits<Words>(widen_lanes(x + i)) & 0x7f800000u;
    none |= same_bits<Words>(exponents == 0x7f800000u);
  }
  uint32_t found = 0;
  for (int l = 0; l < kLanes; ++l) found |= none[l];
  for (; i < count; ++i) found |= (x[i] & 0x7f80) == 0x7f80;
  return found == 0;
}

[[maybe_unused]] void interleave_plain(const bf16* rows, int64_t stride, int64_t pairs, bf16* to) {
  for (int64_t k = 0; k < pairs; ++k, to += 2 * kPanel)
    for (int64_t n = 0; n < kPanel; ++n) __builtin_memcpy(to + 2 * n, rows + n * stride + 2 * k, 2 * sizeof(bf16));
}

// Whole numbers: any order gives the same sum.
[[maybe_unused]] void gemm_int8_plain(const int8_t* x, int64_t x_stride, int64_t rows, const int8_t* packed, const int32_t*,
                     int64_t quads, int64_t panels, const void*, int32_t* y, int64_t y_stride) {
  for (int64_t p = 0; p < panels; ++p, packed += quads * kPanel * 4)
    for (int64_t r = 0; r < rows; ++r) {
      int32_t sum[kPanel] = {};
      for (int64_t q = 0; q < quads; ++q)
        for (int64_t n = 0; n < kPanel; ++n)
          for (int64_t j = 0; j < 4; ++j)
            sum[n] += static_cast<int32_t>(x[r * x_stride + 4 * q + j]) * packed[(q * kPanel + n) * 4 + j];
      for (int64_t n = 0; n < kPanel; ++n) y[r * y_stride + p * kPanel + n] = sum[n];
    }
}

// The lines of every panel that a block of rows is multiplied by; before the first of all the sums are zero, and before
// others they stand in y.
struct Reach {
  int64_t lines;  // of a panel in all
  int64_t first, last;

  bool whole() const { return last - first == lines; }
};

// What a block of rows asks for while it multiplies: its part of the weights that come next, every so many lines one.
struct Ahead {
  const char* from;  // null for nothing
  int64_t number, blocks;
};

constexpr int64_t kNearLines = 1024;  // of a panel: so many of each stay near until the last block of rows has seen them
constexpr int64_t kReachLines = 512;

// Splits the work into blocks of rows that fit the registers, and walks over the weights once for each group of
// panels: the second block of rows finds them in a near cache. Long panels are walked over in stretches, since a group
// of them would not fit it. Block<rows, panels> computes one block.
template <template <int, int> class Block, int kRows, int kPanels>
struct Rows {
  template <class X, class W, class Y>
  static void run(int64_t rows, const X* x, int64_t x_stride, const W* w, const Reach& reach, Y* y, int64_t y_stride,
                  const Ahead& ahead) {
    if (rows == kRows)
      Block<kRows, kPanels>::run(x, x_stride, w, reach, y, y_stride, ahead);
    else if constexpr (kRows > 1)
      Rows<Block, kRows - 1, kPanels>::run(rows, x, x_stride, w, reach, y, y_stride, ahead);
  }
};

// All blocks of rows for some panels. Inlined, so that where nothing is fetched ahead nothing is asked about it.
template <template <int, int> class Block, int kRows, int kPanels, class X, class W, class Y>
[[gnu::always_inline]] inline void walk_rows(const X* x, int64_t x_stride, int64_t rows, const W* w, const Reach& reach,
                                             const void* next, Y* y, int64_t y_stride) {
  const int64_t blocks = (rows + kRows - 1) / kRows;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t from = rows * b / blocks, to = rows * (b + 1) / blocks;
    Rows<Block, kRows, kPanels>::run(to - from, x + from * x_stride, x_stride, w, reach, y + from * y_stride, y_stride,
                                     {static_cast<const char*>(next), b, blocks});
  }
}

template <template <int, int> class Block, int kRows, int kPanels, class X, class Y>
inline void walk(const X* x, int64_t x_stride, int64_t rows, const X* packed, int64_t lines, int64_t panels,
                 const void* ahead, Y* y, int64_t y_stride) {
  const int64_t panel = lines * (kLineBytes / sizeof(X));
  const int64_t stretches = rows <= kRows || lines <= kNearLines ? 1 : (lines + kReachLines - 1) / kReachLines;
  int64_t p = 0;
  for (; p + kPanels <= panels; p += kPanels) {
    const X* w = packed + p * panel;
    const void* following = ahead != nullptr && p + kPanels < panels ? w + kPanels * panel : ahead;
    for (int64_t s = 0; s < stretches; ++s) {
      const Reach reach{lines, lines * s / stretches, lines * (s + 1) / stretches};
      const bool here = ahead != nullptr && reach.last < lines;
      const void* next = here ? reinterpret_cast<const char*>(w) + reach.last * kLineBytes : following;
      walk_rows<Block, kRows, kPanels>(x, x_stride, rows, w, reach, next, y + p * kPanel, y_stride);
    }
  }
  if constexpr (kPanels > 1) {
    if (p < panels)
      walk<Block, kRows, kPanels - 1>(x, x_stride, rows, packed + p * panel, lines, panels - p, ahead, y + p * kPanel,
                                      y_stride);
  }
}

}  // namespace
}  // namespace draftsmith

#include "kernels_attention.inl"
#include "kernels_sampling.inl"
