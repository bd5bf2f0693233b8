// Weights in the layout that the kernels stream, and the product with them.
//
// A matrix of N output and K input features becomes (panels, pairs, 16, 2): panel p holds the outputs 16 p … 16 p + 15,
// and one line of 64 bytes holds two inputs of each. What lies past N or K is zero.
#pragma once

#include <algorithm>
#include <new>
#include <vector>

#include "kernels.h"
#include "pieces.h"
#include "team.h"
#include "pytorch.h"

namespace draftsmith {

// A vector that begins at a line of the cache. Rows that do not are read in two halves, at half the speed.
template <class T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};
  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kLine)); }
  void deallocate(T* memory, size_t) { ::operator delete(memory, kLine); }
  bool operator==(const LineAllocator&) const { return true; }
};
template <class T>
using Lined = std::vector<T, LineAllocator<T>>;

inline const bf16* bits(const Tensor& tensor) { return tensor.const_data_ptr<bf16>(); }
inline bf16* mutable_bits(const Tensor& tensor) { return tensor.mutable_data_ptr<bf16>(); }

void check_packed(const Tensor& packed, int64_t outputs, int64_t inputs);
void check_packed_int8(const Tensor& packed, const Tensor& scales, int64_t outputs, int64_t inputs);
void check_packed_int4(const Tensor& packed, int64_t outputs, int64_t inputs);

// One linear layer, without its PyTorch tensors (whose owner outlives it). Its weights are bf16; or int8 with a scale for
// each output; or int4 with a scale and a zero point for each output and group of inputs, and a unit of the scales for each
// output. Rows are quantised as they come where weights are: with a scale each, or with one for each group.
struct Linear {
  const bf16* data = nullptr;
  const int8_t* quantised = nullptr;  // in the place of data
  const float* scales = nullptr;
  const int32_t* sums = nullptr;  // Σ of the quantised weights of each output
  const uint8_t* nibbles = nullptr;  // of int4, in the place of data
  const float* bias = nullptr;    // null for none
  int64_t outputs = 0, inputs = 0, panels = 0;

  int64_t pairs() const { return (inputs + 1) / 2; }
  int64_t quads() const { return (inputs + 3) / 4; }

  int64_t groups() const { return (inputs + kGroup - 1) / kGroup; }
  // Whether it reads rows in whole numbers.
  bool rounds() const { return quantised != nullptr || nibbles != nullptr; }

  // Whether rows that were taken for this layer are those that the other one reads.
  bool reads_as(const Linear& other) const {
    return (quantised == nullptr) == (other.quantised == nullptr) && (nibbles == nullptr) == (other.nibbles == nullptr);
  }

  // Where a panel begins.
  const void* panel(int64_t index) const {
    if (nibbles != nullptr) return nibbles + index * Int4Panel{groups()}.bytes();
    if (quantised != nullptr) return quantised + index * quads() * 4 * kPanel;
    return data + index * pairs() * 2 * kPanel;
  }

  int64_t bytes() const {
    if (nibbles != nullptr) return panels * Int4Panel{groups()}.bytes();
    return panels * kPanel * (quantised == nullptr ? pairs() * 2 * 2 : quads() * 4);
  }

  // What a thread of the team reads first of this layer.
  const void* begin(const Team& team) const { return panel(team.share(panels).first); }

  // The same layer, of some of its panels only.
  Linear stretch(int64_t panel, int64_t count) const {
    Linear part = *this;
    if (data != nullptr) part.data += panel * pairs() * 2 * kPanel;
    if (quantised != nullptr)
      part.quantised += panel * quads() * 4 * kPanel, part.scales += panel * kPanel, part.sums += panel * kPanel;
    if (nibbles != nullptr) part.nibbles += panel * Int4Panel{groups()}.bytes();
    if (bias != nullptr) part.bias += panel * kPanel;
    part.panels = count;
    part.outputs = std::min(count * kPanel, outputs - panel * kPanel);
    return part;
  }
};

