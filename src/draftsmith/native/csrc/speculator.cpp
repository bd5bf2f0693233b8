// The MLP speculator's guesses for a step, in one parallel region: stages, top-k, and the tree of the best paths.
//
// The Python of drafters/mlp.py and drafters/grow.py says what is computed; this computes the same, for plans that take
// the best children and keep the best paths.
//
// Words: B rows, S width of a state, D inner width, W drafted vocabulary, C children of a node, N nodes of the draft.
#include <torch/custom_class.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <mutex>
#include <numeric>
#include <vector>

#include "packed.h"

namespace draftsmith {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr float kEpsilon = 1e-6f;
constexpr int64_t kSecondCache = 1 << 20;  // bytes that stay near a thread; processors have 1 or 2 MB

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

class Speculator : public torch::CustomClassHolder {
 public:
  // projections, then heads, of every stage: packed as bf16 or int8, with the scales and sums of the int8 ones, empty
  // for bf16. One entry a stage: embeddings (V, D), norm scales and shifts (D) in fp32.
  // draft_tokens lists the ids behind the W scores, or is empty where they are the vocabulary itself.
  Speculator(Tensors weights, Tensors weight_scales, Tensors sums, Tensors embeddings, Tensors scales,
             Tensors shifts, at::Tensor draft_tokens, int64_t features, int64_t scored, double ratio, bool scale_input)
      : weights_(std::move(weights)), weight_scales_(std::move(weight_scales)), weight_sums_(std::move(sums)),
        embeddings_(std::move(embeddings)), scales_(std::move(scales)), shifts_(std::move(shifts)),
        draft_tokens_(std::move(draft_tokens)),
        features_(features), scored_(scored), ratio_(static_cast<float>(ratio)), scale_input_(scale_input) {
    const size_t stages = scales_.size();
    TORCH_CHECK(stages > 0 && weights_.size() == 2 * stages && weight_scales_.size() == 2 * stages &&
                    weight_sums_.size() == 2 * stages && shifts_.size() == stages &&
                    (embeddings_.empty() || embeddings_.size() == stages),
                "draftsmith: the stages of the speculator do not fit together");
    width_ = scales_[0].numel();
    vocabulary_ = draft_tokens_.numel() ? 0 : scored_;
    for (size_t i = 0; i < stages; ++i) {
      const auto linear = [&](size_t at, int64_t outputs, int64_t inputs) {
        return as_any_linear(weights_[at], weight_scales_[at], weight_sums_[at], at::empty(0), outputs, inputs);
      };
      stages_.push_back(
          {linear(i, width_, i == 0 ? features_ : width_), linear(stages + i, scored_, width_)});
      for (const at::Tensor* t : {&scales_[i], &shifts_[i]})
        TORCH_CHECK(t->is_contiguous() && t->scalar_type() == at::kFloat && t->numel() == width_,
                    "draftsmith: a norm of the speculator has to be fp32 of ", width_, " values");
    }
    for (const at::Tensor& table : embeddings_) {
      TORCH_CHECK(table.is_contiguous() && table.scalar_type() == at::kBFloat16 && table.dim() == 2 &&
                      table.size(1) == width_,
                  "draftsmith: an embedding of the speculator has to be bf16 of width ", width_);
      vocabulary_ = vocabulary_ ? std::min(vocabulary_, table.size(0)) : table.size(0);
    }
    TORCH_CHECK(draft_tokens_.numel() == 0 || (draft_tokens_.numel() == scored_ && draft_tokens_.is_contiguous() &&
                                               draft_tokens_.scalar_type() == at::kLong),
                "draftsmith: the draft tokens have to be ", scored_, " ids, int64");
    for (int64_t i = 0; i < draft_tokens_.numel(); ++i) {
      const int64_t token = draft_tokens_.const_data_ptr<int64_t>()[i];
      TORCH_CHECK_INDEX(token >= 0 && (vocabulary_ == 0 || token < vocabulary_), "draftsmith: there is no token ",
                        token, " to draft");
    }
  }

