// Chains of guesses by a decoder layer that goes on from the states of the target, EAGLE and EAGLE-3, in one region.
//
// drafters/attention/feature_drafter.py, eagle.py and eagle3.py say what is computed. What was committed is read first,
// and the layer is run at the roots alone; then every guess is read with the layer's own output in the place of a
// state.
//
// Words: B rows, T tokens of a context, N entries (a token with the state that predicted it), F width of the layer,
// P width of the tapped states, H query heads, G key heads, D width of a head, W scored tokens.

#include <cmath>
#include <mutex>
#include <vector>

#include "growth.h"
#include "objects.h"
#include "operators.h"

namespace draftsmith {
namespace {

class FeatureLayer : public Object {
 public:
  // Packed layers: what joins or fuses, queries with keys and values, out, gate with up, down, the head.
  // norms: after attention, and for EAGLE-3 those of embedding, state and last state besides.
  // sizes: P, F, H, G, D, inner width, W; factors: epsilon, scale of the rotary angles' cosines and sines.
  // With `keeps_normal` the residual stream of EAGLE-3 starts from the normalised state.
  FeatureLayer(Tensors weights, Tensors scales, Tensors sums, Tensors biases, Tensors norms, Tensor embedding,
               Tensor ids, Tensor frequencies, std::vector<int64_t> sizes, std::vector<double> factors,
               bool keeps_normal)
      : weights_(std::move(weights)), scales_(std::move(scales)), sums_(std::move(sums)), biases_(std::move(biases)),
        norms_(std::move(norms)), embedding_(std::move(embedding)),
        frequencies_(frequencies.to(kFloat).contiguous()), keeps_normal_(keeps_normal),
        growth_(std::move(ids), sizes.size() == 7 ? sizes[6] : 0, false) {
    REQUIRE(sizes.size() == 7 && factors.size() == 2 && weights_.size() == 6 && scales_.size() == 6 &&
                sums_.size() == 6 && biases_.size() == 6 && (norms_.size() == 1 || norms_.size() == 4),
            "draftsmith: the parts of the layer do not fit together");
    taps_ = sizes[0], width_ = sizes[1], heads_ = sizes[2], key_heads_ = sizes[3], head_width_ = sizes[4];
    inner_ = sizes[5], normed_ = norms_.size() == 4;
    epsilon_ = static_cast<float>(factors[0]), rotary_scale_ = static_cast<float>(factors[1]);
    REQUIRE(key_heads_ > 0 && heads_ % key_heads_ == 0 && head_width_ % 2 == 0 && width_ % 2 == 0 &&
                taps_ % 2 == 0 && inner_ % 2 == 0 && (normed_ || taps_ == width_) &&
                2 * frequencies_.numel() == head_width_,
            "draftsmith: the sizes of the layer do not fit together");
    const auto linear = [&](size_t i, int64_t outputs, int64_t inputs) {
      most_inputs_ = std::max(most_inputs_, inputs);
      return as_any_linear(weights_[i], scales_[i], sums_[i], biases_[i], outputs, inputs);
    };
    const int64_t inside = heads_ * head_width_;
    entry_ = linear(0, width_, normed_ ? taps_ : 2 * width_);
    project_ = linear(1, inside + 2 * key_heads_ * head_width_, normed_ ? 2 * width_ : width_);
    out_ = linear(2, width_, inside), gate_up_ = linear(3, 2 * inner_, width_), down_ = linear(4, width_, inner_);
    head_ = linear(5, sizes[6], width_);
    for (const Tensor& norm : norms_)
      REQUIRE(norm.is_contiguous() && norm.scalar_type() == kBFloat16 && norm.numel() == width_,
              "draftsmith: a norm of the layer has to be bf16 of ", width_, " values");
    REQUIRE(embedding_.is_contiguous() && embedding_.scalar_type() == kBFloat16 && embedding_.dim() == 2 &&
                embedding_.size(1) == width_,
            "draftsmith: the embedding of the layer has to be bf16 of width ", width_);
    growth_.limit(embedding_.size(0));
  }