// The bias, if any, has to be fp32.
Linear as_linear(const Tensor& packed, const std::optional<Tensor>& bias, int64_t outputs, int64_t inputs);
// Any of them, by the dtype of the weights; scales and sums are looked at for int8 only, and an empty bias is none.
Linear as_any_linear(const Tensor& packed, const Tensor& scales, const Tensor& sums,
                     const Tensor& bias, int64_t outputs, int64_t inputs);
Linear as_linear_int8(const Tensor& packed, const Tensor& scales, const Tensor& sums,
                      const std::optional<Tensor>& bias, int64_t outputs, int64_t inputs);
Linear as_linear_int4(const Tensor& packed, const std::optional<Tensor>& bias, int64_t outputs, int64_t inputs);

// The bias of a layer; null for none.
const float* bias_of(const std::optional<Tensor>& bias, int64_t outputs);

// The operator of a single layer: rows of x (…, K) to (…, N).
Tensor apply(const Tensor& x, const Linear& layer);
// The operator of a single table, see `embed`.
Tensor look_up(const Tensor& tokens, const Tensor& table, const Tensor& scales, int64_t width, int64_t entries);
// Fresh memory for packed weights, as one dimension.
Tensor fresh_memory(int64_t values, int32_t dtype);

// The weights of one output, of packed int4 weights with so many groups, as bf16.
void unpack_int4_row(const uint8_t* packed, int64_t groups, int64_t output, int64_t inputs, bf16* to);

// A table that rows are looked up in: dense (V, F), or the packed weights of the head that is tied to it, int8 ones
// with the scales of the head.
void embed(const Tensor& table, const Tensor& scales, int64_t width, const int64_t* tokens, int64_t first,
           int64_t last, bf16* out);

constexpr int64_t kChunkPanels = 8;
constexpr int64_t kChunk = kChunkPanels * kPanel;
constexpr int64_t kChunkRows = 64;

// Rows in whole numbers, as a layer reads them: of 4 · quads columns with a scale each, or of whole groups with a scale and
// minus its sum each. What has NaN or infinity has the scale NaN.
// Every thread has its own, with its memory reserved before the threads start: nothing in a team may throw.
struct Quantised {
  Lined<int8_t> values;
  std::vector<float> scales;
  std::vector<int32_t> minus;

  // For rows of up to so many inputs, of any kind.
  void reserve(int64_t rows, int64_t inputs);
  void take(const Linear& layer, const bf16* x, int64_t x_stride, int64_t rows);
};

// How many rows of so many inputs are multiplied by all weights before the next ones: so many that they stay near while
// the weights come by, and weights come by rarely.
inline int64_t near_rows(int64_t inputs) {
  constexpr int64_t kBytes = 1 << 20;
  return std::max<int64_t>(1, kBytes / (inputs * 2 * kChunkRows)) * kChunkRows;
}

// How many groups of near rows there are.
inline int64_t groups_of(int64_t rows, int64_t inputs) { return (rows + near_rows(inputs) - 1) / near_rows(inputs); }

// What is multiplied: rows of x, or what they are in whole numbers, where the layer rounds.
struct Factors {
  const bf16* x;
  int64_t x_stride;
  const Quantised* taken;
};

// Rows for a layer, and for others that read as it does; `mine` is this thread's room for them.
inline Factors factors_for(const Linear& layer, const bf16* x, int64_t x_stride, int64_t rows, Quantised& mine) {
  if (layer.rounds()) mine.take(layer, x, x_stride, rows);
  return {x, x_stride, &mine};
}

