// Attention on tiles; part of kernels_amx.cpp.
//
// It is two products: keys times queries, one of which is packed, and probabilities times values, which are packed on the
// way. Probabilities are split in two bf16, a coarse and a fine one, so that next to nothing of their fp32 value is
// lost.

namespace draftsmith {
namespace {

constexpr int64_t kSegment = 256;  // places whose values are packed at a time
constexpr int64_t kFewQueries = 4;  // below which scores are moved one by one
constexpr int64_t kFetched = 64;  // entries that are asked for together, and lie in one block
constexpr int64_t kSoon = 96;  // entries between one that is read and one that is asked for meanwhile
static_assert(kFetched == kBlockEntries && kBlockEntries % kBlock == 0, "tiles are cut where blocks end");
constexpr int64_t kStride = kSegment + 32;  // of rows of probabilities, so that they do not meet in one set of the cache

inline int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// Asks for some entries of a block: those of a head lie far apart, where the processor does not see them coming.
inline void fetch_entries(const bf16* from, int64_t stride, int64_t width, int64_t count) {
  for (int64_t e = 0; e < count; ++e)
    for (int64_t d = 0; d < width; d += kLineBytes / 2) __builtin_prefetch(from + e * stride + d, 0, 3);
}

// Sixteen keys from place k on as a panel; behind `end` there are zeros.
inline void pack_keys(const AttentionTask& t, int64_t k, int64_t end, bf16* panel) {
  const int64_t pairs = t.width / 2;
  if (k + kPanel <= end) return base()->interleave(t.key(k), t.key_stride, pairs, panel);
  __builtin_memset(panel, 0, static_cast<uint64_t>(pairs * 2 * kPanel) * sizeof(bf16));
  for (int64_t l = 0; k + l < end; ++l)
    for (int64_t d = 0; d < t.width; ++d) panel[d / 2 * 2 * kPanel + 2 * l + d % 2] = t.key(k + l)[d];
}

// The values of two places side by side, in the lines of all panels.
inline void zip(const bf16* even, const bf16* odd, int64_t width, bf16* line, int64_t panel) {
  const auto pair = [](Words a, Words b, bf16* to) { Register<Words>::put(a | b << 16, to); };
  int64_t d = 0;
  for (; d + kPanel <= width; d += kPanel, line += panel) pair(words_at(even + d), words_at(odd + d), line);
  if (d == width) return;
  const Few<bf16> a(even + d, width - d, 0), b(odd + d, width - d, 0);
  pair(words_at(a.values), words_at(b.values), line);
}

// Probabilities as two rows of bf16 each: the upper half of the bits, and what is left of the value.
struct Split {
  Words coarse, fine;  // in the upper halves

  explicit Split(Lanes probability)
      : coarse(same_bits<Words>(probability)),
        fine(same_bits<Words>(probability - same_bits<Lanes>(coarse & 0xffff0000u)) + 0x8000u) {}
};

// How many floats the parts of the scratch of a task take.
struct Parts {
  int64_t packed, lines, scores, rows, probabilities, values, sums, nothing;

  Parts(int64_t most_queries, int64_t places, int64_t width, int64_t value_width)
      : packed(most(round_up(most_queries, kPanel), kFetched) * round_up(width, 2) / 2),
        lines(round_up(most_queries, kPanel) * apart(width) / 2),
        scores(round_up(places, kBlock) * round_up(most_queries, kPanel)),
        rows(most_queries * row_stride(places)),
        probabilities(most_queries * kStride),  // two rows of bf16 for every query
        values(round_up(value_width, kPanel) * kSegment / 2),
        sums(2 * most_queries * round_up(value_width, kPanel)),
        nothing(round_up(value_width, kPanel)) {}

