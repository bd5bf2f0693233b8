// What the threads of a forward do, layer by layer; see decoder.cpp.
#include <cmath>

#include "decoder.h"

namespace draftsmith {

const bf16* Decoder::read(const Team& team, const Pass& pass, const Buffers& b, bf16* features) const {
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
    add(team, layer.out, b.mixed, mixed_stride_, rows, b, layer.gate.begin(team));
    team.barrier();
    normed = norm_rows(team, layer.after_norm, rows, b);
    gate(team, layer, normed, b, rows);
    team.barrier();
    const Linear& following = l + 1 < layers_.size() ? layers_[l + 1].query : head_;
    add(team, layer.down, b.inner, inner_stride_, rows, b, following.begin(team));
    team.barrier();
    tap(team, pass, static_cast<int64_t>(l), b.hidden, s.width, features);
  }
  const bf16* normed = norm_rows(team, last_norm_, rows, b);
  tap(team, pass, -1, normed, normed_stride_, features);
  return normed;
}

const bf16* Decoder::norm_rows(const Team& team, const bf16* weight, int64_t rows, const Buffers& b) const {
  const int64_t width = shape_.width;
  const bool alone = rows <= kOwnRows;
  bf16* to = alone ? b.normed + team.index * rows * normed_stride_ : b.normed;
  const auto [first, last] = alone ? std::pair<int64_t, int64_t>(0, rows) : team.share(rows);
  for (int64_t r = first; r < last; ++r)
    kernels().rms_norm(b.hidden + r * width, weight, width, static_cast<float>(shape_.epsilon),
                       to + r * normed_stride_);
  if (!alone) team.barrier();
  return to;
}

// Queries and keys into buffers, values into the cache.
void Decoder::project(const Team& team, const Pass& pass, const Layer& layer, size_t index, const bf16* normed,
             const Buffers& b) const {
  const int64_t rows = pass.rows(), at_keys = layer.key.outputs;
  const auto into = [](bf16* out, int64_t stride) {
    return [=](int64_t r, int64_t n, int64_t count, const float* values) {
      kernels().narrow_row(values, count, out + r * stride + n);
    };
  };
  Quantised& room = b.rooms[team.index];
  if (layer.query.rounds()) room.take(layer.query, normed, normed_stride_, rows);
  multiply_taken(team, layer.query, normed, normed_stride_, rows, into(b.query, layer.query.outputs), &room, 0,
                 layer.key.begin(team));
  multiply_taken(team, layer.key, normed, normed_stride_, rows, into(b.key, at_keys), &room, 0, layer.value.begin(team));
  bf16* values = pass.values[index];
  multiply_taken(team, layer.value, normed, normed_stride_, rows,
                 [&](int64_t r, int64_t n, int64_t count, const float* results) {
                   kernels().narrow_row(results, count, values + pass.slot(r) * at_keys + n);
                 }, &room, 0, layer.out.begin(team));
}

void Decoder::rotate(const Team& team, const Pass& pass, const Layer& layer, size_t index, const Buffers& b) const {
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

void Decoder::attend(const Team& team, const Pass& pass, const Layer& layer, size_t index, bool owns_heads,
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

void Decoder::attend_some(const Team& team, const Pass& pass, const Layer& layer, size_t index, int64_t row, int64_t node,
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
                         b.mixed + (r + n) * mixed_stride_ + head * groups * s.head_width);
}

void Decoder::add(const Team& team, const Linear& layer, const bf16* from, int64_t stride, int64_t rows,
                  const Buffers& b, const void* ahead) const {
  const int64_t width = shape_.width;
  multiply(team, layer, from, stride, rows, [&](int64_t r, int64_t n, int64_t count, const float* values) {
    kernels().add_row(values, count, b.hidden + r * width + n);
  }, b.rooms[team.index], ahead);
}

// The two products of the gated feed-forward, stretch by stretch, so that their results never leave the cache.
void Decoder::gate(const Team& team, const Layer& layer, const bf16* normed, const Buffers& b, int64_t rows) const {
  alignas(64) float gates[kChunkRows * kChunk];
  const int64_t stride = normed_stride_, inner = inner_stride_;
  const auto [from, to] = team.share(layer.gate.panels);
  Quantised& room = b.rooms[team.index];
  if (layer.gate.rounds()) room.take(layer.gate, normed, stride, rows);
  const int64_t many = near_rows(shape_.width);
  for (int64_t group = 0; group < rows; group += many)
    for (int64_t panel = from; panel < to; panel += kChunkPanels) {
      const int64_t panels = std::min(kChunkPanels, to - panel);
      const void* following = layer.down.begin(team);
      if (panel + panels < to) following = layer.gate.panel(panel + panels);
      else if (group + many < rows) following = layer.gate.panel(from);
      for (int64_t row = group; row < std::min(group + many, rows); row += kChunkRows) {
        const int64_t some = std::min(kChunkRows, rows - row);
        const bf16* x = normed + row * stride;
        const Team alone{0, 1, nullptr};
        multiply_taken(alone, layer.gate.stretch(panel, panels), x, stride, some,
                       [&](int64_t r, int64_t n, int64_t count, const float* values) {
                         std::copy_n(values, count, gates + r * kChunk + n);
                       },
                       &room, row, row == group ? layer.up.panel(panel) : nullptr);
        bf16* mixed = b.inner + row * inner + panel * kPanel;
        multiply_taken(alone, layer.up.stretch(panel, panels), x, stride, some,
                       [&](int64_t r, int64_t n, int64_t count, const float* values) {
                         kernels().silu_times(gates + r * kChunk + n, values, count, mixed + r * inner + n);
                       },
                       &room, row, row == group ? following : nullptr);
      }
    }
}

void Decoder::tap(const Team& team, const Pass& pass, int64_t which, const bf16* states, int64_t stride,
                  bf16* features) const {
  const int64_t width = shape_.width, taps = static_cast<int64_t>(pass.taps.size());
  const auto [first, last] = team.share(pass.rows());
  for (int64_t t = 0; t < taps; ++t)
    if (pass.taps[t] == which)
      for (int64_t r = first; r < last; ++r)
        std::copy_n(states + r * stride, width, features + (pass.line(r) * taps + t) * width);
}

// Logits of the nodes that are wanted: all, or some columns of every row, gathered so that the head is read once.
void Decoder::score(const Team& team, const Pass& pass, const bf16* normed, const Buffers& b, bf16* logits) const {
  const int64_t vocabulary = shape_.vocabulary, width = shape_.width;
  const int64_t rows = pass.some_columns ? static_cast<int64_t>(pass.wanted.size()) : pass.rows();
  const bf16* states = normed;
  if (pass.some_columns) {
    const auto [first, last] = team.share(rows);
    for (int64_t i = first; i < last; ++i)
      std::copy_n(normed + pass.wanted[i].first * normed_stride_, width, b.wanted + i * normed_stride_);
    team.barrier();
    states = b.wanted;
  }
  multiply(team, head_, states, normed_stride_, rows, [&](int64_t r, int64_t n, int64_t count, const float* values) {
    const int64_t line = pass.some_columns ? pass.wanted[r].second : pass.line(r);
    kernels().narrow_row(values, count, logits + line * vocabulary + n);
  }, b.rooms[team.index], layers_.front().query.begin(team));
}

}  // namespace draftsmith
