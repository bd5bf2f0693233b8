// The token that one row of logits gives under the rules of a request, without sorting or copying a vocabulary.
//
// verify/distribution.py says what is computed, and in which order: bias, penalties, temperature, top-k, top-p, min-p.
// What is summed in another order than there may differ in its last bits. So no comparison is trusted that such bits
// could turn: it is repeated with the bits of PyTorch's own operations, or the draw is left to PyTorch (kUndecided).
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <mutex>
#include <numeric>
#include <vector>

#include "packed.h"
#include "race.h"
#include "rules.h"
#include "scores.h"
#include "sums.h"

namespace draftsmith {

// The memory for one node at a time, and what is done with its logits. Several `threads` share the vocabulary, which is
// for whoever has fewer rows than threads.
class Chooser {
 public:
  Chooser(int64_t vocabulary, int64_t threads)
      : vocabulary_(vocabulary), stretches_(stretches_of(vocabulary)), threads_(threads), maxima_(stretches_ * kParts),
        peaks_(stretches_), sums_(stretches_), sums_of_stretches_(stretches_) {}

  // Takes the logits of a node, and changes them by the rules of its row; `path` are the guesses on its path.
  template <class T>
  void take(const T* logits, const Rules& rules, const std::vector<BiasEntry>& bias, const Past& past,
            const std::vector<int64_t>& path) {
    const bool penalises = rules.penalises() && past.counts != nullptr;
    x_ = Scores(logits);
    if (penalises || !bias.empty()) {
      shaped_.resize(vocabulary_);
      over_stretches([&](int64_t, int64_t begin, int64_t end) {
        if constexpr (std::is_same_v<T, float>)
          std::copy(logits + begin, logits + end, shaped_.data() + begin);
        else
          kernels().widen_row(logits + begin, end - begin, shaped_.data() + begin);
      });
      for (const BiasEntry& entry : bias) shaped_[entry.token] += entry.value;
      if (penalises) penalise(rules, past, path);
      x_ = Scores(static_cast<const float*>(shaped_.data()));
    }
    std::atomic<float> highest{-kInfinity};
    over_stretches([&](int64_t, int64_t begin, int64_t end) {
      float own = -kInfinity;
      x_.by_stretches(begin, end, [&](int64_t stretch, int64_t, int64_t count, const float* x) {
        const float most = kernels().maxima(x, count, maxima_.data() + stretch * kParts);
        own = most > own || most != most ? most : own;  // NaN, once it is there, stays: nothing is larger
      });
      float most = highest;
      while ((own > most || own != own) && !highest.compare_exchange_weak(most, own)) continue;
    });
    highest_ = highest;
  }

  // Divides the vocabulary by whole stretches among the threads: work(first stretch, first token, end of the tokens).
  template <class Work>
  void over_stretches(const Work& work) const {
    if (threads_ == 1) return work(0, 0, vocabulary_);
    run_team(threads_, [&](const Team& team) {
      const auto [first, last] = team.share(stretches_);
      if (first < last) work(first, first * kStretch, std::min(last * kStretch, vocabulary_));
    });
  }

  // The largest logit, the first of equals; NaN counts as the largest.
  int64_t best() const {
    int64_t token = 0;
    if (highest_ != highest_) {
      while (x_[token] == x_[token]) ++token;
      return token;
    }
    const int64_t part = std::find(maxima_.begin(), maxima_.end(), highest_) - maxima_.begin();
    for (token = part / kParts * kStretch; x_[token] != highest_;) ++token;
    return token;
  }

  // Whether any token has a probability.
  bool is_readable(const Rules& rules) const { return std::isfinite(highest_ / static_cast<float>(rules.temperature)); }

  // The token that arrives first by the rules, or kUndecided.
  int64_t draw(const Rules& rules, const Race& race) {
    // As in verify/noise.py, where nothing has a weight.
    if (!is_readable(rules)) return vocabulary_ - 1;
    if (rules.filters()) return weigh(rules) ? first_of(race) : kUndecided;
    begin_weighing(rules);
    const int64_t token = first_of_all(race);
    if (token != kUndecided) return token;
    weigh_exactly();
    return first_of(race);
  }

