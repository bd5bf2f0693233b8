// Linear layers for few rows, as PyTorch operators.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>
#include <torch/version.h>

#ifdef __linux__
#include <malloc.h>
#include <sys/mman.h>
#endif

#include <cmath>
#include <vector>

#include "packed.h"

namespace draftsmith {

void check_packed(const at::Tensor& packed, int64_t outputs, int64_t inputs) {
  TORCH_CHECK(packed.dim() == 4 && packed.is_contiguous() && packed.is_cpu() && packed.scalar_type() == at::kBFloat16 &&
                  packed.size(0) == (outputs + kPanel - 1) / kPanel && packed.size(1) == (inputs + 1) / 2 &&
                  packed.size(2) == kPanel && packed.size(3) == 2,
              "draftsmith: packed weights of ", packed.scalar_type(), " on ", packed.device(), " and shape ",
              packed.sizes(), " are not the bf16 ones of a layer from ", inputs,
              " to ", outputs, " features");
}

void check_packed_int8(const at::Tensor& packed, const at::Tensor& scales, int64_t outputs, int64_t inputs) {
  const int64_t panels = (outputs + kPanel - 1) / kPanel;
  TORCH_CHECK(packed.is_contiguous() && packed.is_cpu() && packed.scalar_type() == at::kChar &&
                  packed.sizes() == at::IntArrayRef({panels, (inputs + 3) / 4, kPanel, 4}) &&
                  scales.is_contiguous() && scales.numel() == panels * kPanel && scales.scalar_type() == at::kFloat,
              "draftsmith: these int8 weights are not those of a layer from ", inputs, " to ", outputs, " features");
}

namespace {

const float* bias_of(const std::optional<at::Tensor>& bias, int64_t outputs) {
  if (!bias.has_value()) return nullptr;
  TORCH_CHECK(bias->is_contiguous() && bias->is_cpu() && bias->scalar_type() == at::kFloat && bias->numel() == outputs,
              "draftsmith: the bias has to be fp32, contiguous, and of ", outputs, " values");
  return bias->const_data_ptr<float>();
}

}  // namespace

Linear as_linear(const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t outputs, int64_t inputs) {
  check_packed(packed, outputs, inputs);
  Linear layer;
  layer.data = bits(packed), layer.bias = bias_of(bias, outputs);
  layer.outputs = outputs, layer.inputs = inputs, layer.panels = packed.size(0);
  return layer;
}

Linear as_linear_int8(const at::Tensor& packed, const at::Tensor& scales, const at::Tensor& sums,
                      const std::optional<at::Tensor>& bias, int64_t outputs, int64_t inputs) {
  Linear layer;
  layer.outputs = outputs, layer.inputs = inputs, layer.panels = (outputs + kPanel - 1) / kPanel;
  TORCH_CHECK(inputs <= 1 << 16, "draftsmith: the sum of ", inputs, " int8 products would overflow");
  check_packed_int8(packed, scales, outputs, inputs);
  TORCH_CHECK(sums.is_contiguous() && sums.numel() == layer.panels * kPanel && sums.scalar_type() == at::kInt,
              "draftsmith: these are not the sums of the int8 weights of ", outputs, " features");
  layer.quantised = packed.const_data_ptr<int8_t>(), layer.scales = scales.const_data_ptr<float>();
  layer.sums = sums.const_data_ptr<int32_t>(), layer.bias = bias_of(bias, outputs);
  return layer;
}

Linear as_any_linear(const at::Tensor& packed, const at::Tensor& scales, const at::Tensor& sums,
                     const at::Tensor& bias, int64_t outputs, int64_t inputs) {
  const std::optional<at::Tensor> given = bias.numel() ? std::optional(bias) : std::optional<at::Tensor>();
  return packed.scalar_type() == at::kChar ? as_linear_int8(packed, scales, sums, given, outputs, inputs)
                                           : as_linear(packed, given, outputs, inputs);
}

void Quantised::reserve(int64_t rows, int64_t quads) {
  values.reserve(rows * quads * 4), scales.reserve(rows);
}

void Quantised::take(const bf16* x, int64_t x_stride, int64_t rows, int64_t inputs, int64_t quads) {
  values.assign(rows * quads * 4, 0), scales.resize(rows);
  for (int64_t r = 0; r < rows; ++r)
    scales[r] = kernels().quantise(x + r * x_stride, inputs, values.data() + r * quads * 4);
}

namespace {

// Fresh memory for packed weights, with the wish that it comes in huge pages: the system clears a page when it is first
// touched. To fill 219 MB takes 44 ms in fresh pages of 4 KB, 12 in huge ones, and 8 in memory that was touched before.
at::Tensor fresh_memory(int64_t values) {
  at::Tensor memory = at::empty({values}, at::kBFloat16);
#ifdef __GLIBC__
  malloc_trim(0);  // weights that were packed before and freed go back to the system, so that a model is held once
#endif
#ifdef __linux__
  constexpr uintptr_t kHuge = 2 << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory.const_data_ptr());
  const uintptr_t first = (begin + kHuge - 1) / kHuge * kHuge, last = (begin + memory.nbytes()) / kHuge * kHuge;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
  return memory;
}

// A matrix on its way into panels.
struct Packing {
  const bf16* from;
  int64_t row, column;  // strides
  int64_t outputs, inputs;
  bf16* to;

