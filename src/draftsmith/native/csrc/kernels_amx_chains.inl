// Attention of many queries of a chain on tiles, as in prompts; part of kernels_amx.cpp.
//
// What is multiplied lies near: keys and values of some places are packed once for all queries, which go by sixteen at a
// time. Scores are not kept, since those of a long text would fill the caches. They are computed twice: to find the largest
// of each query, and to become probabilities. Sums have the products of `Attention`, in the same order.

namespace draftsmith {
namespace {

constexpr int64_t kFewestOfChains = 33;  // queries from which packing keys pays

class ChainAttention {
 public:
  ChainAttention(const AttentionTask& task, const Sight& sight)
      : t(task), low_(sight.low / kBlock * kBlock), end_(sight.places), count_(t.nodes * t.groups) {
    const Room parts(count_, t.width, t.value_width);
    // Every part begins at a line of the cache.
    float* at = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(t.scratch) + 63) / 64 * 64);
    queries_ = reinterpret_cast<char*>(at), at += parts.queries;
    keys_ = reinterpret_cast<char*>(at), at += parts.keys;
    values_ = reinterpret_cast<bf16*>(at), at += parts.values;
    sums_ = at, at += parts.sums;
    nothing_ = reinterpret_cast<bf16*>(at);
    __builtin_memset(nothing_, 0, static_cast<uint64_t>(t.value_width) * sizeof(bf16));
    pairs_ = t.width / 2, steps_ = parts.steps, panels_ = parts.panels;
  }

  // How many floats of scratch it takes.
  static int64_t room(int64_t queries, int64_t width, int64_t value_width) {
    return Room(queries, width, value_width).all();
  }

  // Whether every value that some query does not see is finite: zero times one that is not would be no number.
  bool is_finite() const {
    const int64_t all_from = first(count_ - 1), all_to = last(0);
    for (int64_t p = low_; p < end_; ++p) {
      if (p == all_from) p = most(p, all_to);
      if (p < end_ && !all_finite(t.value(p), t.value_width)) return false;
    }
    return true;
  }

  void run() {
    shape_.set(kTile, kTile);
    lay_queries();
    const int64_t stop = round_up(end_, kBlock);
    for (int64_t from = low_; from < stop; from += kSegment) {
      pack_keys_of(from, least(from + kSegment, stop));
      for_groups(from, stop, [&](const Group& g, int64_t begin, int64_t end) {
        score_each(g, from, begin, end, [&](int64_t place, const float* scores) { find_highest(g, place, scores); });
      });
    }
    for (int64_t q = 0; q < count_; ++q) highest_[q] = largest_lane(peaks_[q]) * t.scale;
    for (int64_t from = low_; from < stop; from += kSegment) {
      const int64_t to = least(from + kSegment, stop);
      if (stop - low_ > kSegment) pack_keys_of(from, to);
      pack_values(from, to);
      for_groups(from, stop, [&](const Group& g, int64_t begin, int64_t end) {
        score_each(g, from, begin, end, [&](int64_t place, const float* scores) {
          soften(g, place, scores, probabilities_ + (place - begin) / kBlock * 2 * kTileValues);
        });
        mix(g, (begin - from) / 2, (end - begin) / kBlock);
      });
    }
    write();
  }

 private:
  // How many floats the parts of the scratch take.
  struct Room {
    int64_t groups, steps, panels, queries, keys, values, sums, nothing;

    Room(int64_t most_queries, int64_t width, int64_t value_width)
        : groups((most_queries + kTile - 1) / kTile),
          steps((width / 2 + kTile - 1) / kTile),
          panels((value_width + kPanel - 1) / kPanel),
          queries(groups * steps * kTileFloats),
          keys(kSegment / kPanel * steps * kTileFloats),
          values(panels * kSegment / 2 * kPanel),
          sums(groups * panels * 2 * kTileFloats),
          nothing(panels * kPanel) {}

    int64_t all() const { return queries + keys + values + sums + nothing + kPanel; }
  };
  static constexpr int64_t kTileFloats = kTile * kPanel, kTileValues = kTile * kBlock, kTileBytes = kTile * kLineBytes;

  int64_t first(int64_t q) const { return t.first[t.node(q)]; }
  int64_t last(int64_t q) const { return t.last[t.node(q)]; }

  // Sixteen queries, or those that are left.
  struct Group {
    int64_t first, behind;
    int64_t all_from, all_to;  // places that all of them see

    bool sees(int64_t place) const { return place >= all_from && place + kBlock <= all_to; }
    int64_t number() const { return first / kTile; }
  };

  // Calls work(group, begin, end) for all groups, with the blocks of a segment that some of their queries see.
  template <class Work>
  void for_groups(int64_t from, int64_t stop, const Work& work) const {
    for (int64_t q = 0; q < count_; q += kTile) {
      const int64_t behind = least(q + kTile, count_);
      const int64_t begin = most(from, first(q) / kBlock * kBlock);
      const int64_t end = least(least(from + kSegment, stop), round_up(last(behind - 1), kBlock));
      if (begin < end) work(Group{q, behind, first(behind - 1), last(q)}, begin, end);
    }
  }

