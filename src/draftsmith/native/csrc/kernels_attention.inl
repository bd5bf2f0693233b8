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

constexpr int64_t kKeys = 16;   // that all queries of a stretch meet before the next ones are read
constexpr int64_t kFetchedAhead = 96;  // places by which keys and values are fetched before they are read

// Fetches one head's part of a line of keys or values. Inlined, because compilers think that a function that only fetches
// does nothing, and leave calls of it out.
[[gnu::always_inline]] inline void fetch(const bf16* from, int64_t width) {
  constexpr int64_t kValuesALine = 32;
  for (int64_t d = 0; d < width; d += kValuesALine) __builtin_prefetch(from + d);
}

// Fetches keys, or values, that are read soon after the places from … from + count - 1 of a stretch. Between those of one
// head lie those of the others, so that a processor does not see them coming.
[[gnu::always_inline]] inline void fetch_behind(const AttentionTask& t, const Stretch& s, const bf16* sides,
                                                int64_t stride, int64_t width, int64_t from, int64_t count) {
  const bf16* found[kKeys];
  const int64_t next = from + count + kFetchedAhead, end = next < s.to ? next : s.to;
  for (int64_t p = from == s.from ? from + count : from + kFetchedAhead; p < end; p += kKeys) {
    const int64_t some = end - p < kKeys ? end - p : kKeys;
    find(t, t.node(s.query), sides, stride, p, some, found);
    for (int64_t i = 0; i < some; ++i) fetch(found[i], width);
  }
}

// scores[q * stride + p] = scale · query q · key at place p.
[[maybe_unused]] void score_keys(const AttentionTask& t, const Stretch& s, float* scores, int64_t stride) {
  const int64_t node = t.node(s.query);
  const bf16* keys[kKeys];
  for (int64_t from = s.from; from < s.to; from += kKeys) {
    const int64_t count = s.to - from < kKeys ? s.to - from : kKeys;
    find(t, node, t.keys, t.key_stride, from, count, keys);
    fetch_behind(t, s, t.keys, t.key_stride, t.width, from, count);
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
    fetch_behind(t, s, t.values, t.value_stride, t.value_width, from, count);
    for (int64_t q = s.query; q < s.query + s.queries; ++q) {
      float* out = t.out + q * t.value_width;
      for (int64_t i = 0; i < count; ++i) {
        const float weight = scores[q * stride + from + i];
        for (int64_t d = 0; d < t.value_width; ++d) out[d] += weight * widen(values[i][d]);
      }
    }
  }
}

// Calls work(Count, first query) for some queries after the other, kMost at a time, then for those that are left.
template <int kCount>
struct Count {
  static constexpr int value = kCount;
};
template <int kMost, class Work>
inline void by_queries(int64_t query, int64_t end, const Work& work) {
  for (; query + kMost <= end; query += kMost) work(Count<kMost>{}, query);
  if constexpr (kMost > 1) by_queries<kMost - 1>(query, end, work);
}

// The values of the places of a stretch, and how many are known, with those behind it that are fetched meanwhile.
struct Values {
  const bf16* const* at;
  int64_t known;
};

// As `mix_values` for some of the queries and a stretch of columns: values are widened once for all of these queries. `Line`
// has the instructions: registers of `kWidth` values.
template <class Line, int kQueries, int kLines>
inline void mix(const AttentionTask& t, const Stretch& s, const Values& values, const float* scores, int64_t stride,
                int64_t query, int64_t column) {
  typename Line::Type sum[kQueries][kLines];
  float* out = t.out + query * t.value_width + column;
  for (int q = 0; q < kQueries; ++q)
    for (int l = 0; l < kLines; ++l) sum[q][l] = Line::at(out + q * t.value_width + Line::kWidth * l);
  const int64_t fetched = query == s.query ? s.from + values.known - kFetchedAhead : s.from;
  for (int64_t p = s.from; p < s.to; ++p) {
    const bf16* value = values.at[p - s.from] + column;
    if (p < fetched) fetch(values.at[p - s.from + kFetchedAhead] + column, Line::kWidth * kLines);
    typename Line::Type wide[kLines];
    for (int l = 0; l < kLines; ++l) wide[l] = Line::widened(value + Line::kWidth * l);
    for (int q = 0; q < kQueries; ++q) {
      const typename Line::Type weight = Line::all(scores[(query + q) * stride + p]);
      for (int l = 0; l < kLines; ++l) sum[q][l] = Line::plus(sum[q][l], weight, wide[l]);
    }
  }
  for (int q = 0; q < kQueries; ++q)
    for (int l = 0; l < kLines; ++l) Line::put(sum[q][l], out + q * t.value_width + Line::kWidth * l);
}

// At most kMost queries at a time, over as many columns as kLines lines have; returns the first column that is left.
template <class Line, int kMost, int kLines>
inline int64_t mix_columns(const AttentionTask& t, const Stretch& s, const Values& values, const float* scores,
                           int64_t stride, int64_t column) {
  constexpr int64_t kColumns = kLines * Line::kWidth;
  for (; column + kColumns <= t.value_width; column += kColumns)
    by_queries<kMost>(s.query, s.query + s.queries, [&](auto some, int64_t query) {
      mix<Line, decltype(some)::value, kLines>(t, s, values, scores, stride, query, column);
    });
  return column;
}

