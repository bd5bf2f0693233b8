// A whole forward of a Llama-shaped model over a draft tree, in one parallel region.
//
// The model: RMS norms, rotary positions, grouped-query attention, a gated SiLU feed-forward; biases, norms on the
// heads (Qwen3) and sliding windows where the model has them. Every product and every elementwise step rounds to bf16
// where transformers does. Attention reads the visible entries of a row in the order of their positions, so a node of
// a tree computes bit by bit what it would compute as the last token of a text.
//
// Words: B rows, M nodes, F width of the model, H query heads, G query heads a key head, D width of a head.

#include <cmath>
#include <mutex>
#include <vector>

#include "objects.h"
#include "operators.h"
#include "packed.h"
#include "pass.h"

namespace draftsmith {
namespace {

struct Layer {
  Linear query, key, value, out, gate, up, down;
  const bf16 *input_norm, *after_norm;
  const bf16 *query_norm = nullptr, *key_norm = nullptr;
  int64_t window = 0;  // 0 for none
};

// Memory of a pass, kept for the next one: fresh pages would cost as much as a layer.
template <class T>
struct Scratch {
  std::vector<T> memory;
  T* of(int64_t count) {
    if (static_cast<int64_t>(memory.size()) < count) memory.resize(count);
    return memory.data();
  }
};

constexpr int64_t kOwnRows = 4;  // so few are normed faster than a barrier is passed

class Decoder : public Object {
 public:
  // sizes: width, heads, key_heads, head_width, inner, vocabulary, max_length; factors: epsilon, scale, rotary_scale.
  // weights: query, key, value, out, gate, up, down of every layer, then the head, packed as bf16, int8 or int4; scales
  // and sums of the int8 ones, else empty; biases in fp32, empty for none.
  // norms: input and after-attention norm of every layer, then the last; head_norms: query and key of every layer.
  // embedding: (V, F) dense, or the head's packed weights.
  Decoder(Tensor embedding, Tensors weights, Tensors scales, Tensors sums, Tensors biases, Tensors norms,
          Tensors head_norms, Tensor frequencies, std::vector<int64_t> sizes, std::vector<double> factors,
          std::vector<int64_t> windows)
      : embedding_(std::move(embedding)), weights_(std::move(weights)), scales_(std::move(scales)),
        sums_(std::move(sums)), biases_(std::move(biases)), norms_(std::move(norms)),
        head_norms_(std::move(head_norms)),
        frequencies_(frequencies.to(kFloat).contiguous()) {
    REQUIRE(sizes.size() == 7 && factors.size() == 3, "draftsmith: a decoder has 7 sizes and 3 factors");
    const size_t layers = windows.size();
    shape_ = {static_cast<int64_t>(layers), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6],
              factors[0], factors[1], factors[2]};
    const Shape& s = shape_;
    REQUIRE(weights_.size() == 7 * layers + 1 && scales_.size() == weights_.size() &&
                sums_.size() == weights_.size() && biases_.size() == weights_.size() &&
                norms_.size() == 2 * layers + 1 &&
                (head_norms_.empty() || head_norms_.size() == 2 * layers) &&
                frequencies_.numel() * 2 == s.head_width && s.heads % s.key_heads == 0 && s.width % 2 == 0 &&
                s.inner % 2 == 0 && s.heads * s.head_width % 2 == 0,
            "draftsmith: the parts of the decoder do not fit together");
    if (embedding_.dim() == 2) {
      REQUIRE(embedding_.is_cpu() && embedding_.is_contiguous() && embedding_.scalar_type() == kBFloat16 &&
                  embedding_.size(0) == s.vocabulary && embedding_.size(1) == s.width,
              "draftsmith: the embedding has to be bf16 of (", s.vocabulary, ", ", s.width, ")");
    } else if (embedding_.scalar_type() == kByte) {
      check_packed_int4(embedding_, s.vocabulary, s.width);
    } else if (embedding_.scalar_type() == kChar) {
      check_packed_int8(embedding_, scales_.back(), s.vocabulary, s.width);
    } else {
      check_packed(embedding_, s.vocabulary, s.width);
    }
    head_ = linear(7 * layers, s.vocabulary, s.width);
    const int64_t inside = s.heads * s.head_width, keys = s.key_heads * s.head_width;
    const int64_t outputs[7] = {inside, keys, keys, s.width, s.inner, s.inner, s.width};
    const int64_t inputs[7] = {s.width, s.width, s.width, inside, s.width, s.width, s.inner};
    for (size_t l = 0; l < layers; ++l) {
      Layer layer;
      Linear* parts[7] = {&layer.query, &layer.key, &layer.value, &layer.out, &layer.gate, &layer.up, &layer.down};
      for (int i = 0; i < 7; ++i) *parts[i] = linear(7 * l + i, outputs[i], inputs[i]);
      layer.input_norm = norm(norms_[2 * l], s.width);
      layer.after_norm = norm(norms_[2 * l + 1], s.width);
      if (!head_norms_.empty()) {
        layer.query_norm = norm(head_norms_[2 * l], s.head_width);
        layer.key_norm = norm(head_norms_[2 * l + 1], s.head_width);
      }
      layer.window = windows[l];
      REQUIRE(layer.query.reads_as(layer.key) && layer.query.reads_as(layer.value) && layer.gate.reads_as(layer.up),
              "draftsmith: products of the same rows have to be quantised in one way");
      layers_.push_back(layer);
    }
    last_norm_ = norm(norms_.back(), s.width);
    most_inputs_ = std::max({s.width, inside, s.inner});
  }

