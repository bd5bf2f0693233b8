// The guesses of heads over the target's last state for a step, in one parallel region: Medusa's, Hydra's, and those of
// the recurrent drafter.
//
// The Python of drafters/heads/medusa.py, hydra.py and recurrent.py says what is computed, and where it rounds to bf16.
//
// Words: B rows, F width of the target's state, W scored tokens. A head reads the carry: the target's state, and
// beside it what was read of the tokens behind it. Its steps follow, most of them y = kept x + SiLU(linear x), and its
// scores.

#include <mutex>
#include <vector>

#include "growth.h"
#include "objects.h"
#include "operators.h"

namespace draftsmith {
namespace {

// What of the tokens is read, and stands beside the target's state.
enum Reads : int64_t {
  kNothing = 0,    // nothing: heads guess the same whatever the tokens
  kAll = 1,        // the embeddings of all of them, side by side
  kSum = 2,        // their sum
  kRecurrent = 3,  // s = SiLU(cell of the token's embedding + cell of s)
};

enum Kind : int64_t {
  kProject = 0,   // y = linear x
  kResidual = 1,  // y = x + SiLU(linear x)
  kNarrow = 2,    // y = kept x + SiLU(linear x)
};

class Heads : public Object {
 public:
  // Packed layers, as bf16 or int8, with the scales and sums of the int8 ones, biases, and (outputs, inputs) of each:
  // for recurrent ones the cell of the embedding and that of the state; then for every head those of its steps, the
  // linear one before what is kept, and the one that scores. embedding: (V, F), or empty where nothing is read.
  // ids lists the tokens behind the W scores, or is empty where they are the vocabulary itself.
  Heads(Tensors weights, Tensors scales, Tensors sums, Tensors biases, std::vector<int64_t> sizes,
        std::vector<std::vector<int64_t>> steps, int64_t reads, Tensor embedding, Tensor ids, int64_t features)
      : weights_(std::move(weights)), scales_(std::move(scales)), sums_(std::move(sums)), biases_(std::move(biases)),
        embedding_(std::move(embedding)), reads_(reads), features_(features),
        growth_(std::move(ids), sizes.size() < 2 ? 0 : sizes[sizes.size() - 2], reads == kNothing) {
    REQUIRE(!steps.empty() && scales_.size() == weights_.size() && sums_.size() == weights_.size() &&
                biases_.size() == weights_.size() && sizes.size() == 2 * weights_.size() && features_ > 0 &&
                reads_ >= kNothing && reads_ <= kRecurrent,
            "draftsmith: the parts of the heads do not fit together");
    size_t next = 0;
    const auto linear = [&](int64_t inputs) {
      REQUIRE(next < weights_.size() && sizes[2 * next + 1] == inputs,
              "draftsmith: layer ", next, " of the heads has to read ", inputs, " values");
      const Linear layer = as_any_linear(weights_[next], scales_[next], sums_[next], biases_[next], sizes[2 * next],
                                         sizes[2 * next + 1]);
      most_inputs_ = std::max(most_inputs_, layer.inputs);
      return ++next, layer;
    };
    if (reads_ == kRecurrent) {
      cell_token_ = linear(features_), cell_state_ = linear(features_);
      REQUIRE(cell_token_.outputs == features_ && cell_state_.outputs == features_,
              "draftsmith: the recurrent state has to be ", features_, " wide");
    }
    for (size_t h = 0; h < steps.size(); ++h) {
      Head head;
      int64_t width = carried(static_cast<int64_t>(h));
      carry_width_ = std::max(carry_width_, width);
      for (const int64_t kind : steps[h]) {
        Step step{kind, linear(width), {}};
        if (kind == kNarrow) step.kept = linear(width);
        const int64_t out = step.linear.outputs;
        REQUIRE(kind >= kProject && kind <= kNarrow && (kind != kResidual || out == width) &&
                    (kind != kNarrow || (out == step.kept.outputs && step.linear.reads_as(step.kept))),
                "draftsmith: a step of a head turns ", width, " values into ", out);
        width = out, inner_width_ = std::max(inner_width_, width);
        head.steps.push_back(step);
      }
      head.scores = linear(width);
      REQUIRE(head.scores.outputs == sizes[sizes.size() - 2],
              "draftsmith: all heads have to score the same tokens");
      heads_.push_back(std::move(head));
    }
    REQUIRE(next == weights_.size(), "draftsmith: the heads have ", next, " layers, and ", weights_.size(),
            " are given");
    REQUIRE(reads_ == kNothing || (embedding_.is_contiguous() && embedding_.is_cpu() && embedding_.dim() == 2 &&
                                   embedding_.scalar_type() == kBFloat16 && embedding_.size(1) == features_),
            "draftsmith: the embedding of the heads has to be bf16 of width ", features_);
    growth_.limit(reads_ == kNothing ? 0 : embedding_.size(0));
  }

