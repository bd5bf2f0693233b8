// What drawn guesses leave of a node: which of them stays, guess by guess (`judge`), or what q takes from p for whoever
// verifies a chain as a whole (`share_of_q`, then `leave`, then `loose` and `draw_left`).
//
// accept_sampled in verify/accept.py and accept_block in verify/block.py say what is computed, in float64 over the
// vocabulary: a guess x stays with probability p(x) / q(x); else p becomes max(p - q, 0), divided by its sum, and q loses
// x. Of both no more is computed than a node needs. As in chooser.h, a comparison that last bits could turn is left
// undecided.
#pragma once

#include <type_traits>
#include <vector>

#include "choices.h"

namespace draftsmith {

// What a node comes to: a guess that stays (its number among the node's children), or a token behind the node; with
// neither it is undecided.
struct Outcome {
  int64_t child = -1, token = kUndecided;
};

// The memory for one node at a time. Q is the type of what the guesses were drawn from, whose rows are divided by their
// sums, and sum up to 1 within kShares before.
template <class Q>
class Refusals {
 public:
  explicit Refusals(int64_t vocabulary) : vocabulary_(vocabulary), q_sums_(stretches_of(vocabulary)), rest_sums_(q_sums_) {}

  // Tries the children of a node in turn: their tokens; accepting(k), `left` and `race` are the noise of the test of child
  // k, of the choice of what they leave, and of the target's own where none was refused. The chooser has the node's
  // weights.
  template <class Accepting>
  Outcome judge(const Chooser& chooser, const Q* q, const std::vector<int64_t>& children, const Accepting& accepting,
                double left, const Race& race) {
    p_ = &chooser, q_ = q, refused_.clear(), knows_q_ = false, keeps_rest_ = false;
    // Of sums of shares of p, and of one share in relation to itself.
    double doubt = chooser.doubt();
    for (size_t k = 0; k < children.size(); ++k) {
      const int64_t x = children[k];
      if (!(q[x] > 0) || is_refused(x)) continue;  // q cannot have drawn it, and it is passed over
      const double u = accepting(static_cast<int64_t>(k)), own = share_of(x);
      // What the test says is sure where it says so for everything that p and q may be.
      const double rough = u * static_cast<double>(q[x]), slack = doubt + 1e-12;
      int decided = refused_.empty() ? compare(rough, own, (slack + kShares) * (rough + own)) : 0;
      if (decided == 0) {
        const double test = rough / q_left();
        decided = compare(test, own, refused_.empty() ? slack * (test + own) : doubt + slack * (test + own));
      }
      if (decided == 0) return {};
      if (decided < 0) return {static_cast<int64_t>(k), kUndecided};
      if (!refuse(x, k + 1 < children.size())) return {};
      doubt = loose_ / rest_;
    }
    return {-1, refused_.empty() ? chooser.first_of(race) : draw_rest(left)};
  }

  // The share of q that a token has, with the chooser of the node.
  double share_of_q(const Chooser& chooser, const Q* q, int64_t token) {
    p_ = &chooser, q_ = q, refused_.clear(), knows_q_ = false;
    return static_cast<double>(q[token]) / q_left();
  }

  // Takes q, of which a share was asked for last, from p times a factor, which may be off by so much in relation to itself;
  // returns the sum of what is left.
  double leave(double factor, double factor_doubt) {
    loose_ = factor * (factor_doubt + 2 * p_->doubt()) + 1e-12;
    take_first(factor / p_->total(), 1 / q_left(), false);
    return rest_;
  }

  // How far what `leave` returned may be off.
  double loose() const { return loose_; }

  // The token at u of what `leave` has left, or kUndecided.
  int64_t draw_left(double u) const { return rest_ > 4 * loose_ ? draw_rest(u) : kUndecided; }

  // -1 where a is the smaller one, 1 where it is not, and 0 where both are nearer than `doubt`.
  static int compare(double a, double b, double doubt) {
    if (!(std::fabs(a - b) > doubt + 1e-37)) return 0;
    return a < b ? -1 : 1;
  }

 private:
  static constexpr double kShares = 1e-4;

  bool is_refused(int64_t token) const { return std::find(refused_.begin(), refused_.end(), token) != refused_.end(); }

  // The share of p that a token has by now.
  double share_of(int64_t token) const {
    if (refused_.empty()) return p_->weight_of(token) / p_->total();
    if (!p_->is_few()) return left_[token] / rest_;
    const std::vector<Candidate>& few = p_->few();
    const auto place = std::lower_bound(few.begin(), few.end(), token,
                                        [](const Candidate& some, int64_t one) { return some.token < one; });
    return place != few.end() && place->token == token ? left_[place - few.begin()] / rest_ : 0;
  }

  // What q sums up to without the guesses that were refused.
  double q_left() {
    if (!knows_q_)
      p_->over_stretches([&](int64_t stretch, int64_t begin, int64_t end) {
        if constexpr (std::is_same_v<Q, float>)
          kernels().add_up(q_ + begin, end - begin, q_sums_.data() + stretch);
        else
          for (int64_t i = begin; i < end; i += kStretch)
            q_sums_[i / kStretch] = std::accumulate(q_ + i, q_ + std::min(i + kStretch, end), 0.0);
      });
    knows_q_ = true;
    return std::accumulate(q_sums_.begin(), q_sums_.end(), 0.0);
  }