  // Reads the nodes (B, M) behind `cached` tokens of every row, and writes their keys and values there. Row b lies in
  // slot slots[b] of the cache, or b without slots, and has counts[b] of the nodes, or all. With tables (slots, J), a slot is made
  // of blocks of the cache, and block tables[slot, j] holds its j-th part.
  // Returns the logits (B, M or columns, V) and the tapped states (B, M, F · taps). Of nodes that a row does not have,
  // the logits are anything, and the states zero. Without depths and visible every row is a chain.
  std::tuple<Tensor, Tensor> forward(const Tensor& tokens, const std::optional<Tensor>& depths,
                                             const std::optional<Tensor>& visible, const Tensor& cached,
                                             const Tensors& keys, const Tensors& values,
                                             const std::optional<Tensor>& tables,
                                             const std::optional<Tensor>& slots,
                                             const std::optional<Tensor>& counts, std::vector<int64_t> taps,
                                             const std::optional<Tensor>& columns) {
    const Pass pass =
        checked_pass(shape_, tokens, depths, visible, cached, keys, values, tables, slots, counts, taps, columns);
    const std::lock_guard<std::mutex> alone(busy_);
    const Shape& s = shape_;
    Tensor logits = empty({pass.batch, pass.kept, s.vocabulary}, kBFloat16);
    Tensor features = empty({pass.batch, pass.nodes, s.width * static_cast<int64_t>(taps.size())}, kBFloat16);
    if (pass.rows() < pass.batch * pass.nodes) std::fill_n(mutable_bits(features), features.numel(), 0);
    if (pass.rows() == 0) return {logits, features};
    const int64_t rows = pass.rows(), inside = s.heads * s.head_width, at_keys = s.key_heads * s.head_width;
    const int64_t threads = get_num_threads();
    Buffers b;
    b.hidden = hidden_.of(rows * s.width);
    b.normed = normed_.of(rows * s.width * (rows <= kOwnRows ? threads : 1));
    b.query = query_.of(rows * inside);
    b.key = key_.of(rows * at_keys);
    b.mixed = mixed_.of(rows * inside);
    b.inner = inner_.of(rows * s.inner);
    b.wanted = wanted_.of(static_cast<int64_t>(pass.wanted.size()) * s.width);
    b.cosines = cosines_.of(rows * s.head_width / 2);
    b.sines = sines_.of(rows * s.head_width / 2);
    const int64_t queries = task_nodes() * (s.heads / s.key_heads);
    b.private_size = queries * s.head_width +
                     attention_room(queries, pass.longest + pass.nodes, s.head_width, s.head_width);
    b.private_floats = private_floats_.of(b.private_size * threads);
    tasks_.clear();
    for (int64_t row = 0; row < pass.batch; ++row)
      for (int64_t node = 0; node < pass.count(row); node += task_nodes()) tasks_.emplace_back(row, node);
    rooms_.resize(threads);
    for (Quantised& room : rooms_) room.reserve(rows, most_inputs_);
    b.rooms = rooms_.data();
    bf16* out_logits = mutable_bits(logits);
    bf16* out_features = mutable_bits(features);
    run_team(threads, [&](const Team& team) { run(team, pass, b, out_logits, out_features); });
    return {logits, features};
  }

