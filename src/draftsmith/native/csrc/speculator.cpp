// The MLP speculator's guesses for a step, in one parallel region: its stages, grown into a tree.
//
// The Python of drafters/heads/mlp.py says what is computed.
//
// Words: B rows, S width of a state, D inner width, W drafted vocabulary.

#include <mutex>
#include <vector>

#include "growth.h"
#include "objects.h"
#include "operators.h"

namespace draftsmith {
namespace {

constexpr float kEpsilon = 1e-6f;
constexpr int64_t kSecondCache = 1 << 20;  // bytes that stay near a thread; processors have 1 or 2 MB

class Speculator : public Object {
 public:
  // projections, then heads, of every stage: packed as bf16 or int8, with the scales and sums of the int8 ones, empty
  // for bf16. One entry a stage: embeddings (V, D), norm scales and shifts (D) in fp32.
  // draft_tokens lists the ids behind the W scores, or is empty where they are the vocabulary itself.
  Speculator(Tensors weights, Tensors weight_scales, Tensors sums, Tensors embeddings, Tensors scales,
             Tensors shifts, Tensor draft_tokens, int64_t features, int64_t scored, double ratio, bool scale_input)
      : weights_(std::move(weights)), weight_scales_(std::move(weight_scales)), weight_sums_(std::move(sums)),
        embeddings_(std::move(embeddings)), scales_(std::move(scales)), shifts_(std::move(shifts)),
        features_(features), growth_(std::move(draft_tokens), scored, false), ratio_(static_cast<float>(ratio)),
        scale_input_(scale_input) {
    const size_t stages = scales_.size();
    REQUIRE(stages > 0 && weights_.size() == 2 * stages && weight_scales_.size() == 2 * stages &&
                weight_sums_.size() == 2 * stages && shifts_.size() == stages &&
                (embeddings_.empty() || embeddings_.size() == stages),
            "draftsmith: the stages of the speculator do not fit together");
    width_ = scales_[0].numel();
    int64_t vocabulary = 0;
    for (size_t i = 0; i < stages; ++i) {
      const auto linear = [&](size_t at, int64_t outputs, int64_t inputs) {
        return as_any_linear(weights_[at], weight_scales_[at], weight_sums_[at], empty({0}, kFloat), outputs, inputs);
      };
      stages_.push_back(
          {linear(i, width_, i == 0 ? features_ : width_), linear(stages + i, scored, width_)});
      for (const Tensor* t : {&scales_[i], &shifts_[i]})
        REQUIRE(t->is_contiguous() && t->scalar_type() == kFloat && t->numel() == width_,
                "draftsmith: a norm of the speculator has to be fp32 of ", width_, " values");
    }
    for (const Tensor& table : embeddings_) {
      REQUIRE(table.is_contiguous() && table.scalar_type() == kBFloat16 && table.dim() == 2 &&
                  table.size(1) == width_,
              "draftsmith: an embedding of the speculator has to be bf16 of width ", width_);
      vocabulary = vocabulary ? std::min(vocabulary, table.size(0)) : table.size(0);
    }
    growth_.limit(vocabulary);
  }

  // Returns tokens and parents, both (B, nodes); parents are -1 for children of the root and -2 for padding.
  std::tuple<Tensor, Tensor> propose(const Tensor& tokens, const Tensor& features,
                                             const Tensor& counts, const Form& form,
                                             const Tensors& noise) {
    const std::lock_guard<std::mutex> alone(busy_);
    const int64_t threads = get_num_threads();
    growth_.begin(tokens, features, counts, features_, form, static_cast<int64_t>(stages_.size()), threads);
    growth_.share_noise(noise, threads);
    // All memory comes before the threads: nothing in a team may throw.
    const int64_t widest = growth_.widest();
    projected_.resize(widest * width_), mixed_.resize(threads * width_);
    rooms_.resize(threads);
    for (Quantised& room : rooms_) room.reserve(widest, std::max(features_, width_));
    // Rows of even length, zero behind an odd one: the kernels read two inputs at a time.
    states_.assign(widest * even(width_), 0), inputs_.assign(growth_.batch() * even(features_), 0);
    start(tokens, features, counts);
    run_team(threads, [&](const Team& team) {
      for (int64_t d = 0; d < growth_.depth(); ++d) {
        stage(team, d);
        if (team.index == 0) growth_.choose(d, team.size);
        team.barrier();
        if (growth_.is_over()) break;
      }
    });
    return growth_.place();
  }