  // Stores the entries of a context behind the first starts[b] of every row, slot slots[b] (or b) of keys and values
  // (slots, capacity, G, D), and returns chains of `depth` guesses: tokens and parents (B, depth), -2 in the place of those
  // that are less likely than `confidence`, see `Form`. What is read of the guesses lies behind the committed entries,
  // where the next call overwrites it.
  std::tuple<Tensor, Tensor> propose(const Tensor& tokens, const Tensor& features,
                                             const Tensor& counts, const Tensor& starts,
                                             const std::optional<Tensor>& slots, const Tensor& keys,
                                             const Tensor& values, int64_t depth, double confidence,
                                             const Tensors& noise) {
    const std::lock_guard<std::mutex> alone(busy_);
    const int64_t threads = get_num_threads();
    const Form chain{std::vector<int64_t>(depth, 1), 0, 0, depth, confidence};
    growth_.begin(tokens, features, counts, taps_, chain, depth, threads);
    growth_.share_noise(noise, threads);
    lay_out(tokens, features, counts, starts, slots, keys, values, depth);
    reserve(threads);
    run_team(threads, [&](const Team& team) {
      if (normed_) fuse(team);
      read(team);
      for (int64_t d = 0; d < depth; ++d) {
        if (d > 0) {
          if (team.index == 0) next();
          team.barrier();
          read(team);
        }
        finish(team);
        growth_.rank(team, d, head_, normed_ ? normal_.data() : states_.data(), width_, rooms_[team.index],
                     (normed_ ? project_ : entry_).begin(team));
        if (team.index == 0) growth_.choose(d, team.size);
        team.barrier();
        if (growth_.is_over()) break;
      }
    });
    return growth_.place();
  }

 private:
  struct Entry {
    int64_t token, row, position;
  };

  void lay_out(const Tensor& tokens, const Tensor& features, const Tensor& counts,
               const Tensor& starts, const std::optional<Tensor>& slots, const Tensor& keys, const Tensor& values,
               int64_t depth) {
    const int64_t batch = tokens.size(0), columns = tokens.size(1);
    capacity_ = keys.dim() == 4 ? keys.size(1) : 0;
    for (const Tensor* t : {&keys, &values})
      REQUIRE(t->dim() == 4 && t->is_contiguous() && t->scalar_type() == kBFloat16 &&
                  t->sizes() == Sizes({keys.size(0), capacity_, key_heads_, head_width_}),
              "draftsmith: the memory of the layer has another shape");
    REQUIRE(starts.is_contiguous() && starts.scalar_type() == kLong && starts.numel() == batch,
            "draftsmith: the starts have to be int64 (B)");
    REQUIRE(!slots.has_value() || (slots->is_contiguous() && slots->scalar_type() == kLong &&
                                   slots->numel() == batch),
            "draftsmith: the slots have to be int64 (B)");
    slots_.resize(batch);
    for (int64_t b = 0; b < batch; ++b) {
      slots_[b] = slots.has_value() ? slots->const_data_ptr<int64_t>()[b] : b;
      REQUIRE_INDEX(slots_[b] >= 0 && slots_[b] < keys.size(0), "draftsmith: the memory of the layer has ",
                    keys.size(0), " slots");
    }
    keys_ = mutable_bits(keys), values_ = mutable_bits(values);
    entries_.clear(), roots_.clear(), longest_ = 0;
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t start = starts.const_data_ptr<int64_t>()[b], count = counts.const_data_ptr<int64_t>()[b];
      REQUIRE_INDEX(start >= 0 && start + count + depth <= capacity_, "draftsmith: ", start, " entries and ",
                    count, " new ones with ", depth, " guesses do not fit a slot of ", capacity_);
      for (int64_t t = 0; t < count; ++t) {
        const int64_t token = tokens.const_data_ptr<int64_t>()[b * columns + t];
        REQUIRE_INDEX(token >= 0 && token < embedding_.size(0), "draftsmith: there is no token ", token);
        entries_.push_back({token, b, start + t});
      }
      roots_.push_back(static_cast<int64_t>(entries_.size()) - 1);
      longest_ = std::max(longest_, start + count + depth);
    }
    const int64_t rows = static_cast<int64_t>(entries_.size());
    tapped_.resize(rows * taps_);
    for (int64_t b = 0, n = 0; b < batch; ++b)
      for (int64_t t = 0; t < counts.const_data_ptr<int64_t>()[b]; ++t, ++n)
        std::copy_n(bits(features) + (b * columns + t) * taps_, taps_, tapped_.data() + n * taps_);
  }

  void reserve(int64_t threads) {
    const int64_t rows = static_cast<int64_t>(entries_.size()), batch = growth_.batch();
    for (Lined<bf16>* wide : {&fused_, &residual_}) wide->resize(rows * width_);
    joined_.resize(rows * 2 * width_), turned_.resize(rows * project_.outputs);
    for (Lined<bf16>* few : {&states_, &normal_}) few->resize(batch * width_);
    mixed_.resize(batch * heads_ * head_width_), gated_.resize(batch * 2 * inner_), inside_.resize(batch * inner_);
    angles_.resize(threads * head_width_);
    scratch_.resize(threads * scratch_size());
    rooms_.resize(threads);
    for (Quantised& room : rooms_) room.reserve(rows, most_inputs_);
  }

  int64_t groups() const { return heads_ / key_heads_; }
  int64_t scratch_size() const {
    return groups() * head_width_ + attention_room(groups(), longest_, head_width_, head_width_);
  }