  // Returns tokens and parents, both (B, nodes); parents are -1 for children of the root and -2 for padding.
  std::tuple<Tensor, Tensor> propose(const Tensor& tokens, const Tensor& features,
                                             const Tensor& counts, const Form& form,
                                             const Tensors& noise) {
    const std::lock_guard<std::mutex> alone(busy_);
    const int64_t threads = get_num_threads();
    growth_.begin(tokens, features, counts, features_, form, static_cast<int64_t>(heads_.size()), threads);
    growth_.share_noise(noise, threads);
    // All memory comes before the threads: nothing in a team may throw. Rows are of even length, zero behind an odd
    // one: the kernels read two inputs at a time.
    const int64_t widest = growth_.widest();
    for (Lined<bf16>& carry : carries_) carry.resize(widest * even(carry_width_));
    for (Lined<bf16>& inner : inner_) inner.assign(widest * even(inner_width_), 0);
    if (reads_ == kRecurrent) read_.assign(widest * even(features_), 0), cells_.assign(widest * even(features_), 0);
    rooms_.resize(threads);
    for (Quantised& room : rooms_) room.reserve(widest, most_inputs_);
    start(tokens, features, counts);
    run_team(threads, [&](const Team& team) {
      for (int64_t d = 0; d < growth_.depth(); ++d) {
        carry(team, d);
        guess(team, d);
        if (team.index == 0) growth_.choose(d, team.size);
        team.barrier();
        if (growth_.is_over()) break;
      }
    });
    return growth_.place();
  }

 private:
  struct Step {
    int64_t kind;
    Linear linear, kept;
  };

  struct Head {
    std::vector<Step> steps;
    Linear scores;
  };

  // The width of what head h reads.
  int64_t carried(int64_t h) const { return reads_ == kNothing ? features_ : features_ * (reads_ == kAll ? h + 2 : 2); }

  // Carries of a depth: those that its nodes read, and the ones of their parents, in turns.
  bf16* carry_of(int64_t depth, int64_t row) {
    return carries_[(depth + 1) % 2].data() + row * even(carry_width_);
  }

  // Before the first depth: the state that predicted the root, and an empty state of the recurrent kinds beside it.
  void start(const Tensor& tokens, const Tensor& features, const Tensor& counts) {
    for (int64_t b = 0; b < growth_.batch(); ++b) {
      bf16* to = carry_of(reads_ == kNothing ? 0 : -1, b);
      std::copy_n(bits(features) + Growth::last(tokens, counts, b) * features_, features_, to);
      std::fill(to + features_, to + even(carry_width_), 0);
    }
  }

  // Lets every node that is expanded read its token; every thread takes some of them.
  void carry(const Team& team, int64_t depth) {
    if (reads_ == kNothing) return;
    const int64_t rows = growth_.rows(depth), kept = reads_ == kAll ? features_ * (depth + 1) : features_;
    const auto [first, last] = team.share(rows);
    for (int64_t r = first; r < last; ++r) {
      const bf16* from = carry_of(depth - 1, growth_.parent(r));
      const bf16* token = bits(embedding_) + growth_.token(r) * features_;
      bf16* to = carry_of(depth, r);
      std::copy_n(from, kept, to);
      if (reads_ == kAll) {
        std::copy_n(token, features_, to + kept);
      } else if (reads_ == kSum) {
        for (int64_t i = 0; i < features_; ++i) to[kept + i] = narrow(widen(from[kept + i]) + widen(token[i]));
      } else {
        std::copy_n(token, features_, read_.data() + r * even(features_));
        std::copy_n(from + kept, features_, cells_.data() + r * even(features_));
      }
      // What an earlier, longer row left there.
      std::fill(to + carried(depth), to + even(carried(depth)), 0);
    }
    team.barrier();
    if (reads_ != kRecurrent) return;
    Quantised& room = rooms_[team.index];
    const int64_t stride = even(features_);
    // Both products give this thread the same columns, so nobody waits between them.
    multiply(team, cell_state_, cells_.data(), stride, rows,
             [&](int64_t r, int64_t n, int64_t count, const float* values) {
               kernels().narrow_row(values, count, carry_of(depth, r) + features_ + n);
             }, room, cell_token_.begin(team));
    multiply(team, cell_token_, read_.data(), stride, rows,
             [&](int64_t r, int64_t n, int64_t count, const float* values) {
               bf16* to = carry_of(depth, r) + features_ + n;
               float sums[kChunk];
               kernels().add_row(values, count, to);
               for (int64_t i = 0; i < count; ++i) sums[i] = widen(to[i]);
               kernels().silu_times(sums, ones_.data(), count, to);
             }, room, opening(team, depth, 0));
    team.barrier();
  }

