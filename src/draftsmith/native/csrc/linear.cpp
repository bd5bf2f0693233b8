// Linear layers for few rows, as PyTorch operators.
#include <torch/library.h>

#include <cmath>
#include <vector>

#include "packed.h"

namespace draftsmith {

void check_packed(const at::Tensor& packed, int64_t outputs, int64_t inputs) {
  TORCH_CHECK(packed.dim() == 4 && packed.is_contiguous() && packed.is_cpu() && packed.scalar_type() == at::kBFloat16 &&
                  packed.size(0) == (outputs + kPanel - 1) / kPanel && packed.size(1) == (inputs + 1) / 2 &&
                  packed.size(2) == kPanel && packed.size(3) == 2,
              "draftsmith: packed weights of shape ", packed.sizes(), " are not those of a layer from ", inputs,
              " to ", outputs, " features");
}

Linear as_linear(const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t outputs, int64_t inputs) {
  check_packed(packed, outputs, inputs);
  Linear layer{bits(packed), nullptr, outputs, inputs, packed.size(0), packed.size(1)};
  if (bias.has_value()) {
    TORCH_CHECK(bias->is_contiguous() && bias->is_cpu() && bias->scalar_type() == at::kFloat &&
                    bias->numel() == outputs,
                "draftsmith: the bias has to be fp32, contiguous, and of ", outputs, " values");
    layer.bias = bias->const_data_ptr<float>();
  }
  return layer;
}

namespace {

at::Tensor pack(const at::Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_cpu() && weight.scalar_type() == at::kBFloat16,
              "draftsmith: only bf16 matrices on a CPU are packed");
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  const int64_t panels = (outputs + kPanel - 1) / kPanel, pairs = (inputs + 1) / 2;
  at::Tensor packed = at::empty({panels, pairs, kPanel, 2}, weight.options());
  const bf16* from = bits(weight);
  bf16* to = mutable_bits(packed);
  const int64_t row = weight.stride(0), column = weight.stride(1);
  run_team(false, [&](const Team& team) {
    const auto [first, last] = team.share(panels);
    for (int64_t p = first; p < last; ++p)
      for (int64_t n = 0; n < kPanel; ++n) {
        const int64_t output = p * kPanel + n;
        bf16* lane = to + p * pairs * 2 * kPanel + 2 * n;
        for (int64_t k = 0; k < 2 * pairs; ++k)
          lane[k / 2 * 2 * kPanel + k % 2] = output < outputs && k < inputs ? from[output * row + k * column] : 0;
      }
  });
  return packed;
}

at::Tensor unpack(const at::Tensor& packed, int64_t outputs, int64_t inputs) {
  check_packed(packed, outputs, inputs);
  at::Tensor weight = at::empty({outputs, inputs}, packed.options());
  const bf16* from = bits(packed);
  bf16* to = mutable_bits(weight);
  const int64_t pairs = packed.size(1);
  run_team(false, [&](const Team& team) {
    const auto [first, last] = team.share(outputs);
    for (int64_t n = first; n < last; ++n) {
      const bf16* lane = from + n / kPanel * pairs * 2 * kPanel + n % kPanel * 2;
      for (int64_t k = 0; k < inputs; ++k) to[n * inputs + k] = lane[k / 2 * 2 * kPanel + k % 2];
    }
  });
  return weight;
}

// Rows of x as the kernels read them: of even length, each contiguous.
at::Tensor as_rows(const at::Tensor& x, int64_t inputs) {
  TORCH_CHECK(x.is_cpu() && x.scalar_type() == at::kBFloat16 && x.dim() >= 1 && x.size(-1) == inputs,
              "draftsmith: the layer reads bf16 rows of ", inputs, " features on a CPU, not ", x.sizes());
  at::Tensor rows = x.reshape({-1, inputs});
  if (inputs % 2 != 0) return at::constant_pad_nd(rows, {0, 1});
  return rows.stride(1) == 1 || inputs == 1 ? rows : rows.contiguous();
}

std::vector<int64_t> with_last(const at::Tensor& x, int64_t size) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = size;
  return sizes;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                  int64_t outputs) {
  const int64_t inputs = x.dim() ? x.size(-1) : 0;
  const Linear layer = as_linear(packed, bias, outputs, inputs);
  const at::Tensor rows_RK = as_rows(x, inputs);
  at::Tensor out = at::empty(with_last(x, outputs), x.options());
  bf16* to = mutable_bits(out);
  const int64_t rows = rows_RK.size(0);
  if (rows == 0) return out;
  const bf16* from = bits(rows_RK);
  const int64_t stride = rows_RK.stride(0);
  run_team(rows * outputs * inputs < 32768, [&](const Team& team) {
    multiply(team, layer, from, stride, rows, [&](int64_t r, int64_t n, int64_t count, const float* values) {
      for (int64_t i = 0; i < count; ++i) to[r * outputs + n + i] = narrow(values[i]);
    });
  });
  return out;
}

