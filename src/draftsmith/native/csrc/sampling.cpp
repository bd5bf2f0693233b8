// What the target chooses under the rules of a request, without a tensor as wide as the vocabulary for every node.
//
// verify/distribution.py, verify/noise.py and verify/accept.py say what is computed. B rows, N guesses, M = N + 1 nodes
// with the root first, D depth, V vocabulary.

#include <vector>

#include "choices.h"
#include "operators.h"

namespace draftsmith {
namespace {

// Counts the first counts_B[b] tokens of every row as output of its slot.
void count_tokens(const Tensor& prompted_RV, const Tensor& counts_RV, const Tensor& seen_RV,
                  const Tensor& seen_R, const Tensor& slots_B, const Tensor& committed_BT,
                  const Tensor& counts_B) {
  const History history(prompted_RV, counts_RV, seen_RV, seen_R);
  const Tensor slots = slots_B.contiguous(), tokens_BT = committed_BT.contiguous(), taken = counts_B.contiguous();
  const int64_t batch = tokens_BT.size(0), width = tokens_BT.size(1), vocabulary = history.vocabulary();
  REQUIRE(is_rows(slots, batch) && is_rows(taken, batch) && tokens_BT.scalar_type() == kLong,
          "draftsmith: slots, tokens and counts have to be int64, for the same rows");
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t slot = slots.const_data_ptr<int64_t>()[b], count = taken.const_data_ptr<int64_t>()[b];
    history.check(slot);
    REQUIRE_INDEX(count >= 0 && count <= width, "draftsmith: a row cannot have ", count, " of ", width, " tokens");
    const bool* prompted = prompted_RV.const_data_ptr<bool>() + slot * vocabulary;
    int32_t* counts = counts_RV.mutable_data_ptr<int32_t>() + slot * vocabulary;
    int32_t* seen = seen_RV.mutable_data_ptr<int32_t>() + slot * vocabulary;
    int64_t& seen_count = seen_R.mutable_data_ptr<int64_t>()[slot];
    for (int64_t t = 0; t < count; ++t) {
      const int64_t token = tokens_BT.const_data_ptr<int64_t>()[b * width + t];
      REQUIRE_INDEX(token >= 0 && token < vocabulary, "draftsmith: there is no token ", token);
      if (counts[token]++ == 0 && !prompted[token]) seen[seen_count++] = static_cast<int32_t>(token);
    }
  }
}

// ---- guesses that were not drawn

int64_t choose(const Choices& all, Chooser& chooser, int64_t b, int64_t node, int64_t level) {
  all.take(chooser, b, node);
  const Rules& own = all.rules[b];
  return own.temperature > 0 ? chooser.draw(own, all.race(b, level)) : chooser.best();
}

// Follows the guesses of a row that are what the target chooses.
std::pair<int64_t, int64_t> follow(const Choices& all, Chooser& chooser, int64_t b, int64_t* path) {
  const int64_t *tokens = all.tokens(b), *parents = all.parents(b), nodes = all.nodes;
  // As in step.cpp: the depth of a node if the path to it is right, else -1; its parent; what is chosen behind it.
  std::vector<int64_t> level(nodes, -1), up(nodes, 0), choice(nodes, kUndecided);
  level[0] = 0, choice[0] = choose(all, chooser, b, 0, 0);
  int64_t end = 0;
  for (int64_t n = 0; n + 1 < nodes; ++n) {
    up[n + 1] = std::max<int64_t>(parents[n] + 1, 0);
    REQUIRE_INDEX(up[n + 1] <= n, "draftsmith: the parent of node ", n, " comes behind it");
    if (parents[n] == kUnused || level[up[n + 1]] < 0) continue;
    if (choice[up[n + 1]] == kUndecided) return {0, kUndecided};
    if (tokens[n] != choice[up[n + 1]]) continue;
    level[n + 1] = level[up[n + 1]] + 1, choice[n + 1] = choose(all, chooser, b, n + 1, level[n + 1]);
    if (level[n + 1] > level[end]) end = n + 1;
  }
  REQUIRE_INDEX(level[end] <= all.depth, "draftsmith: the draft is deeper than its plan");
  for (int64_t d = all.depth; d-- > 0;) path[d] = end;
  for (int64_t d = level[end], node = end; d-- > 0; node = up[node]) path[d] = node;
  return {level[end], choice[end]};
}

// Accepts the longest path of what the target chooses or draws under the rules of every row.
Accepted accept_choices(const Tensor& logits_BMV, const Tensor& tokens_BN, const Tensor& parents_BN,
                        const Tensor& visible_BMM, int64_t depth, const Tensor& rules_BX, const Tensor& top_k_B,
                        const Tensor& seeds_B, const Tensor& positions_B, const Tensors& bias, const Tensors& history) {
  const Choices all(logits_BMV, tokens_BN, parents_BN, visible_BMM, depth, rules_BX, top_k_B, seeds_B, positions_B, bias,
                    history);
  return all.accept<Chooser>([&](Chooser& chooser, int64_t b, int64_t* path) { return follow(all, chooser, b, path); });
}

Tensor noise(const Tensor& seeds, const Tensor& positions, int64_t stream, const Tensor& indices) {
  const Tensor seeds_B = seeds.contiguous(), positions_B = positions.contiguous(), indices_B = indices.contiguous();
  REQUIRE(is_rows(seeds_B, seeds.numel()) && is_rows(positions_B, seeds.numel()) && is_rows(indices_B, seeds.numel()),
          "draftsmith: seeds, positions and indices have to be int64, one of each a row");
  Tensor u_B = empty(seeds.sizes(), kDouble);
  for (int64_t b = 0; b < seeds.numel(); ++b)
    u_B.mutable_data_ptr<double>()[b] =
        uniform(seeds_B.const_data_ptr<int64_t>()[b], positions_B.const_data_ptr<int64_t>()[b],
                static_cast<Stream>(stream), indices_B.const_data_ptr<int64_t>()[b]);
  return u_B;
}

void set_lanes(int64_t lanes) { pytorch_lanes() = lanes; }

}  // namespace

void define_sampling(Library& library) {
  library.def<count_tokens>(
      "count_tokens(Tensor prompted_RV, Tensor(a!) counts_RV, Tensor(b!) seen_RV, Tensor(c!) seen_R,"
      " Tensor slots_B, Tensor tokens_BT, Tensor counts_B) -> ()");
  library.def<accept_choices>(
      "accept_choices(Tensor logits_BMV, Tensor tokens_BN, Tensor parents_BN, Tensor visible_BMM, int depth,"
      " Tensor rules_BX, Tensor top_k_B, Tensor seeds_B, Tensor positions_B, Tensor[] bias, Tensor[] history)"
      " -> (Tensor, Tensor, Tensor)");
  library.def<noise>("noise(Tensor seeds_B, Tensor positions_B, int stream, Tensor indices_B) -> Tensor");
  library.def_without_tensors<set_lanes>("set_lanes(int lanes) -> ()");
}

}  // namespace draftsmith