  // As tiles, one for every sixteen pairs; what is missing in the last ones is zero.
  void lay_queries() {
    const int64_t rows = round_up(count_, kTile);
    __builtin_memset(queries_, 0, static_cast<uint64_t>(rows * steps_ * kLineBytes));
    for (int64_t q = 0; q < count_; ++q)
      for (int64_t step = 0; step < steps_; ++step)
        __builtin_memcpy(queries_ + (q / kTile * steps_ + step) * kTileBytes + q % kTile * kLineBytes,
                         t.query(q) + step * kBlock, static_cast<uint64_t>(4 * least(kTile, pairs_ - step * kTile)));
    for (int64_t q = 0; q < count_; ++q) peaks_[q] = lowest(), totals_[q] = Lanes{};
    __builtin_memset(sums_, 0, static_cast<uint64_t>(rows * panels_ * 2 * kLineBytes));
  }

  void pack_keys_of(int64_t from, int64_t to) {
    const int64_t end = least(to, end_);
    for (int64_t k = from; k < least(from + kSoon, end); k += kPanel)
      fetch_entries(t.key(k), t.key_stride, t.width, least(kPanel, end - k));
    for (int64_t k = from; k < to; k += kPanel) {
      if (k + kSoon < end) fetch_entries(t.key(k + kSoon), t.key_stride, t.width, least(kPanel, end - k - kSoon));
      char* panel = keys_ + (k - from) / kPanel * steps_ * kTileBytes;
      pack_keys(t, k, end, reinterpret_cast<bf16*>(panel));
      __builtin_memset(panel + pairs_ * kLineBytes, 0, static_cast<uint64_t>((steps_ * kTile - pairs_) * kLineBytes));
    }
  }

  void pack_values(int64_t from, int64_t to) {
    const int64_t end = least(to, end_), pairs = (to - from) / 2;
    for (int64_t k = from; k < least(from + kSoon, end); k += kPanel)
      fetch_entries(t.value(k), t.value_stride, t.value_width, least(kPanel, end - k));
    for (int64_t k = 0; k < pairs; ++k) {
      const int64_t p = from + 2 * k, soon = p + kSoon;
      if (soon < end) fetch_entries(t.value(soon), t.value_stride, t.value_width, least(2, end - soon));
      zip(p < end ? t.value(p) : nothing_, p + 1 < end ? t.value(p + 1) : nothing_, t.value_width,
          values_ + k * 2 * kPanel, kSegment * kPanel);
    }
  }

  // Calls work(place, scores) for one block after the other: the products of a group with 32 keys, a tile for each half of
  // these. The next ones are multiplied meanwhile.
  template <class Work>
  void score_each(const Group& g, int64_t from, int64_t begin, int64_t end, const Work& work) {
    float *now = scores_, *next = scores_ + 2 * kTileFloats;
    score(g, from, begin, now);
    for (int64_t place = begin; place < end; place += kBlock) {
      if (place + kBlock < end) score(g, from, place + kBlock, next);
      work(place, now);
      float* done = now;
      now = next, next = done;
    }
  }

  void score(const Group& g, int64_t from, int64_t place, float* to) const {
    const char* query = queries_ + g.number() * steps_ * kTileBytes;
    const char* key = keys_ + (place - from) / kPanel * steps_ * kTileBytes;
    tiles_will_read();
    zero_tile<0>(), zero_tile<1>();
    for (int64_t step = 0; step < steps_; ++step) {
      load_tile<4>(query + step * kTileBytes, kLineBytes);
      load_tile<6>(key + step * kTileBytes, kLineBytes), multiply_bf16_tiles<0, 4, 6>();
      load_tile<7>(key + (steps_ + step) * kTileBytes, kLineBytes), multiply_bf16_tiles<1, 4, 7>();
    }
    store_tile<0>(to, kLineBytes), store_tile<1>(to + kTileFloats, kLineBytes);
  }

  // A score that is no number may be passed over here, since it makes the sum of the probabilities none.
  void find_highest(const Group& g, int64_t place, const float* scores) {
    const bool all = g.sees(place);
    for (int64_t q = g.first; q < g.behind; ++q, scores += kPanel) {
      Lanes even = lanes_at(scores), odd = lanes_at(scores + kTileFloats);
      if (!all) even = where_seen(q, place, even, lowest()), odd = where_seen(q, place + kPanel, odd, lowest());
      peaks_[q] = larger(larger(even, odd), peaks_[q]);
    }
  }

  // `value` where the query sees the sixteen places from `place` on, elsewhere `other`.
  Lanes where_seen(int64_t q, int64_t place, Lanes value, Lanes other) const {
    const Words since = numbers() + static_cast<uint32_t>(place - first(q));
    return choose(since < static_cast<uint32_t>(last(q) - first(q)), value, other);
  }
  static Lanes lowest() { return Lanes{} - __builtin_inff(); }

