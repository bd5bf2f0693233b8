// Weights in 4 bits: how they are packed, read back, and multiplied, as PyTorch operators.
//
// A weight is (8 · q - zero) · scale · unit, q being 0 … 15; every output has a scale and a zero point (8 bits each, the
// zero point in eighths of a level) for each group of 32 inputs, and a unit in fp32: 4.5 bits a weight. The layout is
// that of `Int4Panel` in kernels.h.

#include "operators.h"
#include "packed.h"

namespace draftsmith {
namespace {

// Inputs, as whole groups, among which what rounding leaves is handed on. For every input there are so many factors of four
// bytes.
constexpr int64_t kBlock = 1024;
// Where errors are handed on, the unit is so many times what the widest group of its output needs: later groups grow.
constexpr float kRoom = 1.2f;

// A matrix on its way into panels, in bf16 or fp32, with the factors of its inputs where it is rounded by them.
struct Packing {
  Tensor held;
  int64_t outputs, inputs, row, column;  // row and column are strides
  const bf16* narrow_from;  // or else
  const float* wide_from;
  const float* factors;
  uint8_t* to;

  int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
  int64_t groups() const { return (inputs + kGroup - 1) / kGroup; }
  // How many inputs a row of factors is about.
  int64_t across() const { return std::min(groups() * kGroup, kBlock); }

  // Gives the weight of an output and an input; behind the last input stands another's.
  template <class T>
  float value(const T* from, int64_t n, int64_t k) const {
    const T one = from[n * row + std::min(k, inputs - 1) * column];
    if constexpr (std::is_same_v<T, bf16>)
      return widen(one);
    else
      return one;
  }

  // Gives the unit with which the scales of all groups of an output fit 8 bits; NaN where a weight is not finite.
  template <class T>
  float unit(const T* from, int64_t n) const {
    float widest = 0, broken = 0;
    for (int64_t g = 0; g < groups(); ++g) {
      float low = 0, high = 0, most = value(from, n, g * kGroup);
      for (int64_t k = 0; k < kGroup; ++k) {
        const float one = value(from, n, g * kGroup + k);
        low = std::min(low, one), high = std::max(high, one), most = std::max(most, one), broken += one * 0;
      }
      high = most < 0 ? std::max(most, low / 2) : high;  // as `round_group` has it
      widest = std::max(widest, high / 15 - low / 15);
    }
    if (!(broken == broken)) return broken;
    // So large that steps and their inverses stay in their format.
    return std::max(widest / (8 * 255) * (factors == nullptr ? 1 : kRoom), 0x1p-121f);
  }

  void write(int64_t p, int64_t g, const uint8_t* levels, const uint8_t* scales, const uint8_t* zeros) const {
    const Int4Panel panel{groups()};
    uint8_t* lines = to + p * panel.bytes() + panel.levels(g);
    uint8_t* details = to + p * panel.bytes() + panel.details(g) + g % 2;
    for (int64_t n = 0; n < kPanel; ++n) {
      for (int64_t k = 0; k < kGroup / 2; ++k) {
        const uint8_t* level = levels + (k / 4 * 8 + k % 4) * kPanel + n;
        lines[k / 4 * 64 + 4 * n + k % 4] = static_cast<uint8_t>(*level | level[4 * kPanel] << 4);
      }
      details[4 * n] = zeros[n], details[4 * n + 2] = scales[n];
      if (g % 2 == 0) details[4 * n + 1] = details[4 * n + 3] = 0;
    }
  }

  template <class T>
  void group(const T* from, const float* units, int64_t p, int64_t g) const {
    uint8_t levels[kGroup * kPanel] = {}, scales[kPanel] = {}, zeros[kPanel] = {};
    const int64_t first = p * kPanel;
    for (int64_t n = 0; n < std::min(kPanel, outputs - first); ++n) {
      float values[kGroup];
      uint8_t own[kGroup];
      for (int64_t k = 0; k < kGroup; ++k) values[k] = value(from, first + n, g * kGroup + k);
      kernels().round_group(values, units[n], own, scales + n, zeros + n);
      for (int64_t k = 0; k < kGroup; ++k) levels[k * kPanel + n] = own[k];
    }
    write(p, g, levels, scales, zeros);
  }

