// Linear layers for few rows, as PyTorch operators.

#ifdef __linux__
#include <malloc.h>
#include <sys/mman.h>
#endif

#include <cmath>
#include <vector>

#include "operators.h"
#include "packed.h"

namespace draftsmith {

void check_packed(const Tensor& packed, int64_t outputs, int64_t inputs) {
  REQUIRE(packed.dim() == 4 && packed.is_contiguous() && packed.is_cpu() && packed.scalar_type() == kBFloat16 &&
              packed.size(0) == (outputs + kPanel - 1) / kPanel && packed.size(1) == (inputs + 1) / 2 &&
              packed.size(2) == kPanel && packed.size(3) == 2,
          "draftsmith: packed weights of ", name_of(packed.scalar_type()), packed.is_cpu() ? "" : ", not on a CPU,",
          " and shape ", packed.sizes(), " are not the bf16 ones of a layer from ", inputs,
          " to ", outputs, " features");
}

void check_packed_int8(const Tensor& packed, const Tensor& scales, int64_t outputs, int64_t inputs) {
  const int64_t panels = (outputs + kPanel - 1) / kPanel;
  REQUIRE(packed.is_contiguous() && packed.is_cpu() && packed.scalar_type() == kChar &&
              packed.sizes() == Sizes({panels, (inputs + 3) / 4, kPanel, 4}) &&
              scales.is_contiguous() && scales.numel() == panels * kPanel && scales.scalar_type() == kFloat,
          "draftsmith: these int8 weights are not those of a layer from ", inputs, " to ", outputs, " features");
}

const float* bias_of(const std::optional<Tensor>& bias, int64_t outputs) {
  if (!bias.has_value()) return nullptr;
  REQUIRE(bias->is_contiguous() && bias->is_cpu() && bias->scalar_type() == kFloat && bias->numel() == outputs,
          "draftsmith: the bias has to be fp32, contiguous, and of ", outputs, " values");
  return bias->const_data_ptr<float>();
}

Linear as_linear(const Tensor& packed, const std::optional<Tensor>& bias, int64_t outputs, int64_t inputs) {
  check_packed(packed, outputs, inputs);
  Linear layer;
  layer.data = bits(packed), layer.bias = bias_of(bias, outputs);
  layer.outputs = outputs, layer.inputs = inputs, layer.panels = packed.size(0);
  return layer;
}

Linear as_linear_int8(const Tensor& packed, const Tensor& scales, const Tensor& sums,
                      const std::optional<Tensor>& bias, int64_t outputs, int64_t inputs) {
  Linear layer;
  layer.outputs = outputs, layer.inputs = inputs, layer.panels = (outputs + kPanel - 1) / kPanel;
  REQUIRE(inputs <= 1 << 16, "draftsmith: the sum of ", inputs, " int8 products would overflow");
  check_packed_int8(packed, scales, outputs, inputs);
  REQUIRE(sums.is_contiguous() && sums.numel() == layer.panels * kPanel && sums.scalar_type() == kInt,
          "draftsmith: these are not the sums of the int8 weights of ", outputs, " features");
  layer.quantised = packed.const_data_ptr<int8_t>(), layer.scales = scales.const_data_ptr<float>();
  layer.sums = sums.const_data_ptr<int32_t>(), layer.bias = bias_of(bias, outputs);
  return layer;
}

Linear as_any_linear(const Tensor& packed, const Tensor& scales, const Tensor& sums,
                     const Tensor& bias, int64_t outputs, int64_t inputs) {
  const std::optional<Tensor> given = bias.numel() ? std::optional(bias) : std::optional<Tensor>();
  if (packed.scalar_type() == kByte) return as_linear_int4(packed, given, outputs, inputs);
  return packed.scalar_type() == kChar ? as_linear_int8(packed, scales, sums, given, outputs, inputs)
                                       : as_linear(packed, given, outputs, inputs);
}

void Quantised::reserve(int64_t rows, int64_t inputs) {
  const int64_t groups = (inputs + kGroup - 1) / kGroup;
  values.reserve(rows * groups * kGroup), scales.reserve(rows * groups), minus.reserve(rows * groups);
}

void Quantised::take(const Linear& layer, const bf16* x, int64_t x_stride, int64_t rows) {
  if (layer.nibbles != nullptr) {
    const int64_t groups = layer.groups();
    values.resize(rows * groups * kGroup), scales.resize(rows * groups), minus.resize(rows * groups);
    for (int64_t r = 0; r < rows; ++r)
      kernels().quantise_groups(x + r * x_stride, layer.inputs, values.data() + r * groups * kGroup,
                                scales.data() + r * groups, minus.data() + r * groups);
    return;
  }
  const int64_t width = layer.quads() * 4;
  values.assign(rows * width, 0), scales.resize(rows);
  for (int64_t r = 0; r < rows; ++r)
    scales[r] = kernels().quantise(x + r * x_stride, layer.inputs, values.data() + r * width);
}

// With the wish that it comes in huge pages: the system clears a page when it is first
// touched. To fill 219 MB takes 44 ms in fresh pages of 4 KB, 12 in huge ones, and 8 in memory that was touched before.
Tensor fresh_memory(int64_t values, int32_t dtype) {
  Tensor memory = empty({values}, dtype);
#ifdef __GLIBC__
  malloc_trim(0);  // weights that were packed before and freed go back to the system, so that a model is held once
#endif
#ifdef __linux__
  constexpr uintptr_t kHuge = 2 << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory.mutable_data());
  const uintptr_t first = (begin + kHuge - 1) / kHuge * kHuge, last = (begin + values * memory.element_size()) / kHuge * kHuge;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
  return memory;
}

