// What the threads of a forward do, layer by layer; see decoder.cpp.
#include <cmath>

#include "decoder.h"

namespace draftsmith {

const bf16* Decoder::read(const Team& team, const Pass& pass, const Buffers& b, bf16* features) const {
  const Shape& s = shape_;
  const int64_t rows = pass.rows();
  deal(team, b);
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
  for (size_t l = 0; l < layers_.size(); ++l) {
    const Layer& layer = layers_[l];
    const bf16* normed = norm_rows(team, layer.input_norm, rows, b);
    if (b.jobs.by_heads) {
      attend_by_heads(team, pass, layer, l, normed, b);
    } else {
      project(team, pass, layer, l, normed, b);
      team.barrier();
      const auto [own, own_end] = team.share(s.key_heads);
      rotate(pass, layer, l, own, own_end, b);
      team.barrier();
      attend(team, pass, layer, l, b);
    }
    team.barrier();
    add(team, layer.out, {b.mixed, mixed_stride_}, rows, b, layer.gate.begin(team), b.jobs.out(l));
    team.barrier();
    normed = norm_rows(team, layer.after_norm, rows, b);
    gate(team, layer, normed, b, rows, b.jobs.gate(l));
    team.barrier();
    const Linear& following = l + 1 < layers_.size() ? layers_[l + 1].query : head_;
    add(team, layer.down, {b.inner, inner_stride_}, rows, b, following.begin(team), b.jobs.down(l));
    team.barrier();
    tap(team, pass, static_cast<int64_t>(l), b.hidden, s.width, features);
  }
  const bf16* normed = norm_rows(team, last_norm_, rows, b);
  tap(team, pass, -1, normed, normed_stride_, features);
  return normed;
}

void Decoder::deal(const Team& team, const Buffers& b) const {
  const Jobs& jobs = b.jobs;
  const auto deal_all = [&](int64_t job, int64_t groups, const Linear& layer) {
    for (int64_t g = 0; g < groups; ++g) b.pieces->deal(team, job + g, layer.panels);
  };
  const int64_t tasks = static_cast<int64_t>(tasks_.size()), key_heads = shape_.key_heads;
  for (size_t l = 0; l < layers_.size(); ++l) {
    b.pieces->deal(team, jobs.attend(l), jobs.by_heads ? key_heads : tasks * key_heads);
    if (!jobs.by_heads) {
      const Linear* projected[3] = {&layers_[l].query, &layers_[l].key, &layers_[l].value};
      for (int64_t which = 0; which < 3; ++which) deal_all(jobs.project(l, which), jobs.width_groups, *projected[which]);
    }
    deal_all(jobs.out(l), jobs.out_groups, layers_[l].out);
    deal_all(jobs.gate(l), jobs.width_groups, layers_[l].gate);
    deal_all(jobs.down(l), jobs.inner_groups, layers_[l].down);
  }
  deal_all(jobs.head(), jobs.width_groups, head_);
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

// Calls multiply(layer, what follows it, store) for queries and keys into buffers, and for values into the cache.
template <class Multiply>
void Decoder::project_each(const Pass& pass, const Layer& layer, size_t index, const Buffers& b, const Multiply& multiply) const {
  const int64_t at_queries = layer.query.outputs, at_keys = layer.key.outputs;
  const auto into = [](bf16* out, int64_t stride) {
    return [=](int64_t r, int64_t n, int64_t count, const float* values) {
      kernels().narrow_row(values, count, out + r * stride + n);
    };
  };
  bf16* values = pass.values[index];
  multiply(0, layer.query, into(b.query, at_queries));
  multiply(1, layer.key, into(b.key, at_keys));
  multiply(2, layer.value, [&](int64_t r, int64_t n, int64_t count, const float* results) {
    kernels().narrow_row(results, count, values + pass.slot(r) * at_keys + n);
  });
}

void Decoder::project(const Team& team, const Pass& pass, const Layer& layer, size_t index, const bf16* normed,
                      const Buffers& b) const {
  const int64_t rows = pass.rows();
  Quantised& room = b.rooms[team.index];
  if (layer.query.rounds()) room.take(layer.query, normed, normed_stride_, rows);
  const Linear* following[3] = {&layer.key, &layer.value, &layer.out};
  project_each(pass, layer, index, b, [&](int64_t which, const Linear& linear, const auto& store) {
    multiply_pieces(team, linear, {normed, normed_stride_, &room, 0}, rows, store, following[which]->begin(team), *b.pieces,
                    b.jobs.project(index, which));
  });
}

// A thread that takes a head projects what it reads, and waits for nobody before attention.
void Decoder::attend_by_heads(const Team& team, const Pass& pass, const Layer& layer, size_t index, const bf16* normed,
                              const Buffers& b) const {
  const int64_t rows = pass.rows();
  Quantised& room = b.rooms[team.index];
  if (layer.query.rounds()) room.take(layer.query, normed, normed_stride_, rows);
  const auto [own, own_end] = team.share(shape_.key_heads);
  for (;;) {
    const auto [head, end] = b.pieces->take(team, b.jobs.attend(index), 1);
    if (head == end) return;
    const auto panel_of = [&](const Linear& linear, int64_t h) { return h * (linear.outputs / shape_.key_heads) / kPanel; };
    const bool goes_on = own <= head && end < own_end;
    project_each(pass, layer, index, b, [&](int64_t which, const Linear& linear, const auto& store) {
      const int64_t last = panel_of(linear, end);
      const Linear& following = which == 0 ? layer.key : which == 1 ? layer.value : goes_on ? layer.query : layer.out;
      const void* behind = which < 2 ? following.panel(panel_of(following, head)) : goes_on ? following.panel(panel_of(following, end)) : following.begin(team);
      for (int64_t panel = panel_of(linear, head); panel < last; panel += kChunkPanels) {
        const int64_t panels = std::min(kChunkPanels, last - panel);
        multiply_panels(linear, panel, panels, {normed, normed_stride_, &room, 0}, 0, rows, store,
                        panel + panels < last ? linear.panel(panel + panels) : behind);
      }
    });
    rotate(pass, layer, index, head, end, b);
    for (const auto& [row, node] : tasks_) attend_some(team, pass, layer, index, row, node, head, b);
  }
}

// The queries and keys of some key heads.
void Decoder::rotate(const Pass& pass, const Layer& layer, size_t index, int64_t first_key, int64_t last_key,
                     const Buffers& b) const {
  const Shape& s = shape_;
  const int64_t half = s.head_width / 2, groups = s.heads / s.key_heads;
  const auto turn = [&](int64_t r, bf16* head, const bf16* weight, bf16* to) {
    if (weight != nullptr) kernels().rms_norm(head, weight, s.head_width, static_cast<float>(s.epsilon), head);
    kernels().rotate(head, b.cosines + r * half, b.sines + r * half, half, to);
  };
  for (int64_t r = 0; r < pass.rows(); ++r) {
    for (int64_t h = first_key * groups; h < last_key * groups; ++h) {
      bf16* head = b.query + (r * s.heads + h) * s.head_width;
      turn(r, head, layer.query_norm, head);
    }
    for (int64_t h = first_key; h < last_key; ++h)
      turn(r, b.key + (r * s.key_heads + h) * s.head_width, layer.key_norm,
           pass.keys[index] + (pass.slot(r) * s.key_heads + h) * s.head_width);
  }
}

void Decoder::attend(const Team& team, const Pass& pass, const Layer& layer, size_t index, const Buffers& b) const {
  for (;;) {
    const auto [from, to] = b.pieces->take(team, b.jobs.attend(index), 1);
    if (from == to) return;
    const auto [row, node] = tasks_[from / shape_.key_heads];
    attend_some(team, pass, layer, index, row, node, from % shape_.key_heads, b);
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

void Decoder::add(const Team& team, const Linear& layer, Factors factors, int64_t rows, const Buffers& b, const void* ahead,
                  int64_t job) const {
  const int64_t width = shape_.width;
  Quantised& room = b.rooms[team.index];
  if (layer.rounds()) room.take(layer, factors.x, factors.x_stride, rows);
  factors.taken = &room;
  multiply_pieces(team, layer, factors, rows, [&](int64_t r, int64_t n, int64_t count, const float* values) {
    kernels().add_row(values, count, b.hidden + r * width + n);
  }, ahead, *b.pieces, job);
}

// The two products of the gated feed-forward, stretch by stretch, so that their results never leave the cache.
void Decoder::gate(const Team& team, const Layer& layer, const bf16* normed, const Buffers& b, int64_t rows,
                   int64_t job) const {
  alignas(64) float gates[kChunkRows * kChunk];
  const int64_t inner = inner_stride_;
  Quantised& room = b.rooms[team.index];
  if (layer.gate.rounds()) room.take(layer.gate, normed, normed_stride_, rows);
  const Factors factors{normed, normed_stride_, &room, 0};
  const int64_t many = near_rows(shape_.width), groups = groups_of(rows, shape_.width);
  for (int64_t group = 0; group < groups; ++group)
    for (;;) {
      const auto [panel, end] = b.pieces->take(team, job + group, kChunkPanels);
      if (panel == end) break;
      const auto [own, own_end] = team.share(layer.gate.panels);
      const void* following = layer.down.begin(team);
      if (own <= panel && end < own_end) following = layer.gate.panel(end);
      else if (group + 1 < groups) following = layer.gate.panel(own);
      for (int64_t row = group * many, last = std::min(row + many, rows); row < last; row += kChunkRows) {
        const int64_t to = std::min(row + kChunkRows, last);
        const bool is_first = row == group * many;
        multiply_panels(layer.gate, panel, end - panel, factors, row, to,
                        [&](int64_t r, int64_t, int64_t count, const float* values) {
                          std::copy_n(values, count, gates + (r - row) * kChunk);
                        }, is_first ? layer.up.panel(panel) : nullptr);
        multiply_panels(layer.up, panel, end - panel, factors, row, to,
                        [&](int64_t r, int64_t n, int64_t count, const float* values) {
                          kernels().silu_times(gates + (r - row) * kChunk, values, count, b.inner + r * inner + n);
                        }, is_first ? following : nullptr);
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
void Decoder::score_nodes(const Team& team, const Pass& pass, const bf16* normed, const Buffers& b, bf16* logits) const {
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
  score(team, b, states, rows, [&](int64_t r, int64_t n, int64_t count, const float* values) {
    const int64_t line = pass.some_columns ? pass.wanted[r].second : pass.line(r);
    kernels().narrow_row(values, count, logits + line * vocabulary + n);
  });
}

}  // namespace draftsmith