  // Returns tokens and parents, both (B, nodes); parents are -1 for children of the root and -2 for padding.
  std::tuple<at::Tensor, at::Tensor> propose(const at::Tensor& tokens, const at::Tensor& features,
                                             const at::Tensor& counts, std::vector<int64_t> branching, int64_t paths,
                                             int64_t beam, int64_t nodes) {
    check(tokens, features, counts, branching);
    const std::lock_guard<std::mutex> alone(busy_);
    const int64_t batch = tokens.size(0), depth = static_cast<int64_t>(branching.size());
    at::Tensor out_tokens = at::zeros({batch, nodes}, tokens.options());
    at::Tensor out_parents = at::full({batch, nodes}, -2, tokens.options());
    const bool ranked = std::any_of(branching.begin(), branching.end(), [](int64_t c) { return c > 1; });
    Plan plan{branching, ranked, beam, {}};
    const int64_t widest = plan.prepare() * batch, threads = at::get_num_threads();
    batch_ = batch;
    Levels levels(depth);
    // All memory comes before the threads: nothing in a team may throw.
    int64_t most = 1;
    for (int64_t d = 0; d < depth; ++d) {
      levels[d].width = plan.expanded[d] * branching[d];
      levels[d].tokens.reserve(levels[d].width * batch), levels[d].parents.reserve(levels[d].width * batch);
      levels[d].scores.reserve(levels[d].width * batch);
      most = std::max(most, levels[d].width);
    }
    rows_.resize(widest), parents_.resize(widest), expanded_.resize(widest);
    projected_.resize(widest * width_), mixed_.resize(threads * width_);
    partial_.resize(threads * most * batch), sums_.resize(threads * widest * 2);
    best_.resize(most), order_.resize(most);
    rooms_.resize(threads);
    for (Quantised& room : rooms_) room.reserve(widest, (std::max(features_, width_) + 3) / 4);
    // Rows of even length, zero behind an odd one: the kernels read two inputs at a time.
    states_.assign(widest * even(width_), 0), inputs_.assign(batch * even(features_), 0);
    start(tokens, features, counts);
    run_team(threads, [&](const Team& team) {
      for (int64_t d = 0; d < depth; ++d) {
        stage(team, plan, d);
        if (team.index == 0) choose(plan, d, levels, team.size);
        team.barrier();
      }
    });
    for (int64_t b = 0; b < batch; ++b)
      place(levels, plan, b, paths, nodes, out_tokens.mutable_data_ptr<int64_t>() + b * nodes,
            out_parents.mutable_data_ptr<int64_t>() + b * nodes);
    return {out_tokens, out_parents};
  }

 private:
  struct Stage {
    Linear projection, head;
  };

  struct Plan {
    std::vector<int64_t> branching;
    bool ranked;
    int64_t beam;                   // 0 for none
    std::vector<int64_t> expanded;  // nodes a row that stage d starts from

    // Returns the most that are expanded at a depth.
    int64_t prepare() {
      int64_t frontier = 1, widest = 1;
      for (const int64_t children : branching) {
        expanded.push_back(frontier);
        widest = std::max(widest, frontier);
        frontier *= children;
        if (beam > 0) frontier = std::min(frontier, beam);
      }
      return widest;
    }
  };

  // The nodes of a depth: B rows of `width` nodes, parents being places in the level above.
  struct Level {
    int64_t width = 0;
    std::vector<int64_t> tokens, parents;
    std::vector<float> scores;
  };
  using Levels = std::vector<Level>;

  void check(const at::Tensor& tokens, const at::Tensor& features, const at::Tensor& counts,
             const std::vector<int64_t>& branching) const {
    TORCH_CHECK(tokens.dim() == 2 && tokens.is_contiguous() && tokens.scalar_type() == at::kLong &&
                    counts.is_contiguous() && counts.scalar_type() == at::kLong && counts.numel() == tokens.size(0) &&
                    features.is_contiguous() && features.scalar_type() == at::kBFloat16 &&
                    features.sizes() == at::IntArrayRef({tokens.size(0), tokens.size(1), features_}),
                "draftsmith: the context has to be int64 tokens (B, T), bf16 features (B, T, ", features_,
                ") and int64 counts (B)");
    TORCH_CHECK(branching.size() <= stages_.size(), "draftsmith: the speculator has ", stages_.size(), " stages");
    for (const int64_t children : branching)
      TORCH_CHECK(children > 0 && children <= scored_, "draftsmith: a node cannot have ", children, " children");
    const int64_t* count = counts.const_data_ptr<int64_t>();
    for (int64_t b = 0; b < tokens.size(0); ++b) {
      TORCH_CHECK_INDEX(count[b] > 0 && count[b] <= tokens.size(1), "draftsmith: a row has ", count[b], " tokens");
      const int64_t root = tokens.const_data_ptr<int64_t>()[b * tokens.size(1) + count[b] - 1];
      TORCH_CHECK_INDEX(root >= 0 && (vocabulary_ == 0 || root < vocabulary_), "draftsmith: there is no token ", root);
    }
  }