  // From the carries to the best children of every node that is expanded.
  void guess(const Team& team, int64_t depth) {
    const int64_t rows = growth_.ranked_rows(depth);
    Quantised& room = rooms_[team.index];
    const bf16* x = carry_of(reads_ == kNothing ? 0 : depth, 0);
    int64_t stride = even(carry_width_), place = 0;
    const std::vector<Step>& steps = heads_[depth].steps;
    for (size_t i = 0; i < steps.size(); ++i) {
      run(team, steps[i], x, stride, rows, inner_[place].data(), room, opening(team, depth, i + 1));
      team.barrier();
      x = inner_[place].data(), stride = even(inner_width_), place = 1 - place;
    }
    const void* next = reads_ == kRecurrent ? cell_state_.begin(team) : opening(team, (depth + 1) % heads_.size(), 0);
    growth_.rank(team, depth, heads_[depth].scores, x, stride, room, next);
  }

  // The weights that this thread reads first in a step of a head, or in the scores behind its last.
  const void* opening(const Team& team, int64_t depth, size_t step) const {
    const Head& head = heads_[depth];
    if (step == head.steps.size()) return head.scores.begin(team);
    return (head.steps[step].kind == kNarrow ? head.steps[step].kept : head.steps[step].linear).begin(team);
  }

  // One step, every thread its columns of all rows. `ahead` is as in kernels.h.
  void run(const Team& team, const Step& step, const bf16* x, int64_t stride, int64_t rows, bf16* y, Quantised& room,
           const void* ahead) {
    const int64_t out = even(inner_width_);
    const auto into = [&](int64_t r, int64_t n, int64_t count, const float* values) {
      kernels().narrow_row(values, count, y + r * out + n);
    };
    const auto activated = [&](int64_t r, int64_t n, int64_t count, const float* values) {
      bf16 narrowed[kChunk];
      float wide[kChunk];
      kernels().silu_times(values, ones_.data(), count, narrowed);
      for (int64_t i = 0; i < count; ++i) wide[i] = widen(narrowed[i]);
      kernels().add_row(wide, count, y + r * out + n);
    };
    const Factors factors = factors_for(step.linear, x, stride, rows, room);
    if (step.kind == kNarrow) {
      multiply_factors(team, step.kept, factors, rows, into, step.linear.begin(team));
    } else if (step.kind == kResidual) {
      const auto [from, to] = team.share(step.linear.panels);
      const int64_t first = from * kPanel, last = std::min(to * kPanel, step.linear.outputs);
      for (int64_t r = 0; r < rows; ++r)
        if (first < last) std::copy(x + r * stride + first, x + r * stride + last, y + r * out + first);
    }
    if (step.kind == kProject)
      multiply_factors(team, step.linear, factors, rows, into, ahead);
    else
      multiply_factors(team, step.linear, factors, rows, activated, ahead);
  }

  Tensors weights_, scales_, sums_, biases_;
  Tensor embedding_;
  int64_t reads_, features_, carry_width_ = 0, inner_width_ = 0, most_inputs_ = 0;
  Growth growth_;
  Linear cell_token_, cell_state_;
  std::vector<Head> heads_;
  std::vector<float> ones_ = std::vector<float>(kChunk, 1.0f);
  std::mutex busy_;  // what follows serves one draft at a time
  Lined<bf16> carries_[2], inner_[2], read_, cells_;
  std::vector<Quantised> rooms_;
};

int64_t make_heads(const Tensors& weights, const Tensors& scales, const Tensors& sums, const Tensors& biases,
                   const std::vector<int64_t>& sizes, const std::vector<std::vector<int64_t>>& steps, int64_t reads,
                   const Tensor& embedding, const Tensor& ids, int64_t features) {
  return keep(std::make_shared<Heads>(weights, scales, sums, biases, sizes, steps, reads, embedding, ids, features));
}

std::tuple<Tensor, Tensor> draft_by_heads(int64_t heads, const Tensor& tokens, const Tensor& features,
                                          const Tensor& counts, const std::vector<int64_t>& branching, int64_t paths,
                                          int64_t beam, int64_t nodes, double confidence, const Tensors& noise) {
  return kept<Heads>(heads)->propose(tokens, features, counts, {branching, paths, beam, nodes, confidence}, noise);
}

}  // namespace

void define_heads(Library& library) {
  library.def<make_heads>(
      "make_heads(Tensor[] weights, Tensor[] scales, Tensor[] sums, Tensor[] biases, int[] sizes, int[][] steps,"
      " int reads, Tensor embedding, Tensor ids, int features) -> int");
  library.def<draft_by_heads>(
      "draft_by_heads(int heads, Tensor tokens, Tensor features, Tensor counts, int[] branching, int paths, int beam,"
      " int nodes, float confidence, Tensor[] noise) -> (Tensor, Tensor)");
}

}  // namespace draftsmith