  // Finds what every token weighs that the rules leave, if not exactly, then within `doubt`. Returns false where last bits
  // decide which tokens these are. The logits have to be readable.
  bool weigh(const Rules& rules) {
    begin_weighing(rules);
    if (is_few_) return weigh_few(rules);
    weigh_all();
    total_ = std::accumulate(sums_.begin(), sums_.end(), 0.0);
    return true;
  }

  // Does so for all tokens with PyTorch's own exponentials, summed in float64.
  void weigh_exactly() {
    weights_.resize(vocabulary_);
    over_stretches([&](int64_t, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) weights_[i] = x_[i] / temperature_ - top_;
    });
    call("aten::exp_", "", over(weights_));
    over_stretches([&](int64_t stretch, int64_t begin, int64_t end) {
      kernels().add_up(weights_.data() + begin, end - begin, sums_of_stretches_.data() + stretch);
    });
    total_ = std::accumulate(sums_of_stretches_.begin(), sums_of_stretches_.end(), 0.0);
    is_exact_ = true;
  }

  // The token that arrives first by the weights that are known now, or kUndecided.
  int64_t first_of(const Race& race) const {
    First first;
    if (is_few_) {
      for (size_t i = 0; i < some_.size(); ++i) {
        const double weight = order_[i];
        if (weight > 0 && race.soonest(some_[i].token) <= first.time * 1.001 * weight)
          first.offer(race.time(some_[i].token) / weight, some_[i].token);
      }
    } else {
      look(race, reach_of_best(race), first);
    }
    return first.is_sure(is_exact_ ? 1e-12 : kRough) ? first.token : kUndecided;
  }

  // How far the sum of some tokens' shares can lie from what PyTorch finds.
  double doubt() const { return is_exact_ ? exactly() : 4 * kRough; }
  bool is_exact() const { return is_exact_; }
  // What all weigh together.
  double total() const { return total_; }
  // Whether filters have left these tokens alone, in increasing order.
  bool is_few() const { return is_few_; }
  const std::vector<Candidate>& few() const { return some_; }
  // What each of the few weighs, or each of all tokens.
  const std::vector<float>& weights() const { return is_few_ ? order_ : weights_; }
  double weight_of(int64_t token) const {
    if (!is_few_) return weights_[token];
    const auto place = std::lower_bound(some_.begin(), some_.end(), token,
                                        [](const Candidate& some, int64_t one) { return some.token < one; });
    return place != some_.end() && place->token == token ? order_[place - some_.begin()] : 0;
  }

 private:
  void begin_weighing(const Rules& rules) {
    temperature_ = static_cast<float>(rules.temperature);
    top_ = highest_ / temperature_;
    is_few_ = is_exact_ = rules.filters();
  }

  // The same as `first_of` after `weigh`, of all tokens, but most of them are never weighed: no token of a stretch arrives
  // sooner than it would if it weighed as much as the heaviest one there.
  int64_t first_of_all(const Race& race) {
    find_peaks();
    const double reach = reach_of_best(race);
    First first;
    std::mutex alone;
    over_stretches([&](int64_t stretch, int64_t begin, int64_t end) {
      First own;
      alignas(64) float weights[kStretch];
      for (; begin < end; ++stretch, begin += kStretch) {
        const int64_t count = std::min(kStretch, end - begin);
        const double most = weight_by_score(peaks_[stretch]), early = most * std::min(reach, own.time * own.near);
        if (early < Race::kSoonest / 2) continue;
        if (early < kFewEarly) {
          own.look_at_few(race, begin, count, most, reach, [&](int64_t token) { return weight_by_score(x_[token]); });
          continue;
        }
        float sum;  // which nobody asks for
        x_.by_stretches(begin, begin + count, [&](int64_t, int64_t, int64_t, const float* x) {
          kernels().weigh(x, count, temperature_, top_, weights, &sum);
        });
        own.look_at_stretch(race, weights, begin, count, reach);
      }
      const std::lock_guard<std::mutex> guard(alone);
      first.take(own);
    });
    return first.is_sure(kRough) ? first.token : kUndecided;
  }

  // The best token weighs one, so nobody who arrives later than it does, with some room for errors, is the first.
  double reach_of_best(const Race& race) const { return race.time(best()) * First{}.near; }

  double weight_by_score(float score) const { return std::exp(static_cast<double>(score / temperature_ - top_)); }

