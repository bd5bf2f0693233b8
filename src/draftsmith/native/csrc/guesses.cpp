// Chains of a model's own choices, in one parallel region: what a copy of the target in fewer bits drafts, or some of its
// layers.
//
// drafters/models/model_drafter.py and drafters/grow.py say what is computed: a choice is the likeliest token, the first of
// equals, or one that is drawn.
//
// Words: B rows, D depth, V vocabulary.

#include <limits>

#include "decoder.h"
#include "drawing.h"
#include "growth.h"

namespace draftsmith {
namespace {

constexpr Best kNothing{-std::numeric_limits<float>::infinity(), 0};

}  // namespace

template <class Choose>
void Decoder::follow(const Tensor& guesses, const Tensor& roots, const Tensor& cached, const Tensors& keys,
                     const Tensors& values, const std::optional<Tensor>& tables, const std::optional<Tensor>& slots,
                     const Choose& choose) {
  const int64_t batch = guesses.size(0), depth = guesses.size(1);
  int64_t* to = guesses.mutable_data_ptr<int64_t>();
  for (int64_t b = 0; b < batch; ++b) std::fill_n(to + b * depth, depth, roots.const_data_ptr<int64_t>()[b]);
  // Checked as the chains that they become, of which one node a row is read at a time.
  Pass pass = checked_pass(shape_, guesses, {}, {}, cached, keys, values, tables, slots, {}, {}, {});
  pass.longest += depth, pass.nodes = 1;
  pass.tokens.resize(batch), pass.rows_of.resize(batch), pass.numbers.assign(batch, 0);
  pass.begins.resize(batch + 1);
  for (int64_t b = 0; b <= batch; ++b) pass.begins[b] = b;
  for (int64_t b = 0; b < batch; ++b) pass.rows_of[b] = b, pass.tokens[b] = to[b * depth];
  const std::lock_guard<std::mutex> alone(busy_);
  const int64_t threads = get_num_threads();
  const Buffers b = prepare(pass, threads);
  run_team(threads, [&](const Team& team) {
    for (int64_t level = 0; level < depth; ++level) {
      choose(team, level, read(team, pass, b, nullptr), b.rooms[team.index], to);
      if (team.index == 0)
        for (int64_t r = 0; r < batch; ++r) pass.tokens[r] = to[r * depth + level], ++pass.cached[r];
      team.barrier();
    }
  });
}

Tensor Decoder::guess(const Tensor& roots, const Tensor& cached, const Tensors& keys, const Tensors& values,
                      const std::optional<Tensor>& tables, const std::optional<Tensor>& slots, int64_t depth) {
  REQUIRE(is_whole(roots) && roots.dim() == 1 && depth > 0,
          "draftsmith: roots have to be int64 (B), and a chain has at least one guess");
  const int64_t batch = roots.numel();
  Tensor guesses = empty({batch, depth}, kLong);
  if (batch == 0) return guesses;
  std::vector<Best> found(get_num_threads() * batch);  // by each thread in its share of the scores
  const auto choose = [&](const Team& team, int64_t level, const bf16* states, Quantised& room, int64_t* to) {
    Best* mine = found.data() + team.index * batch;
    std::fill_n(mine, batch, kNothing);
    multiply(team, head_, states, shape_.width, batch,
             [&](int64_t r, int64_t n, int64_t count, const float* scores) {
               float rounded[kChunk];
               if (kernels().round_row(scores, count, rounded) > mine[r].score)
                 for (int64_t i = 0; i < count; ++i) offer(mine + r, 1, rounded[i], n + i);
             }, room, layers_.front().query.begin(team));
    team.barrier();
    if (team.index > 0) return;
    for (int64_t r = 0; r < batch; ++r) {
      Best choice = kNothing;
      for (int64_t t = 0; t < team.size; ++t) offer(&choice, 1, found[t * batch + r].score, found[t * batch + r].index);
      to[r * depth + level] = choice.index;
    }
  };
  follow(guesses, roots, cached, keys, values, tables, slots, choose);
  return guesses;
}

std::tuple<Tensor, Tensor> Decoder::draw(const Tensor& roots, const Tensor& cached, const Tensors& keys,
                                         const Tensors& values, const std::optional<Tensor>& tables,
                                         const std::optional<Tensor>& slots, int64_t depth,
                                         const Tensor& temperature_B, const Tensor& seeds_B, const Tensor& positions_B,
                                         int64_t stream) {
  const int64_t batch = roots.numel(), vocabulary = shape_.vocabulary, stretches = stretches_of(vocabulary);
  REQUIRE(is_whole(roots) && roots.dim() == 1 && depth > 0,
          "draftsmith: roots have to be int64 (B), and a chain has at least one guess");
  REQUIRE(is_whole(seeds_B) && seeds_B.numel() == batch && is_whole(positions_B) && positions_B.numel() == batch &&
              temperature_B.is_contiguous() && temperature_B.scalar_type() == kFloat && temperature_B.numel() == batch,
          "draftsmith: a chain that is drawn takes fp32 temperatures, and int64 seeds and positions, one of each a row");
  // Nobody asks what guesses by the target's own noise were drawn from, so every level has the same memory.
  const bool races = static_cast<Stream>(stream) == Stream::kTarget;
  const int64_t kept = races ? 1 : depth;
  Tensor guesses = empty({batch, depth}, kLong), q_BDV = empty({batch, kept, vocabulary}, kFloat);
  if (batch == 0) return {guesses, q_BDV};
  float* q = q_BDV.mutable_data_ptr<float>();
  const float* temperature = temperature_B.const_data_ptr<float>();
  const int64_t *seed = seeds_B.const_data_ptr<int64_t>(), *position = positions_B.const_data_ptr<int64_t>();
  std::vector<float> highest(get_num_threads() * batch), rough(batch * stretches);
  std::vector<double> sums(batch * stretches);
  const auto choose = [&](const Team& team, int64_t level, const bf16* states, Quantised& room, int64_t* to) {
    const auto shares = [&](int64_t r) {
      return Shares{q + (r * kept + (races ? 0 : level)) * vocabulary, vocabulary, temperature[r],
                    rough.data() + r * stretches, sums.data() + r * stretches};
    };
    float* mine = highest.data() + team.index * batch;
    std::fill_n(mine, batch, kNothing.score);
    multiply(team, head_, states, shape_.width, batch,
             [&](int64_t r, int64_t n, int64_t count, const float* scores) {
               mine[r] = std::max(mine[r], kernels().round_row(scores, count, shares(r).q + n));
             }, room, layers_.front().query.begin(team));
    settle(team, batch, vocabulary, highest.data(), shares);
    const auto [own, end] = team.share(batch);
    for (int64_t r = own; r < end; ++r) {
      int64_t& token = to[r * depth + level];
      const auto noise = [&](int64_t) {
        return uniform(seed[r], position[r] + level, static_cast<Stream>(stream), level);
      };
      if (races)
        token = shares(r).first({seed[r], position[r] + level, Stream::kTarget});
      else
        shares(r).draw(1, noise, &token);
    }
    team.barrier();
  };
  follow(guesses, roots, cached, keys, values, tables, slots, choose);
  return {guesses, q_BDV};
}

}  // namespace draftsmith
