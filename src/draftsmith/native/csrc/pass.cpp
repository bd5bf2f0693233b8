// Checks what a forward is called with.
#include "pass.h"

namespace draftsmith {
namespace {

bool is_chain(const int64_t* depths, const bool* visible, int64_t nodes) {
  for (int64_t m = 0; m < nodes; ++m, visible += nodes)
    if (depths[m] != m || !std::all_of(visible, visible + m + 1, [](bool sees) { return sees; }) ||
        std::any_of(visible + m + 1, visible + nodes, [](bool sees) { return sees; }))
      return false;
  return true;
}

// Writes down what every node sees of the draft.
void find_paths(const bool* visible, Pass& pass) {
  const int64_t nodes = pass.nodes;
  pass.chains.resize(pass.batch);
  for (int64_t b = 0; b < pass.batch; ++b) {
    pass.chains[b] = is_chain(pass.depths + b * nodes, visible + b * nodes * nodes, nodes);
    if (pass.chains[b]) continue;
    pass.paths.resize(pass.rows() * nodes);
    for (int64_t r = b * nodes; r < (b + 1) * nodes; ++r) {
      int64_t count = 0;
      for (int64_t m = 0; m < nodes; ++m) {
        if (!visible[r * nodes + m]) continue;
        TORCH_CHECK_INDEX(pass.depths[b * nodes + m] == count && m <= r % nodes, "draftsmith: node ", r % nodes,
                          " sees node ", m, ", which is not node ", count, " of its path");
        pass.paths[r * nodes + count++] = static_cast<int32_t>(pass.cached[b] + m);
      }
      TORCH_CHECK_INDEX(count == pass.depths[r] + 1 && visible[r * nodes + r % nodes], "draftsmith: node ", r % nodes,
                        " is ", pass.depths[r], " deep, but its path has ", count, " nodes");
    }
  }
}

}  // namespace

Pass checked_pass(const Shape& s, const at::Tensor& tokens, const std::optional<at::Tensor>& depths,
                  const std::optional<at::Tensor>& visible, const at::Tensor& cached, const Tensors& keys,
                  const Tensors& values, int64_t first_row, const std::vector<int64_t>& taps,
                  const std::optional<at::Tensor>& columns) {
  const auto whole = [](const at::Tensor& t) {
    return t.is_cpu() && t.scalar_type() == at::kLong && t.is_contiguous();
  };
  TORCH_CHECK(tokens.dim() == 2 && whole(tokens), "draftsmith: tokens have to be (B, M), int64 and contiguous");
  Pass pass;
  pass.batch = tokens.size(0), pass.nodes = tokens.size(1), pass.first_row = first_row, pass.taps = taps;
  pass.max_length = s.max_length;
  TORCH_CHECK(whole(cached) && cached.numel() == pass.batch, "draftsmith: cached has to be int64 (B)");
  TORCH_CHECK(depths.has_value() == visible.has_value(), "draftsmith: depths and visible are given together");
  if (visible.has_value())
    TORCH_CHECK(whole(*depths) && depths->sizes() == tokens.sizes() && visible->is_cpu() &&
                    visible->scalar_type() == at::kBool && visible->is_contiguous() &&
                    visible->sizes() == at::IntArrayRef({pass.batch, pass.nodes, pass.nodes}),
                "draftsmith: depths have to be int64 (B, M), and visible bool (B, M, M), both contiguous");
  const size_t layers = static_cast<size_t>(s.layers);
  TORCH_CHECK(keys.size() == layers && values.size() == layers && !keys.empty(),
              "draftsmith: the cache has another number of layers");
  const int64_t slots = keys[0].size(0);
  pass.capacity = keys[0].size(1);
  for (const Tensors* side : {&keys, &values})
    for (const at::Tensor& t : *side)
      TORCH_CHECK(t.is_cpu() && t.scalar_type() == at::kBFloat16 && t.is_contiguous() &&
                      t.sizes() == at::IntArrayRef({slots, pass.capacity, s.key_heads, s.head_width}),
                  "draftsmith: the cache has another shape");
  for (at::Tensor t : keys) pass.keys.push_back(mutable_bits(t));
  for (at::Tensor t : values) pass.values.push_back(mutable_bits(t));
  pass.tokens = tokens.const_data_ptr<int64_t>(), pass.cached = cached.const_data_ptr<int64_t>();
  pass.depths = depths.has_value() ? depths->const_data_ptr<int64_t>() : nullptr;
  pass.columns = nullptr, pass.kept = pass.nodes;
  if (columns.has_value()) {
    TORCH_CHECK(whole(*columns) && columns->dim() == 1, "draftsmith: columns have to be int64 of one dimension");
    pass.columns = columns->const_data_ptr<int64_t>(), pass.kept = columns->numel();
    for (int64_t i = 0; i < pass.kept; ++i)
      TORCH_CHECK_INDEX(pass.columns[i] >= 0 && pass.columns[i] < pass.nodes, "draftsmith: there is no node ",
                        pass.columns[i]);
  }
  TORCH_CHECK_INDEX(first_row >= 0 && first_row + pass.batch <= slots, "draftsmith: the cache has ", slots, " slots");
  pass.longest = 0;
  for (int64_t r = 0; r < pass.batch; ++r) {
    TORCH_CHECK_INDEX(pass.cached[r] >= 0 && pass.cached[r] + pass.nodes <= pass.capacity, "draftsmith: ",
                      pass.cached[r], " cached tokens and ", pass.nodes, " nodes do not fit a slot of ",
                      pass.capacity);
    pass.longest = std::max(pass.longest, pass.cached[r]);
  }
  if (visible.has_value())
    find_paths(visible->const_data_ptr<bool>(), pass);
  else
    pass.chains.assign(pass.batch, true);
  for (int64_t r = 0; r < pass.rows(); ++r)
    TORCH_CHECK_INDEX(pass.tokens[r] >= 0 && pass.tokens[r] < s.vocabulary, "draftsmith: there is no token ",
                      pass.tokens[r]);
  for (const int64_t tap : taps)
    TORCH_CHECK_INDEX(tap >= -1 && tap < s.layers, "draftsmith: there is no tap ", tap);
  return pass;
}

}  // namespace draftsmith