  void look(const Race& race, double reach, First& first) const {
    std::mutex alone;
    over_stretches([&](int64_t, int64_t begin, int64_t end) {
      First own;
      own.look(race, weights_.data(), begin, end, reach);
      const std::lock_guard<std::mutex> guard(alone);
      first.take(own);
    });
  }

  void penalise(const Rules& rules, const Past& past, const std::vector<int64_t>& path) {
    const auto change = [&](int64_t token, int32_t count) {
      float x = shaped_[token];
      x = x > 0 ? x / rules.repetition : x * rules.repetition;
      x -= rules.frequency * static_cast<float>(count);
      shaped_[token] = x - rules.presence * (count > 0 ? 1.0f : 0.0f);
    };
    const auto on_path = [&](int64_t token) { return std::count(path.begin(), path.end(), token); };
    for (int64_t i = 0; i < past.seen_count; ++i)
      change(past.seen[i], static_cast<int32_t>(past.counts[past.seen[i]] + on_path(past.seen[i])));
    for (size_t i = 0; i < path.size(); ++i) {
      const int64_t token = path[i];
      const bool known = past.counts[token] > 0 || past.prompted[token];
      if (!known && std::find(path.begin(), path.begin() + i, token) == path.begin() + i)
        change(token, static_cast<int32_t>(on_path(token)));
    }
  }

  void weigh_all() {
    weights_.resize(vocabulary_);
    over_stretches([&](int64_t, int64_t begin, int64_t end) {
      x_.by_stretches(begin, end, [&](int64_t stretch, int64_t from, int64_t count, const float* x) {
        kernels().weigh(x, count, temperature_, top_, weights_.data() + from, sums_.data() + stretch);
      });
    });
  }

  // How far two sums of all weights in float64, in any order, can lie apart, as a part of the sum; at least 1e-13.
  double exactly() const { return std::max(1e-13, static_cast<double>(vocabulary_) * 0x1p-51); }

  // The largest logit of every stretch.
  void find_peaks() {
    for (int64_t s = 0; s < stretches_; ++s) {
      std::array<float, 4> most;
      const float* of = maxima_.data() + s * kParts;
      std::copy_n(of, most.size(), most.begin());
      for (int64_t part = 4; part < kParts; part += 4)
        for (int64_t l = 0; l < 4; ++l) most[l] = of[part + l] > most[l] ? of[part + l] : most[l];
      peaks_[s] = std::max(std::max(most[0], most[1]), std::max(most[2], most[3]));
    }
  }

  // All tokens whose logit is `bound` or more, and some a little below it, in any order; returns the true bound.
  float collect(float bound) {
    some_.clear();
    bound -= std::fabs(bound) * 1e-6f + 1e-30f;
    for (int64_t s = 0; s < stretches_; ++s) {
      if (!(peaks_[s] >= bound)) continue;
      const int64_t first = s * kStretch, last = std::min(first + kStretch, vocabulary_);
      for (int64_t part = 0; part < kParts; ++part)
        if (maxima_[s * kParts + part] >= bound)
          for (int64_t i = first + part; i < last; i += kParts)
            if (x_[i] >= bound) some_.push_back({x_[i] / temperature_, static_cast<int32_t>(i)});
    }
    return bound;
  }

  void keep_top_k(int64_t k) {
    // The k-th largest of the maxima, of stretches or of their parts, is no larger than the k-th largest logit.
    float bound = -kInfinity;
    order_.clear();
    if (2 * k <= stretches_)
      order_ = peaks_;
    else if (k <= static_cast<int64_t>(maxima_.size()))
      order_ = maxima_;
    if (!order_.empty()) {
      std::nth_element(order_.begin(), order_.begin() + (k - 1), order_.end(), std::greater<float>());
      bound = order_[k - 1];
    }
    collect(bound);
    std::nth_element(some_.begin(), some_.begin() + (k - 1), some_.end(),
                     [](const Candidate& a, const Candidate& b) { return a.score > b.score; });
    const float last = some_[k - 1].score;
    some_.erase(std::remove_if(some_.begin(), some_.end(), [&](const Candidate& c) { return c.score < last; }),
                some_.end());
    is_all_ = true;
  }

  // The sum of the candidates' weights, by their places in some_weights_.
  double weigh_some() {
    some_weights_.resize(some_.size());
    for (size_t i = 0; i < some_.size(); ++i)
      some_weights_[i] = is_all_ ? std::exp(static_cast<double>(some_[i].score - top_)) : weights_[some_[i].token];
    return std::accumulate(some_weights_.begin(), some_weights_.end(), 0.0);
  }

