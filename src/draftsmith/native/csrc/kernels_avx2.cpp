// AVX2 with FMA: a panel is two registers of eight, weights are widened to fp32 on the way.
#include "kernels.h"

#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>
#define DRAFTSMITH_AVX2
#define DRAFTSMITH_MULTIPLY_ADD(a, b, c) \
  Lanes(_mm256_fmadd_ps((a).low, (b).low, (c).low), _mm256_fmadd_ps((a).high, (b).high, (c).high))

#include "kernels_common.inl"
#include "kernels_int4.inl"

namespace draftsmith {
namespace {

inline __m256 lows(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 highs(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

// While line k is multiplied, a block of rows asks for its part of what comes next, when it is its turn.
template <int kPanels>
[[gnu::always_inline]] inline void fetch_ahead(const Ahead& ahead, const Reach& reach, int64_t k, int64_t& turn) {
  if (ahead.from == nullptr || turn-- != 0) return;
  const int64_t line = reach.whole() ? k * kPanels : k - reach.first, apart = reach.whole() ? 1 : reach.lines;
  for (int p = 0; p < kPanels; ++p) _mm_prefetch(ahead.from + (line + p * apart) * kLineBytes, _MM_HINT_T1);
  turn = ahead.blocks - 1;
}

// One of the inputs of line k in every lane: the first of its pair, or the second. Rows of bf16 are whole; those that were
// widened begin with the stretch.
inline const bf16* begin(const bf16* x, const Reach& reach) { return x + 2 * reach.first; }
inline const float* begin(const float* x, const Reach&) { return x; }
template <int kSecond>
inline __m256 input(const bf16* pair) {
  int both;
  __builtin_memcpy(&both, pair, sizeof both);
  return kSecond ? highs(_mm256_set1_epi32(both)) : lows(_mm256_set1_epi32(both));
}
template <int kSecond>
inline __m256 input(const float* pair) {
  return _mm256_broadcast_ss(pair + kSecond);
}

// The sums and what is multiplied need nearly all registers. Compilers are held to keep the sums there: for a single one in
// memory, all others would wait at every line.
template <int kRows, int kPanels>
struct Block {
  using Sums = __m256[kRows][kPanels][2];

  template <class X>
  static void run(const X* x, int64_t x_stride, const bf16* w, const Reach& reach, float* y, int64_t y_stride,
                  const Ahead& ahead) {
    Sums sum;
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p)
        for (int h = 0; h < 2; ++h)
          sum[r][p][h] =
              reach.first == 0 ? _mm256_setzero_ps() : _mm256_loadu_ps(y + r * y_stride + p * kPanel + 8 * h);
    int64_t turn = ahead.number;
    x = begin(x, reach);
    for (int64_t k = reach.first; k < reach.last; ++k, x += 2) {
      fetch_ahead<kPanels>(ahead, reach, k, turn);
      const bf16* line = w + k * 2 * kPanel;
      if constexpr (kRows == 1) {
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) {
          multiply<0>(x, x_stride, line, reach, p, sum);
          multiply<1>(x, x_stride, line, reach, p, sum);
        }
      } else {
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) multiply<0>(x, x_stride, line, reach, p, sum);
        asm volatile("" ::: "memory");  // weights are read again for the second inputs, and need no registers until then
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) multiply<1>(x, x_stride, line, reach, p, sum);
        asm volatile("" ::: "memory");
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p)
        for (int h = 0; h < 2; ++h) _mm256_storeu_ps(y + r * y_stride + p * kPanel + 8 * h, sum[r][p][h]);
  }

 private:
  // One input of all rows by its weights of a panel.
  template <int kSecond, class X>
  [[gnu::always_inline]] static void multiply(const X* x, int64_t x_stride, const bf16* w, const Reach& reach, int p,
                                              Sums& sum) {
    const __m256i* line = reinterpret_cast<const __m256i*>(w + p * reach.lines * 2 * kPanel);
    const __m256i left_pairs = _mm256_loadu_si256(line), right_pairs = _mm256_loadu_si256(line + 1);
    const __m256 left = kSecond ? highs(left_pairs) : lows(left_pairs);
    const __m256 right = kSecond ? highs(right_pairs) : lows(right_pairs);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const __m256 one = input<kSecond>(x + r * x_stride);
      sum[r][p][0] = _mm256_fmadd_ps(one, left, sum[r][p][0]);
      sum[r][p][1] = _mm256_fmadd_ps(one, right, sum[r][p][1]);
      if constexpr (kRows > 1) asm("" : "+x"(sum[r][p][0]), "+x"(sum[r][p][1]));
    }
  }
};

constexpr int64_t kWidened = 64;  // rows