  template <class T>
  void block(const T* from, float* units, int64_t p, int64_t begins) const {
    alignas(64) float values[kBlock * kPanel] = {};
    const int64_t first = p * kPanel, count = std::min(kBlock, groups() * kGroup - begins);
    for (int64_t k = 0; k < count; ++k)
      for (int64_t n = 0; n < std::min(kPanel, outputs - first); ++n)
        values[k * kPanel + n] = value(from, first + n, begins + k);
    for (int64_t k = 0; k < count; k += kGroup) {
      uint8_t levels[kGroup * kPanel], scales[kPanel], zeros[kPanel];
      kernels().round_panel(values + k * kPanel, count - k, factors + (begins + k) * across() + k, across(), units,
                            levels, scales, zeros);
      for (int64_t i = k * kPanel; i < (k + kGroup) * kPanel; ++i) units[i % kPanel] += 0 * values[i];  // NaN or nothing
      write(p, (begins + k) / kGroup, levels, scales, zeros);
    }
  }

  template <class T>
  void panel(const T* from, int64_t p) const {
    alignas(64) float units[kPanel] = {};
    for (int64_t n = 0; n < std::min(kPanel, outputs - p * kPanel); ++n) units[n] = unit(from, p * kPanel + n);
    if (factors == nullptr)
      for (int64_t g = 0; g < groups(); ++g) group(from, units, p, g);
    else
      for (int64_t k = 0; k < groups() * kGroup; k += kBlock) block(from, units, p, k);
    const Int4Panel layout{groups()};
    std::copy_n(reinterpret_cast<const uint8_t*>(units), sizeof units, to + p * layout.bytes() + layout.units());
  }

  void panel(int64_t p) const {
    narrow_from != nullptr ? panel(narrow_from, p) : panel(wide_from, p);
  }
};

// Packs several matrices into one piece of memory; those with factors (inputs up to whole groups, inputs of a block) are
// rounded by them. There may be none, and those of a matrix may be empty.
Tensors pack_all_int4(const Tensors& weights, const Tensors& factors) {
  REQUIRE(factors.empty() || factors.size() == weights.size(), "draftsmith: there are factors of ", factors.size(),
          " matrices, not ", weights.size());
  std::vector<Packing> work;
  std::vector<std::vector<int64_t>> shapes;
  int64_t bytes = 0, panels = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const Tensor& weight = weights[i];
    REQUIRE(weight.dim() == 2 && weight.is_cpu(), "draftsmith: only matrices on a CPU are packed");
    const Tensor held = weight.scalar_type() == kBFloat16 ? weight : weight.to(kFloat);
    const bool narrow = held.scalar_type() == kBFloat16;
    work.push_back({held, weight.size(0), weight.size(1), held.stride(0), held.stride(1), narrow ? bits(held) : nullptr,
                    narrow ? nullptr : held.const_data_ptr<float>(), nullptr, nullptr});
    Packing& matrix = work.back();
    if (!factors.empty() && factors[i].numel() > 0) {
      REQUIRE(factors[i].is_contiguous() && factors[i].is_cpu() && factors[i].scalar_type() == kFloat &&
                  factors[i].sizes() == Sizes({matrix.groups() * kGroup, matrix.across()}),
              "draftsmith: these factors are not those of ", weight.size(1), " inputs");
      matrix.factors = factors[i].const_data_ptr<float>();
    }
    const Int4Panel panel{matrix.groups()};
    shapes.push_back({matrix.panels(), panel.lines(), 64});
    bytes += matrix.panels() * panel.bytes(), panels += matrix.panels();
  }
  Tensor memory = fresh_memory(bytes, kByte);
  Tensors packed;
  int64_t taken = 0;
  for (size_t i = 0; i < work.size(); ++i) {
    packed.push_back(memory.piece(taken, shapes[i]));
    work[i].to = memory.mutable_data_ptr<uint8_t>() + taken;
    taken += Sizes(shapes[i]).product();
  }
  run_team(get_num_threads(), [&](const Team& team) {
    const auto [first, last] = team.share(panels);
    int64_t begins = 0;  // of the matrix, among all panels
    for (const Packing& matrix : work) {
      const int64_t own = matrix.panels();
      for (int64_t p = std::max<int64_t>(0, first - begins); p < std::min(own, last - begins); ++p) matrix.panel(p);
      begins += own;
    }
  });
  return packed;
}

Tensor pack_int4(const Tensor& weight) { return pack_all_int4({weight}, {})[0]; }

Tensor unpack_int4(const Tensor& packed, int64_t outputs, int64_t inputs) {
  check_packed_int4(packed, outputs, inputs);
  Tensor weight = empty({outputs, inputs}, kBFloat16);
  const uint8_t* from = packed.const_data_ptr<uint8_t>();
  bf16* to = mutable_bits(weight);
  const int64_t groups = (inputs + kGroup - 1) / kGroup;
  run_team(get_num_threads(), [&](const Team& team) {
    const auto [first, last] = team.share(outputs);
    for (int64_t n = first; n < last; ++n) unpack_int4_row(from, groups, n, inputs, to + n * inputs);
  });
  return weight;
}

Tensor linear_int4(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t outputs) {
  return apply(x, as_linear_int4(packed, bias, outputs, x.dim() ? x.size(-1) : 0));
}

Tensor embedding_int4(const Tensor& tokens, const Tensor& packed, int64_t width, int64_t entries) {
  check_packed_int4(packed, entries, width);
  return look_up(tokens, packed, packed, width, entries);
}

}  // namespace

