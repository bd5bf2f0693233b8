// Products of rows in int8 with weights in 4 bits, for the instruction set of the file that includes this one.
//
// The whole numbers of a group are summed exactly, and groups are added in their order, every step rounded once: what
// comes out is the same on every instruction set, bit by bit.

namespace draftsmith {
namespace {

constexpr float kMagic = 12582912.0f;  // whose low bits are a whole number; added and taken off again, it rounds

inline uint32_t largest_word(Words words) {
  uint32_t most[kLanes];
  Register<Words>::put(words, most);
  for (int l = 0; l < 8; ++l) most[l] = most[l] > most[l + 8] ? most[l] : most[l + 8];
  for (int l = 0; l < 4; ++l) most[l] = most[l] > most[l + 4] ? most[l] : most[l + 4];
  for (int l = 0; l < 2; ++l) most[l] = most[l] > most[l + 2] ? most[l] : most[l + 2];
  return most[0] > most[1] ? most[0] : most[1];
}

// As `quantise`, of a whole group, with minus the sum of what comes out.
inline float quantise_group(const bf16* x, int8_t* to, int32_t* minus) {
  const Lanes first = widen_lanes(x), second = widen_lanes(x + kLanes);
  const Words size = same_bits<Words>(first) & 0x7fffffffu, other = same_bits<Words>(second) & 0x7fffffffu;
  union { uint32_t u; float f; } most{largest_word(choose(size > other, size, other))};
  const float inverse = most.u > 0 ? 127 / most.f : 0;
  if (!(inverse <= 3e38f) || most.u >= 0x7f800000u) {  // too small for its inverse, or not finite
    for (int64_t i = 0; i < kGroup; ++i) to[i] = 0;
    const float scale = quantise(x, kGroup, to);
    *minus = 0;
    for (int64_t i = 0; i < kGroup; ++i) *minus -= to[i];
    return scale;
  }
  const Lanes magic = Lanes{} + kMagic;
  const Lanes low = first * inverse + magic, high = second * inverse + magic;
  put_bytes(same_bits<Words>(low), to);
  put_bytes(same_bits<Words>(high), to + kLanes);
  *minus = -static_cast<int32_t>(sum_of((low - magic) + (high - magic)));
  return most.f / 127;
}

void quantise_groups(const bf16* x, int64_t count, int8_t* to, float* scales, int32_t* minus) {
  int64_t k = 0;
  for (; k + kGroup <= count; k += kGroup, to += kGroup) *scales++ = quantise_group(x + k, to, minus++);
  if (k == count) return;
  bf16 last[kGroup] = {};
  for (int64_t i = 0; k + i < count; ++i) last[i] = x[k + i];
  *scales = quantise_group(last, to, minus);
}

// Scales and zero points that are tried: shares of a group's range, levels moved aside by parts of a step.
constexpr float kShares[] = {1.0f, 0.95f, 0.9f, 0.85f}, kAside[] = {-0.25f, 0.25f};

// The levels, 0 … 15, of sixteen values.
template <class Step>
inline Lanes levels_of(Lanes values, Step inverse, Step zero) {
  const Lanes least{}, most = Lanes{} + 15.0f, magic = Lanes{} + kMagic;
  const Lanes above = larger(values * inverse + zero, least);  // 0 for NaN
  return (choose(above > most, most, above) + magic) - magic;
}

void round_group(const float* values, float unit, uint8_t* levels, uint8_t* scale, uint8_t* zero) {
  const Lanes first = lanes_at(values), second = lanes_at(values + kLanes);
  float low = values[0], high = values[0], broken = unit * 0;
  for (int64_t k = 0; k < kGroup; ++k) {
    low = values[k] < low ? values[k] : low, high = values[k] > high ? values[k] : high;
    broken += values[k] * 0;  // NaN where one is not finite
    levels[k] = 0;
  }
  *zero = 0, *scale = 0;
  if (!(broken == broken) || (low == 0 && high == 0)) return;
  low = low < 0 ? low : 0, high = high > low / 2 ? high : low / 2;  // which zero points can tell
  float best = __builtin_inff(), best_inverse = 0, best_zero = 0;
  for (const float share : kShares)
    for (const float aside : kAside) {
      const float wanted = ((high / 15 - low / 15) * share / (8 * unit) + kMagic) - kMagic;
      const float whole = wanted > 1 ? wanted > 255 ? 255 : wanted : 1, step = 8 * (whole * unit);
      const float inverse = 1 / step, bottom = low + (1 - share) / 2 * (high - low);
      const float eighths = ((aside - bottom * inverse) * 8 + kMagic) - kMagic;
      const float nearest = eighths > 0 ? eighths > 255 ? 255 : eighths : 0, by = nearest / 8;
      const Lanes a = (levels_of(first, inverse, by) - by) * step - first;
      const Lanes b = (levels_of(second, inverse, by) - by) * step - second;
      const float error = sum_of(a * a + b * b);
      if (error < best || best_inverse == 0) {
        best = error, best_inverse = inverse, best_zero = by;
        *scale = static_cast<uint8_t>(whole), *zero = static_cast<uint8_t>(nearest);
      }
    }
  Lanes whole[2] = {levels_of(first, best_inverse, best_zero), levels_of(second, best_inverse, best_zero)};
  for (int64_t k = 0; k < kGroup; ++k) levels[k] = static_cast<uint8_t>(whole[k / kLanes][k % kLanes]);
}

// Rounds the weights of sixteen outputs input by input; what each leaves is made up for by those behind it. factors are
// (32, 32). Returns the error of every output.
inline Lanes round_in_turn(const float* values, const float* factors, Lanes step, Lanes inverse, Lanes zero,
                           Lanes* levels, Lanes* errors) {
  Lanes left[kGroup], total{};
  for (int64_t k = 0; k < kGroup; ++k) left[k] = lanes_at(values + k * kLanes);
  for (int64_t k = 0; k < kGroup; ++k) {
    levels[k] = levels_of(left[k], inverse, zero);
    errors[k] = (left[k] - (levels[k] - zero) * step) / factors[k * kGroup + k];
    total += errors[k] * errors[k];
    for (int64_t later = k + 1; later < kGroup; ++later) left[later] -= errors[k] * factors[later * kGroup + k];
  }
  return total;
}

void round_panel(float* values, int64_t inputs, const float* factors, int64_t stride, const float* units,
                 uint8_t* levels, uint8_t* scales, uint8_t* zeros) {
  const Lanes unit = lanes_at(units), none{}, one = none + 1.0f, most = none + 255.0f, magic = none + kMagic;
  Lanes low = lanes_at(values), high = low, broken = unit * none;
  for (int64_t k = 0; k < kGroup; ++k) {
    const Lanes value = lanes_at(values + k * kLanes);
    low = choose(value < low, value, low), high = larger(value, high);
    broken += value * none;  // NaN where one is not finite
  }
  const auto counts = (broken == broken) & ((low != none) | (high != none));
  low = choose(low < none, low, none), high = larger(high, low / 2);
  Lanes best{}, best_scale{}, best_zero{}, best_levels[kGroup] = {}, best_errors[kGroup] = {};
  Lanes tried[kGroup], errors[kGroup];
  float own[kGroup * kGroup];  // near each other: rows of factors may lie so that caches hold few of them
  for (int64_t k = 0; k < kGroup; ++k) __builtin_memcpy(own + k * kGroup, factors + k * stride, kGroup * sizeof(float));
  for (const float share : kShares)
    for (const float aside : kAside) {
      // As in `round_group`.
      const Lanes wanted = ((high / 15 - low / 15) * share / (8 * unit) + magic) - magic;
      const Lanes above = larger(wanted, one);
      const Lanes whole = choose(above > most, most, above), step = 8 * (whole * unit);
      const Lanes inverse = 1 / step, bottom = low + (1 - share) / 2 * (high - low);
      const Lanes eighths = ((aside - bottom * inverse) * 8 + magic) - magic, least = larger(eighths, none);
      const Lanes nearest = choose(least > most, most, least);
      const Lanes error = round_in_turn(values, own, step, inverse, nearest / 8, tried, errors);
      const auto better = (error < best) | (best_scale == none);
      best = choose(better, error, best), best_scale = choose(better, whole, best_scale);
      best_zero = choose(better, nearest, best_zero);
      for (int64_t k = 0; k < kGroup; ++k) {
        best_levels[k] = choose(better, tried[k], best_levels[k]);
        best_errors[k] = choose(better, errors[k], best_errors[k]);
      }
    }
  for (int64_t k = 0; k < kGroup; ++k) best_errors[k] = choose(counts, best_errors[k], none);
  constexpr int64_t kTogether = 4;  // sums that do not wait for each other
  for (int64_t later = kGroup; later < inputs; later += kTogether) {
    Lanes handed[kTogether] = {};
    for (int64_t k = 0; k < kGroup; ++k)
      for (int64_t i = 0; i < kTogether; ++i) handed[i] += best_errors[k] * factors[(later + i) * stride + k];
    for (int64_t i = 0; i < kTogether; ++i)
      put_lanes(lanes_at(values + (later + i) * kLanes) - handed[i], values + (later + i) * kLanes);
  }
  for (int64_t n = 0; n < kPanel; ++n) {
    scales[n] = counts[n] ? static_cast<uint8_t>(best_scale[n]) : uint8_t{0};
    zeros[n] = counts[n] ? static_cast<uint8_t>(best_zero[n]) : uint8_t{0};
    for (int64_t k = 0; k < kGroup; ++k)
      levels[k * kPanel + n] = counts[n] ? static_cast<uint8_t>(best_levels[k][n]) : uint8_t{0};
  }
}

// Plain C++, for any processor.
[[maybe_unused]] void gemm_int4_plain(const GroupedRows& x, int64_t rows, const uint8_t* packed, int64_t groups,
                                      int64_t panels, const void*, float* y, int64_t y_stride) {
  const Int4Panel panel{groups};
  for (int64_t p = 0; p < panels; ++p, packed += panel.bytes())
    for (int64_t r = 0; r < rows; ++r) {
      float total[kPanel] = {};
      for (int64_t g = 0; g < groups; ++g) {
        const int8_t* inputs = x.values + (r * groups + g) * kGroup;
        const uint8_t *line = packed + panel.levels(g), *details = packed + panel.details(g) + g % 2;
        int32_t sum[kPanel] = {};
        for (int64_t i = 0; i < kGroup; i += 8, line += kLineBytes)
          for (int64_t n = 0; n < kPanel; ++n)
            for (int64_t j = 0; j < 4; ++j)
              sum[n] += (line[4 * n + j] & 15) * inputs[i + j] + (line[4 * n + j] >> 4) * inputs[i + 4 + j];
        for (int64_t n = 0; n < kPanel; ++n) {
          const int32_t exact = 8 * sum[n] + details[4 * n] * x.minus[r * groups + g];
          total[n] += static_cast<float>(exact) * (static_cast<float>(details[4 * n + 2]) * x.scales[r * groups + g]);
        }
      }
      for (int64_t n = 0; n < kPanel; ++n) {
        float unit;
        __builtin_memcpy(&unit, packed + panel.units() + 4 * n, sizeof unit);
        y[r * y_stride + p * kPanel + n] = total[n] * unit;
      }
    }
}

constexpr int64_t kBytesAhead = 12 * kTwoGroupBytes;  // of what a single row is multiplied by: 7 KiB

// Some rows by some panels. `Set` has the instructions: registers of `kBytes`, of which a line takes several.
template <class Set, int kRows, int kPanels>
inline void block_int4(const GroupedRows& x, int64_t first, const uint8_t* w, int64_t groups, float* y, int64_t y_stride,
                       const Ahead& ahead) {
  constexpr int kPieces = static_cast<int>(kLineBytes) / Set::kBytes, kColumns = kPanels * kPieces;
  const Int4Panel panel{groups};
  const int64_t size = panel.bytes();
  typename Set::Real total[kRows][kColumns];
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kColumns; ++c) total[r][c] = Set::nothing();
  const char* next = ahead.from;
  int64_t turn = ahead.number;
  // A group by its lines and those of its details; `kSecond` says that it is the second of two.
  const auto add_group = [&]<bool kSecond>(int64_t g, const uint8_t* lines, const uint8_t* details) {
    const int64_t at = first * groups + g;  // of the first row's group
    typename Set::Whole sum[kRows][kColumns];
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kColumns; ++c) sum[r][c] = Set::zero();
#pragma GCC unroll 4
    for (int l = 0; l < static_cast<int>(kGroup) / 8; ++l) {
      typename Set::Whole low[kColumns], high[kColumns];
      for (int c = 0; c < kColumns; ++c)
        Set::split(lines + c / kPieces * size + l * kLineBytes + c % kPieces * Set::kBytes, low[c], high[c]);
      for (int r = 0; r < kRows; ++r) {
        const int8_t* inputs = x.values + (at + r * groups) * kGroup + 8 * l;
        const typename Set::Whole before = Set::all(inputs), behind = Set::all(inputs + 4);
        for (int c = 0; c < kColumns; ++c) sum[r][c] = Set::add(sum[r][c], low[c], before);
        for (int c = 0; c < kColumns; ++c) sum[r][c] = Set::add(sum[r][c], high[c], behind);
      }
    }
    for (int c = 0; c < kColumns; ++c) {
      const typename Set::Whole both = Set::load(details + c / kPieces * size + c % kPieces * Set::kBytes);
      const typename Set::Whole zeros = Set::template byte<kSecond ? 1 : 0>(both);
      const typename Set::Real scales = Set::real(Set::template byte<kSecond ? 3 : 2>(both));
      for (int r = 0; r < kRows; ++r) {
        // Beside a zero point stands a zero, so that the upper half of the sum does not count.
        const typename Set::Whole minus = Set::all(x.minus + at + r * groups);
        const typename Set::Real exact = Set::real(Set::exact(sum[r][c], zeros, minus));
        total[r][c] = Set::plus(total[r][c], Set::times(exact, Set::times(scales, Set::each(x.scales[at + r * groups]))));
      }
    }
  };
  const uint8_t* pair = w;
  for (int64_t g = 0; g < groups; g += 2, pair += kTwoGroupBytes) {
    if constexpr (kRows * kPanels == 1) {
      // So little is computed that reading is all: one stream, asked for further on than the processor itself looks.
      const int64_t on = pair - w + kBytesAhead;
      const char* from = on < size ? reinterpret_cast<const char*>(w) + on : next + (on - size);
      for (int64_t i = 0; i < kTwoGroupBytes && next != nullptr; i += kLineBytes) __builtin_prefetch(from + i, 0, 2);
    } else if (next != nullptr && turn-- == 0) {
      for (int64_t i = 0; i < kPanels * kTwoGroupBytes; i += kLineBytes)
        __builtin_prefetch(next + kPanels * (pair - w) + i, 0, 2);
      turn = ahead.blocks - 1;
    }
    if (g + 1 < groups) {
      add_group.template operator()<false>(g, pair, pair + 512);
      add_group.template operator()<true>(g + 1, pair + 256, pair + 512);
    } else {
      add_group.template operator()<false>(g, pair, pair + 256);
    }
  }
  for (int c = 0; c < kColumns; ++c) {
    typename Set::Real units;
    __builtin_memcpy(&units, w + c / kPieces * size + panel.units() + c % kPieces * Set::kBytes, Set::kBytes);
    for (int r = 0; r < kRows; ++r) {
      const typename Set::Real result = Set::times(total[r][c], units);
      __builtin_memcpy(reinterpret_cast<char*>(y + r * y_stride) + c * Set::kBytes, &result, Set::kBytes);
    }
  }
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
  const int64_t blocks = (rows + kRows - 1) / kRows, panel = Int4Panel{groups}.bytes();
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

// One row waits for memory alone, which is read fastest in its own order.
template <class Set>
[[maybe_unused]] void gemm_int4_by(const GroupedRows& x, int64_t rows, const uint8_t* packed, int64_t groups,
                                   int64_t panels, const void* ahead, float* y, int64_t y_stride) {
  if (rows == 1)
    walk_int4<Set, 1, Set::kAlone>(x, rows, packed, groups, panels, ahead, y, y_stride);
  else
    walk_int4<Set, Set::kRows, Set::kPanels>(x, rows, packed, groups, panels, ahead, y, y_stride);
}

#ifdef DRAFTSMITH_AVX512
struct Int4Lines {
  static constexpr int kBytes = 64, kRows = 5, kPanels = 2, kAlone = 1;
  using Whole = __m512i;
  using Real = __m512;
  static Real nothing() { return _mm512_setzero_ps(); }
  static Whole zero() { return _mm512_setzero_si512(); }
  static Whole all(const void* from) {
    int word;
    __builtin_memcpy(&word, from, sizeof word);
    return _mm512_set1_epi32(word);
  }
  static Whole load(const uint8_t* from) { return _mm512_loadu_si512(from); }
  static void split(const uint8_t* from, Whole& low, Whole& high) {
    const Whole both = load(from), nibble = _mm512_set1_epi8(15);
    low = _mm512_and_si512(both, nibble), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
  }
  template <int kByte>
  static Whole byte(Whole words) {
    return _mm512_and_si512(kByte == 0 ? words : _mm512_srli_epi32(words, 8 * kByte), _mm512_set1_epi32(255));
  }
#ifdef DRAFTSMITH_VNNI
  static Whole add(Whole sum, Whole weights, Whole inputs) { return _mm512_dpbusd_epi32(sum, weights, inputs); }
  static Whole exact(Whole sum, Whole zeros, Whole minus) {
    return _mm512_dpwssd_epi32(_mm512_slli_epi32(sum, 3), zeros, minus);
  }
#else
  // Sums of 16 bits hold a group: eight times two products of 15 · 127 at most.
  static Whole add(Whole sum, Whole weights, Whole inputs) {
    sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(weights, inputs));
    asm("" : "+v"(sum));  // compilers would add in another order, for which all products of a group wait in memory
    return sum;
  }
  static Whole exact(Whole sum, Whole zeros, Whole minus) {
    return _mm512_add_epi32(_mm512_madd_epi16(sum, _mm512_set1_epi16(8)), _mm512_madd_epi16(zeros, minus));
  }
#endif
  static Real each(float value) { return _mm512_set1_ps(value); }
  static Real real(Whole words) { return _mm512_cvtepi32_ps(words); }
  static Real times(Real a, Real b) { return _mm512_mul_ps(a, b); }
  static Real plus(Real a, Real b) { return _mm512_add_ps(a, b); }
};
#endif

}  // namespace
}  // namespace draftsmith