  // Collects more than what top-p keeps of all tokens, first those that it is sure to keep; returns the sum of all
  // weights, and the number of those in `sure`.
  double collect_top_p(double rest, size_t& sure) {
    weigh_all();
    const double all = std::accumulate(sums_.begin(), sums_.end(), 0.0), slack = rest * 1e-3 + 4 * kRough;
    float surely = kInfinity;
    for (const float reach : {0.5f, 1.0f, 1.5f, 2.0f, 2.5f, 3.0f, 3.5f, 4.0f, 4.5f, 5.0f, 6.0f, 7.0f, 8.0f, 10.0f, 13.0f,
                              16.0f, 20.0f, kInfinity}) {
      const float bound = collect(highest_ - reach * temperature_);
      const double left = (all - weigh_some()) / all;
      if (left < rest - slack) break;
      if (left > rest + slack) surely = bound;
    }
    const auto end = std::partition(some_.begin(), some_.end(), [&](const Candidate& c) { return x_[c.token] >= surely; });
    sure = static_cast<size_t>(end - some_.begin());
    weigh_some();
    return all;
  }

  // Keeps what top-p keeps of the candidates, of which the weights are known and the first ones are sure to stay, and of
  // all others that are left by `all`.
  void keep_top_p(float rest, double all, size_t sure) {
    const size_t count = some_.size();
    by_weight_.resize(count);
    for (size_t i = 0; i < count; ++i) by_weight_[i] = static_cast<int32_t>(i);
    // Among equals, the first by index is dropped first.
    std::sort(by_weight_.begin() + static_cast<int64_t>(sure), by_weight_.end(), [this](int32_t a, int32_t b) {
      return some_[a].score != some_[b].score ? some_[a].score > some_[b].score : some_[a].token > some_[b].token;
    });
    // PyTorch sums fp32 numbers in lanes in increasing order. No partial sum errs by more than half its last bit, so that
    // the error of a sum is bounded by what its tokens weigh, each times its rank.
    double mass = 0, above = 0, ranked = 0;
    for (size_t j = 0; j < count; ++j) {
      const double weight = some_weights_[by_weight_[j]];
      mass += weight, above += j < sure ? weight : 0;
      ranked += weight * static_cast<double>(std::max(j + 1, sure));
    }
    ranked += std::max(0.0, all - mass) * static_cast<double>(vocabulary_);
    const double doubt = 2 * kRough + rest * 0x1p-24 * (ranked / all / static_cast<double>(pytorch_lanes()) + 32);
    size_t kept = sure;
    for (; kept < count; ++kept) {
      const double below = (all - above) / all;
      if (kept > 0 && std::fabs(below - rest) <= doubt) {
        kept = exactly_kept(rest);
        break;
      }
      if (kept > 0 && below < rest) break;
      above += some_weights_[by_weight_[kept]];
    }
    kept = std::min(kept, count);
    kept_.resize(kept);
    for (size_t j = 0; j < kept; ++j) kept_[j] = some_[by_weight_[j]];
    std::swap(some_, kept_);
    is_all_ = true;
  }

  static constexpr int64_t kLast = -1;  // dimension
  static constexpr std::optional<int64_t> kSameType = std::nullopt;

  static Tensor softmax(const Tensor& scores_V) { return call("aten::softmax", "int", scores_V, kLast, kSameType); }

  static float largest(const Tensor& values_V) {
    const float* values = values_V.const_data_ptr<float>();
    return *std::max_element(values, values + values_V.numel());
  }

  // The scores of all tokens that no filter has dropped so far, and minus infinity in the place of others.
  Tensor scores() const {
    Tensor scores_V = full<float>({vocabulary_}, -kInfinity);
    float* to = scores_V.mutable_data_ptr<float>();
    if (is_all_)
      for (const Candidate& candidate : some_) to[candidate.token] = candidate.score;
    else
      for (int64_t i = 0; i < vocabulary_; ++i) to[i] = x_[i] / temperature_;
    return scores_V;
  }