at::Tensor embedding(const at::Tensor& tokens, const at::Tensor& packed, int64_t width, int64_t entries) {
  check_packed(packed, entries, width);
  TORCH_CHECK(tokens.is_cpu() && tokens.scalar_type() == at::kLong, "draftsmith: token ids have to be int64 on a CPU");
  const at::Tensor flat = tokens.contiguous();
  std::vector<int64_t> sizes = tokens.sizes().vec();
  sizes.push_back(width);
  at::Tensor out = at::empty(sizes, packed.options());
  const int64_t* ids = flat.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < flat.numel(); ++i)
    TORCH_CHECK_INDEX(ids[i] >= 0 && ids[i] < entries, "draftsmith: token ", ids[i], " is not in a table of ", entries);
  embed(packed, width, ids, 0, flat.numel(), mutable_bits(out));
  return out;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> pack_int8(const at::Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_cpu(), "draftsmith: only matrices on a CPU are packed");
  const at::Tensor dense = weight.to(at::kFloat).contiguous();
  const int64_t outputs = dense.size(0), inputs = dense.size(1);
  const int64_t panels = (outputs + kPanel - 1) / kPanel, quads = (inputs + 3) / 4;
  at::Tensor packed = at::zeros({panels, quads, kPanel, 4}, at::kChar);
  at::Tensor scales = at::zeros({panels * kPanel}, at::kFloat), sums = at::zeros({panels * kPanel}, at::kInt);
  const float* from = dense.const_data_ptr<float>();
  int8_t* to = packed.mutable_data_ptr<int8_t>();
  float* scale = scales.mutable_data_ptr<float>();
  int32_t* sum = sums.mutable_data_ptr<int32_t>();
  run_team(false, [&](const Team& team) {
    const auto [first, last] = team.share(outputs);
    for (int64_t n = first; n < last; ++n) {
      float most = 0;
      for (int64_t k = 0; k < inputs; ++k) most = std::max(most, std::abs(from[n * inputs + k]));
      scale[n] = most / 127;
      int8_t* lane = to + n / kPanel * quads * 4 * kPanel + n % kPanel * 4;
      for (int64_t k = 0; k < inputs && most > 0; ++k) {
        const int value = static_cast<int>(std::nearbyint(from[n * inputs + k] / scale[n]));
        lane[k / 4 * 4 * kPanel + k % 4] = static_cast<int8_t>(value);
        sum[n] += value;
      }
    }
  });
  return {packed, scales, sums};
}