 private:
  struct Stage {
    Linear projection, head;
  };

  // The state that predicted the root of every row.
  void start(const Tensor& tokens, const Tensor& features, const Tensor& counts) {
    const int64_t stride = even(features_);
    for (int64_t b = 0; b < tokens.size(0); ++b) {
      const bf16* from = bits(features) + Growth::last(tokens, counts, b) * features_;
      bf16* to = inputs_.data() + b * stride;
      std::copy_n(from, features_, to);
      if (scale_input_) {
        float squares = 0;
        for (int64_t i = 0; i < features_; ++i) squares += widen(from[i]) * widen(from[i]);
        const float scale = 1 / std::sqrt(squares / static_cast<float>(features_) + kEpsilon) / std::sqrt(2.0f);
        for (int64_t i = 0; i < features_; ++i) to[i] = narrow(widen(from[i]) * scale);
      }
    }
  }

  // From the states of the level above to the best children of every node that is expanded.
  void stage(const Team& team, int64_t depth) {
    const Stage& stage = stages_[depth];
    Quantised& room = rooms_[team.index];
    const bf16* input = depth == 0 ? inputs_.data() : states_.data();
    const int64_t stride = even(depth == 0 ? features_ : width_);
    // Siblings share their parent's state, and so its projection.
    const Stage& following = stages_[(depth + 1) % stages_.size()];
    multiply(team, stage.projection, input, stride, growth_.sources(),
             [&](int64_t r, int64_t n, int64_t count, const float* values) {
               kernels().narrow_row(values, count, projected_.data() + r * width_ + n);
             }, room, is_near(team, depth, &Stage::projection) ? nullptr : stage.head.begin(team));
    team.barrier();
    activate(team, depth, growth_.rows(depth));
    team.barrier();
    growth_.rank(team, depth, stage.head, states_.data(), even(width_), room,
                 is_near(team, depth, &Stage::head) ? nullptr : following.projection.begin(team));
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
      kernels().activate(projected_.data() + growth_.parent(r) * width_,
                         table == nullptr ? nullptr : table + growth_.token(r) * width_, ratio_, scale, shift, width_,
                         kEpsilon, first, last, mixed_.data() + team.index * width_, states_.data() + r * even(width_));
  }

  Tensors weights_, weight_scales_, weight_sums_, embeddings_, scales_, shifts_;
  int64_t features_, width_;
  Growth growth_;
  float ratio_;
  bool scale_input_;
  std::vector<Stage> stages_;
  std::mutex busy_;  // what follows serves one draft at a time
  Lined<bf16> inputs_, projected_, states_;
  std::vector<float> mixed_;
  std::vector<Quantised> rooms_;
};

int64_t make_speculator(const Tensors& weights, const Tensors& weight_scales, const Tensors& sums,
                        const Tensors& embeddings, const Tensors& scales, const Tensors& shifts,
                        const Tensor& draft_tokens, int64_t features, int64_t scored, double ratio, bool scale_input) {
  return keep(std::make_shared<Speculator>(weights, weight_scales, sums, embeddings, scales, shifts, draft_tokens,
                                           features, scored, ratio, scale_input));
}

std::tuple<Tensor, Tensor> draft_by_stages(int64_t speculator, const Tensor& tokens, const Tensor& features,
                                           const Tensor& counts, const std::vector<int64_t>& branching, int64_t paths,
                                           int64_t beam, int64_t nodes, double confidence, const Tensors& noise) {
  return kept<Speculator>(speculator)->propose(tokens, features, counts, {branching, paths, beam, nodes, confidence}, noise);
}

}  // namespace

void define_speculator(Library& library) {
  library.def<make_speculator>(
      "make_speculator(Tensor[] weights, Tensor[] weight_scales, Tensor[] sums, Tensor[] embeddings, Tensor[] scales,"
      " Tensor[] shifts, Tensor draft_tokens, int features, int scored, float ratio, bool scale_input) -> int");
  library.def<draft_by_stages>(
      "draft_by_stages(int speculator, Tensor tokens, Tensor features, Tensor counts, int[] branching, int paths,"
      " int beam, int nodes, float confidence, Tensor[] noise) -> (Tensor, Tensor)");
}

}  // namespace draftsmith
