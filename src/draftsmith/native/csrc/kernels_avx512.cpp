// AVX-512 without bf16 arithmetic: weights are widened to fp32 on the way.
#include "kernels.h"

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma")
#include <immintrin.h>
#define DRAFTSMITH_AVX512

#include "kernels_common.inl"
#include "kernels_int4.inl"

namespace draftsmith {
namespace {

inline __m512 lows(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 highs(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

template <int kRows, int kPanels>
struct Block {
  static void run(const bf16* x, int64_t x_stride, const bf16* w, const Reach& reach, float* y, int64_t y_stride,
                  const Ahead&) {
    __m512 sum[kRows][kPanels];
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kPanels; ++p)
        sum[r][p] = reach.first == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(y + r * y_stride + p * kPanel);
    for (int64_t k = reach.first; k < reach.last; ++k) {
      __m512 low[kPanels], high[kPanels];
      for (int p = 0; p < kPanels; ++p) {
        const __m512i both = _mm512_loadu_si512(w + (p * reach.lines + k) * 2 * kPanel);
        low[p] = lows(both), high[p] = highs(both);
      }
      for (int r = 0; r < kRows; ++r) {
        int pair;
        __builtin_memcpy(&pair, x + r * x_stride + 2 * k, sizeof pair);
        const __m512i xs = _mm512_set1_epi32(pair);
        const __m512 x_low = lows(xs), x_high = highs(xs);
        for (int p = 0; p < kPanels; ++p) {
          sum[r][p] = _mm512_fmadd_ps(x_low, low[p], sum[r][p]);
          sum[r][p] = _mm512_fmadd_ps(x_high, high[p], sum[r][p]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kPanels; ++p) _mm512_storeu_ps(y + r * y_stride + p * kPanel, sum[r][p]);
  }
};

void gemm(const bf16* x, int64_t x_stride, int64_t rows, const bf16* packed, int64_t pairs, int64_t panels,
          const void* ahead, float* y, int64_t y_stride) {
  walk<Block, 8, 2>(x, x_stride, rows, packed, pairs, panels, ahead, y, y_stride);
}

// Transposes 16 × 16 words of 32 bits in registers: within quarters of 128 bits, then the quarters.
void interleave(const bf16* rows, int64_t stride, int64_t pairs, bf16* to) {
  int64_t k = 0;
  for (; k + 16 <= pairs; k += 16, to += 16 * 2 * kPanel) {
    __m512i r[16], t[16];
    for (int n = 0; n < 16; ++n) r[n] = _mm512_loadu_si512(rows + n * stride + 2 * k);
    for (int n = 0; n < 16; n += 2)
      t[n] = _mm512_unpacklo_epi32(r[n], r[n + 1]), t[n + 1] = _mm512_unpackhi_epi32(r[n], r[n + 1]);
    for (int n = 0; n < 16; n += 4)
      for (int h = 0; h < 2; ++h) {
        r[n + 2 * h] = _mm512_unpacklo_epi64(t[n + h], t[n + h + 2]);
        r[n + 2 * h + 1] = _mm512_unpackhi_epi64(t[n + h], t[n + h + 2]);
      }
    for (int j = 0; j < 4; ++j) {  // quarter q of r[n + j] holds the words 4 q + j of the rows n … n + 3
      const __m512i even_low = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
      const __m512i even_high = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
      const __m512i odd_low = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
      const __m512i odd_high = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
      t[j] = _mm512_shuffle_i32x4(even_low, even_high, 0x88), t[8 + j] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
      t[4 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88), t[12 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
    }
    for (int line = 0; line < 16; ++line) _mm512_storeu_si512(to + line * 2 * kPanel, t[line]);
  }
  interleave_plain(rows + 2 * k, stride, pairs - k, to);
}

}  // namespace

const Kernels* avx512_kernels() {
  const Kernels* base = avx2_kernels();  // which has code of its own where this file would have none
  if (base == nullptr || !__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
    return nullptr;
  static const Kernels table{"avx512", gemm, base->gemm_int8, gemm_int4_by<Int4Lines>, base->attend, base->most_queries, base->attention_room, rms_norm,
                             silu_times, narrow_row, add_row, round_row, quantise, quantise_groups, round_group, round_panel, rotate, activate,
                             sum_exponentials, argmax, all_finite, widen_row, maxima, weigh, add_up, rest, share, early, interleave};
  return &table;
}

}  // namespace draftsmith

#else
namespace draftsmith {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace draftsmith
#endif