// Up to so many rows are widened once for all panels, a stretch of their inputs at a time.
void widen_and_walk(const bf16* x, int64_t x_stride, int64_t rows, const bf16* packed, int64_t pairs, int64_t panels,
                    const void* ahead, float* y, int64_t y_stride) {
  constexpr int64_t kRoom = 16384, kApart = 16;  // so that rows begin in different sets of the nearest cache
  alignas(64) float wide[kRoom];
  const int64_t most = (kRoom / rows - kApart) / 2, stretches = (pairs + most - 1) / most, panel = pairs * 2 * kPanel;
  for (int64_t s = 0; s < stretches; ++s) {
    const Reach reach{pairs, pairs * s / stretches, pairs * (s + 1) / stretches};
    const int64_t inputs = 2 * (reach.last - reach.first), stride = inputs + kApart;
    for (int64_t r = 0; r < rows; ++r) widen_row(x + r * x_stride + 2 * reach.first, inputs, wide + r * stride);
    for (int64_t p = 0; p < panels; ++p) {
      const bf16* w = packed + p * panel;
      const void* next = ahead;
      if (ahead != nullptr && p + 1 < panels) next = w + panel + reach.first * 2 * kPanel;
      if (ahead != nullptr && p + 1 == panels && s + 1 < stretches) next = packed + reach.last * 2 * kPanel;
      walk_rows<Block, 6, 1>(wide, stride, rows, w, reach, next, y + p * kPanel, y_stride);
    }
  }
}

// Few rows would wait for their own sums, unless they have several panels of them. A single one is read as fast as it can
// be without asking. Up to three wait for memory anyway, so nothing is gained by widening them.
void gemm(const bf16* x, int64_t x_stride, int64_t rows, const bf16* packed, int64_t pairs, int64_t panels,
          const void* ahead, float* y, int64_t y_stride) {
  if (rows <= 1)
    walk<Block, 1, 4>(x, x_stride, rows, packed, pairs, panels, nullptr, y, y_stride);
  else if (rows == 2)
    walk<Block, 2, 2>(x, x_stride, rows, packed, pairs, panels, ahead, y, y_stride);
  else if (rows == 3)
    walk<Block, 3, 1>(x, x_stride, rows, packed, pairs, panels, ahead, y, y_stride);
  else
    for (int64_t r = 0; r < rows; r += kWidened)
      widen_and_walk(x + r * x_stride, x_stride, rows - r < kWidened ? rows - r : kWidened, packed, pairs, panels, ahead,
                     y + r * y_stride, y_stride);
}

// Bytes are multiplied by bytes, one side with signs, the other without: the sign of a weight goes to the input. No input is
// -128, whose sign could not be turned, so no sum of two products leaves 16 bits.
template <int kRows, int kPanels>
struct BlockOfQuads {
  static void run(const int8_t* x, int64_t x_stride, const int8_t* w, const Reach& reach, int32_t* y, int64_t y_stride,
                  const Ahead& ahead) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[kRows][kPanels][2];
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kPanels; ++p)
        for (int h = 0; h < 2; ++h)
          sum[r][p][h] = reach.first == 0 ? _mm256_setzero_si256()
                                          : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(
                                                y + r * y_stride + p * kPanel + 8 * h));
    int64_t turn = ahead.number;
    for (int64_t k = reach.first; k < reach.last; ++k) {
      fetch_ahead<kPanels>(ahead, reach, k, turn);
      for (int p = 0; p < kPanels; ++p)
        for (int h = 0; h < 2; ++h) {
          const __m256i weights =
              _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + (p * reach.lines + k) * kLineBytes) + h);
          const __m256i sizes = _mm256_abs_epi8(weights);
          for (int r = 0; r < kRows; ++r) {
            int quad;
            __builtin_memcpy(&quad, x + r * x_stride + 4 * k, sizeof quad);
            const __m256i signed_inputs = _mm256_sign_epi8(_mm256_set1_epi32(quad), weights);
            const __m256i products = _mm256_madd_epi16(_mm256_maddubs_epi16(sizes, signed_inputs), ones);
            sum[r][p][h] = _mm256_add_epi32(sum[r][p][h], products);
          }
        }
    }
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kPanels; ++p)
        for (int h = 0; h < 2; ++h)
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(y + r * y_stride + p * kPanel + 8 * h), sum[r][p][h]);
  }
};

void gemm_int8(const int8_t* x, int64_t x_stride, int64_t rows, const int8_t* packed, const int32_t*, int64_t quads,
               int64_t panels, const void* ahead, int32_t* y, int64_t y_stride) {
  if (rows <= 2)
    walk<BlockOfQuads, 2, 2>(x, x_stride, rows, packed, quads, panels, ahead, y, y_stride);
  else
    walk<BlockOfQuads, 5, 1>(x, x_stride, rows, packed, quads, panels, ahead, y, y_stride);
}

