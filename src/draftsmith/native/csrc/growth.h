// How guesses grow into a tree: the best children of every node, depth by depth, and then the best paths or nodes.
//
// drafters/grow.py says what is computed; this computes the same, for plans that are not `sampled` or static. Growing
// ends where no deeper guess could be kept in any row. Trees that can end so have their nodes in another order than in
// grow.py: one that does not depend on how far other rows went.
//
// Words: B rows, W scored tokens, C children of a node, N nodes of the draft.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>
#include <vector>

#include "drawing.h"
#include "packed.h"

namespace draftsmith {

inline int64_t even(int64_t width) { return (width + 1) / 2 * 2; }

struct Best {
  float score;
  int64_t index;
};

// Keeps the best few in order, the first of equals first.
inline void offer(Best* best, int64_t count, float score, int64_t index) {
  if (!(score > best[count - 1].score)) return;
  int64_t place = count - 1;
  for (; place > 0 && score > best[place - 1].score; --place) best[place] = best[place - 1];
  best[place] = {score, index};
}

// What a draft looks like: children of a node at every depth; how many paths are kept, and how many nodes of a depth are
// expanded, 0 for all; and how many nodes are kept. Guesses less likely than `confidence` are left out, those before them
// taken into account.
struct Form {
  std::vector<int64_t> branching;
  int64_t paths, beam, nodes;
  double confidence;
};

class Growth {
 public:
  // `ids` lists the tokens behind the W scores, or is empty where they are the vocabulary itself. With `shared`, all
  // nodes of a row have the same children, and one row of states stands for them.
  Growth(Tensor ids, int64_t scored, bool shared) : ids_(std::move(ids)), scored_(scored), shared_(shared) {
    REQUIRE(ids_.numel() == 0 ||
                (ids_.numel() == scored_ && ids_.is_contiguous() && ids_.scalar_type() == kLong),
            "draftsmith: the draft tokens have to be ", scored_, " ids, int64");
  }

  // Says that tokens are 0 … vocabulary - 1, which an embedding is looked up for.
  void limit(int64_t vocabulary) {
    limit_ = vocabulary;
    for (int64_t i = 0; i < ids_.numel(); ++i) {
      const int64_t token = ids_.const_data_ptr<int64_t>()[i];
      REQUIRE_INDEX(token >= 0 && (limit_ == 0 || token < limit_), "draftsmith: there is no token ", token,
                    " to draft");
    }
    REQUIRE(ids_.numel() || limit_ == 0 || scored_ <= limit_, "draftsmith: there are ", limit_,
            " tokens, but ", scored_, " are scored");
  }

  // Begins at the roots of a context: tokens (B, T), the states of width `features` that predicted them, counts (B).
  void begin(const Tensor& context, const Tensor& features, const Tensor& counts, int64_t width, const Form& form,
             int64_t stages, int64_t threads) {
    check(context, features, counts, width, form.branching, stages);
    REQUIRE(form.paths >= 0 && form.beam >= 0 && form.nodes >= 0, "draftsmith: a draft cannot have ", form.paths,
            " paths, a beam of ", form.beam, " and ", form.nodes, " nodes");
    const double confidence = form.confidence;
    branching_ = form.branching, paths_ = form.paths, nodes_ = form.nodes, batch_ = context.size(0), grown_ = 0;
    branches_ = std::any_of(branching_.begin(), branching_.end(), [](int64_t children) { return children > 1; });
    REQUIRE(confidence >= 0 && confidence < 1, "draftsmith: a confidence is 0 or more and below 1, not ", confidence);
    bounded_ = confidence > 0, weighs_ = branches_ || bounded_;
    least_ = static_cast<float>(std::log(confidence));
    expanded_.clear(), levels_.resize(depth()), widest_ = batch_;
    int64_t frontier = 1, most = 1;
    all_ = 0;
    for (int64_t d = 0; d < depth(); ++d) {
      expanded_.push_back(frontier);
      widest_ = std::max(widest_, frontier * batch_);
      frontier *= branching_[d];
      most = std::max(most, frontier);
      Level& level = levels_[d];
      level.width = frontier;
      level.tokens.clear(), level.parents.clear(), level.scores.clear();
      level.tokens.reserve(frontier * batch_), level.parents.reserve(frontier * batch_);
      level.scores.reserve(frontier * batch_);
      level.order.resize(frontier * batch_);
      all_ += frontier;
      if (form.beam > 0) frontier = std::min(frontier, form.beam);
    }
    tokens_.resize(widest_), parents_.resize(widest_), chosen_.resize(widest_);
    partial_.resize(threads * most * batch_), sums_.resize(threads * widest_ * 2);
    best_.resize(most);
    for (int64_t b = 0; b < batch_; ++b)
      tokens_[b] = context.const_data_ptr<int64_t>()[last(context, counts, b)], parents_[b] = b;
    sources_ = batch_;
  }