  int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
  int64_t pairs() const { return (inputs + 1) / 2; }

  // Line after line, so that memory is written in order; sixteen rows are read side by side.
  void panel(int64_t p) const {
    bf16* line = to + p * pairs() * 2 * kPanel;
    int64_t k = 0;
    if (column == 1 && (p + 1) * kPanel <= outputs) {
      k = inputs / 2;
      kernels().interleave(from + p * kPanel * row, row, k, line);
      line += k * 2 * kPanel;
    }
    for (; k < pairs(); ++k, line += 2 * kPanel)
      for (int64_t n = 0; n < kPanel; ++n) {
        const int64_t output = p * kPanel + n, at = output * row + 2 * k * column;
        line[2 * n] = output < outputs ? from[at] : 0;
        line[2 * n + 1] = output < outputs && 2 * k + 1 < inputs ? from[at + column] : 0;
      }
  }
};

// Packs several matrices, or stacks of matrices of one size, into one piece of memory.
Tensors pack_all(at::TensorList weights) {
  std::vector<std::vector<int64_t>> shapes;
  int64_t lines = 0;
  for (const at::Tensor& weight : weights) {
    TORCH_CHECK((weight.dim() == 2 || weight.dim() == 3) && weight.is_cpu() && weight.scalar_type() == at::kBFloat16,
                "draftsmith: only bf16 matrices on a CPU are packed");
    shapes.push_back({(weight.size(-2) + kPanel - 1) / kPanel, (weight.size(-1) + 1) / 2, kPanel, 2});
    if (weight.dim() == 3) shapes.back().insert(shapes.back().begin(), weight.size(0));
    lines += c10::multiply_integers(shapes.back()) / (2 * kPanel);
  }
  at::Tensor memory = fresh_memory(lines * 2 * kPanel);
  Tensors packed;
  std::vector<Packing> work;
  int64_t taken = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const int64_t values = c10::multiply_integers(shapes[i]);
    packed.push_back(memory.narrow(0, taken, values).view(shapes[i]));
    const at::Tensor stack = weights[i].dim() == 2 ? weights[i].unsqueeze(0) : weights[i];
    for (int64_t e = 0; e < stack.size(0); ++e)
      work.push_back({bits(stack) + e * stack.stride(0), stack.stride(1), stack.stride(2), stack.size(1), stack.size(2),
                      mutable_bits(memory) + taken + e * (values / stack.size(0))});
    taken += values;
  }
  // Every thread fills a stretch of its own: two that touch one huge page at the same time would both clear it.
  run_team(at::get_num_threads(), [&](const Team& team) {
    const auto [first, last] = team.share(lines);
    int64_t line = 0;
    for (const Packing& matrix : work)
      for (int64_t p = 0; p < matrix.panels(); ++p, line += matrix.pairs())
        if (first <= line && line < last) matrix.panel(p);
  });
  return packed;
}

at::Tensor pack(const at::Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2, "draftsmith: only bf16 matrices on a CPU are packed");
  return pack_all(weight)[0];
}

at::Tensor unpack(const at::Tensor& packed, int64_t outputs, int64_t inputs) {
  check_packed(packed, outputs, inputs);
  at::Tensor weight = at::empty({outputs, inputs}, packed.options());
  const bf16* from = bits(packed);
  bf16* to = mutable_bits(weight);
  const int64_t pairs = packed.size(1);
  run_team(at::get_num_threads(), [&](const Team& team) {
    const auto [first, last] = team.share(outputs);
    for (int64_t n = first; n < last; ++n) {
      const bf16* lane = from + n / kPanel * pairs * 2 * kPanel + n % kPanel * 2;
      for (int64_t k = 0; k < inputs; ++k) to[n * inputs + k] = lane[k / 2 * 2 * kPanel + k % 2];
    }
  });
  return weight;
}

