// A whole forward of a Llama-shaped model over a draft tree, in one parallel region.
//
// The model: RMS norms, rotary positions, grouped-query attention, a gated SiLU feed-forward; biases, norms on the
// heads (Qwen3) and sliding windows where the model has them. Every product and every elementwise step rounds to bf16
// where transformers does. Attention reads the visible entries of a row in the order of their positions, so a node of
// a tree computes bit by bit what it would compute as the last token of a text.
//
// Words: B rows, M nodes, F width of the model, H query heads, G query heads a key head, D width of a head.
#include "decoder.h"

#include "operators.h"

namespace draftsmith {
namespace {

const bf16* norm(const Tensor& weight, int64_t width) {
  REQUIRE(weight.is_cpu() && weight.is_contiguous() && weight.scalar_type() == kBFloat16 && weight.numel() == width,
          "draftsmith: a norm has to be bf16 of ", width, " values");
  return bits(weight);
}

}  // namespace

Decoder::Decoder(Tensor embedding, Tensors weights, Tensors scales, Tensors sums, Tensors biases, Tensors norms,
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
  normed_stride_ = apart(s.width), mixed_stride_ = apart(inside), inner_stride_ = apart(s.inner);
}

std::tuple<Tensor, Tensor> Decoder::forward(const Tensor& tokens, const std::optional<Tensor>& depths,
                                            const std::optional<Tensor>& visible, const Tensor& cached,
                                            const Tensors& keys, const Tensors& values,
                                            const std::optional<Tensor>& tables, const std::optional<Tensor>& slots,
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
  const int64_t threads = get_num_threads();
  const Buffers b = prepare(pass, threads);
  bf16* out_logits = mutable_bits(logits);
  bf16* out_features = mutable_bits(features);
  run_team(threads, [&](const Team& team) {
    score_nodes(team, pass, read(team, pass, b, out_features), b, out_logits);
  });
  return {logits, features};
}

Linear Decoder::linear(size_t index, int64_t outputs, int64_t inputs) const {
  return as_any_linear(weights_[index], scales_[index], sums_[index], biases_[index], outputs, inputs);
}

void Decoder::divide(const Pass& pass, int64_t threads) {
  constexpr int64_t kEach = 8;  // tasks of a thread, of all key heads, so that none waits long for the others
  const int64_t groups = shape_.heads / shape_.key_heads;
  int64_t longest = 1;
  for (int64_t row = 0; row < pass.batch; ++row) longest = std::max(longest, pass.count(row));
  const auto nodes = [&](int64_t queries) { return std::clamp<int64_t>(queries / groups, 1, longest); };
  const auto tasks = [&](int64_t queries) {
    int64_t count = 0;
    for (int64_t row = 0; row < pass.batch; ++row) count += (pass.count(row) + nodes(queries) - 1) / nodes(queries);
    return count * shape_.key_heads;
  };
  int64_t queries = kernels().most_queries;
  while (queries > kMostQueries && tasks(queries) < kEach * threads) queries /= 2;
  task_nodes_ = nodes(queries);
  tasks_.clear();
  for (int64_t row = 0; row < pass.batch; ++row)
    for (int64_t node = 0; node < pass.count(row); node += task_nodes_) tasks_.emplace_back(row, node);
}

Decoder::Buffers Decoder::prepare(const Pass& pass, int64_t threads) {
  const Shape& s = shape_;
  const int64_t rows = pass.rows(), inside = s.heads * s.head_width;
  Buffers b;
  b.hidden = hidden_.of(rows * s.width);
  b.normed = normed_.of(normed_stride_ * std::max(rows, std::min(rows, kOwnRows) * threads));
  b.query = query_.of(rows * inside);
  b.key = key_.of(rows * s.key_heads * s.head_width);
  b.mixed = mixed_.of(rows * mixed_stride_);
  b.inner = inner_.of(rows * inner_stride_);
  b.wanted = wanted_.of(static_cast<int64_t>(pass.wanted.size()) * normed_stride_);
  b.cosines = cosines_.of(rows * s.head_width / 2);
  b.sines = sines_.of(rows * s.head_width / 2);
  divide(pass, threads);
  const int64_t queries = task_nodes_ * (s.heads / s.key_heads);
  b.private_size = queries * s.head_width +
                   kernels().attention_room(queries, pass.longest + pass.nodes, s.head_width, s.head_width);
  b.private_floats = private_floats_.of(b.private_size * threads);
  const int64_t scored = pass.some_columns ? static_cast<int64_t>(pass.wanted.size()) : rows;
  rooms_.resize(threads);
  for (Quantised& room : rooms_) room.reserve(std::max(rows, scored), most_inputs_);
  b.rooms = rooms_.data();
  // With fewer heads, all that threads have to do for one is too large a piece.
  const bool by_heads = rows <= kChunkRows && s.head_width % kPanel == 0 && s.key_heads >= 4 * threads;
  b.jobs = {by_heads, s.layers, groups_of(rows, s.width), groups_of(rows, inside), groups_of(rows, s.inner),
            groups_of(scored, s.width)};
  pieces_.reserve(b.jobs.all(), threads), b.pieces = &pieces_;
  return b;
}

namespace {

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

std::tuple<Tensor, Tensor> guess(int64_t decoder, const Tensor& roots, const Tensor& cached, const Tensors& keys,
                                 const Tensors& values, const std::optional<Tensor>& tables,
                                 const std::optional<Tensor>& slots, int64_t depth, double least, double spread) {
  return kept<Decoder>(decoder)->guess(roots, cached, keys, values, tables, slots, depth, {least, spread});
}

std::tuple<Tensor, Tensor, Tensor> guess_drawn(
    int64_t decoder, const Tensor& roots, const Tensor& cached, const Tensors& keys, const Tensors& values,
    const std::optional<Tensor>& tables, const std::optional<Tensor>& slots, int64_t depth, const Tensor& temperature_B,
    const Tensor& seeds_B, const Tensor& positions_B, int64_t stream, double least, double spread) {
  return kept<Decoder>(decoder)->draw(roots, cached, keys, values, tables, slots, depth, temperature_B, seeds_B,
                                      positions_B, stream, {least, spread});
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
  library.def<guess>(
      "guess(int decoder, Tensor roots, Tensor cached, Tensor(a!)[] keys, Tensor(b!)[] values, Tensor? tables,"
      " Tensor? slots, int depth, float least, float spread) -> (Tensor, Tensor)");
  library.def<guess_drawn>(
      "guess_drawn(int decoder, Tensor roots, Tensor cached, Tensor(a!)[] keys, Tensor(b!)[] values, Tensor? tables,"
      " Tensor? slots, int depth, Tensor temperature_B, Tensor seeds_B, Tensor positions_B, int stream, float least,"
      " float spread) -> (Tensor, Tensor, Tensor)");
}

}  // namespace draftsmith
