// Loops over sixteen lanes in plain C++, compiled once for every instruction set by the file that includes this one.
// Everything is internal to that file: code for one processor must never be linked in the place of another's.
// No standard header may come in after the instruction set is chosen, for the same reason.

namespace draftsmith {
namespace {

constexpr int kLanes = 16;
constexpr int64_t kLineBytes = 64;  // of packed weights: some inputs of every output of a panel

// e^x for x ≤ 0 or small, relative error below 3e-7; 0 far below.
inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
  union { float f; uint32_t u; } shifted{x * 1.44269504088896341f + 12582912.0f};  // the low bits: a whole number
  const float whole = shifted.f - 12582912.0f;
  const float rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float value = 1.9875691500e-4f;
  value = value * rest + 1.3981999507e-3f;
  value = value * rest + 8.3334519073e-3f;
  value = value * rest + 4.1665795894e-2f;
  value = value * rest + 1.6666665459e-1f;
  value = value * rest + 5.0000001201e-1f;
  value = value * rest * rest + rest + 1.0f;
  union { uint32_t u; float f; } power{(shifted.u - 0x4b400000u + 127u) << 23};
  return value * power.f;
}

inline float sum_of(const float (&lanes)[kLanes]) {
  float total[8];
  for (int l = 0; l < 8; ++l) total[l] = lanes[l] + lanes[l + 8];
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
  float lanes[kLanes] = {};
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] += widen(a[d + l]) * widen(b[d + l]);
  for (int l = 0; d + l < width; ++l) lanes[l] += widen(a[d + l]) * widen(b[d + l]);
  return sum_of(lanes);
}

void narrow_row(const float* values, int64_t count, bf16* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = narrow(values[i]);
}

void add_row(const float* values, int64_t count, bf16* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = narrow(widen(to[i]) + through_bf16(values[i]));
}

float round_row(const float* values, int64_t count, float* to) {
  float most[kLanes];
  for (int l = 0; l < kLanes; ++l) most[l] = -__builtin_inff();
  const auto take = [&](int64_t i, int l) {
    to[i] = through_bf16(values[i]);
    most[l] = to[i] > most[l] ? to[i] : most[l];
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int l = 0; l < kLanes; ++l) take(i + l, l);
  for (int l = 0; i + l < count; ++l) take(i + l, l);
  for (int l = 1; l < kLanes; ++l) most[0] = most[l] > most[0] ? most[l] : most[0];
  return most[0];
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
#pragma GCC ivdep
  for (int64_t d = 0; d < half; ++d) {
    const float low = widen(head[d]), high = widen(head[d + half]);
    to[d] = narrow(through_bf16(low * cosines[d]) + through_bf16(-high * sines[d]));
    to[d + half] = narrow(through_bf16(high * cosines[d]) + through_bf16(low * sines[d]));
  }
}

void rms_norm(const bf16* x, const bf16* weight, int64_t width, float epsilon, bf16* out) {
  float lanes[kLanes] = {};
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] += widen(x[d + l]) * widen(x[d + l]);
  for (int l = 0; d + l < width; ++l) lanes[l] += widen(x[d + l]) * widen(x[d + l]);
  const float scale = 1.0f / __builtin_sqrtf(sum_of(lanes) / static_cast<float>(width) + epsilon);
  for (d = 0; d < width; ++d) out[d] = narrow(through_bf16(widen(x[d]) * scale) * widen(weight[d]));
}

void silu_times(const float* gate, const float* up, int64_t count, bf16* out) {
  for (int64_t i = 0; i < count; ++i) {
    const float g = through_bf16(gate[i]);
    out[i] = narrow(through_bf16(g / (1.0f + exponential(-g))) * through_bf16(up[i]));
  }
}

// x · Φ(x), by a formula for erf with an absolute error below 2e-7 (Abramowitz and Stegun, 7.1.26).
inline float gelu(float x) {
  const float z = (x < 0 ? -x : x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * z);
  const float series = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
  const float tail = 0.5f * series * exponential(-z * z);
  return x * (x < 0 ? tail : 1.0f - tail);
}

void activate(const bf16* projected, const bf16* token, float ratio, const float* scale, const float* shift,
              int64_t width, float epsilon, int64_t first, int64_t last, float* mixed, bf16* out) {
  if (token == nullptr)
    for (int64_t d = 0; d < width; ++d) mixed[d] = widen(projected[d]);
  else
    for (int64_t d = 0; d < width; ++d)
      mixed[d] = through_bf16(widen(projected[d]) + through_bf16(ratio * widen(token[d])));
  float lanes[kLanes] = {};
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] += mixed[d + l] * mixed[d + l];
  for (int l = 0; d + l < width; ++l) lanes[l] += mixed[d + l] * mixed[d + l];
  const float inverse = 1.0f / __builtin_sqrtf(sum_of(lanes) / static_cast<float>(width) + epsilon);
  for (d = first; d < last; ++d) out[d] = narrow(gelu(through_bf16(mixed[d] * inverse * scale[d] + shift[d])));
}

float sum_exponentials(const float* x, int64_t count, float highest) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] += exponential(x[i + l] - highest);
  for (int l = 0; i + l < count; ++l) lanes[l] += exponential(x[i + l] - highest);
  return sum_of(lanes);
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
  return largest_of(count, [&](int64_t i) { return static_cast<int16_t>(x[i] & 0x7f80); }) != 0x7f80;
}

