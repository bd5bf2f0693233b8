// What a verification is given: the target's logits at every node, the tree of guesses, and what requests ask for.
//
// B rows, N guesses, M = N + 1 nodes with the root first, D depth, V vocabulary, R slots of the history, K entries of bias.
#pragma once

#include <tuple>
#include <vector>

#include "chooser.h"
#include "noise.h"

namespace draftsmith {

constexpr int64_t kUnused = -2;

// Whether a tensor holds an int64 for every row.
inline bool is_rows(const Tensor& tensor, int64_t batch) {
  return tensor.is_contiguous() && tensor.scalar_type() == kLong && tensor.numel() == batch;
}

// The history of the penalties.
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

// What is accepted: the path (B, D), how many guesses of it stay (B), and the token behind them (B), which is -1 where last
// bits would decide; nothing else of such a row is valid.
using Accepted = std::tuple<Tensor, Tensor, Tensor>;

struct Choices {
  Tensor logits_BMV, tokens_BN, parents_BN, visible_BMM, seeds_B, positions_B;
  int64_t batch, nodes, depth, vocabulary;
  std::vector<Rules> rules = {};
  std::vector<std::vector<BiasEntry>> bias = {};
  std::vector<Past> pasts = {};

  // Raises where the tensors are no draft with its logits, or do not fit each other. rules_BX holds temperature, top-p,
  // min-p, repetition, presence and frequency; bias is empty, or rows, tokens and values (K); history is empty, or what
  // History is made of, and the rows' slots.
  Choices(const Tensor& logits_BMV, const Tensor& tokens_BN, const Tensor& parents_BN, const Tensor& visible_BMM,
          int64_t depth, const Tensor& rules_BX, const Tensor& top_k_B, const Tensor& seeds_B, const Tensor& positions_B,
          const Tensors& bias, const Tensors& history);

  int64_t guesses() const { return nodes - 1; }
  const int64_t* tokens(int64_t b) const { return tokens_BN.const_data_ptr<int64_t>() + b * guesses(); }
  const int64_t* parents(int64_t b) const { return parents_BN.const_data_ptr<int64_t>() + b * guesses(); }

  // Noise for what is so many tokens behind the root of a row.
  double noise(int64_t b, int64_t level, Stream stream, int64_t index) const {
    return uniform(seeds_B.const_data_ptr<int64_t>()[b], positions_B.const_data_ptr<int64_t>()[b] + level, stream, index);
  }

  // The target's own choice of the token that is so many behind the root of a row.
  Race race(int64_t b, int64_t level) const {
    return {seeds_B.const_data_ptr<int64_t>()[b], positions_B.const_data_ptr<int64_t>()[b] + level, Stream::kTarget};
  }

  // Gives a node's logits to the chooser.
  void take(Chooser& chooser, int64_t b, int64_t node) const;

  // Lets follow(memory, row, path) write the path of every row and return its length and the token behind it. Rows are
  // divided among the threads, or the vocabulary is, where there are fewer rows: Memory, of which every thread that has
  // rows makes its own, is told of both.
  template <class Memory, class Follow>
  Accepted accept(const Follow& follow) const {
    Tensor path_BD = full<int64_t>({batch, depth}, 0);
    Tensor counts_B = empty({batch}, kLong), next_B = empty({batch}, kLong);
    int64_t *paths = path_BD.mutable_data_ptr<int64_t>(), *counts = counts_B.mutable_data_ptr<int64_t>();
    int64_t* next = next_B.mutable_data_ptr<int64_t>();
    const int64_t threads = get_num_threads();
    const auto some = [&](int64_t begin, int64_t end, int64_t helpers) {
      Memory memory(vocabulary, helpers);
      for (int64_t b = begin; b < end; ++b) std::tie(counts[b], next[b]) = follow(memory, b, paths + b * depth);
    };
    if (batch < threads && vocabulary >= kWide)
      some(0, batch, threads);
    else
      parallel_for(0, batch, 1, [&](int64_t begin, int64_t end) { some(begin, end, 1); });
    return {path_BD, counts_B, next_B};
  }

 private:
  static constexpr int64_t kWide = 1 << 16;  // a vocabulary that several threads walk through sooner than one

  // The guesses on the path to a node.
  std::vector<int64_t> path_to(int64_t b, int64_t node) const;
};

}  // namespace draftsmith