  // How many tokens top-p keeps, by PyTorch's own bits.
  size_t exactly_kept(float rest) {
    Tensor ascending_V = scores();
    sort(ascending_V.mutable_data_ptr<float>());
    const Tensor below_V = call("aten::cumsum", "", softmax(ascending_V), kLast, kSameType);
    const float* below = below_V.const_data_ptr<float>();
    const int64_t dropped = std::upper_bound(below, below + vocabulary_ - 1, rest) - below;
    return static_cast<size_t>(vocabulary_ - dropped);
  }

  // Sorts as many numbers as there are tokens, none of them NaN, by eleven bits after the other.
  void sort(float* values) {
    constexpr int kBits = 11, kRounds = 3;
    constexpr uint32_t kSign = 0x80000000u;
    std::vector<uint32_t> from(vocabulary_), to(vocabulary_);
    std::array<std::array<int64_t, 1 << kBits>, kRounds> places{};
    const auto digit = [](uint32_t key, int round) { return (key >> (round * kBits)) & ((1u << kBits) - 1); };
    for (int64_t i = 0; i < vocabulary_; ++i) {
      const uint32_t word = std::bit_cast<uint32_t>(values[i]);
      from[i] = word & kSign ? ~word : word | kSign;
      for (int round = 0; round < kRounds; ++round) ++places[round][digit(from[i], round)];
    }
    for (int round = 0; round < kRounds; ++round) {
      std::exclusive_scan(places[round].begin(), places[round].end(), places[round].begin(), int64_t{0});
      for (const uint32_t key : from) to[places[round][digit(key, round)]++] = key;
      std::swap(from, to);
    }
    for (int64_t i = 0; i < vocabulary_; ++i)
      values[i] = std::bit_cast<float>(from[i] & kSign ? from[i] & ~kSign : ~from[i]);
  }

  void keep_min_p(float least) {
    kept_.resize(some_.size());
    Tensor exact_V;  // PyTorch's own bits, where they are needed
    float limit = 0;
    size_t kept = 0;
    for (const Candidate candidate : some_) {
      const double weight = std::exp(static_cast<double>(candidate.score - top_));
      bool stays = candidate.score == top_ || weight > least;
      if (candidate.score != top_ && std::fabs(weight - least) <= 4 * kRough * least) {
        if (!exact_V.defined()) exact_V = softmax(scores()), limit = least * largest(exact_V);
        stays = exact_V.const_data_ptr<float>()[candidate.token] >= limit;
      }
      if (stays) kept_[kept++] = candidate;
    }
    some_.assign(kept_.begin(), kept_.begin() + static_cast<int64_t>(kept));
  }

  bool weigh_few(const Rules& rules) {
    const float rest = static_cast<float>(1 - rules.top_p), least = static_cast<float>(rules.min_p);
    const bool by_mass = rules.top_p < 1;
    if ((by_mass && rest < 1e-5f) || (rules.min_p > 0 && least < 1e-30f)) return false;
    is_all_ = false;
    find_peaks();
    if (rules.top_k > 0) keep_top_k(rules.top_k);
    if (by_mass) {
      size_t sure = 0;
      const double all = is_all_ ? weigh_some() : collect_top_p(rest, sure);
      keep_top_p(rest, all, sure);
    } else if (!is_all_) {
      collect(highest_ + temperature_ * (std::log(least) - 1e-3f));
    }
    if (rules.min_p > 0) keep_min_p(least);
    std::sort(some_.begin(), some_.end(), [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
    order_.resize(some_.size());
    for (size_t i = 0; i < some_.size(); ++i) order_[i] = some_[i].score - top_;
    call("aten::exp_", "", over(order_));
    total_ = std::accumulate(order_.begin(), order_.end(), 0.0);
    return true;
  }

  // Where no token of a stretch is likelier than this to be early, the few that are take less time to weigh one by one than
  // all of them together.
  static constexpr double kFewEarly = 1.0 / 32;

  int64_t vocabulary_, stretches_, threads_;
  std::vector<float> shaped_, maxima_, peaks_, order_, sums_, weights_;
  std::vector<double> sums_of_stretches_, some_weights_;
  std::vector<Candidate> some_, kept_;  // what filters have left so far
  bool is_all_ = false;                 // whether those are all that are left
  std::vector<int32_t> by_weight_;
  Scores x_;
  bool is_few_ = false, is_exact_ = false;
  float highest_ = 0, temperature_ = 1, top_ = 0;
  double total_ = 0;  // of what the tokens weigh
};

}  // namespace draftsmith
