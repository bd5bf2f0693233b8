// Plain C++ for any processor, ARM included.
#include "kernels.h"
#include "kernels_common.inl"
#include "kernels_int4.inl"

namespace draftsmith {
namespace {

template <int kRows, int kPanels>
struct Block {
  static void run(const bf16* x, int64_t x_stride, const bf16* w, const Reach& reach, float* y, int64_t y_stride,
                  const Ahead&) {
    for (int r = 0; r < kRows; ++r) {
      float sum[kPanel];
      for (int n = 0; n < kPanel; ++n) sum[n] = reach.first == 0 ? 0 : y[r * y_stride + n];
      const bf16* row = x + r * x_stride;
      for (int64_t k = reach.first; k < reach.last; ++k) {
        const float low = widen(row[2 * k]), high = widen(row[2 * k + 1]);
        const bf16* pair = w + k * 2 * kPanel;
        for (int n = 0; n < kPanel; ++n) sum[n] += low * widen(pair[2 * n]) + high * widen(pair[2 * n + 1]);
      }
      for (int n = 0; n < kPanel; ++n) y[r * y_stride + n] = sum[n];
    }
  }
};

void gemm(const bf16* x, int64_t x_stride, int64_t rows, const bf16* packed, int64_t pairs, int64_t panels,
          const void* ahead, float* y, int64_t y_stride) {
  walk<Block, 1, 1>(x, x_stride, rows, packed, pairs, panels, ahead, y, y_stride);
}

}  // namespace

const Kernels* portable_kernels() {
  static const Kernels table{"portable", gemm, gemm_int8_plain, gemm_int4_plain, attend_by<score_keys, mix_values>, kMostQueries, room_for_scores, rms_norm,
                             silu_times, narrow_row, add_row, round_row, quantise, quantise_groups, round_group, round_panel, rotate, activate,
                             sum_exponentials, argmax, all_finite, widen_row, maxima, weigh, add_up, rest, share, early, interleave_plain};
  return &table;
}

}  // namespace draftsmith