  // What stands for the states of the entries: the tapped ones, projected to one, for EAGLE-3.
  void fuse(const Team& team) {
    multiply(team, entry_, tapped_.data(), taps_, static_cast<int64_t>(entries_.size()),
             [&](int64_t r, int64_t n, int64_t count, const float* values) {
               kernels().narrow_row(values, count, fused_.data() + r * width_ + n);
             }, rooms_[team.index], project_.begin(team));
    team.barrier();
  }

  // Keys and values of the entries into memory, queries and residual stream of the roots aside.
  void read(const Team& team) {
    const int64_t rows = static_cast<int64_t>(entries_.size());
    const auto [first, last] = team.share(rows);
    const bf16* table = bits(embedding_);
    for (int64_t r = first; r < last; ++r) {
      const bf16* token = table + entries_[r].token * width_;
      const bf16* state = (normed_ ? fused_.data() : tapped_.data()) + r * width_;
      bf16* to = joined_.data() + r * 2 * width_;
      if (normed_) {
        kernels().rms_norm(token, bits(norms_[1]), width_, epsilon_, to);
        kernels().rms_norm(state, bits(norms_[2]), width_, epsilon_, to + width_);
        std::copy_n(keeps_normal_ ? to + width_ : state, width_, residual_.data() + r * width_);
      } else {
        std::copy_n(token, width_, to), std::copy_n(state, width_, to + width_);
      }
    }
    team.barrier();
    Quantised& room = rooms_[team.index];
    if (!normed_) {
      multiply(team, entry_, joined_.data(), 2 * width_, rows,
               [&](int64_t r, int64_t n, int64_t count, const float* values) {
                 kernels().narrow_row(values, count, residual_.data() + r * width_ + n);
               }, room, project_.begin(team));
      team.barrier();
    }
    const bf16* x = normed_ ? joined_.data() : residual_.data();
    multiply(team, project_, x, project_.inputs, rows,
             [&](int64_t r, int64_t n, int64_t count, const float* values) {
               kernels().narrow_row(values, count, turned_.data() + r * project_.outputs + n);
             }, room, out_.begin(team));
    team.barrier();
    const int64_t half = head_width_ / 2, inside = heads_ * head_width_, at_keys = key_heads_ * head_width_;
    const float* frequencies = frequencies_.const_data_ptr<float>();
    float *cosines = angles_.data() + team.index * head_width_, *sines = cosines + half;
    for (int64_t r = first; r < last; ++r) {
      const Entry& entry = entries_[r];
      const bool is_root = r == roots_[entry.row];
      for (int64_t d = 0; d < half; ++d) {
        const float angle = static_cast<float>(entry.position) * frequencies[d];
        cosines[d] = through_bf16(std::cos(angle) * rotary_scale_);
        sines[d] = through_bf16(std::sin(angle) * rotary_scale_);
      }
      bf16* heads = turned_.data() + r * project_.outputs;
      const int64_t place = (slots_[entry.row] * capacity_ + entry.position) * at_keys;
      for (int64_t h = is_root ? 0 : heads_; h < heads_; ++h)
        kernels().rotate(heads + h * head_width_, cosines, sines, half, heads + h * head_width_);
      for (int64_t g = 0; g < key_heads_; ++g)
        kernels().rotate(heads + inside + g * head_width_, cosines, sines, half, keys_ + place + g * head_width_);
      std::copy_n(heads + inside + at_keys, at_keys, values_ + place);
      if (is_root) std::copy_n(residual_.data() + r * width_, width_, states_.data() + entry.row * width_);
    }
    team.barrier();
  }