  // Lets rows guess with the target's own noise, see drafters/draws.py: what scores are divided by (B, fp32), the seeds
  // (B), and the positions of the first guesses (B); or nothing. Children are then those that arrive first, in their
  // order.
  void share_noise(const Tensors& noise, int64_t threads) {
    has_noise_ = !noise.empty() && !branching_.empty();
    if (!has_noise_) return;
    REQUIRE(noise.size() == 3 && noise[0].scalar_type() == kFloat && noise[1].scalar_type() == kLong &&
                noise[2].scalar_type() == kLong,
            "draftsmith: noise is fp32 temperatures, int64 seeds and int64 positions");
    for (const Tensor& one : noise)
      REQUIRE(one.is_contiguous() && one.numel() == batch_, "draftsmith: noise has one number a row, not ", one.numel());
    temperatures_ = noise[0], seeds_ = noise[1], positions_ = noise[2];
    const int64_t rows = shared_ ? batch_ : widest_, most = *std::max_element(branching_.begin(), branching_.end());
    const int64_t stretches = stretches_of(scored_);
    shares_.resize(rows * scored_), highest_.resize(threads * rows);
    rough_.resize(rows * stretches), share_sums_.resize(rows * stretches);
    first_.resize(rows * most), first_scores_.resize(rows * most);
    times_.resize(threads * std::max(most, kCompared)), arrived_.resize(times_.size());
  }

  // Where the root of row b stands among all tokens of the context.
  static int64_t last(const Tensor& context, const Tensor& counts, int64_t b) {
    return b * context.size(1) + counts.const_data_ptr<int64_t>()[b] - 1;
  }

  int64_t batch() const { return batch_; }
  int64_t depth() const { return static_cast<int64_t>(branching_.size()); }
  // Whether nothing further down would stay. Threads ask behind the barrier that follows `choose`, which writes it anew
  // only behind another one.
  bool is_over() const { return over_; }
  // The most nodes that any depth expands, of all rows together.
  int64_t widest() const { return widest_; }
  // The nodes that a depth expands: each has read a token, and has a parent among the `sources` that came before.
  int64_t rows(int64_t depth) const { return expanded_[depth] * batch_; }
  int64_t token(int64_t row) const { return tokens_[row]; }
  int64_t parent(int64_t row) const { return parents_[row]; }
  int64_t sources() const { return sources_; }
  // How many rows of states `rank` reads.
  int64_t ranked_rows(int64_t depth) const { return shared_ ? batch_ : rows(depth); }

  // Finds the best children by this thread's share of the scores; the team meets at the end. `ahead` is as in kernels.h.
  void rank(const Team& team, int64_t depth, const Linear& head, const bf16* states, int64_t stride, Quantised& room,
            const void* ahead) {
    const int64_t rows = ranked_rows(depth), children = branching_[depth];
    Best* best = partial_.data() + team.index * rows * children;
    float* sums = sums_.data() + team.index * rows * 2;
    std::fill_n(best, rows * children, Best{-std::numeric_limits<float>::infinity(), 0});
    for (int64_t r = 0; r < rows; ++r) sums[2 * r] = -std::numeric_limits<float>::infinity(), sums[2 * r + 1] = 0;
    const int64_t each = rows / batch_;
    const auto is_drawn = [&](int64_t r) {
      return has_noise_ && temperatures_.const_data_ptr<float>()[r / each] > kNoNoise;
    };
    float* highest = has_noise_ ? highest_.data() + team.index * rows : nullptr;
    if (has_noise_) std::fill_n(highest, rows, -std::numeric_limits<float>::infinity());
    multiply(team, head, states, stride, rows,
             [&](int64_t r, int64_t n, int64_t count, const float* values) {
               float rounded[kChunk];
               float* to = is_drawn(r) ? shares_.data() + r * scored_ + n : rounded;
               const float most = kernels().round_row(values, count, to);
               if (is_drawn(r)) {
                 highest[r] = std::max(highest[r], most);
                 if (bounded_ && !branches_) add_up(to, count, most, sums + 2 * r);
                 return;
               }
               Best* mine = best + r * children;
               if (most > mine[children - 1].score)
                 for (int64_t i = 0; i < count; ++i) offer(mine, children, rounded[i], n + i);
               if (weighs_) add_up(rounded, count, most, sums + 2 * r);
             }, room, ahead);
    has_noise_ ? race(team, depth, rows, is_drawn, best, sums) : team.barrier();
  }

