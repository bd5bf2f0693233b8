// What surrounds a verification, as one operator each: lay a draft out for the target, and commit what it accepts.
//
// verify/tree.py, verify/accept.py and engine/steps/step.py say what is computed. B rows, N guesses, M = N + 1 nodes
// with the root first, D depth of the plan, T = D + 1, F width of the states, V vocabulary.

#include <vector>

#include "operators.h"
#include "packed.h"
#include "pass.h"

namespace draftsmith {
namespace {

constexpr int64_t kUnused = -2;

// Where the places of rows lie in the tensors of a cache, each (blocks, entries of a block, …).
struct Slots {
  int64_t block = 0, blocks = 0, across = 1, capacity = 0;
  const int64_t* slots;
  const int32_t* tables;

  Slots(const Tensors& cache, int64_t batch, const std::optional<Tensor>& given,
        const std::optional<Tensor>& tables_RJ)
      : slots(given.has_value() ? given->const_data_ptr<int64_t>() : nullptr),
        tables(tables_RJ.has_value() ? tables_RJ->const_data_ptr<int32_t>() : nullptr) {
    if (tables != nullptr) {
      REQUIRE(tables_RJ->dim() == 2 && tables_RJ->is_contiguous(),
              "draftsmith: the tables of the cache have to be int32 (slots, J)");
      across = tables_RJ->size(1);
    }
    for (const Tensor& t : cache) {
      REQUIRE(t.dim() >= 3 && t.is_contiguous() && t.size(0) == cache[0].size(0) && t.size(1) == cache[0].size(1),
              "draftsmith: the cache has another shape");
      block = t.size(1);
    }
    capacity = across * block;
    if (cache.empty()) return;
    blocks = cache[0].size(0);
    const int64_t held = tables == nullptr ? blocks : tables_RJ->size(0);
    for (int64_t b = 0; b < batch; ++b)
      REQUIRE(slot(b) >= 0 && slot(b) < held, "draftsmith: the cache has another shape");
  }