  // Takes q from p, and the guess from q; `again` says that another guess will be tried. Returns false where too little is
  // left to know it well.
  bool refuse(int64_t x, bool again) {
    const double q_scale = 1 / q_left();
    const bool first = refused_.empty();
    // Sums of max(p - q, 0) are off by what sums of p and of q are.
    loose_ = 2 * (first ? p_->doubt() : loose_ / rest_) + 1e-12;
    if (first)
      take_first(1 / p_->total(), q_scale, again);
    else
      take_again(1 / rest_, q_scale);
    refused_.push_back(x);
    const int64_t stretch = x / kStretch, end = std::min((stretch + 1) * kStretch, vocabulary_);
    q_sums_[stretch] = 0;
    for (int64_t i = stretch * kStretch; i < end; ++i)
      if (!is_refused(i)) q_sums_[stretch] += static_cast<double>(q_[i]);
    return rest_ > 4 * loose_;
  }

  void take_first(double scale, double q_scale, bool again) {
    scale_ = scale, q_scale_ = q_scale, keeps_rest_ = again || p_->is_few();
    const std::vector<float>& weights = p_->weights();
    if (keeps_rest_) left_.resize(weights.size());
    if (p_->is_few()) {
      rest_ = 0;
      for (size_t j = 0; j < left_.size(); ++j)
        rest_ += left_[j] = left_of(weights[j], q_[p_->few()[j].token]);
      return;
    }
    p_->over_stretches([&](int64_t stretch, int64_t begin, int64_t end) {
      if constexpr (std::is_same_v<Q, float>) {
        kernels().rest(weights.data() + begin, scale, q_ + begin, q_scale, end - begin,
                       keeps_rest_ ? left_.data() + begin : nullptr, rest_sums_.data() + stretch);
      } else {
        for (int64_t first = begin; first < end; first += kStretch) {
          double sum = 0;
          for (int64_t i = first; i < std::min(first + kStretch, end); ++i) {
            const double left = left_of(weights[i], q_[i]);
            if (keeps_rest_) left_[i] = left;
            sum += left;
          }
          rest_sums_[first / kStretch] = sum;
        }
      }
    });
    rest_ = std::accumulate(rest_sums_.begin(), rest_sums_.end(), 0.0);
  }

  void take_again(double scale, double q_scale) {
    const auto less = [&](size_t place, int64_t token) {
      const double gone = is_refused(token) ? 0 : static_cast<double>(q_[token]) * q_scale;
      return left_[place] = std::max(left_[place] * scale - gone, 0.0);
    };
    rest_ = 0;
    if (p_->is_few()) {
      for (size_t j = 0; j < left_.size(); ++j) rest_ += less(j, p_->few()[j].token);
      return;
    }
    for (int64_t first = 0; first < vocabulary_; first += kStretch) {
      double sum = 0;
      for (int64_t i = first; i < std::min(first + kStretch, vocabulary_); ++i) sum += less(i, i);
      rest_sums_[first / kStretch] = sum, rest_ += sum;
    }
  }

  double left_of(float weight, Q q) const {
    return std::max(static_cast<double>(weight) * scale_ - static_cast<double>(q) * q_scale_, 0.0);
  }

  // The token at u of what is left, or kUndecided.
  int64_t draw_rest(double u) const {
    const double target = u * rest_, doubt = 2 * loose_;
    if (p_->is_few()) {
      const int64_t place = token_at(left_, 0, static_cast<int64_t>(left_.size()), 0, target, doubt);
      return place == kUndecided ? kUndecided : p_->few()[place].token;
    }
    double below = 0;
    const int64_t first = stretch_at(rest_sums_, target, below) * kStretch;
    if (keeps_rest_) return token_at(left_, first, vocabulary_, below, target, doubt);
    struct {
      const Refusals& all;
      double operator[](int64_t i) const { return all.left_of(all.p_->weights()[i], all.q_[i]); }
    } left{*this};
    return token_at(left, first, vocabulary_, below, target, doubt);
  }

  int64_t vocabulary_;
  const Chooser* p_ = nullptr;
  const Q* q_ = nullptr;
  std::vector<int64_t> refused_;
  bool knows_q_ = false;            // whether q_sums_ are those of this node
  std::vector<double> q_sums_;      // of every stretch, without what was refused
  bool keeps_rest_ = false;         // whether left_ holds what is left of p, of every token or of the few
  std::vector<double> left_, rest_sums_;
  double rest_ = 0, loose_ = 0;     // what is left of p in all, and how far sums of it may be off
  double scale_ = 0, q_scale_ = 0;  // of the weights and of q, at the first refusal
};

// The memory of a thread for rows with drawn guesses.
template <class Q>
struct DrawnMemory {
  Chooser chooser;
  Refusals<Q> refusals;
  DrawnMemory(int64_t vocabulary, int64_t threads) : chooser(vocabulary, threads), refusals(vocabulary) {}
};

// Raises where guesses cannot have been drawn from this.
inline void check_drawn(const Choices& all, const Tensor& q_BMV) {
  const int32_t dtype = q_BMV.scalar_type();
  REQUIRE(q_BMV.dim() == 3 && q_BMV.size(0) == all.batch && q_BMV.size(2) == all.vocabulary && q_BMV.stride(2) == 1 &&
              (dtype == kFloat || dtype == kDouble),
          "draftsmith: what the guesses were drawn from has to be fp32 or float64 (", all.batch, ", M, ", all.vocabulary,
          ")");
}

}  // namespace draftsmith
