// AVX512-BF16 and VNNI: two products and two sums for each lane in one instruction.
#include "kernels.h"

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma")
#include <immintrin.h>
#define DRAFTSMITH_AVX512
#define DRAFTSMITH_VNNI
#define DRAFTSMITH_BF16

#include "kernels_common.inl"
#include "kernels_int4.inl"

namespace draftsmith {
namespace {

// Both kinds of weights come in lines of 64 bytes, of which one instruction multiplies all with a few inputs of a row.
struct Pairs {
  using X = bf16;
  using Y = float;
  using Sum = __m512;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum at(const Y* sums) { return _mm512_loadu_ps(sums); }
  static Sum add(Sum sum, __m512i weights, int xs) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights),
                            reinterpret_cast<__m512bh>(_mm512_set1_epi32(xs)));
  }
};

// The instruction multiplies unsigned by signed bytes: x is moved up by 128, which adds 128 · Σ w.
struct Quads {
  using X = int8_t;
  using Y = int32_t;
  using Sum = __m512i;
  static Sum zero() { return _mm512_setzero_si512(); }
  static Sum at(const Y* sums) { return _mm512_loadu_si512(sums); }
  static Sum add(Sum sum, __m512i weights, int xs) {
    return _mm512_dpbusd_epi32(sum, _mm512_set1_epi32(xs ^ static_cast<int>(0x80808080)), weights);
  }
};

template <class Kind>
struct Of {
  using X = typename Kind::X;
  using Y = typename Kind::Y;

  template <int kRows, int kPanels>
  struct Block {
    static void run(const X* x, int64_t x_stride, const X* w, const Reach& reach, Y* y, int64_t y_stride,
                    const Ahead& ahead) {
      constexpr int64_t kLine = kLineBytes / sizeof(X);
      typename Kind::Sum sum[kRows][kPanels];
      for (int r = 0; r < kRows; ++r)
        for (int p = 0; p < kPanels; ++p)
          sum[r][p] = reach.first == 0 ? Kind::zero() : Kind::at(y + r * y_stride + p * kPanel);
      // Every block of rows asks for its part of what comes next, so that reading never waits for multiplying, nor the
      // other way round.
      const char* next = ahead.from;
      int64_t turn = ahead.number;
      for (int64_t k = reach.first; k < reach.last; ++k) {
        __m512i weights[kPanels];
        for (int p = 0; p < kPanels; ++p) weights[p] = _mm512_loadu_si512(w + (p * reach.lines + k) * kLine);
        if (next != nullptr && turn-- == 0) {
          const int64_t line = reach.whole() ? k * kPanels : k - reach.first, apart = reach.whole() ? 1 : reach.lines;
          for (int p = 0; p < kPanels; ++p) _mm_prefetch(next + (line + p * apart) * kLineBytes, _MM_HINT_T1);
          turn = ahead.blocks - 1;
        }
        for (int r = 0; r < kRows; ++r) {
          int xs;
          __builtin_memcpy(&xs, x + r * x_stride + k * (kLine / kPanel), sizeof xs);
          for (int p = 0; p < kPanels; ++p) sum[r][p] = Kind::add(sum[r][p], weights[p], xs);
        }
      }
      for (int r = 0; r < kRows; ++r)
        for (int p = 0; p < kPanels; ++p)
          __builtin_memcpy(y + r * y_stride + p * kPanel, &sum[r][p], sizeof sum[r][p]);
    }
  };
};

// Thirty-two registers hold sums, the lines of weights that they are of, and inputs. As long as all rows fit them, weights
// come by once and as fast as for one row, even if a line of inputs then serves fewer panels.
void gemm(const bf16* x, int64_t x_stride, int64_t rows, const bf16* packed, int64_t pairs, int64_t panels,
          const void* ahead, float* y, int64_t y_stride) {
  if (rows > 6 && rows <= 14)
    walk<Of<Pairs>::Block, 14, 2>(x, x_stride, rows, packed, pairs, panels, ahead, y, y_stride);
  else
    walk<Of<Pairs>::Block, 6, 4>(x, x_stride, rows, packed, pairs, panels, ahead, y, y_stride);
}

// Inputs take registers of their own here, so fewer sums fit.
void gemm_int8(const int8_t* x, int64_t x_stride, int64_t rows, const int8_t* packed, const int32_t* sums,
               int64_t quads, int64_t panels, const void* ahead, int32_t* y, int64_t y_stride) {
  if (rows <= 4)
    walk<Of<Quads>::Block, 4, 4>(x, x_stride, rows, packed, quads, panels, ahead, y, y_stride);
  else
    walk<Of<Quads>::Block, 8, 2>(x, x_stride, rows, packed, quads, panels, ahead, y, y_stride);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < panels * kPanel; ++n) y[r * y_stride + n] -= sums[n] * 128;
}

}  // namespace
}  // namespace draftsmith

#include "kernels_avx512bf16_attention.inl"

namespace draftsmith {

const Kernels* avx512bf16_kernels() {
  const Kernels* base = avx512_kernels();
  if (base == nullptr || !__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni")) return nullptr;
  static const Kernels table{"avx512bf16", gemm, gemm_int8, gemm_int4_by<Int4Lines>, attend_by<score_keys_by_pairs, mix_values_by<Line>, 16>,
                             kMostQueries, room_for_scores, rms_norm, silu_times, narrow_row, add_row, round_row, quantise, quantise_groups, round_group, round_panel, rotate, activate,
                             sum_exponentials, argmax, all_finite, widen_row, maxima, weigh, add_up, rest, share, early, base->interleave};
  return &table;
}

}  // namespace draftsmith

#else
namespace draftsmith {
const Kernels* avx512bf16_kernels() { return nullptr; }
}  // namespace draftsmith
#endif