  int64_t slot(int64_t row) const { return slots == nullptr ? row : slots[row]; }
  int64_t entry(int64_t row, int64_t place) const {
    const int64_t part = slot(row) * across + place / block;
    const int64_t number = tables == nullptr ? part : tables[part];
    REQUIRE_INDEX(number >= 0 && number < blocks, "draftsmith: slot ", slot(row), " has no block for place ", place);
    return number * block + place % block;
  }
};

void check_tree(const Tensor& tokens_BN, const Tensor& parents_BN) {
  REQUIRE(tokens_BN.dim() == 2 && tokens_BN.sizes() == parents_BN.sizes() && tokens_BN.scalar_type() == kLong &&
              parents_BN.scalar_type() == kLong,
          "draftsmith: tokens and parents have to be int64 (B, N)");
}

// Returns tokens (B, M), depths (B, M), who sees whom (B, M, M), and how many nodes each row has, the root included, up to
// the last that is used (B); nothing where every row has all of them.
std::tuple<Tensor, Tensor, Tensor, std::optional<Tensor>> lay_out(
    const Tensor& tokens_BT, const Tensor& counts_B, const Tensor& drafted, const Tensor& drafted_parents) {
  check_tree(drafted, drafted_parents);
  const Tensor draft_BN = drafted.contiguous(), parents_BN = drafted_parents.contiguous();
  const int64_t batch = draft_BN.size(0), guesses = draft_BN.size(1), nodes = guesses + 1;
  REQUIRE(tokens_BT.dim() == 2 && tokens_BT.size(0) == batch && tokens_BT.is_contiguous() &&
              counts_B.numel() == batch && counts_B.is_contiguous(),
          "draftsmith: the context does not fit the draft");
  Tensor tokens_BM = empty({batch, nodes}, kLong);
  Tensor depths_BM = full<int64_t>({batch, nodes}, 0);
  Tensor visible_BMM = full<bool>({batch, nodes, nodes}, false);
  std::vector<int64_t> used(batch, 1);
  const int64_t *context = tokens_BT.const_data_ptr<int64_t>(), *counts = counts_B.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < batch; ++b) {
    REQUIRE_INDEX(counts[b] > 0 && counts[b] <= tokens_BT.size(1), "draftsmith: a row has ", counts[b], " tokens");
    int64_t* tokens = tokens_BM.mutable_data_ptr<int64_t>() + b * nodes;
    int64_t* depths = depths_BM.mutable_data_ptr<int64_t>() + b * nodes;
    bool* visible = visible_BMM.mutable_data_ptr<bool>() + b * nodes * nodes;
    tokens[0] = context[b * tokens_BT.size(1) + counts[b] - 1];
    visible[0] = true;
    for (int64_t n = 0; n < guesses; ++n) {
      tokens[n + 1] = draft_BN.const_data_ptr<int64_t>()[b * guesses + n];
      const int64_t given = parents_BN.const_data_ptr<int64_t>()[b * guesses + n];
      const int64_t parent = std::max<int64_t>(given + 1, 0);
      if (given != kUnused) used[b] = n + 2;
      REQUIRE_INDEX(parent <= n, "draftsmith: the parent of node ", n, " comes behind it");
      depths[n + 1] = depths[parent] + 1;
      std::copy_n(visible + parent * nodes, n + 1, visible + (n + 1) * nodes);
      visible[(n + 1) * nodes + n + 1] = true;
    }
  }
  std::optional<Tensor> nodes_B;
  if (std::any_of(used.begin(), used.end(), [&](int64_t count) { return count < nodes; })) {
    nodes_B = empty({batch}, kLong);
    std::copy(used.begin(), used.end(), nodes_B->mutable_data_ptr<int64_t>());
  }
  return {tokens_BM, depths_BM, visible_BMM, nodes_B};
}

// What was accepted elsewhere: paths (B, D), how many guesses of them stay (B), and the token behind these (B).
struct Accepted {
  Tensor path_BD, counts_B, next_B;
};

// Accepts the longest path of the target's own choices, unless `accepted` says what to accept, and moves its keys and
// values into place. Row b has the first
// counts[b] nodes, or all, and lies in slot slots[b] of the cache, or b. With tables (slots, J), block tables[slot, j] of
// the cache holds the j-th part of a slot; without, block and slot are one.
// Returns the tokens (B, T), features (B, T, F), counts (B) and lengths (B) of the next context, the table of
// engine/steps/step.py (B, T + 2), and the path (B, D).
using Committed = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
Committed commit(
    const Tensors& cache, const Tensor& logits, const Tensor& features,
    const Tensor& tokens_BM, const Tensor& parents, const Tensor& lengths_B, int64_t depth,
    const std::optional<Tensor>& slots, const std::optional<Tensor>& existing,
    const std::optional<Tensor>& tables, const Accepted* accepted_rows) {
  const Tensor logits_BMV = logits.contiguous(), features_BMF = features.contiguous();
  const Tensor parents_BN = parents.contiguous();
  const int64_t batch = tokens_BM.size(0), nodes = tokens_BM.size(1), guesses = nodes - 1;
  const int64_t vocabulary = logits_BMV.size(2), width = features_BMF.size(2);
  REQUIRE(tokens_BM.is_contiguous() && tokens_BM.scalar_type() == kLong && lengths_B.is_contiguous() &&
              lengths_B.scalar_type() == kLong && lengths_B.numel() == batch && vocabulary > 0 &&
              parents_BN.sizes() == Sizes({batch, guesses}) && parents_BN.scalar_type() == kLong &&
              logits_BMV.sizes() == Sizes({batch, nodes, vocabulary}) &&
              logits_BMV.scalar_type() == kBFloat16 &&
              features_BMF.sizes() == Sizes({batch, nodes, width}) &&
              features_BMF.scalar_type() == kBFloat16,
          "draftsmith: logits, features, tokens and parents do not belong to one draft");
  for (const auto* of_rows : {&slots, &existing})
    REQUIRE(!of_rows->has_value() || (is_whole(**of_rows) && (*of_rows)->numel() == batch),
            "draftsmith: slots and counts have to be int64 (B)");
  if (accepted_rows != nullptr)
    REQUIRE(is_whole(accepted_rows->path_BD) && accepted_rows->path_BD.sizes() == Sizes({batch, depth}) &&
                is_whole(accepted_rows->counts_B) && accepted_rows->counts_B.numel() == batch &&
                is_whole(accepted_rows->next_B) && accepted_rows->next_B.numel() == batch,
            "draftsmith: paths, counts and next tokens have to be int64, for the same rows");
  const Slots places(cache, batch, slots, tables);
  const int64_t kept = depth + 1;
  Tensor out_tokens = empty({batch, kept}, kLong);
  Tensor out_features = empty({batch, kept, width}, kBFloat16);
  Tensor counts_B = empty({batch}, kLong), longer_B = empty({batch}, kLong);
  Tensor table_BX = empty({batch, kept + 2}, kLong);
  Tensor path_BD = empty({batch, depth}, kLong);
  const auto take_row = [&](int64_t b, std::vector<int64_t>& level, std::vector<int64_t>& up,
                            std::vector<int64_t>& choice) {
    const int64_t* tokens = tokens_BM.const_data_ptr<int64_t>() + b * nodes;
    const int64_t* parent = parents_BN.const_data_ptr<int64_t>() + b * guesses;
    const bf16* scores = bits(logits_BMV) + b * nodes * vocabulary;
    const int64_t exist = existing.has_value() ? existing->const_data_ptr<int64_t>()[b] : nodes;
    REQUIRE_INDEX(exist > 0 && exist <= nodes, "draftsmith: ", exist, " of ", nodes, " nodes cannot exist");
    int64_t drafted = 0, accepted = 0, next = 0;
    int64_t* path = path_BD.mutable_data_ptr<int64_t>() + b * depth;
    for (int64_t n = 0; n < exist - 1; ++n) drafted += parent[n] != kUnused;
    if (accepted_rows != nullptr) {
      accepted = accepted_rows->counts_B.const_data_ptr<int64_t>()[b];
      next = accepted_rows->next_B.const_data_ptr<int64_t>()[b];
      std::copy_n(accepted_rows->path_BD.const_data_ptr<int64_t>() + b * depth, depth, path);
      REQUIRE_INDEX(accepted >= 0 && accepted <= depth, "draftsmith: ", accepted, " guesses cannot stay");
      for (int64_t d = 0; d < accepted; ++d)
        REQUIRE_INDEX(path[d] > d && path[d] < exist, "draftsmith: no path leads over node ", path[d]);
    } else {
      int64_t end = 0;
      level[0] = 0, up[0] = 0, choice[0] = kernels().argmax(scores, vocabulary);
      for (int64_t n = 0; n < exist - 1; ++n) {
        up[n + 1] = std::max<int64_t>(parent[n] + 1, 0);
        REQUIRE_INDEX(up[n + 1] <= n, "draftsmith: the parent of node ", n, " comes behind it");
        const bool right = parent[n] != kUnused && level[up[n + 1]] >= 0 && tokens[n + 1] == choice[up[n + 1]];
        level[n + 1] = right ? level[up[n + 1]] + 1 : -1;
        if (right) choice[n + 1] = kernels().argmax(scores + (n + 1) * vocabulary, vocabulary);
        if (level[n + 1] > level[end]) end = n + 1;
      }
      accepted = level[end], next = choice[end];
      REQUIRE_INDEX(accepted <= depth, "draftsmith: the draft is deeper than its plan");
      for (int64_t d = depth; d-- > 0;) path[d] = end;
      for (int64_t d = accepted, node = end; d-- > 0; node = up[node]) path[d] = node;
    }
    int64_t sound = 0;  // tokens that finite logits chose, up to one that others chose
    while (sound <= accepted &&
           kernels().all_finite(scores + (sound == 0 ? 0 : path[sound - 1]) * vocabulary, vocabulary))
      ++sound;
    const int64_t count = sound > 0 ? sound : accepted + 1;
    int64_t* out = out_tokens.mutable_data_ptr<int64_t>() + b * kept;
    int64_t* table = table_BX.mutable_data_ptr<int64_t>() + b * (kept + 2);
    for (int64_t d = 0; d < kept; ++d) out[d] = d < accepted ? tokens[path[d]] : next;
    table[0] = count, table[1] = sound > 0 ? drafted : -1;
    std::copy_n(out, kept, table + 2);
    const bf16* from = bits(features_BMF) + b * nodes * width;
    bf16* to = mutable_bits(out_features) + b * kept * width;
    for (int64_t t = 0; t < kept; ++t) std::copy_n(from + (t == 0 ? 0 : path[t - 1]) * width, width, to + t * width);
    const int64_t length = lengths_B.const_data_ptr<int64_t>()[b];
    counts_B.mutable_data_ptr<int64_t>()[b] = count;
    longer_B.mutable_data_ptr<int64_t>()[b] = length + count;
    for (int64_t d = 0; d < accepted; ++d) {
      if (path[d] == d + 1) continue;
      for (const Tensor& t : cache) {
        const int64_t bytes = t.size(2) * t.size(3) * t.element_size();
        REQUIRE_INDEX(length - 1 + exist <= places.capacity, "draftsmith: the draft does not fit its slot");
        char* storage = static_cast<char*>(t.mutable_data());
        std::copy_n(storage + places.entry(b, length - 1 + path[d]) * bytes, bytes,
                    storage + places.entry(b, length + d) * bytes);
      }
    }
  };
  // Rows are so many vocabularies to look at; a few short ones are not worth waking a thread.
  constexpr int64_t kWorthAThread = 1 << 17;
  parallel_for(0, batch, std::max<int64_t>(1, kWorthAThread / vocabulary), [&](int64_t begin, int64_t end) {
    // Of every node: its depth if the path to it is right, else -1; its parent; and what the target chooses behind it,
    // which only the nodes of right paths need.
    std::vector<int64_t> level(nodes), up(nodes), choice(nodes);
    for (int64_t b = begin; b < end; ++b) take_row(b, level, up, choice);
  });
  return {out_tokens, out_features, counts_B, longer_B, table_BX, path_BD};
}

Committed commit_greedy(
    const Tensors& cache, const Tensor& logits, const Tensor& features, const Tensor& tokens_BM,
    const Tensor& parents, const Tensor& lengths_B, int64_t depth, const std::optional<Tensor>& slots,
    const std::optional<Tensor>& existing, const std::optional<Tensor>& tables) {
  return commit(cache, logits, features, tokens_BM, parents, lengths_B, depth, slots, existing, tables, nullptr);
}

// Commits paths that were accepted by whichever rule.
Committed commit_path(
    const Tensors& cache, const Tensor& logits, const Tensor& features, const Tensor& tokens_BM,
    const Tensor& parents, const Tensor& lengths_B, const Tensor& path_BD, const Tensor& accepted_B,
    const Tensor& next_B, const std::optional<Tensor>& slots, const std::optional<Tensor>& existing,
    const std::optional<Tensor>& tables) {
  const Accepted accepted{path_BD.contiguous(), accepted_B.contiguous(), next_B.contiguous()};
  const int64_t depth = path_BD.size(1);
  return commit(cache, logits, features, tokens_BM, parents, lengths_B, depth, slots, existing, tables, &accepted);
}

// Keeps the states (B, T, F) of the tokens from the last one of every row on, where their places lie.
void keep_states(const Tensor& states_NEF, const Tensor& states, const Tensor& lengths_B,
                 const std::optional<Tensor>& slots, const std::optional<Tensor>& tables) {
  const Tensor states_BTF = states.contiguous();
  const int64_t batch = lengths_B.numel();
  REQUIRE(states_BTF.dim() == 3 && states_NEF.dim() == 3 && states_BTF.size(0) == batch && is_whole(lengths_B) &&
              states_BTF.size(2) == states_NEF.size(2) && states_BTF.scalar_type() == kBFloat16 &&
              states_NEF.scalar_type() == kBFloat16 &&
              (!slots.has_value() || (is_whole(*slots) && slots->numel() == batch)),
          "draftsmith: states, lengths and slots do not fit the cache");
  const Slots places({states_NEF}, batch, slots, tables);
  const int64_t tokens = states_BTF.size(1), width = states_BTF.size(2);
  const bf16* from = bits(states_BTF);
  bf16* to = mutable_bits(states_NEF);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t first = lengths_B.const_data_ptr<int64_t>()[b] - 1;
    REQUIRE_INDEX(first >= 0 && first + tokens <= places.capacity, "draftsmith: the states do not fit their slot");
    for (int64_t t = 0; t < tokens; ++t)
      std::copy_n(from + (b * tokens + t) * width, width, to + places.entry(b, first + t) * width);
  }
}

}  // namespace

void define_steps(Library& library) {
  library.def<lay_out>(
      "lay_out(Tensor tokens_BT, Tensor counts_B, Tensor tokens_BN, Tensor parents_BN)"
      " -> (Tensor, Tensor, Tensor, Tensor?)");
  library.def<commit_greedy>(
      "commit_greedy(Tensor(a!)[] cache, Tensor logits_BMV, Tensor features_BMF, Tensor tokens_BM, Tensor parents_BN,"
      " Tensor lengths_B, int depth, Tensor? slots_B=None, Tensor? counts_B=None,"
      " Tensor? tables_RJ=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def<keep_states>(
      "keep_states(Tensor(a!) states_NEF, Tensor states_BTF, Tensor lengths_B, Tensor? slots_B=None,"
      " Tensor? tables_RJ=None) -> ()");
  library.def<commit_path>(
      "commit_path(Tensor(a!)[] cache, Tensor logits_BMV, Tensor features_BMF, Tensor tokens_BM, Tensor parents_BN,"
      " Tensor lengths_B, Tensor path_BD, Tensor accepted_B, Tensor next_B, Tensor? slots_B=None,"
      " Tensor? counts_B=None, Tensor? tables_RJ=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

}  // namespace draftsmith