namespace {

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
Tensors pack_all(const Tensors& weights) {
  std::vector<std::vector<int64_t>> shapes;
  int64_t lines = 0;
  for (const Tensor& weight : weights) {
    REQUIRE((weight.dim() == 2 || weight.dim() == 3) && weight.is_cpu() && weight.scalar_type() == kBFloat16,
            "draftsmith: only bf16 matrices on a CPU are packed");
    shapes.push_back({(weight.size(-2) + kPanel - 1) / kPanel, (weight.size(-1) + 1) / 2, kPanel, 2});
    if (weight.dim() == 3) shapes.back().insert(shapes.back().begin(), weight.size(0));
    lines += Sizes(shapes.back()).product() / (2 * kPanel);
  }
  Tensor memory = fresh_memory(lines * 2 * kPanel, kBFloat16);
  Tensors packed;
  std::vector<Packing> work;
  int64_t taken = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const int64_t values = Sizes(shapes[i]).product();
    packed.push_back(memory.piece(taken, shapes[i]));
    const Tensor& weight = weights[i];
    const int64_t count = weight.dim() == 2 ? 1 : weight.size(0), step = weight.dim() == 2 ? 0 : weight.stride(0);
    for (int64_t e = 0; e < count; ++e)
      work.push_back({bits(weight) + e * step, weight.stride(-2), weight.stride(-1), weight.size(-2), weight.size(-1),
                      mutable_bits(memory) + taken + e * (values / count)});
    taken += values;
  }
  // Every thread fills a stretch of its own: two that touch one huge page at the same time would both clear it.
  run_team(get_num_threads(), [&](const Team& team) {
    const auto [first, last] = team.share(lines);
    int64_t line = 0;
    for (const Packing& matrix : work)
      for (int64_t p = 0; p < matrix.panels(); ++p, line += matrix.pairs())
        if (first <= line && line < last) matrix.panel(p);
  });
  return packed;
}

Tensor pack(const Tensor& weight) {
  REQUIRE(weight.dim() == 2, "draftsmith: only bf16 matrices on a CPU are packed");
  return pack_all({weight})[0];
}