void interleave_plain(const bf16* rows, int64_t stride, int64_t pairs, bf16* to) {
  for (int64_t k = 0; k < pairs; ++k, to += 2 * kPanel)
    for (int64_t n = 0; n < kPanel; ++n) __builtin_memcpy(to + 2 * n, rows + n * stride + 2 * k, 2 * sizeof(bf16));
}

// scores[g, s] = scale · query g · key s, over the visible entries in their order.
[[maybe_unused]] void score_keys(const AttentionTask& t, int64_t seen) {
  for (int64_t g = 0; g < t.groups; ++g)
    for (int64_t s = 0; s < seen; ++s)
      t.scores[g * seen + s] = t.scale * dot(t.queries + g * t.width, t.keys + entry(t, s) * t.key_stride, t.width);
}

// out[g] = Σ scores[g, s] · value s, one visible entry after the other.
[[maybe_unused]] void mix_values(const AttentionTask& t, int64_t seen) {
  for (int64_t g = 0; g < t.groups; ++g) {
    float* out = t.out + g * t.value_width;
    for (int64_t d = 0; d < t.value_width; ++d) out[d] = 0;
    for (int64_t s = 0; s < seen; ++s) {
      const bf16* value = t.values + entry(t, s) * t.value_stride;
      const float p = t.scores[g * seen + s];
      for (int64_t d = 0; d < t.value_width; ++d) out[d] += p * widen(value[d]);
    }
  }
}

// Turns the scores of one query into e^(score - highest), and returns one over their sum.
inline float soften(float* p, int64_t seen) {
  float most[kLanes], lanes[kLanes] = {};
  for (int l = 0; l < kLanes; ++l) most[l] = p[0];
  int64_t s = 0;
  for (; s + kLanes <= seen; s += kLanes)
    for (int l = 0; l < kLanes; ++l) most[l] = p[s + l] > most[l] ? p[s + l] : most[l];
  for (int l = 0; s + l < seen; ++l) most[l] = p[s + l] > most[l] ? p[s + l] : most[l];
  float highest = most[0];
  for (int l = 1; l < kLanes; ++l) highest = most[l] > highest ? most[l] : highest;
  for (s = 0; s + kLanes <= seen; s += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] += p[s + l] = exponential(p[s + l] - highest);
  for (int l = 0; s + l < seen; ++l) lanes[l] += p[s + l] = exponential(p[s + l] - highest);
  return 1.0f / sum_of(lanes);
}

template <void (*kScore)(const AttentionTask&, int64_t), void (*kMix)(const AttentionTask&, int64_t)>
void attend_by(const AttentionTask& t) {
  const int64_t seen = t.committed - t.first + t.count;
  kScore(t, seen);
  constexpr int64_t kMany = 64;
  for (int64_t from = 0; from < t.groups; from += kMany) {
    AttentionTask some = t;
    some.groups = t.groups - from < kMany ? t.groups - from : kMany;
    some.scores += from * seen, some.out += from * t.value_width;
    float share[kMany];
    for (int64_t g = 0; g < some.groups; ++g) share[g] = soften(some.scores + g * seen, seen);
    kMix(some, seen);
    for (int64_t g = 0; g < some.groups; ++g)
      for (int64_t d = 0; d < t.value_width; ++d) some.out[g * t.value_width + d] *= share[g];
  }
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

// What a block of rows asks for while it multiplies: its part of the weights that come next, every so many lines one.
struct Ahead {
  const char* from;  // null for nothing
  int64_t number, blocks;
};

// Splits the work into blocks of rows that fit the registers, and walks over the weights once for each group of
// panels: the second block of rows finds them in a near cache. Block<rows, panels> computes one block.
template <template <int, int> class Block, int kRows, int kPanels>
struct Rows {
  template <class X, class Y>
  static void run(int64_t rows, const X* x, int64_t x_stride, const X* w, int64_t lines, Y* y, int64_t y_stride,
                  const Ahead& ahead) {
    if (rows == kRows)
      Block<kRows, kPanels>::run(x, x_stride, w, lines, y, y_stride, ahead);
    else if constexpr (kRows > 1)
      Rows<Block, kRows - 1, kPanels>::run(rows, x, x_stride, w, lines, y, y_stride, ahead);
  }
};

template <template <int, int> class Block, int kRows, int kPanels, class X, class Y>
inline void walk(const X* x, int64_t x_stride, int64_t rows, const X* packed, int64_t lines, int64_t panels,
                 const void* ahead, Y* y, int64_t y_stride) {
  const int64_t blocks = (rows + kRows - 1) / kRows, panel = lines * (kLineBytes / sizeof(X));
  int64_t p = 0;
  for (; p + kPanels <= panels; p += kPanels) {
    const X* w = packed + p * panel;
    const void* next = ahead != nullptr && p + kPanels < panels ? w + kPanels * panel : ahead;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t from = rows * b / blocks, to = rows * (b + 1) / blocks;
      Rows<Block, kRows, kPanels>::run(to - from, x + from * x_stride, x_stride, w, lines,
                                       y + from * y_stride + p * kPanel, y_stride,
                                       {static_cast<const char*>(next), b, blocks});
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