  static int64_t row_stride(int64_t places) { return round_up(places, kBlock) + kPanel; }
  int64_t all() const { return packed + lines + scores + rows + probabilities + values + sums + nothing + kPanel; }
};

class Attention {
 public:
  Attention(const AttentionTask& task, const Sight& sight)
      : t(task), interleave_(base()->interleave), low_(sight.low / kBlock * kBlock) {
    const int64_t places = most(sight.places, t.entries) - low_;
    const Parts parts(least(t.nodes * t.groups, kMostQueries), places, t.width, t.value_width);
    row_stride_ = Parts::row_stride(places);
    // Every part begins at a line of the cache.
    float* at = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(t.scratch) + 63) / 64 * 64);
    packed_ = reinterpret_cast<bf16*>(at), at += parts.packed;
    lines_ = reinterpret_cast<bf16*>(at), at += parts.lines;
    scores_ = at, at += parts.scores;
    rows_ = at, at += parts.rows;
    probabilities_ = reinterpret_cast<bf16*>(at), at += parts.probabilities;
    values_ = reinterpret_cast<bf16*>(at), at += parts.values;
    sums_ = at, at += parts.sums;
    nothing_ = reinterpret_cast<bf16*>(at);
    __builtin_memset(nothing_, 0, static_cast<uint64_t>(t.value_width) * sizeof(bf16));
  }

  // Some queries of the task, at most kMostQueries.
  void run(int64_t query, int64_t count) {
    query_ = query, count_ = count;
    common_from_ = end_ = 0, common_to_ = t.last[t.node(query)];
    for (int64_t q = 0; q < count; ++q) {
      common_from_ = most(common_from_, first(q)), common_to_ = least(common_to_, last(q)), end_ = most(end_, last(q));
    }
    stop_ = round_up(end_, kBlock);
    score();
    for (int64_t p = low_, far = least(end_, t.shared); p < least(low_ + kSoon, far); p += kPanel)
      fetch_entries(t.value(p), t.value_stride, t.value_width, least(kPanel, far - p));
    for (int64_t q = 0; q < count; ++q) highest_[q] = highest(q), totals_[q] = Lanes{};
    const int64_t wide = round_up(t.value_width, kPanel);
    for (int64_t i = 0; i < 2 * count * wide; ++i) sums_[i] = 0;
    // Whole blocks of places at which all nodes have the same entries; what lies behind is read node by node.
    const int64_t together = t.paths == nullptr ? stop_ : t.shared / kBlock * kBlock;
    for (int64_t from = low_; from < stop_; from += kSegment) {
      const int64_t to = least(from + kSegment, stop_);
      for (int64_t q = 0; q < count; ++q) soften(q, from, to);
      if (from < together) mix(0, count, from, from, least(to, together));
      if (to > together) mix_nodes(0, count, from, most(from, together), to);
    }
    for (int64_t q = 0; q < count; ++q) {
      const float *coarse = sums_ + 2 * q * wide, *fine = coarse + wide;
      const float share = 1.0f / sum_of(totals_[q]);
      float* out = t.out + (query + q) * t.value_width;
      for (int64_t d = 0; d < t.value_width; ++d) out[d] = (coarse[d] + fine[d]) * share;
    }
  }

 private:
  int64_t first(int64_t q) const { return t.first[t.node(query_ + q)]; }
  int64_t last(int64_t q) const { return t.last[t.node(query_ + q)]; }
  float* row(int64_t q) const { return rows_ + q * row_stride_ - low_; }  // by places

  // Products of all keys with all queries, a row for each query; `factor_` is what is still to be multiplied. The bits are
  // the same whichever of the two is packed.
  void score() {
    if (count_ <= kFewRows && t.paths == nullptr && t.width % 2 == 0)
      score_rows();
    else
      score_lines();
  }

  // The queries as rows, by keys that are packed on the way: products come out as they are needed.
  void score_rows() {
    const int64_t pairs = t.width / 2, stride = apart(t.width);
    factor_ = t.scale;
    for (int64_t q = 0; q < count_; ++q)
      __builtin_memcpy(lines_ + q * stride, t.query(query_ + q), static_cast<uint64_t>(t.width) * sizeof(bf16));
    for (int64_t k = low_; k < least(low_ + kSoon, end_); k += kPanel)
      fetch_entries(t.key(k), t.key_stride, t.width, least(kPanel, end_ - k));
    for (int64_t e = low_, next = 0; e < end_; e = next) {
      next = least((e / kFetched + 1) * kFetched, end_);
      int64_t panels = 0;
      for (int64_t k = e; k < next; k += kPanel, ++panels) {
        if (k + kSoon < end_) fetch_entries(t.key(k + kSoon), t.key_stride, t.width, least(kPanel, end_ - k - kSoon));
        pack_keys(t, k, next, packed_ + panels * pairs * 2 * kPanel);
      }
      multiply_few<false>(lines_, stride, count_, packed_, pairs, panels, nullptr, rows_ + (e - low_), row_stride_);
    }
  }

