// Weights in the layout that the kernels stream, and the product with them.
//
// A matrix of N output and K input features becomes (panels, pairs, 16, 2): panel p holds the outputs 16 p … 16 p + 15,
// and one line of 64 bytes holds two inputs of each. What lies past N or K is zero.
#pragma once
#include <ATen/ATen.h>
#include <c10/util/BFloat16.h>

#include <algorithm>

#include "kernels.h"
#include "team.h"

namespace draftsmith {

inline const bf16* bits(const at::Tensor& tensor) {
  return reinterpret_cast<const bf16*>(tensor.const_data_ptr<c10::BFloat16>());
}
inline bf16* mutable_bits(at::Tensor& tensor) {
  return reinterpret_cast<bf16*>(tensor.mutable_data_ptr<c10::BFloat16>());
}

void check_packed(const at::Tensor& packed, int64_t outputs, int64_t inputs);

// One linear layer, without its PyTorch tensors (whose owner outlives it).
struct Linear {
  const bf16* data = nullptr;
  const float* bias = nullptr;  // null for none
  int64_t outputs = 0, inputs = 0, panels = 0, pairs = 0;
};

// The bias, if any, has to be fp32.
Linear as_linear(const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t outputs, int64_t inputs);

void embed(const at::Tensor& table, int64_t width, const int64_t* tokens, int64_t first, int64_t last, bf16* out);

constexpr int64_t kChunkPanels = 8;
constexpr int64_t kChunk = kChunkPanels * kPanel;
constexpr int64_t kChunkRows = 56;

// Multiplies rows of x by this thread's share of the panels, and hands stretches of the result to
// store(row, first output, count, values); results carry the bias.
template <class Store>
void multiply(const Team& team, const Linear& layer, const bf16* x, int64_t x_stride, int64_t rows,
              const Store& store) {
  alignas(64) float results[kChunkRows * kChunk];
  const auto [from, to] = team.share(layer.panels);
  for (int64_t panel = from; panel < to; panel += kChunkPanels) {
    const int64_t panels = std::min(kChunkPanels, to - panel);
    const int64_t first = panel * kPanel, count = std::min(panels * kPanel, layer.outputs - first);
    for (int64_t row = 0; row < rows; row += kChunkRows) {
      const int64_t some = std::min(kChunkRows, rows - row);
      kernels().gemm(x + row * x_stride, x_stride, some, layer.data + panel * layer.pairs * 2 * kPanel, layer.pairs,
                     panels, results, kChunk);
      for (int64_t r = 0; r < some; ++r) {
        float* values = results + r * kChunk;
        if (layer.bias != nullptr)
          for (int64_t n = 0; n < count; ++n) values[n] += layer.bias[first + n];
        store(row + r, first, count, values);
      }
    }
  }
}

}  // namespace draftsmith
