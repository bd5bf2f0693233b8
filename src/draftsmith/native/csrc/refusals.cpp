// Verification of guesses that were drawn, by rejection sampling from the root down.
//
// accept_sampled in verify/accept.py says what is computed. B rows, N guesses, M = N + 1 nodes with the root first,
// D depth, V vocabulary.

#include "refusals.h"

#include "operators.h"

namespace draftsmith {
namespace {

template <class Q>
struct Verification {
  const Choices& all;
  const Tensor& q_BMV;
  std::vector<int64_t> branching;  // the most children of a node at every depth; empty where nobody says

  // Of a node that has children. Rows behind the last of q belong to nodes without any.
  const Q* q(int64_t b, int64_t node) const {
    REQUIRE_INDEX(node < q_BMV.size(1), "draftsmith: node ", node - 1, " has children, but no distribution");
    return q_BMV.const_data_ptr<Q>() + b * q_BMV.stride(0) + node * q_BMV.stride(1);
  }

  // The children of a node, in order.
  std::vector<int64_t> children(int64_t b, int64_t node, int64_t level) const {
    const int64_t levels = branching.empty() ? all.depth : static_cast<int64_t>(branching.size());
    std::vector<int64_t> found;
    if (level >= std::min(all.depth, levels)) return found;
    const size_t most = branching.empty() ? all.guesses() : branching[level];
    for (int64_t n = 0; n < all.guesses() && found.size() < most; ++n) {
      if (all.parents(b)[n] + 1 != node || all.parents(b)[n] == kUnused) continue;
      REQUIRE_INDEX(node <= n, "draftsmith: the parent of node ", n, " comes behind it");
      const int64_t token = all.tokens(b)[n];
      REQUIRE_INDEX(token >= 0 && token < all.vocabulary, "draftsmith: there is no token ", token);
      found.push_back(n);
    }
    return found;
  }

  std::pair<int64_t, int64_t> follow(Chooser& chooser, Refusals<Q>& refusals, int64_t b, int64_t* path) const {
    int64_t node = 0;
    for (int64_t level = 0;; ++level) {
      const std::vector<int64_t> nodes = children(b, node, level);
      const Outcome found = outcome(chooser, refusals, b, node, level, nodes);
      if (found.child < 0) {
        std::fill(path + level, path + all.depth, node);
        return {level, found.token};
      }
      node = path[level] = nodes[found.child] + 1;
    }
  }

  Outcome outcome(Chooser& chooser, Refusals<Q>& refusals, int64_t b, int64_t node, int64_t level,
                  const std::vector<int64_t>& nodes) const {
    const Rules& own = all.rules[b];
    const Q* of = nodes.empty() ? nullptr : q(b, node);
    std::vector<int64_t> tokens;
    for (const int64_t n : nodes) tokens.push_back(all.tokens(b)[n]);
    all.take(chooser, b, node);
    if (own.temperature == 0) {  // p is a point mass
      const int64_t best = chooser.best();
      for (size_t k = 0; k < tokens.size(); ++k)
        if (tokens[k] == best && of[best] > 0) return {static_cast<int64_t>(k), kUndecided};
      return {-1, best};
    }
    if (tokens.empty()) return {-1, chooser.draw(own, all.race(b, level))};
    if (!chooser.is_readable(own)) return {-1, all.vocabulary - 1};
    if (!chooser.weigh(own)) return {};
    const auto judged = [&] {
      return refusals.judge(
          chooser, of, tokens, [&](int64_t k) { return all.noise(b, level, Stream::kAccept, k); },
          all.noise(b, level, Stream::kResidual, 0), all.race(b, level));
    };
    const Outcome found = judged();
    if (found.child >= 0 || found.token != kUndecided || chooser.is_exact()) return found;
    chooser.weigh_exactly();
    return judged();
  }
};

template <class Q>
Accepted accept_by(const Choices& all, const Tensor& q_BMV, const std::vector<int64_t>& branching) {
  const Verification<Q> verification{all, q_BMV, branching};
  return all.accept<DrawnMemory<Q>>([&](DrawnMemory<Q>& memory, int64_t b, int64_t* path) {
    return verification.follow(memory.chooser, memory.refusals, b, path);
  });
}

// Accepts guesses that were drawn from q_BMV, of which row 0 is the distribution of the root's children.
Accepted accept_drawn(const Tensor& logits_BMV, const Tensor& tokens_BN, const Tensor& parents_BN,
                      const Tensor& visible_BMM, int64_t depth, const Tensor& rules_BX, const Tensor& top_k_B,
                      const Tensor& seeds_B, const Tensor& positions_B, const Tensors& bias, const Tensors& history,
                      const Tensor& q_BMV, const std::vector<int64_t>& branching) {
  const Choices all(logits_BMV, tokens_BN, parents_BN, visible_BMM, depth, rules_BX, top_k_B, seeds_B, positions_B, bias,
                    history);
  check_drawn(all, q_BMV);
  return q_BMV.scalar_type() == kFloat ? accept_by<float>(all, q_BMV, branching) : accept_by<double>(all, q_BMV, branching);
}

}  // namespace

void define_refusals(Library& library) {
  library.def<accept_drawn>(
      "accept_drawn(Tensor logits_BMV, Tensor tokens_BN, Tensor parents_BN, Tensor visible_BMM, int depth,"
      " Tensor rules_BX, Tensor top_k_B, Tensor seeds_B, Tensor positions_B, Tensor[] bias, Tensor[] history,"
      " Tensor q_BMV, int[] branching) -> (Tensor, Tensor, Tensor)");
}

}  // namespace draftsmith
