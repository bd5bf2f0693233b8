// What the target chooses under the rules of a request, without a tensor as wide as the vocabulary for every node.
//
// verify/distribution.py, verify/noise.py and verify/accept.py say what is computed. B rows, N guesses, M = N + 1 nodes
// with the root first, D depth, V vocabulary, R slots of the history, K entries of bias.

#include <algorithm>
#include <array>
#include <vector>

#include "chooser.h"
#include "operators.h"

namespace draftsmith {
namespace {

constexpr int64_t kUnused = -2;

// ---- the history of the penalties

struct History {
  Tensor prompted_RV, counts_RV, seen_RV, seen_R;

  History(const Tensor& prompted, const Tensor& counts, const Tensor& seen, const Tensor& seen_counts)
      : prompted_RV(prompted), counts_RV(counts), seen_RV(seen), seen_R(seen_counts) {
    REQUIRE(prompted.dim() == 2 && prompted.is_contiguous() && prompted.scalar_type() == kBool &&
                counts.sizes() == prompted.sizes() && counts.is_contiguous() && counts.scalar_type() == kInt &&
                seen.sizes() == prompted.sizes() && seen.is_contiguous() && seen.scalar_type() == kInt &&
                seen_counts.numel() == prompted.size(0) && seen_counts.is_contiguous() &&
                seen_counts.scalar_type() == kLong,
            "draftsmith: these tensors are no history");
  }

  int64_t vocabulary() const { return prompted_RV.size(1); }
  void check(int64_t slot) const {
    REQUIRE_INDEX(slot >= 0 && slot < prompted_RV.size(0), "draftsmith: the history has no slot ", slot);
  }
  Past at(int64_t slot) const {
    check(slot);
    return {prompted_RV.const_data_ptr<bool>() + slot * vocabulary(),
            counts_RV.const_data_ptr<int32_t>() + slot * vocabulary(),
            seen_RV.const_data_ptr<int32_t>() + slot * vocabulary(), seen_R.const_data_ptr<int64_t>()[slot]};
  }
};

bool is_rows(const Tensor& tensor, int64_t batch) {
  return tensor.is_contiguous() && tensor.scalar_type() == kLong && tensor.numel() == batch;
}

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

// ---- the operator

// SplitMix64 over (seed, position), for the stream TARGET and index 0, which add nothing.
double uniform(int64_t seed, int64_t position) {
  const auto mix = [](uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  };
  const uint64_t seeded = mix(static_cast<uint64_t>(seed) ^ 0x9E3779B97F4A7C15u);
  const uint64_t hashed = mix(mix(seeded ^ static_cast<uint64_t>(position)));
  return static_cast<double>(hashed >> 11) * 0x1p-53;
}

// The logits of all nodes, which may be a part of a wider tensor, and what of rows is looked at for each of them.
struct Work {
  Tensor logits_BMV, tokens_BN, parents_BN, visible_BMM;
  int64_t batch, nodes, depth, vocabulary;
  std::vector<Rules> rules;
  std::vector<std::vector<BiasEntry>> bias;
  std::vector<Past> pasts;
  const int64_t *seeds, *positions;

  // The guesses on the path to a node.
  std::vector<int64_t> path_to(int64_t b, int64_t node) const {
    std::vector<int64_t> path;
    const bool* visible = visible_BMM.const_data_ptr<bool>() + (b * nodes + node) * nodes;
    for (int64_t n = 1; n < nodes; ++n)
      if (visible[n]) path.push_back(std::max<int64_t>(tokens_BN.const_data_ptr<int64_t>()[b * (nodes - 1) + n - 1], 0));
    return path;
  }

  int64_t choose(Chooser& chooser, int64_t b, int64_t node, int64_t level) const {
    const int64_t at = b * logits_BMV.stride(0) + node * logits_BMV.stride(1);
    const Rules& own = rules[b];
    std::vector<int64_t> path;
    if (own.penalises()) path = path_to(b, node);
    if (logits_BMV.scalar_type() == kFloat)
      chooser.take(logits_BMV.const_data_ptr<float>() + at, own, bias[b], pasts[b], path);
    else
      chooser.take(bits(logits_BMV) + at, own, bias[b], pasts[b], path);
    return own.temperature > 0 ? chooser.draw(own, uniform(seeds[b], positions[b] + level)) : chooser.best();
  }