  // Joins what so many threads found, and lines up the nodes that the next depth expands; for one thread.
  void choose(int64_t depth, int64_t threads) {
    const int64_t each = expanded_[depth], rows = ranked_rows(depth), children = branching_[depth];
    Level& level = levels_[depth];
    for (int64_t node = 0; node < each * batch_; ++node) {
      const int64_t r = shared_ ? node / each : node;
      std::fill_n(best_.begin(), children, Best{-std::numeric_limits<float>::infinity(), 0});
      float highest = -std::numeric_limits<float>::infinity(), sum = 0;
      for (int64_t t = 0; t < threads; ++t) {
        for (int64_t c = 0; c < children; ++c) {
          const Best& one = partial_[(t * rows + r) * children + c];
          offer(best_.data(), children, one.score, one.index);
        }
        highest = std::max(highest, sums_[(t * rows + r) * 2]);
      }
      for (int64_t t = 0; weighs_ && t < threads; ++t)
        sum += sums_[(t * rows + r) * 2 + 1] * std::exp(sums_[(t * rows + r) * 2] - highest);
      for (int64_t c = 0; c < children; ++c) {
        const Best& one = best_[c];
        level.tokens.push_back(ids_.numel() ? ids_.const_data_ptr<int64_t>()[one.index] : one.index);
        level.parents.push_back(depth == 0 ? -1 : chosen_[node]);
        const float above =
            depth == 0 ? 0 : levels_[depth - 1].scores[node / each * levels_[depth - 1].width + chosen_[node]];
        // How sure the draw of a chain is goes with the likeliest token there: what was drawn has no say in it.
        const float score = has_noise_ && !branches_ ? highest : one.score;
        level.scores.push_back(weighs_ ? above + std::min(0.0f, score - highest - std::log(sum)) : 0);
      }
    }
    grown_ = depth + 1;
    over_ = grown_ == this->depth() || none_further(level);
    if (over_) return;
    const int64_t next = expanded_[depth + 1];
    for (int64_t b = 0; b < batch_; ++b) {
      int64_t* order = level.order.data() + b * level.width;
      std::iota(order, order + level.width, 0);
      const float* scores = level.scores.data() + b * level.width;
      if (next < level.width)
        std::sort(order, order + level.width, [&](int64_t i, int64_t j) {
          return scores[i] > scores[j] || (scores[i] == scores[j] && i < j);  // std::stable_sort would allocate
        });
      for (int64_t i = 0; i < next; ++i) {
        const int64_t row = b * next + i;
        chosen_[row] = order[i];
        tokens_[row] = level.tokens[b * level.width + order[i]];
        parents_[row] = b * each + order[i] / children;
      }
    }
    sources_ = each * batch_;
  }

  // Returns tokens and parents, both (B, nodes); parents are -1 for children of the root and -2 for padding. Common
  // prefixes of paths are stored once, in the order in which the paths, best first (or longest first, where growing can
  // end early), meet their nodes.
  std::tuple<Tensor, Tensor> place() const {
    const Tensor tokens = full<int64_t>({batch_, nodes_}, 0), parents = full<int64_t>({batch_, nodes_}, -2);
    for (int64_t b = 0; b < batch_ && grown_ > 0; ++b)
      place_row(b, tokens.mutable_data_ptr<int64_t>() + b * nodes_, parents.mutable_data_ptr<int64_t>() + b * nodes_);
    return {tokens, parents};
  }

 private:
  // Whether a guess of this logarithmic probability is likely enough.
  bool stays(float score) const { return !bounded_ || score >= least_; }

  // Takes some scores of a node, the largest of which is `most`, into its largest so far and the sum of exponentials
  // below that.
  static void add_up(const float* scores, int64_t count, float most, float* running) {
    const float highest = std::max(running[0], most);
    running[1] *= std::exp(running[0] - highest);
    running[1] += kernels().sum_exponentials(scores, count, highest);
    running[0] = highest;
  }