 private:
  struct Buffers {
    bf16 *hidden, *normed, *query, *key, *mixed, *inner, *wanted;
    float *cosines, *sines, *private_floats;
    int64_t private_size;
    Quantised* rooms;  // one for each thread
  };

  Linear linear(size_t index, int64_t outputs, int64_t inputs) const {
    return as_any_linear(weights_[index], scales_[index], sums_[index], biases_[index], outputs, inputs);
  }

  static const bf16* norm(const Tensor& weight, int64_t width) {
    REQUIRE(weight.is_cpu() && weight.is_contiguous() && weight.scalar_type() == kBFloat16 && weight.numel() == width,
            "draftsmith: a norm has to be bf16 of ", width, " values");
    return bits(weight);
  }

  void run(const Team& team, const Pass& pass, const Buffers& b, bf16* logits, bf16* features) const {
    const Shape& s = shape_;
    const int64_t rows = pass.rows();
    const auto [first, last] = team.share(rows);
    embed(embedding_, scales_.back(), s.width, pass.tokens.data(), first, last, b.hidden);
    const float* frequencies = frequencies_.const_data_ptr<float>();
    for (int64_t r = first; r < last; ++r)
      for (int64_t d = 0, half = s.head_width / 2; d < half; ++d) {
        const float angle = static_cast<float>(pass.position(r)) * frequencies[d];
        b.cosines[r * half + d] = through_bf16(std::cos(angle) * static_cast<float>(s.rotary_scale));
        b.sines[r * half + d] = through_bf16(std::sin(angle) * static_cast<float>(s.rotary_scale));
      }
    team.barrier();
    // Where key heads divide evenly, a thread projects all that its heads read, and waits for nobody before attention.
    const bool owns_heads = s.key_heads % team.size == 0 && s.head_width % kPanel == 0;
    for (size_t l = 0; l < layers_.size(); ++l) {
      const Layer& layer = layers_[l];
      const bf16* normed = norm_rows(team, layer.input_norm, rows, b);
      project(team, pass, layer, l, normed, b);
      if (!owns_heads) team.barrier();
      rotate(team, pass, layer, l, b);
      if (!owns_heads) team.barrier();
      attend(team, pass, layer, l, owns_heads, b);
      team.barrier();
      add(team, layer.out, b.mixed, rows, b, layer.gate.begin(team));
      team.barrier();
      normed = norm_rows(team, layer.after_norm, rows, b);
      gate(team, layer, normed, b, rows);
      team.barrier();
      const Linear& following = l + 1 < layers_.size() ? layers_[l + 1].query : head_;
      add(team, layer.down, b.inner, rows, b, following.begin(team));
      team.barrier();
      tap(team, pass, static_cast<int64_t>(l), b.hidden, features);
    }
    const bf16* normed = norm_rows(team, last_norm_, rows, b);
    tap(team, pass, -1, normed, features);
    score(team, pass, normed, b, logits);
  }

  // Returns the states of all rows, normed: by every thread for itself where they are few.
  const bf16* norm_rows(const Team& team, const bf16* weight, int64_t rows, const Buffers& b) const {
    const int64_t width = shape_.width;
    const bool alone = rows <= kOwnRows;
    bf16* to = alone ? b.normed + team.index * rows * width : b.normed;
    const auto [first, last] = alone ? std::pair<int64_t, int64_t>(0, rows) : team.share(rows);
    for (int64_t r = first; r < last; ++r)
      kernels().rms_norm(b.hidden + r * width, weight, width, static_cast<float>(shape_.epsilon), to + r * width);
    if (!alone) team.barrier();
    return to;
  }

