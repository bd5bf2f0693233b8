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
      const auto [from, to] = team.share(rows * s.key_heads);
      for (int64_t i = from; i < to; ++i) rotate(pass, layer, l, i / s.key_heads, i % s.key_heads, b);
      team.barrier();
      attend(team, pass, layer, l, b);
    }
    team.barrier();
    add(team, layer.out, b.mixed, mixed_stride_, rows, b, layer.gate.begin(team), b.jobs.out(l));
    team.barrier();
    normed = norm_rows(team, layer.after_norm, rows, b);
    gate(team, layer, normed, b, rows, b.jobs.gate(l));
    team.barrier();
    const Linear& following = l + 1 < layers_.size() ? layers_[l + 1].query : head_;
    add(team, layer.down, b.inner, inner_stride_, rows, b, following.begin(team), b.jobs.down(l));
    team.barrier();
    tap(team, pass, static_cast<int64_t>(l), b.hidden, s.width, features);
  }
  const bf16* normed = norm_rows(team, last_norm_, rows, b);
  tap(team, pass, -1, normed, normed_stride_, features);
  return normed;
}

void Decoder::deal(const Team& team, const Buffers& b) const {
  const Jobs& jobs = b.jobs;
  const auto deal_groups = [&](int64_t job, int64_t groups, const Linear& layer) {
    for (int64_t g = 0; g < groups; ++g) b.pieces->deal(team, job + g, layer.panels);
  };
  const int64_t tasks = static_cast<int64_t>(tasks_.size()), key_heads = shape_.key_heads;
  for (size_t l = 0; l < layers_.size(); ++l) {
    const Layer& layer = layers_[l];
    b.pieces->deal(team, jobs.attend(l), jobs.by_heads ? key_heads : tasks * key_heads);
    if (!jobs.by_heads) {
      deal_groups(jobs.project(l, 0), jobs.width_groups, layer.query);
      deal_groups(jobs.project(l, 1), jobs.width_groups, layer.key);
      deal_groups(jobs.project(l, 2), jobs.width_groups, layer.value);
    }
    deal_groups(jobs.out(l), jobs.out_groups, layer.out);
    deal_groups(jobs.gate(l), jobs.width_groups, layer.gate);
    deal_groups(jobs.down(l), jobs.inner_groups, layer.down);
  }
  deal_groups(jobs.head(), jobs.head_groups, head_);
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

// Calls multiply(which, layer, store) for queries and keys, into buffers, and for values, into the cache.
template <class Multiply>
void Decoder::project_each(const Pass& pass, const Layer& layer, size_t index, const Buffers& b,
                           const Multiply& multiply) const {
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
  const Factors factors = factors_for(layer.query, normed, normed_stride_, rows, b.rooms[team.index]);
  const Linear* following[3] = {&layer.key, &layer.value, &layer.out};
  project_each(pass, layer, index, b, [&](int64_t which, const Linear& linear, const auto& store) {
    multiply_pieces(team, linear, factors, rows, store, following[which]->begin(team), *b.pieces,
                    b.jobs.project(index, which));
  });
}

// A thread that takes a head projects what it reads, and waits for nobody before attention.
void Decoder::attend_by_heads(const Team& team, const Pass& pass, const Layer& layer, size_t index, const bf16* normed,
                              const Buffers& b) const {
  const int64_t rows = pass.rows(), key_heads = shape_.key_heads;
  const Factors factors = factors_for(layer.query, normed, normed_stride_, rows, b.rooms[team.index]);
  const auto begin = [&](const Linear& linear, int64_t head) { return head * (linear.outputs / key_heads) / kPanel; };
  for (;;) {
    const auto [head, end, goes_on] = b.pieces->take(team, b.jobs.attend(index), 1);
    if (head == end) return;
    const void* behind[3] = {layer.key.panel(begin(layer.key, head)), layer.value.panel(begin(layer.value, head)),
                             goes_on ? layer.query.panel(begin(layer.query, end)) : layer.out.begin(team)};
    project_each(pass, layer, index, b, [&](int64_t which, const Linear& linear, const auto& store) {
      const int64_t last = begin(linear, end);
      for (int64_t panel = begin(linear, head), next = 0; panel < last; panel = next) {
        next = std::min(panel + kChunkPanels, last);
        const void* ahead = next < last ? linear.panel(next) : behind[which];
        multiply_panels(linear, panel, next - panel, factors, 0, rows, store, ahead);
      }
    });
    for (int64_t r = 0; r < rows; ++r) rotate(pass, layer, index, r, head, b);
    for (const auto& [row, node] : tasks_) attend_some(team, pass, layer, index, row, node, head, b);
  }
}

void Decoder::rotate(const Pass& pass, const Layer& layer, size_t index, int64_t row, int64_t key_head,
                     const Buffers& b) const {
  const Shape& s = shape_;
  const int64_t half = s.head_width / 2, groups = s.heads / s.key_heads;
  const auto turn = [&](bf16* head, const bf16* weight, bf16* to) {
    if (weight != nullptr) kernels().rms_norm(head, weight, s.head_width, static_cast<float>(s.epsilon), head);
    kernels().rotate(head, b.cosines + row * half, b.sines + row * half, half, to);
  };
  for (int64_t h = key_head * groups; h < (key_head + 1) * groups; ++h) {
    bf16* head = b.query + (row * s.heads + h) * s.head_width;
    turn(head, layer.query_norm, head);
  }
  turn(b.key + (row * s.key_heads + key_head) * s.head_width, layer.key_norm,
       pass.keys[index] + (pass.slot(row) * s.key_heads + key_head) * s.head_width);
}

// In tasks of prompts the later nodes see more than the earlier ones: who has fewer to see takes more of them.
void Decoder::attend(const Team& team, const Pass& pass, const Layer& layer, size_t index, const Buffers& b) const {
  for (;;) {
    const Pieces::Piece piece = b.pieces->take(team, b.jobs.attend(index), 1);
    if (piece.is_none()) return;
    const auto [row, node] = tasks_[piece.first / shape_.key_heads];
    attend_some(team, pass, layer, index, row, node, piece.first % shape_.key_heads, b);
  }
}

void Decoder::attend_some(const Team& team, const Pass& pass, const Layer& layer, size_t index, int64_t row, int64_t node,
                 int64_t head, const Buffers& b) const {
  const Shape& s = shape_;
  const int64_t groups = s.heads / s.key_heads, at_keys = s.key_heads * s.head_width, r = pass.begins[row] + node;
  const int64_t base = pass.base(row) * at_keys + head * s.head_width;
  int64_t first[kMostQueriesOnTiles], last[kMostQueriesOnTiles];
  AttentionTask task{};
  task.nodes = std::min(task_nodes_, pass.count(row) - node), task.groups = groups;
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
  task.out = out, task.scratch = out + task_nodes_ * groups * s.head_width;
  kernels().attend(task);
  for (int64_t n = 0; n < task.nodes; ++n)
    kernels().narrow_row(out + n * groups * s.head_width, groups * s.head_width,
                         b.mixed + (r + n) * mixed_stride_ + head * groups * s.head_width);
}

void Decoder::add(const Team& team, const Linear& layer, const bf16* from, int64_t stride, int64_t rows,
                  const Buffers& b, const void* ahead, int64_t job) const {
  const int64_t width = shape_.width;
  const Factors factors = factors_for(layer, from, stride, rows, b.rooms[team.index]);
  multiply_pieces(team, layer, factors, rows, [&](int64_t r, int64_t n, int64_t count, const float* values) {
    kernels().add_row(values, count, b.hidden + r * width + n);
  }, ahead, *b.pieces, job);
}

// The two products of the gated feed-forward, piece by piece, so that their results never leave the cache.
void Decoder::gate(const Team& team, const Layer& layer, const bf16* normed, const Buffers& b, int64_t rows,
                   int64_t job) const {
  alignas(64) float gates[kChunkRows * kChunk];
  const int64_t inner = inner_stride_;
  const Factors factors = factors_for(layer.gate, normed, normed_stride_, rows, b.rooms[team.index]);
  const auto multiply_both = [&](int64_t panel, int64_t panels, int64_t first, int64_t last, const void* ahead) {
    for (int64_t row = first; row < last; row += kChunkRows) {
      const int64_t end = std::min(row + kChunkRows, last);
      const bool fetches = row == first;  // the rows behind find the weights in a near cache
      multiply_panels(layer.gate, panel, panels, factors, row, end,
                      [&](int64_t r, int64_t, int64_t count, const float* values) {
                        std::copy_n(values, count, gates + (r - row) * kChunk);
                      }, fetches ? layer.up.panel(panel) : nullptr);
      multiply_panels(layer.up, panel, panels, factors, row, end,
                      [&](int64_t r, int64_t n, int64_t count, const float* values) {
                        kernels().silu_times(gates + (r - row) * kChunk, values, count, b.inner + r * inner + n);
                      }, fetches ? ahead : nullptr);
    }
  };
  by_pieces(team, layer.gate, rows, layer.down.begin(team), *b.pieces, job, multiply_both);
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