Tensor unpack(const Tensor& packed, int64_t outputs, int64_t inputs) {
  check_packed(packed, outputs, inputs);
  Tensor weight = empty({outputs, inputs}, kBFloat16);
  const bf16* from = bits(packed);
  bf16* to = mutable_bits(weight);
  const int64_t pairs = packed.size(1);
  run_team(get_num_threads(), [&](const Team& team) {
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

// Rows of x as the kernels read them: of even length, each contiguous, one after the other in steps of `stride`.
struct Rows {
  Tensor held;
  const bf16* data;
  int64_t count, stride;
};

Rows as_rows(const Tensor& x, int64_t inputs) {
  REQUIRE(x.is_cpu() && x.scalar_type() == kBFloat16 && x.dim() >= 1 && x.size(-1) == inputs,
          "draftsmith: the layer reads bf16 rows of ", inputs, " features on a CPU, not ",
          name_of(x.scalar_type()), " of ", x.sizes());
  int64_t count = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) count *= x.size(d);
  Rows rows{x, nullptr, count, inputs};
  if (x.dim() == 2 && x.stride(1) == 1)
    rows.stride = x.stride(0);
  else
    rows.held = x.contiguous();
  rows.data = bits(rows.held);
  if (inputs % 2 == 0) return rows;
  Tensor padded = full<bf16>({count, inputs + 1}, 0);
  bf16* to = mutable_bits(padded);
  for (int64_t r = 0; r < count; ++r) std::copy_n(rows.data + r * rows.stride, inputs, to + r * (inputs + 1));
  return {padded, to, count, inputs + 1};
}

std::vector<int64_t> with_last(const Tensor& x, int64_t size) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = size;
  return sizes;
}

}  // namespace

Tensor apply(const Tensor& x, const Linear& layer) {
  const Rows given = as_rows(x, layer.inputs);
  Tensor out = empty(with_last(x, layer.outputs), kBFloat16);
  bf16* to = mutable_bits(out);
  const int64_t rows = given.count, stride = given.stride, outputs = layer.outputs;
  if (rows == 0) return out;
  const bf16* from = given.data;
  const int64_t threads = rows * outputs * layer.inputs < kSmall ? 1 : get_num_threads();
  std::vector<Quantised> rooms(threads);
  if (layer.rounds())
    for (Quantised& room : rooms) room.reserve(rows, layer.inputs);
  Pieces pieces;
  const int64_t groups = groups_of(rows, layer.inputs);
  pieces.reserve(groups, threads);
  for (int64_t g = 0; g < groups; ++g) pieces.deal_ahead(g, layer.panels, threads);
  run_team(threads, [&](const Team& team) {
    const auto store = [&](int64_t r, int64_t n, int64_t count, const float* values) {
      kernels().narrow_row(values, count, to + r * outputs + n);
    };
    multiply_pieces(team, layer, factors_for(layer, from, stride, rows, rooms[team.index]), rows, store, layer.begin(team),
                    pieces, 0);
  });
  return out;
}

Tensor look_up(const Tensor& tokens, const Tensor& table, const Tensor& scales, int64_t width, int64_t entries) {
  REQUIRE(tokens.is_cpu() && tokens.scalar_type() == kLong, "draftsmith: token ids have to be int64 on a CPU");
  const Tensor flat = tokens.contiguous();
  std::vector<int64_t> sizes = tokens.sizes().vec();
  sizes.push_back(width);
  Tensor out = empty(sizes, kBFloat16);
  const int64_t* ids = flat.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < flat.numel(); ++i)
    REQUIRE_INDEX(ids[i] >= 0 && ids[i] < entries, "draftsmith: token ", ids[i], " is not in a table of ", entries);
  embed(table, scales, width, ids, 0, flat.numel(), mutable_bits(out));
  return out;
}

namespace {

Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias,
                  int64_t outputs) {
  return apply(x, as_linear(packed, bias, outputs, x.dim() ? x.size(-1) : 0));
}

Tensor embedding(const Tensor& tokens, const Tensor& packed, int64_t width, int64_t entries) {
  check_packed(packed, entries, width);
  return look_up(tokens, packed, packed, width, entries);
}