// Half a line, the outputs 0 … 7 or 8 … 15 of a panel.
struct Int4Halves {
  static constexpr int kBytes = 32, kRows = 3, kPanels = 1, kAlone = 2;
  using Whole = __m256i;
  using Real = __m256;
  static Real nothing() { return _mm256_setzero_ps(); }
  static Whole zero() { return _mm256_setzero_si256(); }
  static Whole all(const void* from) {
    int word;
    __builtin_memcpy(&word, from, sizeof word);
    return _mm256_set1_epi32(word);
  }
  static Whole load(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static void split(const uint8_t* from, Whole& low, Whole& high) {
    const Whole both = load(from), nibble = _mm256_set1_epi8(15);
    low = _mm256_and_si256(both, nibble), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
  }
  // Sums of 16 bits hold a group: eight times two products of 15 · 127 at most.
  static Whole add(Whole sum, Whole weights, Whole inputs) {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, inputs));
    asm("" : "+x"(sum));  // compilers would add in another order, for which all products of a group wait in memory
    return sum;
  }
  static Whole exact(Whole sum, Whole zeros, Whole minus) {
    return _mm256_add_epi32(_mm256_madd_epi16(sum, _mm256_set1_epi16(8)), _mm256_madd_epi16(zeros, minus));
  }
  template <int kByte>
  static Whole byte(Whole words) {
    return _mm256_and_si256(kByte == 0 ? words : _mm256_srli_epi32(words, 8 * kByte), _mm256_set1_epi32(255));
  }
  static Real each(float value) { return _mm256_set1_ps(value); }
  static Real real(Whole words) { return _mm256_cvtepi32_ps(words); }
  static Real times(Real a, Real b) { return _mm256_mul_ps(a, b); }
  static Real plus(Real a, Real b) { return _mm256_add_ps(a, b); }
};

// Transposes 8 × 8 words of 32 bits in registers: within halves of 128 bits, then the halves.
inline void turn_words(__m256i (&r)[8]) {
  __m256i t[8];
  for (int n = 0; n < 8; n += 2)
    t[n] = _mm256_unpacklo_epi32(r[n], r[n + 1]), t[n + 1] = _mm256_unpackhi_epi32(r[n], r[n + 1]);
  __m256i u[8];
  for (int n = 0; n < 8; n += 4)
    for (int h = 0; h < 2; ++h) {
      u[n + 2 * h] = _mm256_unpacklo_epi64(t[n + h], t[n + h + 2]);
      u[n + 2 * h + 1] = _mm256_unpackhi_epi64(t[n + h], t[n + h + 2]);
    }
  for (int j = 0; j < 4; ++j) {  // half h of u[n + j] holds the words 4 h + j of the rows n … n + 3
    r[j] = _mm256_permute2x128_si256(u[j], u[4 + j], 0x20);
    r[4 + j] = _mm256_permute2x128_si256(u[j], u[4 + j], 0x31);
  }
}

// Eight pairs of inputs of sixteen outputs, as eight lines of a panel; from(n) is where those of output n lie.
template <class From>
inline void interleave_eight(const From& from, bf16* to) {
  for (int half = 0; half < 2; ++half) {
    __m256i words[8];
    for (int n = 0; n < 8; ++n) words[n] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from(8 * half + n)));
    turn_words(words);
    for (int n = 0; n < 8; ++n) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + n * 2 * kPanel) + half, words[n]);
  }
}

void interleave(const bf16* rows, int64_t stride, int64_t pairs, bf16* to) {
  int64_t k = 0;
  for (; k + 8 <= pairs; k += 8, to += 8 * 2 * kPanel)
    interleave_eight([&](int n) { return rows + n * stride + 2 * k; }, to);
  interleave_plain(rows + 2 * k, stride, pairs - k, to);
}

}  // namespace
}  // namespace draftsmith

#include "kernels_avx2_attention.inl"

namespace draftsmith {

const Kernels* avx2_kernels() {
  static const Kernels table{"avx2", gemm, gemm_int8, gemm_int4_by<Int4Halves>, attend_by<score_panels, mix_values_by<Line>, 16>, kMostQueries, room_for_scores, rms_norm,
                             silu_times, narrow_row, add_row, round_row, quantise, quantise_groups, round_group, round_panel, rotate, activate,
                             sum_exponentials, argmax, all_finite, widen_row, maxima, weigh, add_up, rest, share, early, interleave};
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &table : nullptr;
}

}  // namespace draftsmith

#else
namespace draftsmith {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace draftsmith
#endif