  // Queries and keys into buffers, values into the cache.
  void project(const Team& team, const Pass& pass, const Layer& layer, size_t index, const bf16* normed,
               const Buffers& b) const {
    const int64_t rows = pass.rows(), width = shape_.width, at_keys = layer.key.outputs;
    const auto into = [](bf16* out, int64_t stride) {
      return [=](int64_t r, int64_t n, int64_t count, const float* values) {
        kernels().narrow_row(values, count, out + r * stride + n);
      };
    };
    Quantised& room = b.rooms[team.index];
    if (layer.query.rounds()) room.take(layer.query, normed, width, rows);
    multiply_taken(team, layer.query, normed, width, rows, into(b.query, layer.query.outputs), &room, 0,
                   layer.key.begin(team));
    multiply_taken(team, layer.key, normed, width, rows, into(b.key, at_keys), &room, 0, layer.value.begin(team));
    bf16* values = pass.values[index];
    multiply_taken(team, layer.value, normed, width, rows,
                   [&](int64_t r, int64_t n, int64_t count, const float* results) {
                     kernels().narrow_row(results, count, values + pass.slot(r) * at_keys + n);
                   }, &room, 0, layer.out.begin(team));
  }

  void rotate(const Team& team, const Pass& pass, const Layer& layer, size_t index, const Buffers& b) const {
    const Shape& s = shape_;
    const int64_t half = s.head_width / 2;
    const auto turn = [&](int64_t r, bf16* head, const bf16* weight, bf16* to) {
      if (weight != nullptr) kernels().rms_norm(head, weight, s.head_width, static_cast<float>(s.epsilon), head);
      kernels().rotate(head, b.cosines + r * half, b.sines + r * half, half, to);
    };
    const auto [first, last] = team.share(s.heads);
    const auto [first_key, last_key] = team.share(s.key_heads);
    for (int64_t r = 0; r < pass.rows(); ++r) {
      for (int64_t h = first; h < last; ++h) {
        bf16* head = b.query + (r * s.heads + h) * s.head_width;
        turn(r, head, layer.query_norm, head);
      }
      for (int64_t h = first_key; h < last_key; ++h)
        turn(r, b.key + (r * s.key_heads + h) * s.head_width, layer.key_norm,
             pass.keys[index] + (pass.slot(r) * s.key_heads + h) * s.head_width);
    }
  }

  // How many nodes of a row attend together.
  int64_t task_nodes() const { return std::max<int64_t>(1, kMostQueries / (shape_.heads / shape_.key_heads)); }

  void attend(const Team& team, const Pass& pass, const Layer& layer, size_t index, bool owns_heads,
              const Buffers& b) const {
    const int64_t tasks = static_cast<int64_t>(tasks_.size()), key_heads = shape_.key_heads;
    if (owns_heads) {
      const auto [first, last] = team.share(key_heads);
      for (int64_t h = first; h < last; ++h)
        for (const auto& [row, node] : tasks_) attend_some(team, pass, layer, index, row, node, h, b);
    } else {
      // In turns: the later nodes of a prompt see more than the earlier ones.
      for (int64_t i = team.index; i < tasks * key_heads; i += team.size) {
        const auto [row, node] = tasks_[i / key_heads];
        attend_some(team, pass, layer, index, row, node, i % key_heads, b);
      }
    }
  }