  // The keys as rows, straight from the cache, by packed queries.
  void score_lines() {
    factor_ = 1.0f;
    const int64_t pairs = (t.width + 1) / 2, stride = 2 * pairs, groups = (count_ + kPanel - 1) / kPanel;
    const int64_t wide = groups * kPanel, bytes = t.width * static_cast<int64_t>(sizeof(bf16));
    for (int64_t g = 0; g < groups; ++g) {
      __builtin_memset(lines_, 0, static_cast<uint64_t>(kPanel * stride) * sizeof(bf16));
      for (int64_t l = 0; l < kPanel && g * kPanel + l < count_; ++l)
        __builtin_memcpy(lines_ + l * stride, t.query(query_ + g * kPanel + l), static_cast<uint64_t>(bytes));
      interleave_(lines_, stride, pairs, packed_ + g * pairs * 2 * kPanel);
    }
    const bool chain = t.paths == nullptr;
    const int64_t entries = chain ? end_ : t.entries, same = chain ? end_ : least(t.shared, end_);
    // Blocks of entries that all nodes have at the places of these numbers become rows at once, while their products are
    // in the nearest cache; the products of the others are kept.
    int64_t kept = most(low_, same / kFetched * kFetched);
    if (t.width % 2 == 0) {
      for (int64_t e = low_, next = 0; e < entries; e = next) {
        next = least((e / kFetched + 1) * kFetched, entries);
        if (next < entries) fetch_entries(t.key(next), t.key_stride, t.width, least(kFetched, entries - next));
        float* products = scores_ + (e < kept ? 0 : e - kept) * wide;
        gemm(t.key(e), t.key_stride, next - e, packed_, pairs, groups, nullptr, products, wide);
        if (e < kept) turn(products, e, next, wide);
      }
    } else {  // the last pair would reach beside the key
      kept = low_, lines_[t.width] = 0;
      for (int64_t e = low_; e < entries; ++e) {
        __builtin_memcpy(lines_, t.key(e), static_cast<uint64_t>(bytes));
        gemm(lines_, stride, 1, packed_, pairs, groups, nullptr, scores_ + (e - low_) * wide, wide);
      }
    }
    turn(scores_, kept, same, wide);
    for (int64_t q = 0; q < count_; ++q)
      for (int64_t p = most(same, first(q)); p < last(q); ++p)
        row(q)[p] = scores_[(t.entry(t.node(query_ + q), p) - kept) * wide + q] * t.scale;
  }

  // From a line for every place to a row for every query, where places are entries. Lines behind the last may come along:
  // nobody sees them.
  void turn(const float* lines, int64_t from, int64_t to, int64_t wide) {
    int64_t p = from;
    alignas(64) float turned[kPanel][kPanel];
    for (; count_ >= kFewQueries && p < to; p += kPanel)
      for (int64_t g = 0; g * kPanel < count_; ++g) {
        interleave_(reinterpret_cast<const bf16*>(lines + (p - from) * wide + g * kPanel), 2 * wide, kPanel,
                    reinterpret_cast<bf16*>(turned));
        for (int64_t l = 0; l < kPanel && g * kPanel + l < count_; ++l)
          put_lanes(lanes_at(turned[l]) * t.scale, row(g * kPanel + l) + p);
      }
    for (int64_t q = 0; q < count_; ++q) {
      float* to_row = row(q);
      for (int64_t place = p; place < to; ++place) to_row[place] = lines[(place - from) * wide + q] * t.scale;
    }
  }

  // The largest score that a query sees, in full.
  float highest(int64_t q) const {
    const float* mine = row(q);
    Lanes most_yet = Lanes{} + mine[first(q)];
    int64_t p = first(q);
    for (; p + kPanel <= last(q); p += kPanel) most_yet = larger(lanes_at(mine + p), most_yet);
    float found = most_yet[0];
    for (int l = 1; l < kPanel; ++l) found = most_yet[l] > found ? most_yet[l] : found;
    for (; p < last(q); ++p) found = mine[p] > found ? mine[p] : found;
    return found * factor_;
  }