  // Follows the guesses of a row that are what the target chooses: writes the path (D), and returns how many they are and
  // what the target chooses behind the last.
  std::pair<int64_t, int64_t> follow(Chooser& chooser, int64_t b, int64_t* path) const {
    const int64_t* tokens = tokens_BN.const_data_ptr<int64_t>() + b * (nodes - 1);
    const int64_t* parents = parents_BN.const_data_ptr<int64_t>() + b * (nodes - 1);
    // As in step.cpp: the depth of a node if the path to it is right, else -1; its parent; what is chosen behind it.
    std::vector<int64_t> level(nodes, -1), up(nodes, 0), choice(nodes, kUndecided);
    level[0] = 0, choice[0] = choose(chooser, b, 0, 0);
    int64_t end = 0;
    for (int64_t n = 0; n + 1 < nodes; ++n) {
      up[n + 1] = std::max<int64_t>(parents[n] + 1, 0);
      REQUIRE_INDEX(up[n + 1] <= n, "draftsmith: the parent of node ", n, " comes behind it");
      if (parents[n] == kUnused || level[up[n + 1]] < 0) continue;
      if (choice[up[n + 1]] == kUndecided) return {0, kUndecided};
      if (tokens[n] != choice[up[n + 1]]) continue;
      level[n + 1] = level[up[n + 1]] + 1, choice[n + 1] = choose(chooser, b, n + 1, level[n + 1]);
      if (level[n + 1] > level[end]) end = n + 1;
    }
    REQUIRE_INDEX(level[end] <= depth, "draftsmith: the draft is deeper than its plan");
    for (int64_t d = depth; d-- > 0;) path[d] = end;
    for (int64_t d = level[end], node = end; d-- > 0; node = up[node]) path[d] = node;
    return {level[end], choice[end]};
  }
};

// Accepts the longest path of what the target chooses or draws under the rules of every row. rules_BX holds temperature,
// top-p, min-p, repetition, presence and frequency. Returns the path (B, D), how many guesses of it stay (B), and the
// token behind them (B), which is -1 where last bits would decide; nothing else of such a row is valid.
std::tuple<Tensor, Tensor, Tensor> accept_choices(
    const Tensor& logits_BMV, const Tensor& drafted, const Tensor& drafted_parents,
    const Tensor& visible_BMM, int64_t depth, const Tensor& rules_BX, const Tensor& top_k_B,
    const Tensor& seeds, const Tensor& positions, const Tensors& bias, const Tensors& history) {
  const int64_t batch = logits_BMV.size(0), nodes = logits_BMV.size(1), vocabulary = logits_BMV.size(2);
  const Tensor seeds_B = seeds.contiguous(), positions_B = positions.contiguous();
  Work work{logits_BMV, drafted.contiguous(), drafted_parents.contiguous(), visible_BMM.contiguous(), batch, nodes, depth,
            vocabulary, {}, {}, {}, nullptr, nullptr};
  const std::vector<int64_t> shape_BN{batch, nodes - 1};
  REQUIRE(work.tokens_BN.sizes() == shape_BN && work.tokens_BN.scalar_type() == kLong &&
              work.parents_BN.sizes() == shape_BN && work.parents_BN.scalar_type() == kLong &&
              work.visible_BMM.sizes() == Sizes({batch, nodes, nodes}) &&
              work.visible_BMM.scalar_type() == kBool && vocabulary > 0 && logits_BMV.stride(2) == 1 &&
              (logits_BMV.scalar_type() == kBFloat16 || logits_BMV.scalar_type() == kFloat),
          "draftsmith: logits and tree do not belong to one draft");
  REQUIRE(is_rows(seeds_B, batch) && is_rows(positions_B, batch) && is_rows(top_k_B, batch) &&
              rules_BX.sizes() == Sizes({batch, 6}) && rules_BX.is_contiguous() &&
              rules_BX.scalar_type() == kDouble,
          "draftsmith: these are no rules for ", batch, " rows");
  work.seeds = seeds_B.const_data_ptr<int64_t>(), work.positions = positions_B.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < batch; ++b) {
    const double* of = rules_BX.const_data_ptr<double>() + b * 6;
    const int64_t k = top_k_B.const_data_ptr<int64_t>()[b];
    // Then quotients of logits neither grow together nor vanish further than `collect` counts with.
    REQUIRE(of[0] == 0 || (of[0] >= 1e-4 && of[0] <= 1e4), "draftsmith: a temperature is 0, or from 0.0001 to 10000");
    REQUIRE(k >= 0 && k <= vocabulary, "draftsmith: there are no ", k, " tokens to keep");
    work.rules.push_back({of[0], of[1], of[2], static_cast<float>(of[3]), static_cast<float>(of[4]),
                          static_cast<float>(of[5]), k});
  }
  work.bias.resize(batch), work.pasts.resize(batch);
  if (!bias.empty()) {
    REQUIRE(bias.size() == 3 && is_rows(bias[0], bias[0].numel()) && is_rows(bias[1], bias[0].numel()) &&
                bias[2].numel() == bias[0].numel() && bias[2].is_contiguous() && bias[2].scalar_type() == kFloat,
            "draftsmith: a bias is made of rows, tokens (int64) and values (fp32)");
    for (int64_t k = 0; k < bias[0].numel(); ++k) {
      const int64_t row = bias[0].const_data_ptr<int64_t>()[k], token = bias[1].const_data_ptr<int64_t>()[k];
      REQUIRE_INDEX(row >= 0 && row < batch && token >= 0 && token < vocabulary, "draftsmith: a bias for row ", row,
                    " and token ", token, " has no place");
      work.bias[row].push_back({token, bias[2].const_data_ptr<float>()[k]});
    }
  }
  if (!history.empty()) {
    REQUIRE(history.size() == 5, "draftsmith: these tensors are no history");
    const History known(history[0], history[1], history[2], history[3]);
    const Tensor slots_B = history[4].contiguous();
    REQUIRE(known.vocabulary() == vocabulary && is_rows(slots_B, batch), "draftsmith: these tensors are no history");
    for (int64_t b = 0; b < batch; ++b)
      if (work.rules[b].penalises()) work.pasts[b] = known.at(slots_B.const_data_ptr<int64_t>()[b]);
    for (int64_t i = 0; i < work.tokens_BN.numel(); ++i)
      REQUIRE_INDEX(work.tokens_BN.const_data_ptr<int64_t>()[i] < vocabulary, "draftsmith: there is no token ",
                    work.tokens_BN.const_data_ptr<int64_t>()[i]);
  }
  Tensor path_BD = full<int64_t>({batch, depth}, 0);
  Tensor counts_B = empty({batch}, kLong), next_B = empty({batch}, kLong);
  int64_t *paths = path_BD.mutable_data_ptr<int64_t>(), *counts = counts_B.mutable_data_ptr<int64_t>();
  int64_t* next = next_B.mutable_data_ptr<int64_t>();
  parallel_for(0, batch, 1, [&](int64_t begin, int64_t end) {
    Chooser chooser(vocabulary);
    for (int64_t b = begin; b < end; ++b)
      std::tie(counts[b], next[b]) = work.follow(chooser, b, paths + b * depth);
  });
  return {path_BD, counts_B, next_B};
}

Tensor target_noise(const Tensor& seeds, const Tensor& positions) {
  const Tensor seeds_B = seeds.contiguous(), positions_B = positions.contiguous();
  REQUIRE(is_rows(seeds_B, seeds.numel()) && is_rows(positions_B, seeds.numel()),
          "draftsmith: seeds and positions have to be int64, one of each a row");
  Tensor u_B = empty(seeds.sizes(), kDouble);
  for (int64_t b = 0; b < seeds.numel(); ++b)
    u_B.mutable_data_ptr<double>()[b] =
        uniform(seeds_B.const_data_ptr<int64_t>()[b], positions_B.const_data_ptr<int64_t>()[b]);
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
  library.def<target_noise>("target_noise(Tensor seeds_B, Tensor positions_B) -> Tensor");
  library.def_without_tensors<set_lanes>("set_lanes(int lanes) -> ()");
}

}  // namespace draftsmith
