// Chains of a model's own choices, in one parallel region: what a copy of the target in fewer bits drafts, or some of its
// layers.
//
// drafters/models/model_drafter.py, quantised_self.py and drafters/grow.py say what is computed: a choice is the likeliest
// token, the first of equals, or one that is drawn. A chain ends where it becomes unlikely that the target chooses the same.
//
// Words: B rows, D depth, V vocabulary.

#include <cmath>
#include <limits>

#include "decoder.h"
#include "drawing.h"
#include "growth.h"

namespace draftsmith {
namespace {

constexpr Best kNothing{-std::numeric_limits<float>::infinity(), 0};
constexpr int64_t kNone = -1;      // in the place of a guess: there is none
constexpr double kWorthIt = 0.15;  // the least chance of a token beside a chain
constexpr double kSpreads = 4;     // a choice that leads by so many times the spread is certain
constexpr double kFarthest = 69;   // a share whose logarithm is further below that of the largest counts as none

// The best two scores of each row that each thread has seen, in any order.
class BestTwo {
 public:
  BestTwo(int64_t threads, int64_t batch) : batch_(batch), found_(2 * threads * batch, kNothing) {}

  void begin(const Team& team) { std::fill_n(of(team.index, 0), 2 * batch_, kNothing); }

  // Takes in scores from `first` on, rounded, of which `most` is the largest.
  void offer_all(const Team& team, int64_t row, const float* scores, int64_t count, float most, int64_t first) {
    Best* mine = of(team.index, row);
    if (!(most >= mine[1].score)) return;
    for (int64_t i = 0; i < count; ++i) offer(mine, {scores[i], first + i});
  }

  // Returns the best two of all threads.
  std::pair<Best, Best> best(const Team& team, int64_t row) const {
    Best both[2] = {kNothing, kNothing};
    for (int64_t t = 0; t < team.size; ++t)
      for (int64_t c = 0; c < 2; ++c) offer(both, found_[2 * (t * batch_ + row) + c]);
    return {both[0], both[1]};
  }

 private:
  // Of equals the first one leads, whichever is offered first.
  static bool leads(const Best& one, const Best& other) {
    return one.score > other.score || (one.score == other.score && one.index < other.index);
  }
  static void offer(Best* two, const Best& one) {
    if (leads(one, two[0]))
      two[1] = two[0], two[0] = one;
    else if (leads(one, two[1]))
      two[1] = one;
  }
  Best* of(int64_t thread, int64_t row) { return found_.data() + 2 * (thread * batch_ + row); }

