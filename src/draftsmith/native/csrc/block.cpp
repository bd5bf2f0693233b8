// Verification of a drawn chain as a whole.
//
// accept_block in verify/block.py says what is computed. B rows, N guesses, M = N + 1 nodes with the root first, D depth,
// V vocabulary.

#include "operators.h"
#include "refusals.h"

namespace draftsmith {
namespace {

// r_i of accept_block, and how far it may be off in relation to itself.
struct Joint {
  double value = 1, doubt = 0;

  bool is_one() const { return value == 1 && doubt == 0; }

  // With another guess, of which the target's share is so many times the drafter's.
  Joint with(double ratio, double ratio_doubt) const {
    const double product = value * ratio, off = doubt + ratio_doubt + 1e-12;
    if (product == 0) return {0, 0};
    if (product * (1 - off) >= 1) return {};
    return {std::min(1.0, product), off};
  }
};

constexpr double kTiny = 1e-37;  // a little more than e^-87, below which `weigh` knows no weight

template <class Q>
struct Block {
  const Choices& all;
  const Tensor& q_BMV;

  const Q* q(int64_t b, int64_t node) const {
    return q_BMV.const_data_ptr<Q>() + b * q_BMV.stride(0) + node * q_BMV.stride(1);
  }

  // How many guesses the chain of a row has.
  int64_t length(int64_t b) const {
    int64_t n = 0;
    for (; n < all.guesses() && all.parents(b)[n] == n - 1; ++n) {
      const int64_t token = all.tokens(b)[n];
      REQUIRE_INDEX(n < q_BMV.size(1), "draftsmith: node ", n - 1, " has children, but no distribution");
      REQUIRE_INDEX(token >= 0 && token < all.vocabulary, "draftsmith: there is no token ", token);
      if (!(q(b, n)[token] > 0)) break;
    }
    REQUIRE_INDEX(n <= all.depth, "draftsmith: the draft is deeper than its plan");
    return n;
  }

  std::pair<int64_t, int64_t> follow(Chooser& chooser, Refusals<Q>& refusals, int64_t b, int64_t* path) const {
    for (int64_t d = 0; d < all.depth; ++d) path[d] = std::min(d + 1, all.guesses());
    if (all.rules[b].temperature == 0) return follow_best(chooser, b);
    const std::pair<int64_t, int64_t> found = judge(chooser, refusals, b, false);
    return found.second == kUndecided && !chooser.is_exact() ? judge(chooser, refusals, b, true) : found;
  }

  // Of a greedy row the guesses stay that are the best tokens.
  std::pair<int64_t, int64_t> follow_best(Chooser& chooser, int64_t b) const {
    const int64_t guesses = length(b);
    for (int64_t node = 0;; ++node) {
      all.take(chooser, b, node);
      const int64_t best = chooser.best();
      if (node == guesses || all.tokens(b)[node] != best) return {node, best};
    }
  }

  // Tests every prefix, the longest of which that passes stays; `exactly` with PyTorch's own exponentials. The token behind
  // a prefix is chosen as soon as this passes, while the weights are at hand: a longer one may not pass.
  std::pair<int64_t, int64_t> judge(Chooser& chooser, Refusals<Q>& refusals, int64_t b, bool exactly) const {
    constexpr std::pair<int64_t, int64_t> undecided{0, kUndecided};
    const int64_t guesses = length(b);
    std::pair<int64_t, int64_t> longest = undecided;
    Joint joint;
    for (int64_t node = 0;; ++node) {
      if (node == guesses) {
        const int passes = node == 0 ? -1 : test_whole(joint, all.noise(b, node - 1, Stream::kBlockAccept, node - 1));
        if (passes == 0) return undecided;
        if (passes > 0) return longest;
        all.take(chooser, b, node);
        return {node, chooser.draw(all.rules[b], all.race(b, node))};
      }
      if (!weigh(chooser, b, node, exactly)) return undecided;
      const double share = refusals.share_of_q(chooser, q(b, node), all.tokens(b)[node]);
      const double rest = refusals.leave(joint.value, joint.doubt);
      const int passes =
          node == 0 ? -1 : test(refusals, joint, rest, all.noise(b, node - 1, Stream::kBlockAccept, node - 1));
      if (passes == 0) return undecided;
      if (passes < 0) longest = {node, refusals.draw_left(all.noise(b, node, Stream::kResidual, 0))};
      const double weight = chooser.weight_of(all.tokens(b)[node]);
      // The rough exponential of what is forbidden is no zero, and its error is no longer small beside it.
      if (!chooser.is_exact() && weight < kTiny) return undecided;
      joint = joint.with(weight / chooser.total() / share, chooser.doubt());
      if (joint.value == 0) return longest;  // nor does a longer one pass
    }
  }

  // -1 where a prefix of the chain passes its test, 1 where it does not, 0 where last bits decide.
  static int test(const Refusals<Q>& refusals, const Joint& joint, double rest, double u) {
    if (joint.is_one()) return -1;
    // u is less than rest / (rest + 1 - r).
    return Refusals<Q>::compare(
        u * (1 - joint.value), (1 - u) * rest, u * joint.value * joint.doubt + (1 - u) * refusals.loose());
  }

  // The same for the whole chain.
  static int test_whole(const Joint& joint, double u) {
    return joint.is_one() ? -1 : Refusals<Q>::compare(u, joint.value, joint.value * joint.doubt);
  }

  bool weigh(Chooser& chooser, int64_t b, int64_t node, bool exactly) const {
    all.take(chooser, b, node);
    if (!chooser.is_readable(all.rules[b]) || !chooser.weigh(all.rules[b])) return false;
    if (exactly && !chooser.is_exact()) chooser.weigh_exactly();
    return true;
  }
};

template <class Q>
Accepted accept_by(const Choices& all, const Tensor& q_BMV) {
  const Block<Q> block{all, q_BMV};
  return all.accept<DrawnMemory<Q>>([&](DrawnMemory<Q>& memory, int64_t b, int64_t* path) {
    return block.follow(memory.chooser, memory.refusals, b, path);
  });
}

// Accepts as much of chains that were drawn from q_BMV as passes as a whole.
Accepted accept_block(const Tensor& logits_BMV, const Tensor& tokens_BN, const Tensor& parents_BN,
                      const Tensor& visible_BMM, int64_t depth, const Tensor& rules_BX, const Tensor& top_k_B,
                      const Tensor& seeds_B, const Tensor& positions_B, const Tensors& bias, const Tensors& history,
                      const Tensor& q_BMV) {
  const Choices all(logits_BMV, tokens_BN, parents_BN, visible_BMM, depth, rules_BX, top_k_B, seeds_B, positions_B, bias,
                    history);
  check_drawn(all, q_BMV);
  return q_BMV.scalar_type() == kFloat ? accept_by<float>(all, q_BMV) : accept_by<double>(all, q_BMV);
}

}  // namespace

void define_block(Library& library) {
  library.def<accept_block>(
      "accept_block(Tensor logits_BMV, Tensor tokens_BN, Tensor parents_BN, Tensor visible_BMM, int depth,"
      " Tensor rules_BX, Tensor top_k_B, Tensor seeds_B, Tensor positions_B, Tensor[] bias, Tensor[] history,"
      " Tensor q_BMV) -> (Tensor, Tensor, Tensor)");
}

}  // namespace draftsmith
