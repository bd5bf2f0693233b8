// What one forward reads and writes: checked tensors as plain pointers.
#pragma once
#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "packed.h"

namespace draftsmith {

struct Shape {
  int64_t layers, width, heads, key_heads, head_width, inner, vocabulary, max_length;
  double epsilon, scale, rotary_scale;
};

// B rows of M nodes each; r counts the nodes of all rows.
struct Pass {
  int64_t batch, nodes, kept, first_row, capacity, longest, max_length;
  const int64_t *tokens, *depths, *cached, *columns;
  const bool* visible;
  std::vector<bf16*> keys, values;
  std::vector<int64_t> taps;

  int64_t rows() const { return batch * nodes; }
  // Where node r stands in its text.
  int64_t position(int64_t r) const { return std::min(cached[r / nodes] + depths[r], max_length - 1); }
  // The entry of the cache that node r writes.
  int64_t slot(int64_t r) const {
    return (first_row + r / nodes) * capacity + cached[r / nodes] + r % nodes;
  }
};

// Raises where the tensors are not what Decoder::forward says, or do not fit each other.
Pass checked_pass(const Shape& shape, const at::Tensor& tokens, const at::Tensor& depths, const at::Tensor& visible,
                  const at::Tensor& cached, const Tensors& keys, const Tensors& values, int64_t first_row,
                  const std::vector<int64_t>& taps, const std::optional<at::Tensor>& columns);

}  // namespace draftsmith