  // Finds whom the target's own noise lets arrive first by the shares that the scores give, in the rows that are drawn; the
  // team meets at the end.
  template <class Drawn>
  void race(const Team& team, int64_t depth, int64_t rows, const Drawn& is_drawn, Best* best, float* sums) {
    const int64_t stretches = stretches_of(scored_), each = rows / batch_, children = branching_[depth];
    const auto shares = [&](int64_t r) {
      return Shares{shares_.data() + r * scored_, scored_, temperatures_.const_data_ptr<float>()[r / each],
                    rough_.data() + r * stretches, share_sums_.data() + r * stretches};
    };
    settle(team, rows, scored_, highest_.data(), shares, is_drawn);
    const int64_t* ids = ids_.numel() ? ids_.const_data_ptr<int64_t>() : nullptr;
    const int64_t room = static_cast<int64_t>(times_.size()) / team.size;
    const auto [own, end] = team.share(rows);
    for (int64_t r = own; r < end; ++r) {
      if (!is_drawn(r)) continue;
      const Race noise(seeds_.const_data_ptr<int64_t>()[r / each],
                       positions_.const_data_ptr<int64_t>()[r / each] + depth, Stream::kTarget);
      if (!branches_) {
        best[r] = {0, shares(r).first(noise, ids)};
        continue;
      }
      float* scores = first_scores_.data() + r * children;
      int64_t* first = first_.data() + r * children;
      shares(r).arrive(noise, ids, children,
                       {times_.data() + team.index * room, arrived_.data() + team.index * room, 0}, scores, first);
      for (int64_t c = 0; c < children; ++c) best[r * children + c] = {scores[c], first[c]};
      sums[2 * r] = 0, sums[2 * r + 1] = 1;  // they are logarithms of probabilities already
    }
    team.barrier();
  }

  // The nodes of a depth: B rows of `width` nodes, parents being places in the level above. `order` has them with those
  // first that the next depth expands.
  struct Level {
    int64_t width = 0;
    std::vector<int64_t> tokens, parents, order;
    std::vector<float> scores;
  };

  // Whether a tree may be complete before its last depth. Which paths are kept goes by their ends, so not where few are.
  bool ends_early() const { return branches_ && paths_ == 0 && (bounded_ || all_ > nodes_); }

  // Whether no guess behind those of the deepest level would be kept, in any row: none is likelier than the one it follows.
  bool none_further(const Level& deepest) const {
    if (branches_ ? !ends_early() : !bounded_) return false;
    for (int64_t b = 0; b < batch_; ++b) {
      const float* scores = deepest.scores.data() + b * deepest.width;
      const float most = *std::max_element(scores, scores + deepest.width);
      if (stays(most) && !(branches_ && are_better(b, most))) return false;
    }
    return true;
  }

  // Whether a row has as many nodes as are kept, all of them likelier than this.
  bool are_better(int64_t b, float score) const {
    int64_t better = 0;
    for (int64_t d = 0; d < grown_; ++d) {
      const float* scores = levels_[d].scores.data() + b * levels_[d].width;
      better += std::count_if(scores, scores + levels_[d].width, [&](float one) { return one > score; });
    }
    return better >= nodes_;
  }

  void check(const Tensor& tokens, const Tensor& features, const Tensor& counts, int64_t width,
             const std::vector<int64_t>& branching, int64_t stages) const {
    REQUIRE(tokens.dim() == 2 && tokens.is_contiguous() && tokens.scalar_type() == kLong &&
                counts.is_contiguous() && counts.scalar_type() == kLong && counts.numel() == tokens.size(0) &&
                features.is_contiguous() && features.scalar_type() == kBFloat16 &&
                features.sizes() == Sizes({tokens.size(0), tokens.size(1), width}),
            "draftsmith: the context has to be int64 tokens (B, T), bf16 features (B, T, ", width,
            ") and int64 counts (B)");
    REQUIRE(static_cast<int64_t>(branching.size()) <= stages, "draftsmith: the speculator has ", stages, " stages");
    for (const int64_t children : branching)
      REQUIRE(children > 0 && children <= scored_, "draftsmith: a node cannot have ", children, " children");
    const int64_t* count = counts.const_data_ptr<int64_t>();
    for (int64_t b = 0; b < tokens.size(0); ++b) {
      REQUIRE_INDEX(count[b] > 0 && count[b] <= tokens.size(1), "draftsmith: a row has ", count[b], " tokens");
      const int64_t root = tokens.const_data_ptr<int64_t>()[last(tokens, counts, b)];
      REQUIRE_INDEX(root >= 0 && (limit_ == 0 || root < limit_), "draftsmith: there is no token ", root);
    }
  }

  struct Node {
    int64_t token, parent, depth;
    float score;
    int64_t place = -1;  // in the draft
  };

