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
  const int64_t *tokens, *cached, *columns;
  const int64_t* depths;  // null where every row is a chain
  std::vector<bf16*> keys, values;
  std::vector<int64_t> taps;
  // Of rows that are no chain: the entries of every node's path, root first and itself last, M for each node.
  std::vector<int32_t> paths;
  std::vector<char> chains;  // of every row: whether each of its nodes sees all nodes before it, and itself

  int64_t rows() const { return batch * nodes; }
  // Where node r stands in its text.
  int64_t position(int64_t r) const { return std::min(place(r), max_length - 1); }
  // The same, past the end of the context too.
  int64_t place(int64_t r) const { return cached[r / nodes] + (depths == nullptr ? r % nodes : depths[r]); }
  // The entry of the cache that node r writes.
  int64_t slot(int64_t r) const {
    return (first_row + r / nodes) * capacity + cached[r / nodes] + r % nodes;
  }
};

// Raises where the tensors are not what Decoder::forward says, or do not fit each other.
Pass checked_pass(const Shape& shape, const at::Tensor& tokens, const std::optional<at::Tensor>& depths,
                  const std::optional<at::Tensor>& visible, const at::Tensor& cached, const Tensors& keys, const Tensors& values,
                  int64_t first_row, const std::vector<int64_t>& taps, const std::optional<at::Tensor>& columns);

}  // namespace draftsmith