// Products of fewer multiplications than this are not worth waking the other threads.
constexpr int64_t kSmall = 32768;

// Rows of x as the kernels read them: of even length, each contiguous.
at::Tensor as_rows(const at::Tensor& x, int64_t inputs) {
  TORCH_CHECK(x.is_cpu() && x.scalar_type() == at::kBFloat16 && x.dim() >= 1 && x.size(-1) == inputs,
              "draftsmith: the layer reads bf16 rows of ", inputs, " features on a CPU, not ", x.scalar_type(), " of ",
              x.sizes());
  at::Tensor rows = x.reshape({-1, inputs});
  if (inputs % 2 != 0) return at::constant_pad_nd(rows, {0, 1});
  return rows.stride(1) == 1 || inputs == 1 ? rows : rows.contiguous();
}

std::vector<int64_t> with_last(const at::Tensor& x, int64_t size) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = size;
  return sizes;
}

at::Tensor apply(const at::Tensor& x, const Linear& layer) {
  const at::Tensor rows_RK = as_rows(x, layer.inputs);
  at::Tensor out = at::empty(with_last(x, layer.outputs), x.options());
  bf16* to = mutable_bits(out);
  const int64_t rows = rows_RK.size(0), outputs = layer.outputs;
  if (rows == 0) return out;
  const bf16* from = bits(rows_RK);
  const int64_t stride = rows_RK.stride(0);
  const int64_t threads = rows * outputs * layer.inputs < kSmall ? 1 : at::get_num_threads();
  std::vector<Quantised> rooms(threads);
  if (layer.quantised != nullptr)
    for (Quantised& room : rooms) room.reserve(rows, layer.quads());
  run_team(threads, [&](const Team& team) {
    multiply(team, layer, from, stride, rows, [&](int64_t r, int64_t n, int64_t count, const float* values) {
      kernels().narrow_row(values, count, to + r * outputs + n);
    }, rooms[team.index], layer.begin(team));
  });
  return out;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                  int64_t outputs) {
  return apply(x, as_linear(packed, bias, outputs, x.dim() ? x.size(-1) : 0));
}

at::Tensor look_up(const at::Tensor& tokens, const at::Tensor& packed, const at::Tensor& scales, int64_t width,
                   int64_t entries) {
  TORCH_CHECK(tokens.is_cpu() && tokens.scalar_type() == at::kLong, "draftsmith: token ids have to be int64 on a CPU");
  const at::Tensor flat = tokens.contiguous();
  std::vector<int64_t> sizes = tokens.sizes().vec();
  sizes.push_back(width);
  at::Tensor out = at::empty(sizes, packed.options().dtype(at::kBFloat16));
  const int64_t* ids = flat.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < flat.numel(); ++i)
    TORCH_CHECK_INDEX(ids[i] >= 0 && ids[i] < entries, "draftsmith: token ", ids[i], " is not in a table of ", entries);
  embed(packed, scales, width, ids, 0, flat.numel(), mutable_bits(out));
  return out;
}

at::Tensor embedding(const at::Tensor& tokens, const at::Tensor& packed, int64_t width, int64_t entries) {
  check_packed(packed, entries, width);
  return look_up(tokens, packed, packed, width, entries);
}