void check_packed_int4(const Tensor& packed, int64_t outputs, int64_t inputs) {
  REQUIRE(packed.is_contiguous() && packed.is_cpu() && packed.scalar_type() == kByte &&
              packed.sizes() == Sizes({(outputs + kPanel - 1) / kPanel, Int4Panel{(inputs + kGroup - 1) / kGroup}.lines(), 64}),
          "draftsmith: these int4 weights are not those of a layer from ", inputs, " to ", outputs, " features");
}

Linear as_linear_int4(const Tensor& packed, const std::optional<Tensor>& bias, int64_t outputs, int64_t inputs) {
  check_packed_int4(packed, outputs, inputs);
  Linear layer;
  layer.outputs = outputs, layer.inputs = inputs, layer.panels = packed.size(0);
  layer.nibbles = packed.const_data_ptr<uint8_t>(), layer.bias = bias_of(bias, outputs);
  return layer;
}

void unpack_int4_row(const uint8_t* packed, int64_t groups, int64_t output, int64_t inputs, bf16* to) {
  const Int4Panel layout{groups};
  const uint8_t* panel = packed + output / kPanel * layout.bytes();
  const int64_t lane = output % kPanel * 4;
  float unit;
  std::copy_n(panel + layout.units() + lane, sizeof unit, reinterpret_cast<uint8_t*>(&unit));
  for (int64_t k = 0; k < inputs; ++k) {
    const int64_t g = k / kGroup, at = k % kGroup;
    const uint8_t *lines = panel + layout.levels(g) + lane, *details = panel + layout.details(g) + lane + g % 2;
    const int32_t q = lines[at / 8 * 64 + at % 4] >> (at % 8 < 4 ? 0 : 4) & 15;
    to[k] = narrow(static_cast<float>(8 * q - details[0]) * (static_cast<float>(details[2]) * unit));
  }
}

void define_int4(Library& library) {
  library.def<pack_int4>("pack_int4(Tensor weight) -> Tensor");
  library.def<pack_all_int4>("pack_all_int4(Tensor[] weights, Tensor[] factors) -> Tensor[]");
  library.def<unpack_int4>("unpack_int4(Tensor packed, int outputs, int inputs) -> Tensor");
  library.def<linear_int4>("linear_int4(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor");
  library.def<embedding_int4>("embedding_int4(Tensor tokens, Tensor packed, int width, int entries) -> Tensor");
}

}  // namespace draftsmith
