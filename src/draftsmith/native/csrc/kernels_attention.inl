// Attention of some nodes of a row over one key head; part of kernels_common.inl.

namespace draftsmith {
namespace {

// Some queries of a task over the places from … to - 1. They may belong to several nodes, if all of these have the same
// entries there.
struct Stretch {
  int64_t query, queries, from, to;
};

// Finds the keys, or the values, that a node has at the places from … from + count - 1. What lies in one block follows
// each other, so one look into the table is enough for it.
inline void find(const AttentionTask& t, int64_t node, const bf16* sides, int64_t stride, int64_t from, int64_t count,
                 const bf16** found) {
  int64_t i = 0;
  const int64_t even = t.paths == nullptr || from + count <= t.shared ? count : t.shared > from ? t.shared - from : 0;
  while (i < even) {
    int64_t end = even;
    if (t.blocks != nullptr && (from + i) / kBlockEntries < (from + even - 1) / kBlockEntries)
      end = ((from + i) / kBlockEntries + 1) * kBlockEntries - from;
    for (const bf16* next = sides + t.line(from + i) * stride; i < end; ++i, next += stride) found[i] = next;
  }
  for (; i < count; ++i) found[i] = sides + t.line(t.entry(node, from + i)) * stride;
}

constexpr int64_t kKeys = 16;  // that all queries of a stretch meet before the next ones are read

// scores[q * stride + p] = scale · query q · key at place p.
[[maybe_unused]] void score_keys(const AttentionTask& t, const Stretch& s, float* scores, int64_t stride) {
  const int64_t node = t.node(s.query);
  const bf16* keys[kKeys];
  for (int64_t from = s.from; from < s.to; from += kKeys) {
    const int64_t count = s.to - from < kKeys ? s.to - from : kKeys;
    find(t, node, t.keys, t.key_stride, from, count, keys);
    for (int64_t q = s.query; q < s.query + s.queries; ++q)
      for (int64_t i = 0; i < count; ++i)
        scores[q * stride + from + i] = t.scale * dot(t.query(q), keys[i], t.width);
  }
}

// out[q] += Σ scores[q * stride + p] · value at place p, one place after the other.
[[maybe_unused]] void mix_values(const AttentionTask& t, const Stretch& s, const float* scores, int64_t stride) {
  const int64_t node = t.node(s.query);
  const bf16* values[kKeys];
  for (int64_t from = s.from; from < s.to; from += kKeys) {
    const int64_t count = s.to - from < kKeys ? s.to - from : kKeys;
    find(t, node, t.values, t.value_stride, from, count, values);
    for (int64_t q = s.query; q < s.query + s.queries; ++q) {
      float* out = t.out + q * t.value_width;
      for (int64_t i = 0; i < count; ++i) {
        const float weight = scores[q * stride + from + i];
        for (int64_t d = 0; d < t.value_width; ++d) out[d] += weight * widen(values[i][d]);
      }
    }
  }
}

// Turns the scores of one query into e^(score - highest), and returns one over their sum. The fifteen places behind the
// last have to exist; they stay what they are.
inline float soften(float* p, int64_t seen) {
  Lanes most = Lanes{} + p[0], sums{};
  int64_t s = 0;
  for (; s + kLanes <= seen; s += kLanes) most = lanes_at(p + s) > most ? lanes_at(p + s) : most;
  const Words inside = Words{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} < static_cast<uint32_t>(seen - s);
  const Lanes last = lanes_at(p + s);
  most = inside & (last > most) ? last : most;
  float highest = most[0];
  for (int l = 1; l < kLanes; ++l) highest = most[l] > highest ? most[l] : highest;
  for (s = 0; s + kLanes <= seen; s += kLanes) {
    const Lanes some = exponential(lanes_at(p + s) - highest);
    put_lanes(some, p + s);
    sums += some;
  }
  const Lanes some = exponential(last - highest);
  put_lanes(inside ? some : last, p + s);
  sums += inside ? some : Lanes{};
  return 1.0f / sum_of(sums);
}

// What the nodes of a task see together.
struct Sight {
  int64_t low, all;  // from `low` on some node sees, and from `all` on every one, up to `shared`
  int64_t places;    // behind the last place of any node

  explicit Sight(const AttentionTask& t) : low(t.shared), all(0), places(t.shared) {
    for (int64_t n = 0; n < t.nodes; ++n) {
      low = t.first[n] < low ? t.first[n] : low;
      all = t.first[n] > all ? t.first[n] : all;
      places = t.last[n] > places ? t.last[n] : places;
    }
    all = all < t.shared ? all : t.shared;
  }
};

[[maybe_unused]] int64_t room_for_scores(int64_t queries, int64_t places, int64_t, int64_t) {
  return queries * (places + 1) + kLanes;
}

// What all nodes see is read once for all of them; what a node sees alone, before and behind it, is read for that node.
// Every query meets its places in their order all the same.
template <void (*kScore)(const AttentionTask&, const Stretch&, float*, int64_t),
          void (*kMix)(const AttentionTask&, const Stretch&, const float*, int64_t)>
void attend_by(const AttentionTask& t) {
  const Sight sight(t);
  const int64_t queries = t.nodes * t.groups, stride = sight.places;
  float *scores = t.scratch, *share = scores + queries * stride;
  const auto behind = [&](int64_t n) {
    return Stretch{n * t.groups, t.groups, t.first[n] > t.shared ? t.first[n] : t.shared, t.last[n]};
  };
  kScore(t, {0, queries, sight.low, t.shared}, scores, stride);
  for (int64_t n = 0; n < t.nodes; ++n) kScore(t, behind(n), scores, stride);
  for (int64_t q = 0; q < queries; ++q) {
    const int64_t first = t.first[t.node(q)];
    share[q] = soften(scores + q * stride + first, t.last[t.node(q)] - first);
  }
  for (int64_t i = 0; i < queries * t.value_width; ++i) t.out[i] = 0;
  for (int64_t n = 0; n < t.nodes; ++n) kMix(t, {n * t.groups, t.groups, t.first[n], sight.all}, scores, stride);
  kMix(t, {0, queries, sight.all, t.shared}, scores, stride);
  for (int64_t n = 0; n < t.nodes; ++n) kMix(t, behind(n), scores, stride);
  for (int64_t q = 0; q < queries; ++q)
    for (int64_t d = 0; d < t.value_width; ++d) t.out[q * t.value_width + d] *= share[q];
}

}  // namespace
}  // namespace draftsmith