// Multiplies the rows first … last - 1 by some panels, at most kChunkPanels, and hands stretches of the result to
// store(row, first output, count, values); results carry the bias. `ahead` is as in kernels.h.
template <class Store>
void multiply_panels(const Linear& layer, int64_t panel, int64_t panels, const Factors& factors, int64_t first,
                     int64_t last, const Store& store, const void* ahead) {
  alignas(64) float results[kChunkRows * kChunk];
  alignas(64) int32_t sums[kChunkRows * kChunk];
  const Linear part = layer.stretch(panel, panels);
  const void* next = ahead;
  for (int64_t row = first; row < last; row += kChunkRows) {
    const int64_t some = std::min(kChunkRows, last - row);
    if (row > first) next = nullptr;  // these weights are near now, and the first rows have fetched what comes next
    const Quantised* taken = factors.taken;
    if (!layer.rounds()) {
      kernels().gemm(factors.x + row * factors.x_stride, factors.x_stride, some, part.data, layer.pairs(), panels, next,
                     results, kChunk);
    } else if (layer.nibbles != nullptr) {
      const int64_t at = row * layer.groups();
      const GroupedRows grouped{taken->values.data() + at * kGroup, taken->scales.data() + at,
                                taken->minus.data() + at};
      kernels().gemm_int4(grouped, some, part.nibbles, layer.groups(), panels, next, results, kChunk);
    } else {
      const int64_t width = layer.quads() * 4;
      kernels().gemm_int8(taken->values.data() + row * width, width, some, part.quantised, part.sums, layer.quads(), panels,
                          next, sums, kChunk);
      for (int64_t r = 0; r < some; ++r)
        for (int64_t n = 0; n < panels * kPanel; ++n)
          results[r * kChunk + n] =
              static_cast<float>(sums[r * kChunk + n]) * (taken->scales[row + r] * part.scales[n]);
    }
    for (int64_t r = 0; r < some; ++r) {
      float* values = results + r * kChunk;
      if (part.bias != nullptr)
        for (int64_t n = 0; n < part.outputs; ++n) values[n] += part.bias[n];
      store(row + r, panel * kPanel, part.outputs, values);
    }
  }
}

// Multiplies rows by this thread's share of the panels.
template <class Store>
void multiply_factors(const Team& team, const Linear& layer, const Factors& factors, int64_t rows, const Store& store,
                      const void* ahead) {
  const auto [from, to] = team.share(layer.panels);
  const int64_t many = near_rows(layer.inputs);
  for (int64_t group = 0; group < rows; group += many)
    for (int64_t panel = from; panel < to; panel += kChunkPanels) {
      const int64_t panels = std::min(kChunkPanels, to - panel);
      const void* next = ahead;
      if (ahead != nullptr && panel + panels < to) next = layer.panel(panel + panels);
      if (ahead != nullptr && panel + panels == to && group + many < rows) next = layer.panel(from);
      multiply_panels(layer, panel, panels, factors, group, std::min(group + many, rows), store, next);
    }
}

template <class Store>
void multiply(const Team& team, const Linear& layer, const bf16* x, int64_t x_stride, int64_t rows,
              const Store& store, Quantised& mine, const void* ahead) {
  multiply_factors(team, layer, factors_for(layer, x, x_stride, rows, mine), rows, store, ahead);
}

// Takes all panels piece by piece, for one group of near rows after the other, each of which is a job, from `job` on. Calls
// work(panel, panels, first row, behind the last row, ahead); `ahead` is `behind` where nothing of the layer follows.
template <class Work>
void by_pieces(const Team& team, const Linear& layer, int64_t rows, const void* behind, Pieces& pieces, int64_t job,
               const Work& work) {
  const int64_t many = near_rows(layer.inputs), groups = groups_of(rows, layer.inputs);
  for (int64_t group = 0; group < groups; ++group) {
    const void* next_group = group + 1 < groups ? layer.begin(team) : behind;
    for (;;) {
      const Pieces::Piece piece = pieces.take(team, job + group, kChunkPanels);
      if (piece.is_none()) break;
      const void* ahead = piece.goes_on ? layer.panel(piece.last) : next_group;
      work(piece.first, piece.last - piece.first, group * many, std::min((group + 1) * many, rows), ahead);
    }
  }
}

// As `multiply_factors`, panels being taken piece by piece.
template <class Store>
void multiply_pieces(const Team& team, const Linear& layer, const Factors& factors, int64_t rows, const Store& store,
                     const void* behind, Pieces& pieces, int64_t job) {
  by_pieces(team, layer, rows, behind, pieces, job,
            [&](int64_t panel, int64_t panels, int64_t first, int64_t last, const void* ahead) {
              multiply_panels(layer, panel, panels, factors, first, last, store, ahead);
            });
}

}  // namespace draftsmith