  // The rest of the layer at the roots.
  void finish(const Team& team) {
    const int64_t batch = growth_.batch(), at_keys = key_heads_ * head_width_;
    AttentionTask task{};
    task.out = scratch_.data() + team.index * scratch_size(), task.scratch = task.out + groups() * head_width_;
    task.scale = 1 / std::sqrt(static_cast<float>(head_width_));
    task.nodes = 1, task.groups = groups(), task.width = task.value_width = head_width_;
    task.key_stride = task.value_stride = at_keys;
    for (int64_t i = team.index; i < batch * key_heads_; i += team.size) {
      const int64_t b = i / key_heads_, g = i % key_heads_, base = slots_[b] * capacity_ * at_keys + g * head_width_;
      const int64_t head = g * groups() * head_width_;
      task.keys = keys_ + base, task.values = values_ + base;
      const int64_t first = 0, last = entries_[roots_[b]].position + 1;
      task.first = &first, task.last = &last, task.shared = task.entries = last;
      task.queries = turned_.data() + roots_[b] * project_.outputs + head;
      kernels().attend(task);
      kernels().narrow_row(task.out, groups() * head_width_, mixed_.data() + b * heads_ * head_width_ + head);
    }
    team.barrier();
    Quantised& room = rooms_[team.index];
    const auto added = [&](int64_t r, int64_t n, int64_t count, const float* values) {
      kernels().add_row(values, count, states_.data() + r * width_ + n);
    };
    multiply(team, out_, mixed_.data(), out_.inputs, batch, added, room, gate_up_.begin(team));
    team.barrier();
    normalise(team, norms_[0]);
    multiply(team, gate_up_, normal_.data(), width_, batch,
             [&](int64_t r, int64_t n, int64_t count, const float* values) {
               std::copy_n(values, count, gated_.data() + r * 2 * inner_ + n);
             }, room, down_.begin(team));
    team.barrier();
    const auto [first, last] = team.share(inner_);
    for (int64_t r = 0; r < batch; ++r) {
      const float* gate = gated_.data() + r * 2 * inner_;
      kernels().silu_times(gate + first, gate + inner_ + first, last - first, inside_.data() + r * inner_ + first);
    }
    team.barrier();
    multiply(team, down_, inside_.data(), inner_, batch, added, room, head_.begin(team));
    team.barrier();
    if (normed_) normalise(team, norms_[3]);
  }

  void normalise(const Team& team, const Tensor& norm) {
    const auto [first, last] = team.share(growth_.batch());
    for (int64_t r = first; r < last; ++r)
      kernels().rms_norm(states_.data() + r * width_, bits(norm), width_, epsilon_, normal_.data() + r * width_);
    team.barrier();
  }

  // Makes the guesses the entries to read, each with the layer's own output.
  void next() {
    for (int64_t b = 0; b < growth_.batch(); ++b) {
      entries_[b] = {growth_.token(b), b, entries_[roots_[b]].position + 1};
      roots_[b] = b;
      std::copy_n(states_.data() + b * width_, width_, (normed_ ? fused_ : tapped_).data() + b * width_);
    }
    entries_.resize(growth_.batch());
  }

  Tensors weights_, scales_, sums_, biases_, norms_;
  Tensor embedding_, frequencies_;
  bool keeps_normal_, normed_ = false;
  int64_t taps_ = 0, width_ = 0, heads_ = 0, key_heads_ = 0, head_width_ = 0, inner_ = 0, most_inputs_ = 0;
  float epsilon_ = 0, rotary_scale_ = 1;
  Linear entry_, project_, out_, gate_up_, down_, head_;
  std::mutex busy_;  // what follows serves one draft at a time
  Growth growth_;
  std::vector<Entry> entries_;
  std::vector<int64_t> roots_;  // the last entry of every row
  std::vector<int64_t> slots_;  // of every row, in the memory
  int64_t capacity_ = 0, longest_ = 0;
  bf16 *keys_ = nullptr, *values_ = nullptr;
  Lined<bf16> tapped_, fused_, joined_, residual_, turned_, states_, normal_, mixed_, inside_;
  std::vector<float> gated_, angles_, scratch_;
  std::vector<Quantised> rooms_;
};

int64_t make_feature_layer(const Tensors& weights, const Tensors& scales, const Tensors& sums, const Tensors& biases,
                           const Tensors& norms, const Tensor& embedding, const Tensor& ids, const Tensor& frequencies,
                           const std::vector<int64_t>& sizes, const std::vector<double>& factors, bool keeps_normal) {
  return keep(std::make_shared<FeatureLayer>(weights, scales, sums, biases, norms, embedding, ids, frequencies, sizes,
                                             factors, keeps_normal));
}

std::tuple<Tensor, Tensor> draft_by_features(int64_t layer, const Tensor& tokens, const Tensor& features,
                                             const Tensor& counts, const Tensor& starts,
                                             const std::optional<Tensor>& slots, const Tensor& keys,
                                             const Tensor& values, int64_t depth, double confidence,
                                             const Tensors& noise) {
  return kept<FeatureLayer>(layer)->propose(tokens, features, counts, starts, slots, keys, values, depth, confidence,
                                             noise);
}

}  // namespace

void define_features(Library& library) {
  library.def<make_feature_layer>(
      "make_feature_layer(Tensor[] weights, Tensor[] scales, Tensor[] sums, Tensor[] biases, Tensor[] norms,"
      " Tensor embedding, Tensor ids, Tensor frequencies, int[] sizes, float[] factors, bool keeps_normal) -> int");
  library.def<draft_by_features>(
      "draft_by_features(int layer, Tensor tokens, Tensor features, Tensor counts, Tensor starts, Tensor? slots,"
      " Tensor(a!) keys, Tensor(b!) values, int depth, float confidence,"
      " Tensor[] noise) -> (Tensor, Tensor)");
}

}  // namespace draftsmith
