// Checks what a verification is given, and hands it out node by node.

#include "choices.h"

#include <algorithm>

namespace draftsmith {

Choices::Choices(const Tensor& logits, const Tensor& drafted, const Tensor& drafted_parents, const Tensor& visible,
                 int64_t depth, const Tensor& rules_BX, const Tensor& top_k_B, const Tensor& seeds,
                 const Tensor& positions, const Tensors& biases, const Tensors& history)
    : logits_BMV(logits), tokens_BN(drafted.contiguous()), parents_BN(drafted_parents.contiguous()),
      visible_BMM(visible.contiguous()), seeds_B(seeds.contiguous()), positions_B(positions.contiguous()),
      batch(logits.size(0)), nodes(logits.size(1)), depth(depth), vocabulary(logits.size(2)) {
  const std::vector<int64_t> shape_BN{batch, nodes - 1};
  REQUIRE(tokens_BN.sizes() == shape_BN && tokens_BN.scalar_type() == kLong &&
              parents_BN.sizes() == shape_BN && parents_BN.scalar_type() == kLong &&
              visible_BMM.sizes() == Sizes({batch, nodes, nodes}) &&
              visible_BMM.scalar_type() == kBool && vocabulary > 0 && logits_BMV.stride(2) == 1 &&
              (logits_BMV.scalar_type() == kBFloat16 || logits_BMV.scalar_type() == kFloat),
          "draftsmith: logits and tree do not belong to one draft");
  REQUIRE(is_rows(seeds_B, batch) && is_rows(positions_B, batch) && is_rows(top_k_B, batch) &&
              rules_BX.sizes() == Sizes({batch, 6}) && rules_BX.is_contiguous() &&
              rules_BX.scalar_type() == kDouble,
          "draftsmith: these are no rules for ", batch, " rows");
  for (int64_t b = 0; b < batch; ++b) {
    const double* of = rules_BX.const_data_ptr<double>() + b * 6;
    const int64_t k = top_k_B.const_data_ptr<int64_t>()[b];
    // Then quotients of logits neither grow together nor vanish further than `collect` counts with.
    REQUIRE(of[0] == 0 || (of[0] >= 1e-4 && of[0] <= 1e4), "draftsmith: a temperature is 0, or from 0.0001 to 10000");
    REQUIRE(k >= 0 && k <= vocabulary, "draftsmith: there are no ", k, " tokens to keep");
    rules.push_back({of[0], of[1], of[2], static_cast<float>(of[3]), static_cast<float>(of[4]),
                          static_cast<float>(of[5]), k});
  }
  bias.resize(batch), pasts.resize(batch);
  if (!biases.empty()) {
    REQUIRE(biases.size() == 3 && is_rows(biases[0], biases[0].numel()) && is_rows(biases[1], biases[0].numel()) &&
                biases[2].numel() == biases[0].numel() && biases[2].is_contiguous() && biases[2].scalar_type() == kFloat,
            "draftsmith: a bias is made of rows, tokens (int64) and values (fp32)");
    for (int64_t k = 0; k < biases[0].numel(); ++k) {
      const int64_t row = biases[0].const_data_ptr<int64_t>()[k], token = biases[1].const_data_ptr<int64_t>()[k];
      REQUIRE_INDEX(row >= 0 && row < batch && token >= 0 && token < vocabulary, "draftsmith: a bias for row ", row,
                    " and token ", token, " has no place");
      bias[row].push_back({token, biases[2].const_data_ptr<float>()[k]});
    }
  }
  if (!history.empty()) {
    REQUIRE(history.size() == 5, "draftsmith: these tensors are no history");
    const History known(history[0], history[1], history[2], history[3]);
    const Tensor slots_B = history[4].contiguous();
    REQUIRE(known.vocabulary() == vocabulary && is_rows(slots_B, batch), "draftsmith: these tensors are no history");
    for (int64_t b = 0; b < batch; ++b)
      if (rules[b].penalises()) pasts[b] = known.at(slots_B.const_data_ptr<int64_t>()[b]);
    for (int64_t i = 0; i < tokens_BN.numel(); ++i)
      REQUIRE_INDEX(tokens_BN.const_data_ptr<int64_t>()[i] < vocabulary, "draftsmith: there is no token ",
                    tokens_BN.const_data_ptr<int64_t>()[i]);
  }
}

void Choices::take(Chooser& chooser, int64_t b, int64_t node) const {
  const int64_t at = b * logits_BMV.stride(0) + node * logits_BMV.stride(1);
  std::vector<int64_t> path;
  if (rules[b].penalises()) path = path_to(b, node);
  if (logits_BMV.scalar_type() == kFloat)
    chooser.take(logits_BMV.const_data_ptr<float>() + at, rules[b], bias[b], pasts[b], path);
  else
    chooser.take(bits(logits_BMV) + at, rules[b], bias[b], pasts[b], path);
}

std::vector<int64_t> Choices::path_to(int64_t b, int64_t node) const {
  std::vector<int64_t> path;
  const bool* visible = visible_BMM.const_data_ptr<bool>() + (b * nodes + node) * nodes;
  for (int64_t n = 1; n < nodes; ++n)
    if (visible[n]) path.push_back(std::max<int64_t>(tokens(b)[n - 1], 0));
  return path;
}

}  // namespace draftsmith
