// What one forward reads and writes: checked tensors as plain pointers.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "packed.h"

namespace draftsmith {

struct Shape {
  int64_t layers, width, heads, key_heads, head_width, inner, vocabulary, max_length;
  double epsilon, scale, rotary_scale;
};

// Places of a row follow each other in its slot of the cache, or lie in blocks that a table names.
//
// B rows of up to M nodes each. Only nodes that exist are computed: r counts them through all rows.
struct Pass {
  int64_t batch, nodes, kept, capacity, longest, max_length;
  std::vector<int64_t> slots;   // of every row, in the cache
  const int32_t* tables;        // of the blocks of every slot, `across` each; null where a slot is in one piece
  int64_t across;
  std::vector<int64_t> cached;  // tokens of every row before its first node
  std::vector<int64_t> begins;  // the first node of every row, and behind the last row the number of all nodes
  std::vector<int64_t> rows_of, numbers;  // of every node: its row, and its number there
  std::vector<int64_t> tokens;            // of every node
  std::vector<int64_t> depths;            // of every node; empty where every row is a chain
  std::vector<bf16*> keys, values;
  std::vector<int64_t> taps;
  bool some_columns;  // whether logits are wanted of some nodes only
  std::vector<std::pair<int64_t, int64_t>> wanted;  // those nodes, and the line of the logits where each belongs
  // Of rows that are no chain: the entries of every node's path, root first and itself last, M for each node.
  std::vector<int32_t> paths;
  std::vector<char> chains;  // of every row: whether each of its nodes sees all nodes before it, and itself

  int64_t rows() const { return begins.back(); }
  int64_t count(int64_t row) const { return begins[row + 1] - begins[row]; }
  // Where node r stands in its text.
  int64_t position(int64_t r) const { return std::min(place(r), max_length - 1); }
  // The same, past the end of the context too.
  int64_t place(int64_t r) const { return cached[rows_of[r]] + (depths.empty() ? numbers[r] : depths[r]); }
  // The entry of the cache that node r writes.
  int64_t slot(int64_t r) const {
    const int64_t row = rows_of[r], place = cached[row] + numbers[r];
    if (tables == nullptr) return slots[row] * capacity + place;
    return blocks(row)[place / kBlockEntries] * kBlockEntries + place % kBlockEntries;
  }
  // The blocks of a row; null where its slot is in one piece.
  const int32_t* blocks(int64_t row) const { return tables == nullptr ? nullptr : tables + slots[row] * across; }
  // The first entry of what all entries of a row are counted from.
  int64_t base(int64_t row) const { return tables == nullptr ? slots[row] * capacity : 0; }
  // The line of node r among the nodes of all rows that are M nodes long.
  int64_t line(int64_t r) const { return rows_of[r] * nodes + numbers[r]; }
};

// Raises where the tensors are not what Decoder::forward says, or do not fit each other.
Pass checked_pass(const Shape& shape, const Tensor& tokens, const std::optional<Tensor>& depths,
                  const std::optional<Tensor>& visible, const Tensor& cached, const Tensors& keys,
                  const Tensors& values, const std::optional<Tensor>& tables,
                  const std::optional<Tensor>& slots,
                  const std::optional<Tensor>& counts, const std::vector<int64_t>& taps,
                  const std::optional<Tensor>& columns);

// Whether a tensor is int64, contiguous and on the CPU.
bool is_whole(const Tensor& tensor);

}  // namespace draftsmith