  void place_row(int64_t b, int64_t* tokens, int64_t* parents) const {
    std::vector<std::vector<int64_t>> slots;
    for (const Level& level : levels_) slots.emplace_back(level.width, -1);
    std::vector<Node> found;
    std::vector<int64_t> path(grown_);
    // Stores what is new of the path to a node.
    const auto add = [&](int64_t depth, int64_t node) {
      for (int64_t d = depth; d >= 0; --d) {
        path[d] = node;
        node = levels_[d].parents[b * levels_[d].width + node];
      }
      int64_t parent = -1;
      for (int64_t d = 0; d <= depth; ++d) {
        const Level& level = levels_[d];
        const int64_t at = b * level.width + path[d];
        if (!stays(level.scores[at])) return;
        int64_t& slot = slots[d][path[d]];
        if (slot < 0) {
          slot = static_cast<int64_t>(found.size());
          found.push_back({level.tokens[at], parent, d, level.scores[at]});
        }
        parent = slot;
      }
    };
    const Level& leaves = levels_[grown_ - 1];
    std::vector<int64_t> order(leaves.width);
    std::iota(order.begin(), order.end(), 0);
    const float* scores = leaves.scores.data() + b * leaves.width;
    if (branches_)
      std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return scores[i] > scores[j]; });
    const int64_t kept = paths_ > 0 ? std::min(paths_, leaves.width) : leaves.width;
    for (int64_t k = 0; k < kept; ++k) add(grown_ - 1, order[k]);
    // What the beam left unexpanded; the deepest first, as in the Python.
    for (int64_t d = grown_ - 2; d >= 0 && paths_ == 0; --d)
      for (int64_t k = expanded_[d + 1]; k < levels_[d].width; ++k) add(d, levels_[d].order[b * levels_[d].width + k]);
    if (ends_early() || static_cast<int64_t>(found.size()) > nodes_) {
      for (const int64_t node : best_of(found)) {
        const int64_t parent = found[node].parent;
        *tokens++ = found[node].token, *parents++ = parent < 0 ? -1 : found[parent].place;
      }
    } else {
      for (const Node& node : found) *tokens++ = node.token, *parents++ = node.parent;
    }
  }

  // Returns as many nodes as there is room for, the likeliest, the longest paths first, and writes down their places. A
  // parent stands before its children and is never less likely, so it stays.
  std::vector<int64_t> best_of(std::vector<Node>& found) const {
    std::vector<int64_t> order(found.size()), placed, path;
    std::iota(order.begin(), order.end(), 0);
    const auto likelier = [&](int64_t i, int64_t j) {
      const Node &a = found[i], &b = found[j];
      if (a.score != b.score || a.depth != b.depth) return a.score != b.score ? a.score > b.score : a.depth < b.depth;
      // Equally likely nodes differ in the tokens of their paths.
      for (; i != j && i >= 0; i = found[i].parent, j = found[j].parent)
        if (found[i].token != found[j].token) return found[i].token < found[j].token;
      return false;
    };
    std::sort(order.begin(), order.end(), likelier);
    order.resize(std::min<size_t>(order.size(), nodes_));
    std::sort(order.begin(), order.end(), [&](int64_t i, int64_t j) {
      return found[i].depth != found[j].depth ? found[i].depth > found[j].depth : likelier(i, j);
    });
    for (int64_t end : order) {
      path.clear();
      for (; end >= 0 && found[end].place < 0; end = found[end].parent) path.push_back(end);
      for (; !path.empty(); path.pop_back()) {
        found[path.back()].place = static_cast<int64_t>(placed.size());
        placed.push_back(path.back());
      }
    }
    return placed;
  }

  Tensor ids_;
  int64_t scored_, limit_ = 0;
  bool shared_;
  // Of the draft that is being made: whether nodes have several children, whether it matters how likely guesses are,
  // whether those stay alone the logarithm of whose probability is no smaller than the least, and whether none would.
  bool branches_ = false, weighs_ = false, bounded_ = false;
  float least_ = 0;
  bool over_ = false;
  int64_t grown_ = 0;  // depths that have their guesses
  int64_t paths_ = 0, nodes_ = 0, all_ = 0;  // how many are kept (0 paths are all), and how many nodes there are in all
  std::vector<int64_t> branching_, expanded_;  // children of a node, and nodes a row to expand, at every depth
  int64_t batch_ = 0, widest_ = 1, sources_ = 0;
  std::vector<Level> levels_;
  // Of the nodes that are expanded: tokens read, parents' places, and their own places in their level.
  std::vector<int64_t> tokens_, parents_, chosen_;
  // The best children and the sums of exponentials that every thread found in its share of the scores.
  std::vector<Best> partial_, best_;
  std::vector<float> sums_;
  // Where the target's noise is shared: it, and what scores become.
  bool has_noise_ = false;
  Tensor temperatures_, seeds_, positions_;
  std::vector<float> shares_, highest_, rough_, first_scores_;
  std::vector<double> share_sums_, times_;
  std::vector<int64_t> first_, arrived_;
};

}  // namespace draftsmith
