// AVX2 with FMA: a panel is two registers of eight, weights are widened to fp32 on the way.
#include "kernels.h"

#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

#include "kernels_common.inl"
#include "kernels_int4.inl"

namespace draftsmith {
namespace {

inline __m256 lows(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 highs(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

template <int kRows, int kPanels>
struct Block {
  static void run(const bf16* x, int64_t x_stride, const bf16* w, const Reach& reach, float* y, int64_t y_stride,
                  const Ahead&) {
    __m256 sum[kRows][2];
    for (int r = 0; r < kRows; ++r)
      for (int h = 0; h < 2; ++h)
        sum[r][h] = reach.first == 0 ? _mm256_setzero_ps() : _mm256_loadu_ps(y + r * y_stride + 8 * h);
    for (int64_t k = reach.first; k < reach.last; ++k) {
      const __m256i w0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + k * 2 * kPanel));
      const __m256i w1 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + k * 2 * kPanel) + 1);
      for (int r = 0; r < kRows; ++r) {
        int pair;
        __builtin_memcpy(&pair, x + r * x_stride + 2 * k, sizeof pair);
        const __m256i xs = _mm256_set1_epi32(pair);
        sum[r][0] = _mm256_fmadd_ps(lows(xs), lows(w0), sum[r][0]);
        sum[r][1] = _mm256_fmadd_ps(lows(xs), lows(w1), sum[r][1]);
        sum[r][0] = _mm256_fmadd_ps(highs(xs), highs(w0), sum[r][0]);
        sum[r][1] = _mm256_fmadd_ps(highs(xs), highs(w1), sum[r][1]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      _mm256_storeu_ps(y + r * y_stride, sum[r][0]);
      _mm256_storeu_ps(y + r * y_stride + 8, sum[r][1]);
    }
  }
};

void gemm(const bf16* x, int64_t x_stride, int64_t rows, const bf16* packed, int64_t pairs, int64_t panels,
          const void* ahead, float* y, int64_t y_stride) {
  walk<Block, 4, 1>(x, x_stride, rows, packed, pairs, panels, ahead, y, y_stride);
}

// Half a line, the outputs 0 … 7 or 8 … 15 of a panel.
struct Int4Halves {
  static constexpr int kBytes = 32, kRows = 3, kPanels = 1, kAlone = 2;
  using Whole = __m256i;
  using Real = __m256;
  static Real nothing() { return _mm256_setzero_ps(); }
  static Whole zero() { return _mm256_setzero_si256(); }
  static Whole all(int word) { return _mm256_set1_epi32(word); }
  static Whole load(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static void split(const uint8_t* from, Whole& low, Whole& high) {
    const Whole both = load(from), nibble = _mm256_set1_epi8(15);
    low = _mm256_and_si256(both, nibble), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
  }
  // Sums of 16 bits hold a group: eight times two products of 15 · 127 at most.
  static Whole add(Whole sum, Whole weights, Whole inputs) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, inputs));
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
void interleave(const bf16* rows, int64_t stride, int64_t pairs, bf16* to) {
  int64_t k = 0;
  for (; k + 8 <= pairs; k += 8, to += 8 * 2 * kPanel)
    for (int half = 0; half < 2; ++half) {
      __m256i r[8], t[8];
      for (int n = 0; n < 8; ++n)
        r[n] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows + (8 * half + n) * stride + 2 * k));
      for (int n = 0; n < 8; n += 2)
        t[n] = _mm256_unpacklo_epi32(r[n], r[n + 1]), t[n + 1] = _mm256_unpackhi_epi32(r[n], r[n + 1]);
      for (int n = 0; n < 8; n += 4)
        for (int h = 0; h < 2; ++h) {
          r[n + 2 * h] = _mm256_unpacklo_epi64(t[n + h], t[n + h + 2]);
          r[n + 2 * h + 1] = _mm256_unpackhi_epi64(t[n + h], t[n + h + 2]);
        }
      for (int j = 0; j < 4; ++j) {  // half h of r[n + j] holds the words 4 h + j of the rows n … n + 3
        const __m256i low = _mm256_permute2x128_si256(r[j], r[4 + j], 0x20);
        const __m256i high = _mm256_permute2x128_si256(r[j], r[4 + j], 0x31);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + j * 2 * kPanel) + half, low);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (4 + j) * 2 * kPanel) + half, high);
      }
    }
  interleave_plain(rows + 2 * k, stride, pairs - k, to);
}

}  // namespace

const Kernels* avx2_kernels() {
  static const Kernels table{"avx2", gemm, gemm_int8_plain, gemm_int4_by<Int4Halves>, attend_by<score_keys, mix_values>, room_for_scores, rms_norm,
                             silu_times, narrow_row, add_row, round_row, quantise, quantise_groups, round_group, round_panel, rotate, activate,
                             sum_exponentials, argmax, all_finite, widen_row, maxima, weigh, rest, share, early, interleave};
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &table : nullptr;
}

}  // namespace draftsmith

#else
namespace draftsmith {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace draftsmith
#endif