  // The root of every row and the state that predicted it.
  void start(const at::Tensor& tokens, const at::Tensor& features, const at::Tensor& counts) {
    const int64_t width = tokens.size(1), stride = even(features_);
    for (int64_t b = 0; b < tokens.size(0); ++b) {
      const int64_t last = b * width + counts.const_data_ptr<int64_t>()[b] - 1;
      rows_[b] = tokens.const_data_ptr<int64_t>()[last], parents_[b] = b;
      const bf16* from = bits(features) + last * features_;
      bf16* to = inputs_.data() + b * stride;
      std::copy_n(from, features_, to);
      if (scale_input_) {
        float squares = 0;
        for (int64_t i = 0; i < features_; ++i) squares += widen(from[i]) * widen(from[i]);
        const float scale = 1 / std::sqrt(squares / static_cast<float>(features_) + kEpsilon) / std::sqrt(2.0f);
        for (int64_t i = 0; i < features_; ++i) to[i] = narrow(widen(from[i]) * scale);
      }
    }
    sources_ = tokens.size(0);
  }

  // From the states of the level above to the best children of every node that is expanded.
  void stage(const Team& team, const Plan& plan, int64_t depth) {
    const Stage& stage = stages_[depth];
    Quantised& room = rooms_[team.index];
    const int64_t rows = plan.expanded[depth] * batch_, children = plan.branching[depth];
    const bf16* input = depth == 0 ? inputs_.data() : states_.data();
    const int64_t stride = even(depth == 0 ? features_ : width_);
    // Siblings share their parent's state, and so its projection.
    const Stage& following = stages_[(depth + 1) % stages_.size()];
    multiply(team, stage.projection, input, stride, sources_,
             [&](int64_t r, int64_t n, int64_t count, const float* values) {
               kernels().narrow_row(values, count, projected_.data() + r * width_ + n);
             }, room, is_near(team, depth, &Stage::projection) ? nullptr : stage.head.begin(team));
    team.barrier();
    activate(team, depth, rows);
    team.barrier();
    Best* best = partial_.data() + team.index * rows * children;
    float* sums = sums_.data() + team.index * rows * 2;
    std::fill_n(best, rows * children, Best{-std::numeric_limits<float>::infinity(), 0});
    for (int64_t r = 0; r < rows; ++r) sums[2 * r] = -std::numeric_limits<float>::infinity(), sums[2 * r + 1] = 0;
    multiply(team, stage.head, states_.data(), even(width_), rows,
             [&](int64_t r, int64_t n, int64_t count, const float* values) {
               float rounded[kChunk];
               const float most = kernels().round_row(values, count, rounded);
               Best* mine = best + r * children;
               if (most > mine[children - 1].score)
                 for (int64_t i = 0; i < count; ++i) offer(mine, children, rounded[i], n + i);
               if (!plan.ranked) return;
               float* running = sums + 2 * r;
               const float highest = std::max(running[0], most);
               running[1] *= std::exp(running[0] - highest);
               running[1] += kernels().sum_exponentials(rounded, count, highest);
               running[0] = highest;
             }, room, is_near(team, depth, &Stage::head) ? nullptr : following.projection.begin(team));
    team.barrier();
  }

  // Whether the stage before has just read this layer, and so little besides that it is still in the second cache:
  // asking for it would only cost.
  bool is_near(const Team& team, int64_t depth, Linear Stage::* part) const {
    if (depth == 0) return false;
    const Stage &stage = stages_[depth], &before = stages_[depth - 1];
    return (stage.*part).panel(0) == (before.*part).panel(0) &&
           stage.projection.bytes() + stage.head.bytes() <= team.size * kSecondCache;
  }

  // state = GELU(norm(projection + ratio · embedding)); every thread computes its columns of every row.
  void activate(const Team& team, int64_t depth, int64_t rows) {
    const float *scale = scales_[depth].const_data_ptr<float>(), *shift = shifts_[depth].const_data_ptr<float>();
    const bf16* table = embeddings_.empty() ? nullptr : bits(embeddings_[depth]);
    const auto [first, last] = team.share(width_);
    for (int64_t r = 0; r < rows; ++r)
      kernels().activate(projected_.data() + parents_[r] * width_,
                         table == nullptr ? nullptr : table + rows_[r] * width_, ratio_, scale, shift, width_, kEpsilon,
                         first, last, mixed_.data() + team.index * width_, states_.data() + r * even(width_));
  }

