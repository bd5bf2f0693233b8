// Products of rows in int8 with weights in 4 bits, for the instruction set of the file that includes this one.
//
// The whole numbers of a group are summed exactly, and groups are added in their order, every step rounded once: what
// comes out is the same on every instruction set, bit by bit.

namespace draftsmith {
namespace {

using Bytes = int8_t __attribute__((vector_size(16), may_alias, aligned(1)));

inline uint32_t largest_word(Words words) {
  uint32_t most[8];
  for (int l = 0; l < 8; ++l) most[l] = words[l] > words[l + 8] ? words[l] : words[l + 8];
  for (int l = 0; l < 4; ++l) most[l] = most[l] > most[l + 4] ? most[l] : most[l + 4];
  for (int l = 0; l < 2; ++l) most[l] = most[l] > most[l + 2] ? most[l] : most[l + 2];
  return most[0] > most[1] ? most[0] : most[1];
}

// As `quantise`, of a whole group, with the sum of what comes out.
inline float quantise_group(const bf16* x, int8_t* to, int32_t* sum) {
  const Lanes first = widen_lanes(x), second = widen_lanes(x + kLanes);
  const Words size = reinterpret_cast<Words>(first) & 0x7fffffffu, other = reinterpret_cast<Words>(second) & 0x7fffffffu;
  union { uint32_t u; float f; } most{largest_word(size > other ? size : other)};
  const float inverse = most.u > 0 ? 127 / most.f : 0;
  if (!(inverse <= 3e38f) || most.u >= 0x7f800000u) {  // too small for its inverse, or not finite
    for (int64_t i = 0; i < kGroup; ++i) to[i] = 0;
    const float scale = quantise(x, kGroup, to);
    *sum = 0;
    for (int64_t i = 0; i < kGroup; ++i) *sum += to[i];
    return scale;
  }
  const Lanes magic = Lanes{} + 12582912.0f;  // whose low bits are a whole number
  const Lanes low = first * inverse + magic, high = second * inverse + magic;
  *reinterpret_cast<Bytes*>(to) = __builtin_convertvector(reinterpret_cast<Words>(low), Bytes);
  *reinterpret_cast<Bytes*>(to + kLanes) = __builtin_convertvector(reinterpret_cast<Words>(high), Bytes);
  *sum = static_cast<int32_t>(sum_of((low - magic) + (high - magic)));
  return most.f / 127;
}

void quantise_groups(const bf16* x, int64_t count, int8_t* to, float* scales, int32_t* sums) {
  int64_t k = 0;
  for (; k + kGroup <= count; k += kGroup, to += kGroup) *scales++ = quantise_group(x + k, to, sums++);
  if (k == count) return;
  bf16 last[kGroup] = {};
  for (int64_t i = 0; k + i < count; ++i) last[i] = x[k + i];
  *scales = quantise_group(last, to, sums);
}

// Scales and zero points that are tried: shares of a group's range, levels moved aside by parts of a step.
constexpr float kShares[] = {1.0f, 0.95f, 0.9f, 0.85f}, kAside[] = {-0.25f, 0.25f};

// The levels, 0 … 15, of sixteen values.
template <class Step>
inline Lanes levels_of(Lanes values, Step inverse, Step zero) {
  const Lanes least{}, most = Lanes{} + 15.0f, magic = Lanes{} + 12582912.0f;  // whose low bits are a whole number
  const Lanes at = values * inverse + zero, above = at < least ? least : at;
  return ((above > most ? most : above) + magic) - magic;
}

void round_group(const float* values, uint8_t* levels, bf16* scale, int16_t* zero) {
  const Lanes first = lanes_at(values), second = lanes_at(values + kLanes);
  float low = values[0], high = values[0], broken = 0;
  for (int64_t k = 0; k < kGroup; ++k) {
    low = values[k] < low ? values[k] : low, high = values[k] > high ? values[k] : high;
    broken += values[k] * 0;  // NaN where one is not finite
    levels[k] = 0;
  }
  *zero = 0, *scale = broken == broken ? 0 : narrow(__builtin_nanf(""));
  const float farthest = high > -low ? high : -low;
  if (!(broken == broken) || farthest == 0) return;
  float best = __builtin_inff(), best_inverse = 0, best_zero = 0;
  for (const float share : kShares)
    for (const float aside : kAside) {
      // So large that neither its inverse nor the zero point leaves its format.
      float step = (high / 15 - low / 15) * share;
      step = step > farthest / 2000 ? step : farthest / 2000;
      step = through_bf16(step > 0x1p-118f ? step : 0x1p-118f);
      const float inverse = 1 / step, bottom = low + (1 - share) / 2 * (high - low);
      const float sixteenths = (aside - bottom * inverse) * 16, nearest = (sixteenths + 12582912.0f) - 12582912.0f;
      const float by = nearest / 16;
      const Lanes a = (levels_of(first, inverse, by) - by) * step - first;
      const Lanes b = (levels_of(second, inverse, by) - by) * step - second;
      const float error = sum_of(a * a + b * b);
      if (error < best || best_inverse == 0) {
        best = error, best_inverse = inverse, best_zero = by;
        *scale = narrow(step / 16), *zero = static_cast<int16_t>(nearest);
      }
    }
  Lanes whole[2] = {levels_of(first, best_inverse, best_zero), levels_of(second, best_inverse, best_zero)};
  for (int64_t k = 0; k < kGroup; ++k) levels[k] = static_cast<uint8_t>(whole[k / kLanes][k % kLanes]);
}

// Rounds the weights of sixteen outputs input by input; what each leaves is made up for by those behind it. Returns the
// error of every output.
inline Lanes round_in_turn(const float* values, const float* factors, int64_t stride, Lanes step, Lanes inverse,
                           Lanes zero, Lanes* levels, Lanes* errors) {
  Lanes left[kGroup], total{};
  for (int64_t k = 0; k < kGroup; ++k) left[k] = lanes_at(values + k * kLanes);
  for (int64_t k = 0; k < kGroup; ++k) {
    levels[k] = levels_of(left[k], inverse, zero);
    errors[k] = (left[k] - (levels[k] - zero) * step) / factors[k * stride + k];
    total += errors[k] * errors[k];
    for (int64_t later = k + 1; later < kGroup; ++later) left[later] -= errors[k] * factors[later * stride + k];
  }
  return total;
}

void round_panel(float* values, int64_t inputs, const float* factors, int64_t stride, uint8_t* levels, bf16* scales,
                 int16_t* zeros) {
  Lanes low = lanes_at(values), high = low, broken{};
  for (int64_t k = 0; k < kGroup; ++k) {
    const Lanes value = lanes_at(values + k * kLanes);
    low = value < low ? value : low, high = value > high ? value : high;
    broken += value * Lanes{};  // NaN where one is not finite
  }
  const Lanes farthest = high > -low ? high : -low, magic = Lanes{} + 12582912.0f, least = Lanes{} + 0x1p-118f;
  Lanes best{}, best_step{}, best_zero{}, best_levels[kGroup] = {}, best_errors[kGroup] = {};
  Lanes tried[kGroup], errors[kGroup];
  for (const float share : kShares)
    for (const float aside : kAside) {
      // As in `round_group`.
      Lanes step = (high / 15 - low / 15) * share;
      step = step > farthest / 2000 ? step : farthest / 2000;
      step = lanes_through_bf16(step > least ? step : least);
      const Lanes inverse = 1 / step, bottom = low + (1 - share) / 2 * (high - low);
      const Lanes nearest = ((aside - bottom * inverse) * 16 + magic) - magic;
      const Lanes error = round_in_turn(values, factors, stride, step, inverse, nearest / 16, tried, errors);
      const auto better = (error < best) | (best_step == Lanes{});
      best = better ? error : best, best_step = better ? step : best_step, best_zero = better ? nearest : best_zero;
      for (int64_t k = 0; k < kGroup; ++k) {
        best_levels[k] = better ? tried[k] : best_levels[k];
        best_errors[k] = better ? errors[k] : best_errors[k];
      }
    }
  const auto counts = (broken == broken) & (farthest != Lanes{});
  for (int64_t k = 0; k < kGroup; ++k) best_errors[k] = counts ? best_errors[k] : Lanes{};
  for (int64_t later = kGroup; later < inputs; ++later) {
    const float* own = factors + later * stride;
    Lanes handed{};
    for (int64_t k = 0; k < kGroup; ++k) handed += best_errors[k] * own[k];
    const Lanes left = lanes_at(values + later * kLanes) - handed;
    for (int64_t n = 0; n < kLanes; ++n) values[later * kLanes + n] = left[n];
  }
  for (int64_t n = 0; n < kPanel; ++n) {
    scales[n] = counts[n] ? narrow(best_step[n] / 16) : broken[n] == broken[n] ? bf16{0} : narrow(__builtin_nanf(""));
    zeros[n] = counts[n] ? static_cast<int16_t>(best_zero[n]) : int16_t{0};
    for (int64_t k = 0; k < kGroup; ++k)
      levels[k * kPanel + n] = counts[n] ? static_cast<uint8_t>(best_levels[k][n]) : uint8_t{0};
  }
}

// Plain C++, for any processor.
[[maybe_unused]] void gemm_int4_plain(const GroupedRows& x, int64_t rows, const uint8_t* packed, int64_t groups,
                                      int64_t panels, const void*, float* y, int64_t y_stride) {
  for (int64_t p = 0; p < panels; ++p, packed += groups * kGroupBytes)
    for (int64_t r = 0; r < rows; ++r) {
      float total[kPanel] = {};
      const uint8_t* line = packed;
      for (int64_t g = 0; g < groups; ++g) {
        const int8_t* inputs = x.values + (r * groups + g) * kGroup;
        int32_t sum[kPanel] = {};
        for (int64_t i = 0; i < kGroup; i += 8, line += kLineBytes)
          for (int64_t n = 0; n < kPanel; ++n)
            for (int64_t j = 0; j < 4; ++j)
              sum[n] += (line[4 * n + j] & 15) * inputs[i + j] + (line[4 * n + j] >> 4) * inputs[i + 4 + j];
        for (int64_t n = 0; n < kPanel; ++n) {
          uint32_t step;
          __builtin_memcpy(&step, line + 4 * n, sizeof step);
          const int32_t exact = 16 * sum[n] - static_cast<int16_t>(step & 0xffffu) * x.sums[r * groups + g];
          const float scale = widen(static_cast<bf16>(step >> 16)) * x.scales[r * groups + g];
          total[n] += static_cast<float>(exact) * scale;
        }
        line += kLineBytes;
      }
      for (int64_t n = 0; n < kPanel; ++n) y[r * y_stride + p * kPanel + n] = total[n];
    }
}

constexpr int64_t kGroupsAhead = 64;  // of the one that a single row is multiplied by: 20 KiB

// Some rows by some panels. `Set` has the instructions: registers of `kBytes`, of which a line takes several.
template <class Set, int kRows, int kPanels>
inline void block_int4(const GroupedRows& x, int64_t first, const uint8_t* w, int64_t groups, float* y, int64_t y_stride,
                       const Ahead& ahead) {
  constexpr int kPieces = static_cast<int>(kLineBytes) / Set::kBytes, kColumns = kPanels * kPieces;
  typename Set::Real total[kRows][kColumns];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kColumns; ++c) total[r][c] = Set::nothing();
  const char* next = ahead.from;
  int64_t turn = ahead.number;
  for (int64_t g = 0; g < groups; ++g) {
    if constexpr (kRows * kPanels == 1) {
      // So little is computed that reading is all: one stream, asked for further on than the processor itself looks.
      const int64_t on = g + kGroupsAhead;
      const char* from = on < groups ? reinterpret_cast<const char*>(w) + on * kGroupBytes
                                     : next + (on - groups) * kGroupBytes;
      for (int64_t i = 0; i < kGroupBytes && next != nullptr; i += kLineBytes) __builtin_prefetch(from + i, 0, 2);
    } else if (next != nullptr && turn-- == 0) {
      for (int64_t i = 0; i < kPanels * kGroupBytes; i += kLineBytes)
        __builtin_prefetch(next + g * kPanels * kGroupBytes + i, 0, 2);
      turn = ahead.blocks - 1;
    }
    const uint8_t* lines = w + g * kGroupBytes;
    const int64_t at = first * groups + g;  // of the first row's group
    typename Set::Whole sum[kRows][kColumns];
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kColumns; ++c) sum[r][c] = Set::zero();
#pragma GCC unroll 4
    for (int l = 0; l < static_cast<int>(kGroup) / 8; ++l) {
      typename Set::Whole low[kColumns], high[kColumns];
      for (int c = 0; c < kColumns; ++c)
        Set::split(lines + c / kPieces * groups * kGroupBytes + l * kLineBytes + c % kPieces * Set::kBytes, low[c],
                   high[c]);
      for (int r = 0; r < kRows; ++r) {
        int quads[2];
        __builtin_memcpy(quads, x.values + (at + r * groups) * kGroup + 8 * l, sizeof quads);
        const typename Set::Whole before = Set::all(quads[0]), behind = Set::all(quads[1]);
        for (int c = 0; c < kColumns; ++c) sum[r][c] = Set::add(sum[r][c], low[c], before);
        for (int c = 0; c < kColumns; ++c) sum[r][c] = Set::add(sum[r][c], high[c], behind);
      }
    }
    for (int c = 0; c < kColumns; ++c) {
      const typename Set::Whole steps =
          Set::load(lines + c / kPieces * groups * kGroupBytes + (kGroup / 8) * kLineBytes + c % kPieces * Set::kBytes);
      for (int r = 0; r < kRows; ++r) {
        // Beside minus the sum stands a zero for the scale's bits.
        const typename Set::Whole minus = Set::all(-x.sums[at + r * groups] & 0xffff);
        total[r][c] = Set::scaled(total[r][c], Set::exact(sum[r][c], steps, minus), steps, x.scales[at + r * groups]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kColumns; ++c)
      __builtin_memcpy(reinterpret_cast<char*>(y + r * y_stride) + c * Set::kBytes, &total[r][c], Set::kBytes);
}

template <class Set, int kRows, int kPanels>
inline void rows_int4(int64_t rows, const GroupedRows& x, int64_t first, const uint8_t* w, int64_t groups, float* y,
                      int64_t y_stride, const Ahead& ahead) {
  if (rows == kRows)
    block_int4<Set, kRows, kPanels>(x, first, w, groups, y, y_stride, ahead);
  else if constexpr (kRows > 1)
    rows_int4<Set, kRows - 1, kPanels>(rows, x, first, w, groups, y, y_stride, ahead);
}

// As `walk`.
template <class Set, int kRows, int kPanels>
inline void walk_int4(const GroupedRows& x, int64_t rows, const uint8_t* packed, int64_t groups, int64_t panels,
                      const void* ahead, float* y, int64_t y_stride) {
  const int64_t blocks = (rows + kRows - 1) / kRows, panel = groups * kGroupBytes;
  int64_t p = 0;
  for (; p + kPanels <= panels; p += kPanels) {
    const uint8_t* w = packed + p * panel;
    const void* next = ahead != nullptr && p + kPanels < panels ? w + kPanels * panel : ahead;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t from = rows * b / blocks, to = rows * (b + 1) / blocks;
      rows_int4<Set, kRows, kPanels>(to - from, x, from, w, groups, y + from * y_stride + p * kPanel, y_stride,
                                     {static_cast<const char*>(next), b, blocks});
    }
  }
  if constexpr (kPanels > 1) {
    if (p < panels)
      walk_int4<Set, kRows, kPanels / 2>(x, rows, packed + p * panel, groups, panels - p, ahead, y + p * kPanel,
                                         y_stride);
  }
}

// Few rows leave registers for more panels; one row waits for memory alone, which is read fastest in its own order.
template <class Set>
[[maybe_unused]] void gemm_int4_by(const GroupedRows& x, int64_t rows, const uint8_t* packed, int64_t groups,
                                   int64_t panels, const void* ahead, float* y, int64_t y_stride) {
  if (rows == 1)
    walk_int4<Set, 1, Set::kAlone>(x, rows, packed, groups, panels, ahead, y, y_stride);
  else if (rows <= Set::kFewRows)
    walk_int4<Set, Set::kFewRows, 2 * Set::kPanels>(x, rows, packed, groups, panels, ahead, y, y_stride);
  else
    walk_int4<Set, Set::kRows, Set::kPanels>(x, rows, packed, groups, panels, ahead, y, y_stride);
}

#ifdef DRAFTSMITH_AVX512
struct Int4Lines {
  static constexpr int kBytes = 64, kRows = 6, kPanels = 2, kFewRows = 2, kAlone = 1;
  using Whole = __m512i;
  using Real = __m512;
  static Real nothing() { return _mm512_setzero_ps(); }
  static Whole zero() { return _mm512_setzero_si512(); }
  static Whole all(int word) { return _mm512_set1_epi32(word); }
  static Whole load(const uint8_t* from) { return _mm512_loadu_si512(from); }
  static void split(const uint8_t* from, Whole& low, Whole& high) {
    const Whole both = load(from), nibble = _mm512_set1_epi8(15);
    low = _mm512_and_si512(both, nibble), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
  }
#ifdef DRAFTSMITH_VNNI
  static Whole add(Whole sum, Whole weights, Whole inputs) { return _mm512_dpbusd_epi32(sum, weights, inputs); }
  static Whole exact(Whole sum, Whole steps, Whole minus) {
    return _mm512_dpwssd_epi32(_mm512_slli_epi32(sum, 4), steps, minus);
  }
#else
  // Sums of 16 bits hold a group: eight times two products of 15 · 127 at most.
  static Whole add(Whole sum, Whole weights, Whole inputs) {
    return _mm512_add_epi16(sum, _mm512_maddubs_epi16(weights, inputs));
  }
  static Whole exact(Whole sum, Whole steps, Whole minus) {
    return _mm512_add_epi32(_mm512_madd_epi16(sum, _mm512_set1_epi16(16)), _mm512_madd_epi16(steps, minus));
  }
#endif
  static Real scaled(Real total, Whole exact, Whole steps, float scale) {
    const Real step = _mm512_castsi512_ps(_mm512_and_si512(steps, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
    return _mm512_add_ps(total, _mm512_mul_ps(_mm512_cvtepi32_ps(exact), _mm512_mul_ps(step, _mm512_set1_ps(scale))));
  }
};
#endif

}  // namespace
}  // namespace draftsmith