  int64_t batch_;
  std::vector<Best> found_;
};

}  // namespace

double Bound::chance(double lead) const { return spread > 0 ? 0.5 * std::erfc(-lead / (spread * std::sqrt(2.0))) : 1; }

template <class Choose>
void Decoder::follow(const Tensor& guesses, const Tensor& others, const Tensor& roots, const Tensor& cached,
                     const Tensors& keys, const Tensors& values, const std::optional<Tensor>& tables,
                     const std::optional<Tensor>& slots, const Bound& bound, const Choose& choose) {
  const int64_t batch = guesses.size(0), depth = guesses.size(1);
  int64_t *to = guesses.mutable_data_ptr<int64_t>(), *beside = others.mutable_data_ptr<int64_t>();
  for (int64_t b = 0; b < batch; ++b) std::fill_n(to + b * depth, depth, roots.const_data_ptr<int64_t>()[b]);
  // Checked as the chains that they become, of which one node a row is read at a time.
  Pass pass = checked_pass(shape_, guesses, {}, {}, cached, keys, values, tables, slots, {}, {}, {});
  pass.longest += depth, pass.nodes = 1;
  pass.tokens.resize(batch), pass.rows_of.resize(batch), pass.numbers.assign(batch, 0);
  pass.begins.resize(batch + 1);
  for (int64_t b = 0; b <= batch; ++b) pass.begins[b] = b;
  for (int64_t b = 0; b < batch; ++b) pass.rows_of[b] = b, pass.tokens[b] = to[b * depth];
  std::fill_n(to, batch * depth, kNone), std::fill_n(beside, batch * depth, kNone);
  std::vector<Chosen> chosen(batch);
  std::vector<double> chances(batch, 1);  // that the target has chosen the same so far
  const std::lock_guard<std::mutex> alone(busy_);
  const int64_t threads = get_num_threads();
  const Buffers b = prepare(pass, threads);
  bool goes_on = true;
  run_team(threads, [&](const Team& team) {
    for (int64_t level = 0; level < depth && goes_on; ++level) {
      choose(team, level, b, read(team, pass, b, nullptr), chosen.data());
      if (team.index == 0) {
        goes_on = false;
        for (int64_t r = 0; r < batch; ++r) {
          const auto [token, other, lead] = chosen[r];
          // A row that has ended goes along with the others: a row more costs little.
          pass.tokens[r] = token, ++pass.cached[r];
          if (!(chances[r] >= bound.least)) continue;
          to[r * depth + level] = token;
          if (bound.least > 0) {
            const double chance = bound.chance(lead);
            if (chances[r] * (1 - chance) >= kWorthIt) beside[r * depth + level] = other;
            chances[r] *= chance;
          }
          goes_on |= chances[r] >= bound.least;
        }
      }
      team.barrier();
    }
  });
}

std::tuple<Tensor, Tensor> Decoder::guess(const Tensor& roots, const Tensor& cached, const Tensors& keys,
                                          const Tensors& values, const std::optional<Tensor>& tables,
                                          const std::optional<Tensor>& slots, int64_t depth, const Bound& bound) {
  REQUIRE(is_whole(roots) && roots.dim() == 1 && depth > 0,
          "draftsmith: roots have to be int64 (B), and a chain has at least one guess");
  const int64_t batch = roots.numel();
  Tensor guesses = empty({batch, depth}, kLong), others = empty({batch, depth}, kLong);
  if (batch == 0) return {guesses, others};
  BestTwo found(get_num_threads(), batch);
  const auto choose = [&](const Team& team, int64_t, const Buffers& b, const bf16* states, Chosen* chosen) {
    found.begin(team);
    score(team, b, states, batch, [&](int64_t r, int64_t n, int64_t count, const float* scores) {
      float rounded[kChunk];
      const float most = kernels().round_row(scores, count, rounded);
      found.offer_all(team, r, rounded, count, most, n);
    });
    team.barrier();
    if (team.index > 0) return;
    for (int64_t r = 0; r < batch; ++r) {
      const auto [first, second] = found.best(team, r);
      chosen[r] = {first.index, second.index, first.score - second.score};
    }
  };
  follow(guesses, others, roots, cached, keys, values, tables, slots, bound, choose);
  return {guesses, others};
}

std::tuple<Tensor, Tensor, Tensor> Decoder::draw(
    const Tensor& roots, const Tensor& cached, const Tensors& keys, const Tensors& values,
    const std::optional<Tensor>& tables, const std::optional<Tensor>& slots, int64_t depth, const Tensor& temperature_B,
    const Tensor& seeds_B, const Tensor& positions_B, int64_t stream, const Bound& bound) {
  const int64_t batch = roots.numel(), vocabulary = shape_.vocabulary, stretches = stretches_of(vocabulary);
  REQUIRE(is_whole(roots) && roots.dim() == 1 && depth > 0,
          "draftsmith: roots have to be int64 (B), and a chain has at least one guess");
  REQUIRE(is_whole(seeds_B) && seeds_B.numel() == batch && is_whole(positions_B) && positions_B.numel() == batch &&
              temperature_B.is_contiguous() && temperature_B.scalar_type() == kFloat && temperature_B.numel() == batch,
          "draftsmith: a chain that is drawn takes fp32 temperatures, and int64 seeds and positions, one of each a row");
  // Nobody asks what guesses by the target's own noise were drawn from, so every level has the same memory.
  const bool races = static_cast<Stream>(stream) == Stream::kTarget;
  // Whether there is a guess must not say what other guesses were drawn.
  REQUIRE(races || bound.least == 0, "draftsmith: only chains by the target's own noise may end early");
  const int64_t kept = races ? 1 : depth;
  Tensor guesses = empty({batch, depth}, kLong), others = empty({batch, depth}, kLong);
  Tensor q_BDV = empty({batch, kept, vocabulary}, kFloat);
  if (batch == 0) return {guesses, others, q_BDV};
  float* q = q_BDV.mutable_data_ptr<float>();
  const float* temperature = temperature_B.const_data_ptr<float>();
  const int64_t *seed = seeds_B.const_data_ptr<int64_t>(), *position = positions_B.const_data_ptr<int64_t>();
  std::vector<float> highest(get_num_threads() * batch), rough(batch * stretches);
  std::vector<double> sums(batch * stretches);
  BestTwo found(get_num_threads(), batch);  // of rows without noise, if they may end early
  const auto choose = [&](const Team& team, int64_t level, const Buffers& b, const bf16* states, Chosen* chosen) {
    const auto shares = [&](int64_t r) {
      return Shares{q + (r * kept + (races ? 0 : level)) * vocabulary, vocabulary, temperature[r],
                    rough.data() + r * stretches, sums.data() + r * stretches};
    };
    float* mine = highest.data() + team.index * batch;
    std::fill_n(mine, batch, kNothing.score);
    found.begin(team);
    score(team, b, states, batch, [&](int64_t r, int64_t n, int64_t count, const float* scores) {
      float* rounded = shares(r).q + n;
      const float most = kernels().round_row(scores, count, rounded);
      mine[r] = std::max(mine[r], most);
      if (bound.least > 0 && temperature[r] <= kNoNoise) found.offer_all(team, r, rounded, count, most, n);
    });
    settle(team, batch, vocabulary, highest.data(), shares);
    const auto [own, end] = team.share(batch);
    for (int64_t r = own; r < end; ++r) {
      const auto noise = [&](int64_t) {
        return uniform(seed[r], position[r] + level, static_cast<Stream>(stream), level);
      };
      chosen[r] = {};
      const Race race(seed[r], position[r] + level, Stream::kTarget);
      if (!races) {
        shares(r).draw(1, noise, &chosen[r].token);
      } else if (bound.least == 0) {
        chosen[r].token = shares(r).first(race);
      } else if (temperature[r] <= kNoNoise) {
        const auto [first, second] = found.best(team, r);
        chosen[r] = {first.index, second.index, first.score - second.score};
      } else {
        const double heat = temperature[r];
        const First two = shares(r).first_two(race, std::exp(std::min(kSpreads * bound.spread / heat, kFarthest)));
        // The other token would have arrived first if its score, or that of the first, had been wrong by so much.
        const bool leads = two.next > two.time * two.near;
        chosen[r] = {two.token, two.next_token, leads ? kInfinity : heat * std::log(two.next / two.time)};
      }
    }
    team.barrier();
  };
  follow(guesses, others, roots, cached, keys, values, tables, slots, bound, choose);
  return {guesses, others, q_BDV};
}

}  // namespace draftsmith