  // Joins what the threads found, and lines up the nodes that the next stage expands.
  void choose(const Plan& plan, int64_t depth, Levels& levels, int64_t threads) {
    const int64_t each = plan.expanded[depth], rows = each * batch_, children = plan.branching[depth];
    Level& level = levels[depth];
    for (int64_t r = 0; r < rows; ++r) {
      std::fill_n(best_.begin(), children, Best{-std::numeric_limits<float>::infinity(), 0});
      float highest = -std::numeric_limits<float>::infinity(), sum = 0;
      for (int64_t t = 0; t < threads; ++t) {
        for (int64_t c = 0; c < children; ++c) {
          const Best& one = partial_[(t * rows + r) * children + c];
          offer(best_.data(), children, one.score, one.index);
        }
        highest = std::max(highest, sums_[(t * rows + r) * 2]);
      }
      for (int64_t t = 0; plan.ranked && t < threads; ++t)
        sum += sums_[(t * rows + r) * 2 + 1] * std::exp(sums_[(t * rows + r) * 2] - highest);
      for (int64_t c = 0; c < children; ++c) {
        const Best& one = best_[c];
        const int64_t token = draft_tokens_.numel() ? draft_tokens_.const_data_ptr<int64_t>()[one.index] : one.index;
        level.tokens.push_back(token);
        level.parents.push_back(depth == 0 ? -1 : expanded_[r]);
        const float above =
            depth == 0 ? 0 : levels[depth - 1].scores[r / each * levels[depth - 1].width + expanded_[r]];
        level.scores.push_back(plan.ranked ? above + std::min(0.0f, one.score - highest - std::log(sum)) : 0);
      }
    }
    if (depth + 1 == static_cast<int64_t>(plan.branching.size())) return;
    const int64_t next = plan.expanded[depth + 1];
    for (int64_t b = 0; b < batch_; ++b) {
      std::iota(order_.begin(), order_.begin() + level.width, 0);
      const float* scores = level.scores.data() + b * level.width;
      if (next < level.width)
        std::sort(order_.begin(), order_.begin() + level.width, [&](int64_t i, int64_t j) {
          return scores[i] > scores[j] || (scores[i] == scores[j] && i < j);  // std::stable_sort would allocate
        });
      for (int64_t i = 0; i < next; ++i) {
        const int64_t row = b * next + i;
        expanded_[row] = order_[i];
        rows_[row] = level.tokens[b * level.width + order_[i]];
        parents_[row] = b * each + order_[i] / children;
      }
    }
    sources_ = rows;
  }

  // Stores the common prefixes of the best paths once, in the order in which the paths, best first, meet their nodes.
  static void place(const Levels& levels, const Plan& plan, int64_t b, int64_t paths, int64_t nodes, int64_t* tokens,
                    int64_t* parents) {
    const int64_t depth = static_cast<int64_t>(plan.branching.size());
    const Level& leaves = levels[depth - 1];
    std::vector<int64_t> order(leaves.width);
    std::iota(order.begin(), order.end(), 0);
    const float* scores = leaves.scores.data() + b * leaves.width;
    if (plan.ranked)
      std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return scores[i] > scores[j]; });
    const int64_t kept = paths > 0 ? std::min(paths, leaves.width) : leaves.width;
    std::vector<std::vector<int64_t>> slots;
    for (const Level& level : levels) slots.emplace_back(level.width, -1);
    int64_t used = 0;
    std::vector<int64_t> path(depth);
    for (int64_t k = 0; k < kept; ++k) {
      int64_t node = order[k];
      for (int64_t d = depth - 1; d >= 0; --d) {
        path[d] = node;
        node = levels[d].parents[b * levels[d].width + node];
      }
      int64_t parent = -1;
      for (int64_t d = 0; d < depth; ++d) {
        int64_t& slot = slots[d][path[d]];
        if (slot < 0) {
          if (used == nodes) return;
          slot = used++;
          tokens[slot] = levels[d].tokens[b * levels[d].width + path[d]];
          parents[slot] = parent;
        }
        parent = slot;
      }
    }
  }

  Tensors weights_, weight_scales_, weight_sums_, embeddings_, scales_, shifts_;
  at::Tensor draft_tokens_;
  int64_t features_, scored_, width_, vocabulary_;
  float ratio_;
  bool scale_input_;
  std::vector<Stage> stages_;
  std::mutex busy_;  // what follows serves one draft at a time
  // Of the level that is being computed: tokens read, their parents' places among the states above, and the states.
  std::vector<int64_t> rows_, parents_, expanded_, order_;
  int64_t batch_ = 0, sources_ = 0;
  std::vector<bf16> inputs_, projected_, states_;
  // The best children and the sums of exponentials that every thread found in its share of the vocabulary.
  std::vector<Best> partial_, best_;
  std::vector<float> sums_;
  std::vector<float> mixed_;
  std::vector<Quantised> rooms_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(draftsmith, library) {
  library.class_<Speculator>("Speculator")
      .def(torch::init<Tensors, Tensors, Tensors, Tensors, Tensors, Tensors, at::Tensor, int64_t, int64_t, double,
                       bool>())
      .def("propose", &Speculator::propose);
}

}  // namespace draftsmith