  // The nodes of a row from `node` on, as many as attend together, over one key head.
  void attend_some(const Team& team, const Pass& pass, const Layer& layer, size_t index, int64_t row, int64_t node,
                   int64_t head, const Buffers& b) const {
    const Shape& s = shape_;
    const int64_t groups = s.heads / s.key_heads, at_keys = s.key_heads * s.head_width, r = pass.begins[row] + node;
    const int64_t base = pass.base(row) * at_keys + head * s.head_width;
    int64_t first[kMostQueries], last[kMostQueries];
    AttentionTask task{};
    task.nodes = std::min(task_nodes(), pass.count(row) - node), task.groups = groups;
    task.width = task.value_width = s.head_width, task.scale = static_cast<float>(s.scale);
    task.queries = b.query + (r * s.heads + head * groups) * s.head_width, task.query_stride = s.heads * s.head_width;
    task.keys = pass.keys[index] + base, task.values = pass.values[index] + base;
    task.key_stride = task.value_stride = at_keys, task.blocks = pass.blocks(row);
    if (pass.chains[row]) {  // all of them see what the first of them sees
      task.shared = pass.cached[row] + node + 1, task.entries = pass.cached[row] + node + task.nodes;
    } else {
      task.shared = pass.cached[row], task.entries = pass.cached[row] + pass.count(row);
      task.paths = pass.paths.data() + r * pass.nodes, task.path_stride = pass.nodes;
    }
    for (int64_t n = 0; n < task.nodes; ++n) {
      // The oldest place that the window still shows.
      first[n] = layer.window > 0 ? std::max<int64_t>(0, pass.position(r + n) - layer.window + 1) : 0;
      last[n] = pass.place(r + n) + 1;
    }
    task.first = first, task.last = last;
    float* out = b.private_floats + team.index * b.private_size;
    task.out = out, task.scratch = out + task_nodes() * groups * s.head_width;
    kernels().attend(task);
    for (int64_t n = 0; n < task.nodes; ++n)
      kernels().narrow_row(out + n * groups * s.head_width, groups * s.head_width,
                           b.mixed + ((r + n) * s.heads + head * groups) * s.head_width);
  }

  void add(const Team& team, const Linear& layer, const bf16* from, int64_t rows, const Buffers& b,
           const void* ahead) const {
    const int64_t width = shape_.width;
    multiply(team, layer, from, layer.inputs, rows, [&](int64_t r, int64_t n, int64_t count, const float* values) {
      kernels().add_row(values, count, b.hidden + r * width + n);
    }, b.rooms[team.index], ahead);
  }

  // The two products of the gated feed-forward, stretch by stretch, so that their results never leave the cache.
  void gate(const Team& team, const Layer& layer, const bf16* normed, const Buffers& b, int64_t rows) const {
    alignas(64) float gates[kChunkRows * kChunk];
    const int64_t inner = shape_.inner, width = shape_.width;
    const auto [from, to] = team.share(layer.gate.panels);
    Quantised& room = b.rooms[team.index];
    if (layer.gate.rounds()) room.take(layer.gate, normed, width, rows);
    const int64_t many = near_rows(width);
    for (int64_t group = 0; group < rows; group += many)
      for (int64_t panel = from; panel < to; panel += kChunkPanels) {
        const int64_t panels = std::min(kChunkPanels, to - panel);
        const void* following = layer.down.begin(team);
        if (panel + panels < to) following = layer.gate.panel(panel + panels);
        else if (group + many < rows) following = layer.gate.panel(from);
        for (int64_t row = group; row < std::min(group + many, rows); row += kChunkRows) {
          const int64_t some = std::min(kChunkRows, rows - row);
          const bf16* x = normed + row * width;
          const Team alone{0, 1, nullptr};
          multiply_taken(alone, layer.gate.stretch(panel, panels), x, width, some,
                         [&](int64_t r, int64_t n, int64_t count, const float* values) {
                           std::copy_n(values, count, gates + r * kChunk + n);
                         },
                         &room, row, layer.up.panel(panel));
          bf16* mixed = b.inner + row * inner + panel * kPanel;
          multiply_taken(alone, layer.up.stretch(panel, panels), x, width, some,
                         [&](int64_t r, int64_t n, int64_t count, const float* values) {
                           kernels().silu_times(gates + r * kChunk + n, values, count, mixed + r * inner + n);
                         },
                         &room, row, following);
        }
      }
  }

