// Checks what a forward is called with.
#include "pass.h"

namespace draftsmith {
namespace {

bool is_chain(const int64_t* depths, const bool* visible, int64_t count, int64_t nodes) {
  for (int64_t m = 0; m < count; ++m, visible += nodes)
    if (depths[m] != m || !std::all_of(visible, visible + m + 1, [](bool sees) { return sees; }) ||
        std::any_of(visible + m + 1, visible + count, [](bool sees) { return sees; }))
      return false;
  return true;
}

// Writes down what every node sees of the draft.
void find_paths(const bool* visible, Pass& pass) {
  const int64_t nodes = pass.nodes;
  pass.chains.resize(pass.batch);
  for (int64_t b = 0; b < pass.batch; ++b) {
    const int64_t begin = pass.begins[b], count = pass.count(b);
    const bool* sees = visible + b * nodes * nodes;
    pass.chains[b] = is_chain(pass.depths.data() + begin, sees, count, nodes);
    if (pass.chains[b]) continue;
    pass.paths.resize(pass.rows() * nodes);
    for (int64_t n = 0; n < count; ++n, sees += nodes) {
      int64_t seen = 0;
      for (int64_t m = 0; m < count; ++m) {
        if (!sees[m]) continue;
        REQUIRE_INDEX(pass.depths[begin + m] == seen && m <= n, "draftsmith: node ", n, " sees node ", m,
                      ", which is not node ", seen, " of its path");
        pass.paths[(begin + n) * nodes + seen++] = static_cast<int32_t>(pass.cached[b] + m);
      }
      REQUIRE_INDEX(seen == pass.depths[begin + n] + 1 && sees[n], "draftsmith: node ", n, " is ",
                    pass.depths[begin + n], " deep, but its path has ", seen, " nodes");
    }
  }
}

// Writes down which logits are wanted: all, or those of some columns, one list (U) for all rows or one (B, U) for each.
void find_wanted(const std::optional<Tensor>& columns, Pass& pass) {
  pass.some_columns = columns.has_value();
  pass.kept = pass.nodes;
  if (!pass.some_columns) return;
  REQUIRE(is_whole(*columns) && (columns->dim() == 1 || (columns->dim() == 2 && columns->size(0) == pass.batch)),
          "draftsmith: columns have to be int64 (U) or (B, U)");
  pass.kept = columns->size(-1);
  const int64_t stride = columns->dim() == 1 ? 0 : pass.kept;
  for (int64_t b = 0; b < pass.batch; ++b)
    for (int64_t u = 0; u < pass.kept; ++u) {
      const int64_t column = columns->const_data_ptr<int64_t>()[b * stride + u];
      REQUIRE_INDEX(column >= 0 && column < pass.nodes, "draftsmith: there is no node ", column);
      if (column < pass.count(b)) pass.wanted.emplace_back(pass.begins[b] + column, b * pass.kept + u);
    }
}

}  // namespace

bool is_whole(const Tensor& tensor) {
  return tensor.is_cpu() && tensor.scalar_type() == kLong && tensor.is_contiguous();
}

Pass checked_pass(const Shape& s, const Tensor& tokens, const std::optional<Tensor>& depths,
                  const std::optional<Tensor>& visible, const Tensor& cached, const Tensors& keys,
                  const Tensors& values, const std::optional<Tensor>& tables,
                  const std::optional<Tensor>& slots,
                  const std::optional<Tensor>& counts, const std::vector<int64_t>& taps,
                  const std::optional<Tensor>& columns) {
  REQUIRE(tokens.dim() == 2 && is_whole(tokens), "draftsmith: tokens have to be (B, M), int64 and contiguous");
  Pass pass;
  pass.batch = tokens.size(0), pass.nodes = tokens.size(1), pass.taps = taps;
  pass.max_length = s.max_length;
  REQUIRE(is_whole(cached) && cached.numel() == pass.batch, "draftsmith: cached has to be int64 (B)");
  for (const auto* of_rows : {&slots, &counts})
    REQUIRE(!of_rows->has_value() || (is_whole(**of_rows) && (*of_rows)->numel() == pass.batch),
            "draftsmith: slots and counts have to be int64 (B)");
  REQUIRE(depths.has_value() == visible.has_value(), "draftsmith: depths and visible are given together");
  if (visible.has_value())
    REQUIRE(is_whole(*depths) && depths->sizes() == tokens.sizes() && visible->is_cpu() &&
                visible->scalar_type() == kBool && visible->is_contiguous() &&
                visible->sizes() == Sizes({pass.batch, pass.nodes, pass.nodes}),
            "draftsmith: depths have to be int64 (B, M), and visible bool (B, M, M), both contiguous");
  const size_t layers = static_cast<size_t>(s.layers);
  REQUIRE(keys.size() == layers && values.size() == layers && !keys.empty(),
          "draftsmith: the cache has another number of layers");
  const int64_t blocks = keys[0].size(0), block = keys[0].size(1);
  const int64_t slots_of_cache = tables.has_value() ? tables->size(0) : blocks;
  pass.tables = nullptr, pass.across = 1;
  if (tables.has_value()) {
    REQUIRE(tables->dim() == 2 && tables->is_cpu() && tables->scalar_type() == kInt && tables->is_contiguous() &&
                block == kBlockEntries,
            "draftsmith: tables have to be int32 (slots, J), of blocks of ", kBlockEntries, " entries");
    pass.tables = tables->const_data_ptr<int32_t>(), pass.across = tables->size(1);
  }
  pass.capacity = pass.across * block;
  for (const Tensors* side : {&keys, &values})
    for (const Tensor& t : *side)
      REQUIRE(t.is_cpu() && t.scalar_type() == kBFloat16 && t.is_contiguous() &&
                  t.sizes() == Sizes({blocks, block, s.key_heads, s.head_width}),
              "draftsmith: the cache has another shape");
  for (const Tensor& t : keys) pass.keys.push_back(mutable_bits(t));
  for (const Tensor& t : values) pass.values.push_back(mutable_bits(t));
  pass.longest = 0;
  pass.begins.assign(1, 0);
  pass.slots.resize(pass.batch), pass.cached.resize(pass.batch);
  const int64_t* depth = visible.has_value() ? depths->const_data_ptr<int64_t>() : nullptr;
  for (int64_t b = 0; b < pass.batch; ++b) {
    const int64_t slot = slots.has_value() ? slots->const_data_ptr<int64_t>()[b] : b;
    const int64_t count = counts.has_value() ? counts->const_data_ptr<int64_t>()[b] : pass.nodes;
    const int64_t held = cached.const_data_ptr<int64_t>()[b];
    REQUIRE_INDEX(slot >= 0 && slot < slots_of_cache, "draftsmith: the cache has ", slots_of_cache, " slots");
    REQUIRE_INDEX(count >= 0 && count <= pass.nodes, "draftsmith: ", count, " of ", pass.nodes,
                  " nodes cannot exist");
    REQUIRE_INDEX(held >= 0 && held + count <= pass.capacity, "draftsmith: ", held, " cached tokens and ", count,
                  " nodes do not fit a slot of ", pass.capacity);
    for (int64_t j = 0; tables.has_value() && j * block < held + count; ++j) {
      const int32_t number = pass.tables[slot * pass.across + j];
      REQUIRE_INDEX(number >= 0 && number < blocks, "draftsmith: slot ", slot, " has no block for place ", j * block,
                    ", and ", held + count, " are needed");
    }
    pass.slots[b] = slot, pass.cached[b] = held, pass.longest = std::max(pass.longest, held);
    for (int64_t m = 0; m < count; ++m) {
      const int64_t token = tokens.const_data_ptr<int64_t>()[b * pass.nodes + m];
      REQUIRE_INDEX(token >= 0 && token < s.vocabulary, "draftsmith: there is no token ", token);
      pass.tokens.push_back(token), pass.rows_of.push_back(b), pass.numbers.push_back(m);
      if (depth != nullptr) pass.depths.push_back(depth[b * pass.nodes + m]);
    }
    pass.begins.push_back(pass.begins.back() + count);
  }
  find_wanted(columns, pass);
  if (visible.has_value())
    find_paths(visible->const_data_ptr<bool>(), pass);
  else
    pass.chains.assign(pass.batch, true);
  for (const int64_t tap : taps)
    REQUIRE_INDEX(tap >= -1 && tap < s.layers, "draftsmith: there is no tap ", tap);
  return pass;
}

}  // namespace draftsmith