  // The probabilities of a group at 32 places, not yet divided by their sum, as two tiles: of every query a coarse row and a
  // fine one. Where a query sees nothing they are zero.
  void soften(const Group& g, int64_t place, const float* scores, bf16* row) {
    const bool all = g.sees(place);
    const float scale = t.scale;
    for (int64_t q = g.first; q < g.behind; ++q, scores += kPanel, row += 2 * kBlock) {
      Lanes even = exponential(lanes_at(scores) * scale - highest_[q]);
      Lanes odd = exponential(lanes_at(scores + kTileFloats) * scale - highest_[q]);
      if (!all) even = where_seen(q, place, even, Lanes{}), odd = where_seen(q, place + kPanel, odd, Lanes{});
      totals_[q] = totals_[q] + even + odd;
      const Split a(even), b(odd);
      put_upper_halves(a.coarse, b.coarse, row);
      put_upper_halves(a.fine, b.fine, row + kBlock);
    }
  }

  // Adds the values of some steps of 32 places, from pair `pair` of the segment on, times the probabilities of a group.
  void mix(const Group& g, int64_t pair, int64_t steps) {
    float* to = sums_ + g.number() * panels_ * 2 * kTileFloats;
    tiles_will_read();
    for (int64_t p = 0; p < panels_; p += 2, to += 4 * kTileFloats) {
      const char* panel = reinterpret_cast<const char*>(values_ + (p * kSegment / 2 + pair) * 2 * kPanel);
      p + 1 < panels_ ? mix_panels<true>(panel, steps, to) : mix_panels<false>(panel, steps, to);
    }
  }
  template <bool kTwo>
  void mix_panels(const char* panel, int64_t steps, float* to) const {
    const char *rows = reinterpret_cast<const char*>(probabilities_), *second = panel + kSegment / 2 * kLineBytes;
    load_tile<0>(to, kLineBytes), load_tile<2>(to + kTileFloats, kLineBytes);
    if constexpr (kTwo) load_tile<1>(to + 2 * kTileFloats, kLineBytes), load_tile<3>(to + 3 * kTileFloats, kLineBytes);
    for (int64_t step = 0; step < steps; ++step, rows += 2 * kTileBytes) {
      load_tile<4>(rows, kLineBytes);
      load_tile<6>(panel + step * kTileBytes, kLineBytes), multiply_bf16_tiles<0, 4, 6>();
      load_tile<5>(rows + kTileBytes, kLineBytes), multiply_bf16_tiles<2, 5, 6>();
      if constexpr (kTwo) {
        load_tile<7>(second + step * kTileBytes, kLineBytes), multiply_bf16_tiles<1, 4, 7>();
        multiply_bf16_tiles<3, 5, 7>();
      }
    }
    store_tile<0>(to, kLineBytes), store_tile<2>(to + kTileFloats, kLineBytes);
    if constexpr (kTwo) store_tile<1>(to + 2 * kTileFloats, kLineBytes), store_tile<3>(to + 3 * kTileFloats, kLineBytes);
  }

  void write() const {
    for (int64_t q = 0; q < count_; ++q) {
      const float share = 1.0f / sum_of(totals_[q]);
      const float* sums = sums_ + q / kTile * panels_ * 2 * kTileFloats + q % kTile * 2 * kPanel;
      float* out = t.out + q * t.value_width;
      for (int64_t left = t.value_width; left > 0; left -= kPanel, sums += 2 * kTileFloats, out += kPanel) {
        const Lanes some = (lanes_at(sums) + lanes_at(sums + kPanel)) * share;
        if (left >= kPanel)
          put_lanes(some, out);
        else
          for (int64_t l = 0; l < left; ++l) out[l] = some[l];
      }
    }
  }

  const AttentionTask& t;
  int64_t low_, end_, count_;  // where the first block of places begins, and none sees a place from `end` on
  int64_t pairs_, steps_, panels_;
  char *queries_, *keys_;
  bf16 *values_, *nothing_;
  float* sums_;  // of every group and panel two tiles: a coarse row and a fine one of every query
  float highest_[kMostQueriesOnTiles];
  Lanes peaks_[kMostQueriesOnTiles], totals_[kMostQueriesOnTiles];  // the largest scores yet, and sums of probabilities
  alignas(64) float scores_[4 * kTileFloats];
  alignas(64) bf16 probabilities_[kSegment / kBlock * 2 * kTileValues];
  TileRows shape_;
};

void attend(const AttentionTask& t) {
  const Sight sight(t);
  const int64_t queries = t.nodes * t.groups;
  if (t.paths == nullptr && t.width % 2 == 0 && queries >= kFewestOfChains && queries <= kMostQueriesOnTiles) {
    ChainAttention chain(t, sight);
    if (chain.is_finite()) return chain.run();
  }
  Attention attention(t, sight);
  for (int64_t q = 0; q < queries; q += kMostQueries) attention.run(q, least(kMostQueries, queries - q));
}

int64_t room_on_tiles(int64_t queries, int64_t places, int64_t width, int64_t value_width) {
  return most(ChainAttention::room(queries, width, value_width),
              Parts(least(queries, kMostQueries), places, width, value_width).all());
}

}  // namespace
}  // namespace draftsmith

