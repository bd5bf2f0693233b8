// Chains of a model's own choices, in one parallel region: what a copy of the target in fewer bits drafts, or some of its
// layers.
//
// drafters/models/model_drafter.py says what is computed: a choice is the likeliest token, the first of equals.
//
// Words: B rows, D depth.

#include <limits>

#include "decoder.h"
#include "growth.h"

namespace draftsmith {
namespace {

constexpr Best kNothing{-std::numeric_limits<float>::infinity(), 0};

}  // namespace

Tensor Decoder::guess(const Tensor& roots, const Tensor& cached, const Tensors& keys, const Tensors& values,
                      const std::optional<Tensor>& tables, const std::optional<Tensor>& slots, int64_t depth) {
  REQUIRE(is_whole(roots) && roots.dim() == 1 && depth > 0,
          "draftsmith: roots have to be int64 (B), and a chain has at least one guess");
  const int64_t batch = roots.numel();
  Tensor guesses = empty({batch, depth}, kLong);
  if (batch == 0) return guesses;
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
  std::vector<Best> found(threads * batch);  // by each thread in its share of the scores
  run_team(threads, [&](const Team& team) {
    for (int64_t level = 0; level < depth; ++level) {
      const bf16* states = read(team, pass, b, nullptr);
      Best* mine = found.data() + team.index * batch;
      std::fill_n(mine, batch, kNothing);
      multiply(team, head_, states, shape_.width, batch,
               [&](int64_t r, int64_t n, int64_t count, const float* scores) {
                 float rounded[kChunk];
                 if (kernels().round_row(scores, count, rounded) > mine[r].score)
                   for (int64_t i = 0; i < count; ++i) offer(mine + r, 1, rounded[i], n + i);
               }, b.rooms[team.index], layers_.front().query.begin(team));
      team.barrier();
      if (team.index == 0)
        for (int64_t r = 0; r < batch; ++r) {
          Best choice = kNothing;
          for (int64_t t = 0; t < team.size; ++t) offer(&choice, 1, found[t * batch + r].score, found[t * batch + r].index);
          to[r * depth + level] = pass.tokens[r] = choice.index;
          ++pass.cached[r];
        }
      team.barrier();
    }
  });
  return guesses;
}

}  // namespace draftsmith
