// AVX-512 without bf16 arithmetic: weights are widened to fp32 on the way.
#include "kernels.h"

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma")
#include <immintrin.h>

#include "kernels_common.inl"

namespace draftsmith {
namespace {

inline __m512 lows(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 highs(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

template <int kRows, int kPanels>
struct Block {
  static void run(const bf16* x, int64_t x_stride, const bf16* w, int64_t pairs, float* y, int64_t y_stride,
                  const Ahead&) {
    __m512 sum[kRows][kPanels];
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kPanels; ++p) sum[r][p] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; ++k) {
      __m512 low[kPanels], high[kPanels];
      for (int p = 0; p < kPanels; ++p) {
        const __m512i both = _mm512_loadu_si512(w + (p * pairs + k) * 2 * kPanel);
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

}  // namespace

const Kernels* avx512_kernels() {
  static const Kernels table{"avx512", gemm, gemm_int8_plain, attend_by<score_keys, mix_values>, rms_norm,
                             silu_times, narrow_row, add_row, round_row, quantise, rotate, activate,
                             sum_exponentials, argmax, all_finite};
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
             ? &table
             : nullptr;
}

}  // namespace draftsmith

#else
namespace draftsmith {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace draftsmith
#endif