// Rows of whole numbers times their scales.
Tensor embedding_int8(const Tensor& tokens, const Tensor& packed, const Tensor& scales, int64_t width,
                          int64_t entries) {
  check_packed_int8(packed, scales, entries, width);
  return look_up(tokens, packed, scales, width, entries);
}

std::tuple<Tensor, Tensor, Tensor> pack_int8(const Tensor& weight) {
  REQUIRE(weight.dim() == 2 && weight.is_cpu(), "draftsmith: only matrices on a CPU are packed");
  const Tensor dense = weight.to(kFloat).contiguous();
  const int64_t outputs = dense.size(0), inputs = dense.size(1);
  const int64_t panels = (outputs + kPanel - 1) / kPanel, quads = (inputs + 3) / 4;
  Tensor packed = empty({panels, quads, kPanel, 4}, kChar);
  Tensor scales = full<float>({panels * kPanel}, 0), sums = full<int32_t>({panels * kPanel}, 0);
  const float* from = dense.const_data_ptr<float>();
  int8_t* to = packed.mutable_data_ptr<int8_t>();
  float* scale = scales.mutable_data_ptr<float>();
  int32_t* sum = sums.mutable_data_ptr<int32_t>();
  // Rows are rounded one after the other into room of their own, and a panel is interleaved when its sixteen are there.
  const int64_t width = 4 * quads, threads = get_num_threads();
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
Tensor linear_int8(const Tensor& x, const Tensor& packed, const Tensor& scales, const Tensor& sums,
                       const std::optional<Tensor>& bias, int64_t outputs) {
  const int64_t inputs = x.dim() ? x.size(-1) : 0;
  return apply(x, as_linear_int8(packed, scales, sums, bias, outputs, inputs));
}

bool choose_kernels(const std::string& name) { return use_kernels(name.c_str()); }
std::string kernels_in_use() { return kernels().name; }

}  // namespace

void embed(const Tensor& table, const Tensor& scales, int64_t width, const int64_t* tokens, int64_t first,
           int64_t last, bf16* out) {
  if (table.scalar_type() == kByte) {
    for (int64_t i = first; i < last; ++i)
      unpack_int4_row(table.const_data_ptr<uint8_t>(), (width + kGroup - 1) / kGroup, tokens[i], width, out + i * width);
    return;
  }
  if (table.scalar_type() == kChar) {
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
  const bool dense = table.dim() == 2;
  for (int64_t i = first; i < last; ++i) {
    const int64_t token = tokens[i];
    if (dense) {
      std::copy_n(data + token * width, width, out + i * width);
      continue;
    }
    const bf16* lane = data + token / kPanel * pairs * 2 * kPanel + token % kPanel * 2;
    for (int64_t k = 0; k < width; ++k) out[i * width + k] = lane[k / 2 * 2 * kPanel + k % 2];
  }
}

void define_layers(Library& library) {
  library.def<pack>("pack(Tensor weight) -> Tensor");
  library.def<pack_all>("pack_all(Tensor[] weights) -> Tensor[]");
  library.def<unpack>("unpack(Tensor packed, int outputs, int inputs) -> Tensor");
  library.def<linear>("linear(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor");
  library.def<embedding>("embedding(Tensor tokens, Tensor packed, int width, int entries) -> Tensor");
  library.def<embedding_int8>(
      "embedding_int8(Tensor tokens, Tensor packed, Tensor scales, int width, int entries) -> Tensor");
  library.def<pack_int8>("pack_int8(Tensor weight) -> (Tensor, Tensor, Tensor)");
  library.def<linear_int8>(
      "linear_int8(Tensor x, Tensor packed, Tensor scales, Tensor sums, Tensor? bias, int outputs) -> Tensor");
  library.def_without_tensors<choose_kernels>("use_kernels(str name) -> bool");
  library.def_without_tensors<kernels_in_use>("kernels_in_use() -> str");
}

}  // namespace draftsmith