template <class Line>
[[maybe_unused]] void mix_values_by(const AttentionTask& t, const Stretch& s, const float* scores, int64_t stride) {
  constexpr int kOne = kLanes / Line::kWidth;  // lines of sixteen columns
  if (t.value_width % kLanes != 0) return mix_values(t, s, scores, stride);
  constexpr int64_t kPlaces = 128;  // whose values stay in the nearest cache for all queries
  const bf16* found[kPlaces + kFetchedAhead];
  for (int64_t from = s.from, to = 0; from < s.to; from = to) {
    to = (from / kPlaces + 1) * kPlaces;
    to = to < s.to ? to : s.to;
    const Stretch part{s.query, s.queries, from, to};
    const Values values{found, (s.to - to < kFetchedAhead ? s.to : to + kFetchedAhead) - from};
    find(t, t.node(s.query), t.values, t.value_stride, from, values.known, found);
    if (from == s.from)
      for (int64_t i = 0; i < values.known && i < kFetchedAhead; ++i) fetch(found[i], t.value_width);
    int64_t column = 0;
    if (s.queries <= Line::kFew)  // registers that queries leave free are for more columns
      column = mix_columns<Line, Line::kFew, Line::kLinesOfFew>(t, part, values, scores, stride, column);
    column = mix_columns<Line, Line::kQueries, Line::kLines>(t, part, values, scores, stride, column);
    if constexpr (Line::kLines > kOne) mix_columns<Line, Line::kQueries, kOne>(t, part, values, scores, stride, column);
  }
}

// Turns the scores of one query into e^(score - highest), and returns one over their sum. The fifteen places behind the
// last have to exist; they stay what they are.
inline float soften(float* p, int64_t seen) {
  Lanes most = Lanes{} + p[0], sums{};
  int64_t s = 0;
  for (; s + kLanes <= seen; s += kLanes) most = larger(lanes_at(p + s), most);
  const auto inside = numbers() < static_cast<uint32_t>(seen - s);
  const Lanes last = lanes_at(p + s);
  const float highest = largest_lane(choose(inside, larger(last, most), most));
  for (s = 0; s + kLanes <= seen; s += kLanes) {
    const Lanes some = exponential(lanes_at(p + s) - highest);
    put_lanes(some, p + s);
    sums += some;
  }
  const Lanes some = exponential(last - highest);
  put_lanes(choose(inside, some, last), p + s);
  sums += choose(inside, some, Lanes{});
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

// Rows of scores begin at lines of the cache, an odd number of lines apart, so that those of one place do not meet in one
// set. Each has room for fifteen scores behind the last, that mean nothing.
inline int64_t score_stride(int64_t places) { return ((places + 2 * (kLanes - 1)) / kLanes | 1) * kLanes; }

[[maybe_unused]] int64_t room_for_scores(int64_t queries, int64_t places, int64_t, int64_t) {
  return queries * (score_stride(places) + 1) + 2 * kLanes;
}

constexpr int64_t kMixedTogether = 6;  // nodes of a chain that meet together the values that some of them see

// What all nodes see is read once for all of them; what a node sees alone, before and behind it, is read for that node, or
// in a chain for some neighbours. Every query meets its places in their order all the same. So many nodes of a chain as
// kScoredTogether have scores together, also of places that only some of them see: that pays where many are scored at once.
template <void (*kScore)(const AttentionTask&, const Stretch&, float*, int64_t),
          void (*kMix)(const AttentionTask&, const Stretch&, const float*, int64_t), int64_t kScoredTogether = 1>
void attend_by(const AttentionTask& t) {
  const Sight sight(t);
  const int64_t queries = t.nodes * t.groups, stride = score_stride(sight.places);
  float* scores = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(t.scratch) + 63) / 64 * 64);
  float* share = scores + queries * stride;
  const bool chain = t.paths == nullptr;
  const auto first = [&](int64_t n) { return t.first[n] > t.shared ? t.first[n] : t.shared; };
  const auto score = [&](int64_t n, int64_t count, int64_t from, int64_t to) {
    if (from < to) kScore(t, {n * t.groups, count * t.groups, from, to}, scores, stride);
  };
  const auto mix = [&](int64_t n, int64_t count, int64_t from, int64_t to) {
    if (from < to) kMix(t, {n * t.groups, count * t.groups, from, to}, scores, stride);
  };
  // Up to a whole number of panels of keys; in a chain the next ones are scored with what follows.
  const int64_t whole = kScoredTogether > 1 && chain ? t.shared / kKeys * kKeys : t.shared;
  const int64_t even = whole > sight.low ? whole : t.shared;
  score(0, t.nodes, sight.low, even);
  for (int64_t n = 0, next = 0; n < t.nodes; n = next) {
    next = chain && n + kScoredTogether < t.nodes ? n + kScoredTogether : chain ? t.nodes : n + 1;
    score(n, next - n, t.first[n] > even ? t.first[n] : even, t.last[next - 1]);
  }
  for (int64_t q = 0; q < queries; ++q) {
    const int64_t from = t.first[t.node(q)];
    share[q] = soften(scores + q * stride + from, t.last[t.node(q)] - from);
  }
  for (int64_t i = 0; i < queries * t.value_width; ++i) t.out[i] = 0;
  for (int64_t n = 0; n < t.nodes; ++n) mix(n, 1, t.first[n], sight.all);
  mix(0, t.nodes, sight.all, t.shared);
  for (int64_t n = 0, next = 0; n < t.nodes; n = next) {
    next = chain && n + kMixedTogether < t.nodes ? n + kMixedTogether : chain ? t.nodes : n + 1;
    const int64_t from = first(next - 1), to = t.last[n];  // what these see together, if anything
    if (from < to) {
      for (int64_t m = n; m < next; ++m) mix(m, 1, first(m), from);
      mix(n, next - n, from, to);
    }
    for (int64_t m = n; m < next; ++m) mix(m, 1, from < to ? to : first(m), t.last[m]);
  }
  for (int64_t q = 0; q < queries; ++q)
    for (int64_t d = 0; d < t.value_width; ++d) t.out[q * t.value_width + d] *= share[q];
}

}  // namespace
}  // namespace draftsmith