// y = (scale of the row · scale of the output) · Σ of whole numbers; the row's scale is its largest value over 127.
at::Tensor linear_int8(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales, const at::Tensor& sums,
                       const std::optional<at::Tensor>& bias, int64_t outputs) {
  const int64_t inputs = x.dim() ? x.size(-1) : 0, quads = (inputs + 3) / 4;
  const int64_t panels = (outputs + kPanel - 1) / kPanel;
  TORCH_CHECK(packed.dim() == 4 && packed.is_contiguous() && packed.scalar_type() == at::kChar &&
                  packed.size(0) == panels && packed.size(1) == quads && packed.size(2) == kPanel &&
                  packed.size(3) == 4 && scales.numel() == panels * kPanel && scales.scalar_type() == at::kFloat &&
                  sums.numel() == panels * kPanel && sums.scalar_type() == at::kInt,
              "draftsmith: these int8 weights are not those of a layer from ", inputs, " to ", outputs, " features");
  TORCH_CHECK(!bias.has_value() || (bias->scalar_type() == at::kFloat && bias->numel() == outputs),
              "draftsmith: the bias has to be fp32 and of ", outputs, " values");
  const at::Tensor rows_RK = as_rows(x, inputs);
  const int64_t rows = rows_RK.size(0);
  at::Tensor out = at::empty(with_last(x, outputs), x.options());
  if (rows == 0) return out;
  const bf16* from = bits(rows_RK);
  const int64_t stride = rows_RK.stride(0);
  std::vector<int8_t> quantised(rows * quads * 4);
  std::vector<float> row_scales(rows);
  const int8_t* weights = packed.const_data_ptr<int8_t>();
  const float* scale = scales.const_data_ptr<float>();
  const int32_t* sum = sums.const_data_ptr<int32_t>();
  const float* add = bias.has_value() ? bias->const_data_ptr<float>() : nullptr;
  bf16* to = mutable_bits(out);
  run_team(rows * outputs * inputs < 32768, [&](const Team& team) {
    const auto [first_row, last_row] = team.share(rows);
    for (int64_t r = first_row; r < last_row; ++r) {
      float most = 0;
      for (int64_t k = 0; k < inputs; ++k) most = std::max(most, std::abs(widen(from[r * stride + k])));
      row_scales[r] = most / 127;
      const float inverse = most > 0 ? 127 / most : 0;
      for (int64_t k = 0; k < inputs; ++k)
        quantised[r * quads * 4 + k] = static_cast<int8_t>(std::nearbyint(widen(from[r * stride + k]) * inverse));
    }
    team.barrier();
    alignas(64) int32_t results[kChunkRows * kChunk];
    const auto [begin, end] = team.share(panels);
    for (int64_t panel = begin; panel < end; panel += kChunkPanels) {
      const int64_t some = std::min(kChunkPanels, end - panel);
      const int64_t n0 = panel * kPanel, count = std::min(some * kPanel, outputs - n0);
      for (int64_t row = 0; row < rows; row += kChunkRows) {
        const int64_t block = std::min(kChunkRows, rows - row);
        kernels().gemm_int8(quantised.data() + row * quads * 4, quads * 4, block, weights + panel * quads * 4 * kPanel,
                            sum + n0, quads, some, results, kChunk);
        for (int64_t r = 0; r < block; ++r)
          for (int64_t n = 0; n < count; ++n) {
            const float value = static_cast<float>(results[r * kChunk + n]) * (row_scales[row + r] * scale[n0 + n]);
            to[(row + r) * outputs + n0 + n] = narrow(add != nullptr ? value + add[n0 + n] : value);
          }
      }
    }
  });
  return out;
}

bool choose_kernels(const std::string& name) { return use_kernels(name.c_str()); }
std::string kernels_in_use() { return kernels().name; }

}  // namespace

void embed(const at::Tensor& table, int64_t width, const int64_t* tokens, int64_t first, int64_t last, bf16* out) {
  const bf16* data = bits(table);
  const int64_t pairs = (width + 1) / 2;
  for (int64_t i = first; i < last; ++i) {
    const int64_t token = tokens[i];
    if (table.dim() == 2) {
      std::copy_n(data + token * width, width, out + i * width);
      continue;
    }
    const bf16* lane = data + token / kPanel * pairs * 2 * kPanel + token % kPanel * 2;
    for (int64_t k = 0; k < width; ++k) out[i * width + k] = lane[k / 2 * 2 * kPanel + k % 2];
  }
}

TORCH_LIBRARY(draftsmith, library) {
  library.def("pack(Tensor weight) -> Tensor");
  library.def("unpack(Tensor packed, int outputs, int inputs) -> Tensor");
  library.def("linear(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor");
  library.def("embedding(Tensor tokens, Tensor packed, int width, int entries) -> Tensor");
  library.def("pack_int8(Tensor weight) -> (Tensor, Tensor, Tensor)");
  library.def(
      "linear_int8(Tensor x, Tensor packed, Tensor scales, Tensor sums, Tensor? bias, int outputs) -> Tensor");
  library.def("use_kernels(str name) -> bool", choose_kernels);
  library.def("kernels_in_use() -> str", kernels_in_use);
}

TORCH_LIBRARY_IMPL(draftsmith, CPU, library) {
  library.impl("pack", pack);
  library.impl("unpack", unpack);
  library.impl("linear", linear);
  library.impl("embedding", embedding);
  library.impl("pack_int8", pack_int8);
  library.impl("linear_int8", linear_int8);
}

}  // namespace draftsmith