  // The probabilities of a query at some places, not yet divided by their sum. Where the query sees nothing they are zero.
  void soften(int64_t q, int64_t from, int64_t to) {
    const float* mine = row(q);
    bf16 *coarse = probabilities_ + 2 * q * kStride - from, *fine = coarse + kStride;
    const Words index = numbers();
    const int64_t begin = first(q), end = last(q);
    Lanes total = totals_[q];
    for (int64_t p = from; p < to; p += kPanel) {
      Lanes probability = exponential(lanes_at(mine + p) * factor_ - highest_[q]);
      if (p < begin || p + kPanel > end) {
        const Words place = index + static_cast<uint32_t>(p - begin);
        probability = choose(place < static_cast<uint32_t>(end - begin), probability, Lanes{});
      }
      total += probability;
      const Split split(probability);
      Register<Halves>::put(converted<Halves>(split.coarse >> 16), coarse + p);
      Register<Halves>::put(converted<Halves>(split.fine >> 16), fine + p);
    }
    totals_[q] = total;
  }

  // Adds the values of the places from … to - 1, whole blocks, to the sums of some queries, whose nodes have the same
  // entries there. What a query does not see has no probability; but zero times a value that is no number is none, so
  // where one of several nodes does not see such a value, every node is taken by itself.
  void mix(int64_t query, int64_t count, int64_t segment, int64_t from, int64_t to) {
    const int64_t panels = (t.value_width + kPanel - 1) / kPanel, pairs = (to - from) / 2, wide = panels * kPanel;
    const int64_t node = t.node(query_ + query);
    const bool alone = t.node(query_ + query + count - 1) == node;
    const int64_t seen_from = alone ? first(query) : common_from_, seen_to = alone ? last(query) : common_to_;
    const int64_t end = alone ? last(query) : end_, far = least(end, t.shared);
    for (int64_t k = 0; k < pairs; ++k) {
      const int64_t soon = from + 2 * k + kSoon;
      if (soon < far) fetch_entries(t.value(soon), t.value_stride, t.value_width, least(2, far - soon));
      const bf16* two[2];
      for (int64_t i = 0; i < 2; ++i) {
        const int64_t p = from + 2 * k + i;
        const bool seen = p >= seen_from && p < seen_to;
        two[i] = p < end && (seen || !alone) ? t.value(t.entry(node, p)) : nothing_;
        if (!seen && !all_finite(two[i], t.value_width)) return mix_nodes(query, count, segment, from, to);
      }
      zip(two[0], two[1], t.value_width, values_ + k * 2 * kPanel, pairs * 2 * kPanel);
    }
    float* sums = sums_ + 2 * query * wide;
    const int64_t rows = 2 * count;
    const bf16* weights = probabilities_ + 2 * query * kStride + from - segment;
    if (rows <= kFewRows)
      return multiply_few<true>(weights, kStride, rows, values_, pairs, panels, nullptr, sums, wide);
    Product<false>{reinterpret_cast<const char*>(weights),
                   reinterpret_cast<const char*>(values_), reinterpret_cast<char*>(sums), 2 * kStride, 4 * wide, pairs,
                   true}
        .run(rows, panels, nullptr);
  }

  // As `mix`, node by node.
  void mix_nodes(int64_t query, int64_t count, int64_t segment, int64_t from, int64_t to) {
    for (int64_t q = query, next = 0; q < query + count; q = next) {
      next = least(query + count, (t.node(query_ + q) + 1) * t.groups - query_);
      const int64_t own = least(to, round_up(last(q), kBlock));
      if (from < own) mix(q, next - q, segment, from, own);
    }
  }

  const AttentionTask& t;
  void (*interleave_)(const bf16*, int64_t, int64_t, bf16*);  // of the instruction set below this one
  int64_t low_;                              // where the first block of places begins
  int64_t row_stride_ = 0;
  float factor_ = 1.0f;                      // scores are what rows hold times this
  int64_t query_ = 0, count_ = 0;
  int64_t common_from_ = 0, common_to_ = 0;  // every query sees the places between
  int64_t end_ = 0, stop_ = 0;               // none sees a place from `end` on; whole blocks until `stop`
  bf16 *packed_, *lines_, *probabilities_, *values_, *nothing_;
  float *scores_, *rows_, *sums_;
  float highest_[kMostQueries];  // score of every query
  Lanes totals_[kMostQueries];   // of its probabilities
};

}  // namespace
}  // namespace draftsmith