// Rows of whole numbers times their scales.
at::Tensor embedding_int8(const at::Tensor& tokens, const at::Tensor& packed, const at::Tensor& scales, int64_t width,
                          int64_t entries) {
  check_packed_int8(packed, scales, entries, width);
  return look_up(tokens, packed, scales, width, entries);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> pack_int8(const at::Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_cpu(), "draftsmith: only matrices on a CPU are packed");
  const at::Tensor dense = weight.to(at::kFloat).contiguous();
  const int64_t outputs = dense.size(0), inputs = dense.size(1);
  const int64_t panels = (outputs + kPanel - 1) / kPanel, quads = (inputs + 3) / 4;
  at::Tensor packed = at::empty({panels, quads, kPanel, 4}, at::kChar);
  at::Tensor scales = at::zeros({panels * kPanel}, at::kFloat), sums = at::zeros({panels * kPanel}, at::kInt);
  const float* from = dense.const_data_ptr<float>();
  int8_t* to = packed.mutable_data_ptr<int8_t>();
  float* scale = scales.mutable_data_ptr<float>();
  int32_t* sum = sums.mutable_data_ptr<int32_t>();
  // Rows are rounded one after the other into room of their own, and a panel is interleaved when its sixteen are there.
  const int64_t width = 4 * quads, threads = at::get_num_threads();
  std::vector<int8_t> rooms(threads * kPanel * width);
  run_team(threads, [&](const Team& team) {
    int8_t* room = rooms.data() + team.index * kPanel * width;
    const auto [first, last] = team.share(panels);
    for (int64_t n = first * kPanel; n < last * kPanel; ++n) {
      int8_t* whole = room + n % kPanel * width;
      std::fill_n(whole, width, int8_t{0});
      float most = 0;
      for (int64_t k = 0; k < inputs && n < outputs; ++k) {
        const float size = std::abs(from[n * inputs + k]);
        if (!(size <= most) && !std::isnan(most)) most = size;  // NaN stays, wherever it stands
      }
      scale[n] = std::isfinite(most) ? most / 127 : std::nanf("");
      for (int64_t k = 0; k < inputs && scale[n] > 0; ++k) {
        const int value = static_cast<int>(std::nearbyint(from[n * inputs + k] / scale[n]));
        whole[k] = static_cast<int8_t>(value);
        sum[n] += value;
      }
      if (n % kPanel == kPanel - 1)
        kernels().interleave(reinterpret_cast<const bf16*>(room), width / 2, quads,
                             reinterpret_cast<bf16*>(to + n / kPanel * kPanel * width));
    }
  });
  return {packed, scales, sums};
}

// y = (scale of the row · scale of the output) · Σ of whole numbers; the row's scale is its largest value over 127.
at::Tensor linear_int8(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales, const at::Tensor& sums,
                       const std::optional<at::Tensor>& bias, int64_t outputs) {
  const int64_t inputs = x.dim() ? x.size(-1) : 0;
  return apply(x, as_linear_int8(packed, scales, sums, bias, outputs, inputs));
}

bool choose_kernels(const std::string& name) { return use_kernels(name.c_str()); }
std::string built_for() { return TORCH_VERSION; }
std::string kernels_in_use() { return kernels().name; }

}  // namespace

void embed(const at::Tensor& table, const at::Tensor& scales, int64_t width, const int64_t* tokens, int64_t first,
           int64_t last, bf16* out) {
  if (table.scalar_type() == at::kChar) {
    const int8_t* data = table.const_data_ptr<int8_t>();
    const float* scale = scales.const_data_ptr<float>();
    const int64_t quads = (width + 3) / 4;
    for (int64_t i = first; i < last; ++i) {
      const int64_t token = tokens[i];
      const int8_t* lane = data + token / kPanel * quads * 4 * kPanel + token % kPanel * 4;
      for (int64_t k = 0; k < width; ++k)
        out[i * width + k] = narrow(static_cast<float>(lane[k / 4 * 4 * kPanel + k % 4]) * scale[token]);
    }
    return;
  }
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
  library.def("pack_all(Tensor[] weights) -> Tensor[]");
  library.def("unpack(Tensor packed, int outputs, int inputs) -> Tensor");
  library.def("linear(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor");
  library.def("embedding(Tensor tokens, Tensor packed, int width, int entries) -> Tensor");
  library.def("embedding_int8(Tensor tokens, Tensor packed, Tensor scales, int width, int entries) -> Tensor");
  library.def("pack_int8(Tensor weight) -> (Tensor, Tensor, Tensor)");
  library.def(
      "linear_int8(Tensor x, Tensor packed, Tensor scales, Tensor sums, Tensor? bias, int outputs) -> Tensor");
  library.def("use_kernels(str name) -> bool", choose_kernels);
  library.def("kernels_in_use() -> str", kernels_in_use);
  library.def("built_for() -> str", built_for);
}

// Nothing here has a gradient; asking for one is an error and not silence.
TORCH_LIBRARY_IMPL(draftsmith, Autograd, library) {
  for (const char* name : {"linear", "linear_int8", "embedding", "embedding_int8"})
    library.impl(name, torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(draftsmith, CPU, library) {
  library.impl("pack", pack);
  library.impl("pack_all", pack_all);
  library.impl("unpack", unpack);
  library.impl("linear", linear);
  library.impl("embedding", embedding);
  library.impl("embedding_int8", embedding_int8);
  library.impl("pack_int8", pack_int8);
  library.impl("linear_int8", linear_int8);
}

}  // namespace draftsmith
