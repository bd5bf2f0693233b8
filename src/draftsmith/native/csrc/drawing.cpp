// Guesses of any drafter, drawn from the scores of its nodes.
//
// Draws in drafters/draws.py says what is computed. B rows, F nodes a row, R = B · F, C children of a node, V vocabulary.

#include "drawing.h"

#include "choices.h"
#include "operators.h"

namespace draftsmith {
namespace {

// Copies scores, and returns the largest, NaN left out.
float copy_row(const float* scores, int64_t count, float* to) {
  float most = -kInfinity;
  for (int64_t i = 0; i < count; ++i) to[i] = scores[i], most = scores[i] > most ? scores[i] : most;
  return most;
}

// Draws the children of every node, and returns their tokens (R, C). q_BMV, fp32, gets what they were drawn from: of node f
// of a row in its line `line` + f. The noise of a child has its slot as index: `slot` for the first one of a row. By the
// target's own noise a node has one child, the token that arrives first.
Tensor draw(const Tensor& scores, const Tensor& temperatures, const Tensor& seeds, const Tensor& positions,
            int64_t stream, int64_t children, int64_t slot, const Tensor& q_BMV, int64_t line) {
  const Tensor scores_RV = scores.contiguous(), temperature_B = temperatures.contiguous();
  const Tensor seeds_B = seeds.contiguous(), positions_B = positions.contiguous();
  const int64_t batch = seeds_B.numel();
  REQUIRE(scores_RV.dim() == 2 && scores_RV.scalar_type() == kFloat && batch > 0 && scores_RV.size(0) % batch == 0 &&
              scores_RV.size(1) > 0 && is_rows(seeds_B, batch) && is_rows(positions_B, batch) &&
              temperature_B.scalar_type() == kFloat && temperature_B.numel() == batch && children > 0,
          "draftsmith: scores have to be fp32 (R, V), temperatures fp32, seeds and positions int64, one of each a row");
  const int64_t rows = scores_RV.size(0), vocabulary = scores_RV.size(1), frontier = rows / batch;
  REQUIRE(q_BMV.dim() == 3 && q_BMV.size(0) == batch && q_BMV.size(2) == vocabulary && q_BMV.is_contiguous() &&
              q_BMV.scalar_type() == kFloat && line >= 0 && line + frontier <= q_BMV.size(1),
          "draftsmith: there is no room for what the guesses are drawn from");
  REQUIRE(static_cast<Stream>(stream) != Stream::kTarget || children == 1,
          "draftsmith: by the target's own noise there is one guess behind a node");
  Tensor tokens_RC = empty({rows, children}, kLong);
  int64_t* to = tokens_RC.mutable_data_ptr<int64_t>();
  float* q = q_BMV.mutable_data_ptr<float>();
  const float *from = scores_RV.const_data_ptr<float>(), *temperature = temperature_B.const_data_ptr<float>();
  const int64_t *seed = seeds_B.const_data_ptr<int64_t>(), *position = positions_B.const_data_ptr<int64_t>();
  const int64_t lines = q_BMV.size(1), stretches = stretches_of(vocabulary);
  // Few nodes are shared out by stretches, many one by one.
  const int64_t threads = get_num_threads();
  std::vector<float> rough(rows * stretches), highest(threads * rows);
  std::vector<double> sums(rows * stretches);
  const auto shares = [&](int64_t r) {
    const int64_t b = r / frontier, node = line + r % frontier;
    return Shares{q + (b * lines + node) * vocabulary, vocabulary, temperature[b], rough.data() + r * stretches,
                  sums.data() + r * stretches};
  };
  run_team(threads, [&](const Team& team) {
    const auto [first, last] = team.share(stretches);
    const int64_t begin = first * kStretch, count = std::min(last * kStretch, vocabulary) - begin;
    for (int64_t r = 0; r < rows; ++r)
      highest[team.index * rows + r] =
          copy_row(from + r * vocabulary + begin, count, shares(r).q + begin);
    settle(team, rows, vocabulary, highest.data(), shares);
    const auto [own, end] = team.share(rows);
    for (int64_t r = own; r < end; ++r) {
      const int64_t b = r / frontier, index = slot + r % frontier * children;
      if (static_cast<Stream>(stream) == Stream::kTarget) {
        to[r] = shares(r).first({seed[b], position[b], Stream::kTarget});
        continue;
      }
      shares(r).draw(children, [&](int64_t k) {
        return uniform(seed[b], position[b], static_cast<Stream>(stream), index + k);
      }, to + r * children);
    }
  });
  return tokens_RC;
}

// Finds the children of every node in the order in which the target's own noise lets them arrive, see Shares::arrive, and
// returns logarithms of probabilities (R, C), fp32, and tokens (R, C).
std::tuple<Tensor, Tensor> arrive(const Tensor& scores, const Tensor& temperatures, const Tensor& seeds,
                                  const Tensor& positions, int64_t children) {
  const Tensor scores_RV = scores.contiguous(), temperature_B = temperatures.contiguous();
  const Tensor seeds_B = seeds.contiguous(), positions_B = positions.contiguous();
  const int64_t batch = seeds_B.numel();
  REQUIRE(scores_RV.dim() == 2 && scores_RV.scalar_type() == kFloat && batch > 0 && scores_RV.size(0) % batch == 0 &&
              is_rows(seeds_B, batch) && is_rows(positions_B, batch) && temperature_B.scalar_type() == kFloat &&
              temperature_B.numel() == batch,
          "draftsmith: scores have to be fp32 (R, V), temperatures fp32, seeds and positions int64, one of each a row");
  REQUIRE(children > 0 && children <= scores_RV.size(1), "draftsmith: a node cannot have ", children, " children");
  const int64_t rows = scores_RV.size(0), vocabulary = scores_RV.size(1), frontier = rows / batch;
  const int64_t stretches = stretches_of(vocabulary), room = std::max(children, kCompared);
  Tensor scores_RC = empty({rows, children}, kFloat), tokens_RC = empty({rows, children}, kLong);
  float* to = scores_RC.mutable_data_ptr<float>();
  int64_t* tokens = tokens_RC.mutable_data_ptr<int64_t>();
  const float *from = scores_RV.const_data_ptr<float>(), *temperature = temperature_B.const_data_ptr<float>();
  const int64_t *seed = seeds_B.const_data_ptr<int64_t>(), *position = positions_B.const_data_ptr<int64_t>();
  const int64_t threads = get_num_threads();
  const Tensor q_RV = empty({rows, vocabulary}, kFloat);
  float* q = q_RV.mutable_data_ptr<float>();
  std::vector<float> rough(rows * stretches), highest(threads * rows);
  std::vector<double> sums(rows * stretches), times(threads * room);
  std::vector<int64_t> arrived(threads * room);
  const auto shares = [&](int64_t r) {
    return Shares{q + r * vocabulary, vocabulary, temperature[r / frontier], rough.data() + r * stretches,
                  sums.data() + r * stretches};
  };
  run_team(threads, [&](const Team& team) {
    const auto [first, last] = team.share(stretches);
    const int64_t begin = first * kStretch, count = std::min(last * kStretch, vocabulary) - begin;
    for (int64_t r = 0; r < rows; ++r)
      highest[team.index * rows + r] = copy_row(from + r * vocabulary + begin, count, shares(r).q + begin);
    settle(team, rows, vocabulary, highest.data(), shares);
    const auto [own, end] = team.share(rows);
    for (int64_t r = own; r < end; ++r)
      shares(r).arrive({seed[r / frontier], position[r / frontier], Stream::kTarget}, nullptr, children,
                       {times.data() + team.index * room, arrived.data() + team.index * room, 0}, to + r * children,
                       tokens + r * children);
  });
  return {scores_RC, tokens_RC};
}

}  // namespace

void define_drawing(Library& library) {
  library.def<draw>(
      "draw(Tensor scores_RV, Tensor temperature_B, Tensor seeds_B, Tensor positions_B, int stream, int children,"
      " int slot, Tensor(a!) q_BMV, int line) -> Tensor");
  library.def<arrive>(
      "arrive(Tensor scores_RV, Tensor temperature_B, Tensor seeds_B, Tensor positions_B, int children)"
      " -> (Tensor, Tensor)");
}

}  // namespace draftsmith
