// AVX512-BF16 and VNNI: two products and two sums for each lane in one instruction.
#include "kernels.h"

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma")
#include <immintrin.h>

#include "kernels_common.inl"

namespace draftsmith {
namespace {

// How far ahead of its use a line of weights is asked for, in bytes.
constexpr int64_t kAhead = 1024;

template <int kRows, int kPanels>
struct Block {
  static void run(const bf16* x, int64_t x_stride, const bf16* w, int64_t pairs, float* y, int64_t y_stride) {
    __m512 sum[kRows][kPanels];
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kPanels; ++p) sum[r][p] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; ++k) {
      __m512bh weights[kPanels];
      for (int p = 0; p < kPanels; ++p) {
        const bf16* line = w + (p * pairs + k) * 2 * kPanel;
        weights[p] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(line));
        _mm_prefetch(reinterpret_cast<const char*>(line) + kAhead, _MM_HINT_T0);
      }
      for (int r = 0; r < kRows; ++r) {
        int pair;
        __builtin_memcpy(&pair, x + r * x_stride + 2 * k, sizeof pair);
        const __m512bh xs = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
        for (int p = 0; p < kPanels; ++p) sum[r][p] = _mm512_dpbf16_ps(sum[r][p], weights[p], xs);
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kPanels; ++p) _mm512_storeu_ps(y + r * y_stride + p * kPanel, sum[r][p]);
  }
};

void gemm(const bf16* x, int64_t x_stride, int64_t rows, const bf16* packed, int64_t pairs, int64_t panels, float* y,
          int64_t y_stride) {
  // Thirty-two registers: rows × panels of sums, and one for each panel of weights.
  if (rows <= 6)
    walk<Block, 6, 4>(x, x_stride, rows, packed, pairs, panels, y, y_stride);
  else
    walk<Block, 14, 2>(x, x_stride, rows, packed, pairs, panels, y, y_stride);
}

// The instruction multiplies unsigned by signed bytes: x is moved up by 128, which adds 128 · Σ w.
template <int kRows>
inline void block_int8(const int8_t* x, int64_t x_stride, const int8_t* w, const int32_t* sums, int64_t quads,
                       int32_t* y, int64_t y_stride) {
  const __m512i up = _mm512_set1_epi8(static_cast<char>(0x80));
  const __m512i excess = _mm512_slli_epi32(_mm512_loadu_si512(sums), 7);
  __m512i sum[kRows];
  for (int r = 0; r < kRows; ++r) sum[r] = _mm512_setzero_si512();
  for (int64_t q = 0; q < quads; ++q) {
    const __m512i weights = _mm512_loadu_si512(w + q * 4 * kPanel);
    for (int r = 0; r < kRows; ++r) {
      int quad;
      __builtin_memcpy(&quad, x + r * x_stride + 4 * q, sizeof quad);
      sum[r] = _mm512_dpbusd_epi32(sum[r], _mm512_xor_si512(_mm512_set1_epi32(quad), up), weights);
    }
  }
  for (int r = 0; r < kRows; ++r) _mm512_storeu_si512(y + r * y_stride, _mm512_sub_epi32(sum[r], excess));
}

void gemm_int8(const int8_t* x, int64_t x_stride, int64_t rows, const int8_t* packed, const int32_t* sums,
               int64_t quads, int64_t panels, int32_t* y, int64_t y_stride) {
  for (int64_t p = 0; p < panels; ++p) {
    const int8_t* w = packed + p * quads * 4 * kPanel;
    int64_t r = 0;
    for (; r + 8 <= rows; r += 8)
      block_int8<8>(x + r * x_stride, x_stride, w, sums + p * kPanel, quads, y + r * y_stride + p * kPanel, y_stride);
    for (; r + 2 <= rows; r += 2)
      block_int8<2>(x + r * x_stride, x_stride, w, sums + p * kPanel, quads, y + r * y_stride + p * kPanel, y_stride);
    for (; r < rows; ++r)
      block_int8<1>(x + r * x_stride, x_stride, w, sums + p * kPanel, quads, y + r * y_stride + p * kPanel, y_stride);
  }
}

}  // namespace

const Kernels* avx512bf16_kernels() {
  static const Kernels table{"avx512bf16", gemm, gemm_int8, attend, rms_norm, silu_times, sum_exponentials,
                             argmax};
  return avx512_kernels() != nullptr && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")
             ? &table
             : nullptr;
}

}  // namespace draftsmith

#else
namespace draftsmith {
const Kernels* avx512bf16_kernels() { return nullptr; }
}  // namespace draftsmith
#endif