  void tap(const Team& team, const Pass& pass, int64_t which, const bf16* states, bf16* features) const {
    const int64_t width = shape_.width, taps = static_cast<int64_t>(pass.taps.size());
    const auto [first, last] = team.share(pass.rows());
    for (int64_t t = 0; t < taps; ++t)
      if (pass.taps[t] == which)
        for (int64_t r = first; r < last; ++r)
          std::copy_n(states + r * width, width, features + (pass.line(r) * taps + t) * width);
  }

  // Logits of the nodes that are wanted: all, or some columns of every row, gathered so that the head is read once.
  void score(const Team& team, const Pass& pass, const bf16* normed, const Buffers& b, bf16* logits) const {
    const int64_t vocabulary = shape_.vocabulary, width = shape_.width;
    const int64_t rows = pass.some_columns ? static_cast<int64_t>(pass.wanted.size()) : pass.rows();
    const bf16* states = normed;
    if (pass.some_columns) {
      const auto [first, last] = team.share(rows);
      for (int64_t i = first; i < last; ++i)
        std::copy_n(normed + pass.wanted[i].first * width, width, b.wanted + i * width);
      team.barrier();
      states = b.wanted;
    }
    multiply(team, head_, states, width, rows, [&](int64_t r, int64_t n, int64_t count, const float* values) {
      const int64_t line = pass.some_columns ? pass.wanted[r].second : pass.line(r);
      kernels().narrow_row(values, count, logits + line * vocabulary + n);
    }, b.rooms[team.index], layers_.front().query.begin(team));
  }

  Tensor embedding_;
  Tensors weights_, scales_, sums_, biases_, norms_, head_norms_;
  Tensor frequencies_;
  Shape shape_;
  Linear head_;
  const bf16* last_norm_;
  std::vector<Layer> layers_;
  std::mutex busy_;  // the memory below serves one pass at a time
  Scratch<bf16> hidden_, normed_, query_, key_, mixed_, inner_, wanted_;
  Scratch<float> cosines_, sines_, private_floats_;
  std::vector<Quantised> rooms_;
  std::vector<std::pair<int64_t, int64_t>> tasks_;  // row and first node of the nodes that attend together
  int64_t most_inputs_ = 0;  // of any layer
};

int64_t make_decoder(const Tensor& embedding, const Tensors& weights, const Tensors& scales, const Tensors& sums,
                     const Tensors& biases, const Tensors& norms, const Tensors& head_norms, const Tensor& frequencies,
                     const std::vector<int64_t>& sizes, const std::vector<double>& factors,
                     const std::vector<int64_t>& windows) {
  return keep(std::make_shared<Decoder>(embedding, weights, scales, sums, biases, norms, head_norms, frequencies, sizes,
                                        factors, windows));
}

std::tuple<Tensor, Tensor> decode(int64_t decoder, const Tensor& tokens, const std::optional<Tensor>& depths,
                                  const std::optional<Tensor>& visible, const Tensor& cached, const Tensors& keys,
                                  const Tensors& values, const std::optional<Tensor>& tables,
                                  const std::optional<Tensor>& slots, const std::optional<Tensor>& counts,
                                  const std::vector<int64_t>& taps, const std::optional<Tensor>& columns) {
  return kept<Decoder>(decoder)->forward(tokens, depths, visible, cached, keys, values, tables, slots, counts, taps,
                                         columns);
}

}  // namespace

void define_decoder(Library& library) {
  library.def<make_decoder>(
      "make_decoder(Tensor embedding, Tensor[] weights, Tensor[] scales, Tensor[] sums, Tensor[] biases,"
      " Tensor[] norms, Tensor[] head_norms, Tensor frequencies, int[] sizes, float[] factors, int[] windows) -> int");
  library.def<decode>(
      "decode(int decoder, Tensor tokens, Tensor? depths, Tensor? visible, Tensor cached, Tensor(a!)[] keys,"
      " Tensor(b!)[] values, Tensor? tables, Tensor? slots, Tensor? counts, int[] taps, Tensor? columns)"
      " -> (Tensor, Tensor)");
}

}  // namespace draftsmith
