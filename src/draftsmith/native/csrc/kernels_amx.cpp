// AMX: sixteen rows by sixteen outputs in one instruction, over the same packed weights as everywhere else. Sixteen
// lines of a panel are a tile as they lie, and so are rows, so nothing is packed anew.
//
// Attention is two such products: keys times queries, and probabilities times values, which are packed on the way.
// Probabilities are split in two bf16, a coarse and a fine one, so that next to nothing of their fp32 value is lost.
#include "kernels.h"

#ifdef DRAFTSMITH_EMULATED_TILES
#define DRAFTSMITH_HAS_TILES
#elif defined(__x86_64__) && defined(__linux__) && __has_include(<amxtileintrin.h>)
#define DRAFTSMITH_HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma")
#include <immintrin.h>
#define DRAFTSMITH_MULTIPLY_ADD(a, b, c) _mm512_fmadd_ps(a, b, c)
#define DRAFTSMITH_WORDS_AT(values) \
  reinterpret_cast<Words>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values))))
#endif

#ifdef DRAFTSMITH_HAS_TILES
#include "kernels_common.inl"
#include "tiles.h"

namespace draftsmith {
namespace {

constexpr int64_t kTile = 16;   // rows of a tile, and lines of weights
constexpr int64_t kBlock = 32;  // rows that are multiplied together, as two tiles
constexpr int64_t kAhead = 32;  // lines of a panel between what is multiplied and what is fetched

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Says which rows the tiles have while it lives. Tiles 0 and 1 sum the first sixteen rows of a block for two panels, 2
// and 3 those behind them; 4 and 5 hold the rows, 6 and 7 the weights.
class TileRows {
 public:
  ~TileRows() {
    if (above_ > 0) release_tiles();
  }

  void set(int64_t above, int64_t below) {
    if (above == above_ && below == below_) return;
    above_ = above, below_ = below;
    TileShapes shapes;
    const int64_t rows[8] = {above, above, below, below, above, below, kTile, kTile};
    for (int t = 0; t < 8; ++t) shapes.bytes[t] = kLineBytes, shapes.rows[t] = static_cast<uint8_t>(rows[t]);
    shape_tiles(shapes);
  }

 private:
  int64_t above_ = 0, below_ = 0;
};

// A product with whole numbers or with bf16; both kinds of weights have lines of 64 bytes that meet words of 4 bytes of
// a row, so everything is counted in bytes.
template <bool kWhole>
struct Product {
  const char *x, *packed;
  char* y;
  int64_t x_stride, y_stride, lines;
  bool onto;  // adds to what y holds

  // Up to 32 rows by one or two panels, from w on. `next` is what follows behind the last of them, null for no fetching.
  template <bool kTwoBlocks, bool kTwoPanels>
  void block(int64_t row, int64_t column, const char* w, const char* next, int64_t rows) const {
    const char* above = x + row * x_stride;
    const char* below = above + kTile * x_stride;
    char* to = y + row * y_stride + column * 4;
    char* to_below = to + kTile * y_stride;
    const int64_t panel = lines * kLineBytes;
    tiles_will_read();
    if (onto) {
      load_tile<0>(to, y_stride);
      if constexpr (kTwoPanels) load_tile<1>(to + kLineBytes, y_stride);
      if constexpr (kTwoBlocks) load_tile<2>(to_below, y_stride);
      if constexpr (kTwoBlocks && kTwoPanels) load_tile<3>(to_below + kLineBytes, y_stride);
    } else {
      zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    }
    int64_t k = 0;
    for (; k + kTile <= lines; k += kTile) {
      const int64_t soon = k + kAhead;
      const char* last = kTwoPanels ? w + panel : w;
      if (next != nullptr) {
        if constexpr (kTwoPanels) fetch(w + soon * kLineBytes);
        fetch(soon < lines ? last + soon * kLineBytes : next + (soon - lines) * kLineBytes);
      }
      step<kTwoBlocks, kTwoPanels>(above + 4 * k, below + 4 * k, x_stride, w + k * kLineBytes, last + k * kLineBytes);
    }
    if (k < lines) {  // what is left is less than a tile: zeros fill it up
      alignas(64) char few_rows[kBlock * kLineBytes] = {}, few_lines[2 * kTile * kLineBytes] = {};
      for (int64_t r = 0; r < rows; ++r)
        __builtin_memcpy(few_rows + r * kLineBytes, above + r * x_stride + 4 * k, 4 * (lines - k));
      for (int64_t p = 0; p <= kTwoPanels; ++p)
        __builtin_memcpy(few_lines + p * kTile * kLineBytes, w + p * panel + k * kLineBytes, (lines - k) * kLineBytes);
      tiles_will_read();
      step<kTwoBlocks, kTwoPanels>(few_rows, few_rows + kTile * kLineBytes, kLineBytes, few_lines,
                                   few_lines + kTile * kLineBytes);
    }
    store_tile<0>(to, y_stride);
    if constexpr (kTwoPanels) store_tile<1>(to + kLineBytes, y_stride);
    if constexpr (kTwoBlocks) store_tile<2>(to_below, y_stride);
    if constexpr (kTwoBlocks && kTwoPanels) store_tile<3>(to_below + kLineBytes, y_stride);
  }

  // Up to sixteen rows by four panels, without fetching: more sums at a time, where nobody waits for the memory.
  void four_panels(int64_t column, const char* w) const {
    const int64_t panel = lines * kLineBytes;
    char* to = y + column * 4;
    tiles_will_read();
    load_tile<0>(to, y_stride), load_tile<1>(to + kLineBytes, y_stride);
    load_tile<2>(to + 2 * kLineBytes, y_stride), load_tile<3>(to + 3 * kLineBytes, y_stride);
    for (int64_t k = 0; k < lines; k += kTile) {
      const char* first = w + k * kLineBytes;
      load_tile<4>(x + 4 * k, x_stride);
      load_tile<6>(first, kLineBytes), add<0, 4, 6>();
      load_tile<7>(first + panel, kLineBytes), add<1, 4, 7>();
      load_tile<6>(first + 2 * panel, kLineBytes), add<2, 4, 6>();
      load_tile<7>(first + 3 * panel, kLineBytes), add<3, 4, 7>();
    }
    store_tile<0>(to, y_stride), store_tile<1>(to + kLineBytes, y_stride);
    store_tile<2>(to + 2 * kLineBytes, y_stride), store_tile<3>(to + 3 * kLineBytes, y_stride);
  }

  void run(int64_t count, int64_t panels, const char* ahead) const {
    TileRows shape;
    const int64_t panel = lines * kLineBytes;
    int64_t done = 0;
    if (onto && ahead == nullptr && count <= kTile && lines % kTile == 0)
      for (; done + 4 <= panels; done += 4) shape.set(count, count), four_panels(done * kPanel, packed + done * panel);
    for (int64_t p = done; p < panels; p += 2) {
      const bool two = p + 2 <= panels;
      const char* w = packed + p * panel;
      const char* next = ahead != nullptr && p + 2 < panels ? w + 2 * panel : ahead;
      for (int64_t row = 0; row < count; row += kBlock) {
        const int64_t rows = count - row < kBlock ? count - row : kBlock;
        shape.set(least(rows, kTile), most(rows - kTile, 1));
        const int64_t column = p * kPanel;
        const char* soon = row == 0 ? next : nullptr;  // the rows behind find the weights in a near cache
        if (rows > kTile)
          two ? block<true, true>(row, column, w, soon, rows) : block<true, false>(row, column, w, soon, rows);
        else
          two ? block<false, true>(row, column, w, soon, rows) : block<false, false>(row, column, w, soon, rows);
      }
    }
  }

 private:
  static void fetch(const char* lines) {
    for (int64_t i = 0; i < kTile; ++i) __builtin_prefetch(lines + i * kLineBytes, 0, 2);
  }

  template <int kSum, int kA, int kB>
  static void add() {
    if constexpr (kWhole)
      multiply_int8_tiles<kSum, kA, kB>();
    else
      multiply_bf16_tiles<kSum, kA, kB>();
  }

  template <bool kTwoBlocks, bool kTwoPanels>
  static void step(const char* above, const char* below, int64_t stride, const char* first, const char* second) {
    load_tile<4>(above, stride);
    load_tile<6>(first, kLineBytes);
    add<0, 4, 6>();
    if constexpr (kTwoBlocks) {
      load_tile<5>(below, stride);
      add<2, 5, 6>();
    }
    if constexpr (kTwoPanels) {
      load_tile<7>(second, kLineBytes);
      add<1, 4, 7>();
      if constexpr (kTwoBlocks) add<3, 5, 7>();
    }
  }
};

void gemm(const bf16* x, int64_t x_stride, int64_t rows, const bf16* packed, int64_t pairs, int64_t panels,
          const void* ahead, float* y, int64_t y_stride) {
  Product<false>{reinterpret_cast<const char*>(x), reinterpret_cast<const char*>(packed), reinterpret_cast<char*>(y),
                 2 * x_stride, 4 * y_stride, pairs, false}
      .run(rows, panels, static_cast<const char*>(ahead));
}

void gemm_int8(const int8_t* x, int64_t x_stride, int64_t rows, const int8_t* packed, const int32_t*, int64_t quads,
               int64_t panels, const void* ahead, int32_t* y, int64_t y_stride) {
  Product<true>{reinterpret_cast<const char*>(x), reinterpret_cast<const char*>(packed), reinterpret_cast<char*>(y),
                x_stride, 4 * y_stride, quads, false}
      .run(rows, panels, static_cast<const char*>(ahead));
}

// ---- attention

constexpr int64_t kQueries = 64;   // at a time
constexpr int64_t kSegment = 256;  // places whose values are packed at a time
constexpr int64_t kFewQueries = 4;
constexpr int64_t kFetched = 64;  // entries that are asked for together
constexpr int64_t kStride = kSegment + 32;  // of rows of probabilities, so that they do not meet in one set of the cache

inline int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

void (*interleave_rows)(const bf16*, int64_t, int64_t, bf16*) = nullptr;  // of the instruction set below this one

// How many floats the parts of the scratch of a task take.
struct Parts {
  int64_t queries, keys, scores, rows, chances, values, sums, nothing;

  Parts(int64_t places, int64_t width, int64_t value_width)
      : queries(round_up(kQueries * round_up(width, 2) / 2, kPanel)),
        keys(round_up(kPanel * round_up(width, 2) / 2, kPanel)),
        scores(round_up(places, kBlock) * kQueries),
        rows(kQueries * row_stride(places)),
        chances(kQueries * kStride),  // two rows of bf16 for every query
        values(round_up(value_width, kPanel) * kSegment / 2),
        sums(2 * kQueries * round_up(value_width, kPanel)),
        nothing(round_up(value_width, kPanel)) {}

  static int64_t row_stride(int64_t places) { return round_up(places, kBlock) + kPanel; }
  int64_t all() const { return queries + keys + scores + rows + chances + values + sums + nothing + kPanel; }
};

int64_t attention_room(int64_t, int64_t places, int64_t width, int64_t value_width) {
  return Parts(places, width, value_width).all();
}

class Attention {
 public:
  Attention(const AttentionTask& task, const Sight& sight) : t(task), low_(sight.low / kBlock * kBlock) {
    const int64_t places = most(sight.places, t.entries) - low_;
    const Parts parts(places, t.width, t.value_width);
    row_stride_ = Parts::row_stride(places);
    // Every part begins at a line of the cache.
    float* at = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(t.scratch) + 63) / 64 * 64);
    packed_queries_ = reinterpret_cast<bf16*>(at), at += parts.queries;
    keys_ = reinterpret_cast<bf16*>(at), at += parts.keys;
    scores_ = at, at += parts.scores;
    rows_ = at, at += parts.rows;
    chances_ = reinterpret_cast<bf16*>(at), at += parts.chances;
    values_ = reinterpret_cast<bf16*>(at), at += parts.values;
    sums_ = at, at += parts.sums;
    nothing_ = reinterpret_cast<bf16*>(at);
    __builtin_memset(nothing_, 0, static_cast<uint64_t>(t.value_width) * sizeof(bf16));
  }

  // Some queries of the task, at most kQueries.
  void run(int64_t query, int64_t count) {
    query_ = query, count_ = count;
    common_from_ = end_ = 0, common_to_ = t.last[t.node(query)];
    for (int64_t q = 0; q < count; ++q) {
      common_from_ = most(common_from_, first(q)), common_to_ = least(common_to_, last(q)), end_ = most(end_, last(q));
    }
    stop_ = round_up(end_, kBlock);
    score();
    float share[kQueries];
    for (int64_t q = 0; q < count; ++q) share[q] = chances_of(q);
    const int64_t wide = round_up(t.value_width, kPanel);
    for (int64_t i = 0; i < 2 * count * wide; ++i) sums_[i] = 0;
    // Whole blocks of places at which all nodes have the same entries; what lies behind is read node by node.
    const int64_t together = t.paths == nullptr ? stop_ : t.shared / kBlock * kBlock;
    for (int64_t from = low_; from < stop_; from += kSegment) {
      const int64_t to = least(from + kSegment, stop_);
      for (int64_t q = 0; q < count; ++q) split(q, from, to);
      if (from < together) mix(0, count, from, from, least(to, together));
      for (int64_t q = 0, next = 0; to > together && q < count; q = next) {
        next = least(count, (t.node(query + q) + 1) * t.groups - query);
        const int64_t begin = most(from, together), own = least(to, round_up(last(q), kBlock));
        if (begin < own) mix(q, next - q, from, begin, own);
      }
    }
    for (int64_t q = 0; q < count; ++q) {
      const float *coarse = sums_ + 2 * q * wide, *fine = coarse + wide;
      float* out = t.out + (query + q) * t.value_width;
      for (int64_t d = 0; d < t.value_width; ++d) out[d] = (coarse[d] + fine[d]) * share[q];
    }
  }

 private:
  int64_t first(int64_t q) const { return t.first[t.node(query_ + q)]; }
  int64_t last(int64_t q) const { return t.last[t.node(query_ + q)]; }
  float* row(int64_t q) const { return rows_ + q * row_stride_ - low_; }  // by places

  // Scaled products of all keys with all queries, a row for each query.
  void score() {
    const int64_t pairs = (t.width + 1) / 2, stride = 2 * pairs, groups = (count_ + kPanel - 1) / kPanel;
    const int64_t wide = groups * kPanel, bytes = t.width * static_cast<int64_t>(sizeof(bf16));
    for (int64_t g = 0; g < groups; ++g) {
      __builtin_memset(keys_, 0, static_cast<uint64_t>(kPanel * stride) * sizeof(bf16));
      for (int64_t l = 0; l < kPanel && g * kPanel + l < count_; ++l)
        __builtin_memcpy(keys_ + l * stride, t.query(query_ + g * kPanel + l), static_cast<uint64_t>(bytes));
      interleave_rows(keys_, stride, pairs, packed_queries_ + g * pairs * 2 * kPanel);
    }
    const int64_t entries = t.paths == nullptr ? end_ : t.entries;
    if (t.width % 2 == 0) {
      for (int64_t e = low_; e < entries; e += kFetched) {
        const int64_t next = least(e + kFetched, entries);
        fetch(t.keys, t.key_stride, t.width, next, least(next + kFetched, entries));
        gemm(t.keys + e * t.key_stride, t.key_stride, next - e, packed_queries_, pairs, groups, nullptr,
             scores_ + (e - low_) * wide, wide);
      }
    } else {  // the last pair would reach beside the key
      keys_[t.width] = 0;
      for (int64_t e = low_; e < entries; ++e) {
        __builtin_memcpy(keys_, t.keys + e * t.key_stride, static_cast<uint64_t>(bytes));
        gemm(keys_, stride, 1, packed_queries_, pairs, groups, nullptr, scores_ + (e - low_) * wide, wide);
      }
    }
    const int64_t same = t.paths == nullptr ? end_ : least(t.shared, end_);
    turn(low_, same, wide);
    for (int64_t q = 0; q < count_; ++q)
      for (int64_t p = most(same, first(q)); p < last(q); ++p)
        row(q)[p] = scores_[(t.entry(t.node(query_ + q), p) - low_) * wide + q] * t.scale;
  }

  // Asks for some entries: those of a head lie far apart, where the processor does not see them coming.
  static void fetch(const bf16* from, int64_t stride, int64_t width, int64_t first, int64_t last) {
    for (int64_t e = first; e < last; ++e)
      for (int64_t d = 0; d < width; d += kLineBytes / 2) __builtin_prefetch(from + e * stride + d, 0, 2);
  }

  // From a line for every place to a row for every query, where places are entries. Lines behind the last may come along:
  // nobody sees them.
  void turn(int64_t from, int64_t to, int64_t wide) {
    int64_t p = from;
    alignas(64) float turned[kPanel][kPanel];
    for (; count_ >= kFewQueries && p < to; p += kPanel)
      for (int64_t g = 0; g * kPanel < count_; ++g) {
        interleave_rows(reinterpret_cast<const bf16*>(scores_ + (p - low_) * wide + g * kPanel), 2 * wide, kPanel,
                        reinterpret_cast<bf16*>(turned));
        for (int64_t l = 0; l < kPanel && g * kPanel + l < count_; ++l)
          put_lanes(lanes_at(turned[l]) * t.scale, row(g * kPanel + l) + p);
      }
    for (int64_t q = 0; q < count_; ++q) {
      float* to_row = row(q);
      for (int64_t place = p; place < to; ++place) to_row[place] = scores_[(place - low_) * wide + q] * t.scale;
    }
  }

  // Makes probabilities of a row, zero where the query sees nothing; returns one over their sum.
  float chances_of(int64_t q) {
    float* mine = row(q);
    for (int64_t p = low_; p < first(q); ++p) mine[p] = 0;
    for (int64_t p = last(q); p < stop_; ++p) mine[p] = 0;
    return soften(mine + first(q), last(q) - first(q));
  }

  // The probabilities of some places as two rows of bf16: the upper half of the bits, and what is left of the value.
  void split(int64_t q, int64_t from, int64_t to) {
    const float* mine = row(q) + from;
    bf16 *coarse = chances_ + 2 * q * kStride, *fine = coarse + kStride;
    for (int64_t i = 0; i < to - from; i += kPanel) {
      const Lanes chance = lanes_at(mine + i);
      const Words kept = reinterpret_cast<Words>(chance) & 0xffff0000u;
      const Words rest = reinterpret_cast<Words>(chance - reinterpret_cast<Lanes>(kept)) + 0x8000u;
      *reinterpret_cast<Halves*>(coarse + i) = __builtin_convertvector(kept >> 16, Halves);
      *reinterpret_cast<Halves*>(fine + i) = __builtin_convertvector(rest >> 16, Halves);
    }
  }

  // Adds the values of the places from … to - 1, whole blocks, to the sums of some queries, whose nodes have the same
  // entries there. A query may not see all of these places: their probability is zero, but zero times NaN is not.
  void mix(int64_t query, int64_t count, int64_t segment, int64_t from, int64_t to) {
    const int64_t panels = (t.value_width + kPanel - 1) / kPanel, pairs = (to - from) / 2, wide = panels * kPanel;
    const int64_t node = t.node(query_ + query);
    const bool all = count == count_;
    const int64_t seen_from = all ? common_from_ : first(query), seen_to = all ? common_to_ : last(query);
    const int64_t end = all ? end_ : last(query);
    int64_t broken[kSegment], breaks = 0;
    for (int64_t k = 0; k < pairs; ++k) {
      const int64_t soon = least(from + 2 * k + kFetched, least(end, t.shared));
      if (2 * k % kBlock == 0) fetch(t.values, t.value_stride, t.value_width, soon, least(soon + kBlock, t.shared));
      const bf16* two[2];
      for (int64_t i = 0; i < 2; ++i) {
        const int64_t p = from + 2 * k + i;
        two[i] = p < end ? t.values + t.entry(node, p) * t.value_stride : nothing_;
        if (p < end && (p < seen_from || p >= seen_to) && !all_finite(two[i], t.value_width))
          broken[breaks++] = p, two[i] = nothing_;
      }
      zip(two[0], two[1], values_ + k * 2 * kPanel, pairs * 2 * kPanel);
    }
    float* sums = sums_ + 2 * query * wide;
    Product<false>{reinterpret_cast<const char*>(chances_ + 2 * query * kStride + from - segment),
                   reinterpret_cast<const char*>(values_), reinterpret_cast<char*>(sums), 2 * kStride, 4 * wide, pairs,
                   true}
        .run(2 * count, panels, nullptr);
    for (int64_t i = 0; i < breaks; ++i)  // those who do see them are no numbers any more
      for (int64_t q = query; q < query + count; ++q)
        for (int64_t d = 0; d < t.value_width && broken[i] >= first(q) && broken[i] < last(q); ++d)
          sums_[2 * q * wide + d] += widen(t.values[t.entry(node, broken[i]) * t.value_stride + d]);
  }

  // The values of two places side by side, in the lines of all panels.
  void zip(const bf16* even, const bf16* odd, bf16* line, int64_t panel) const {
    int64_t d = 0;
    for (; d + kPanel <= t.value_width; d += kPanel, line += panel) pair(words_at(even + d), words_at(odd + d), line);
    if (d == t.value_width) return;
    const Few<bf16> a(even + d, t.value_width - d, 0), b(odd + d, t.value_width - d, 0);
    pair(words_at(a.values), words_at(b.values), line);
  }

  static void pair(Words even, Words odd, bf16* line) { *reinterpret_cast<Words*>(line) = even | odd << 16; }

  const AttentionTask& t;
  int64_t low_, row_stride_ = 0;             // the first block of places
  int64_t query_ = 0, count_ = 0;
  int64_t common_from_ = 0, common_to_ = 0;  // every query sees the places between
  int64_t end_ = 0, stop_ = 0;               // none sees a place from `end` on; whole blocks until `stop`
  bf16 *packed_queries_, *keys_, *chances_, *values_, *nothing_;
  float *scores_, *rows_, *sums_;
};

void attend(const AttentionTask& t) {
  Attention attention(t, Sight(t));
  const int64_t queries = t.nodes * t.groups;
  for (int64_t q = 0; q < queries; q += kQueries) attention.run(q, least(kQueries, queries - q));
}

// Asks the system for the registers, once for the process.
bool tiles_are_ours() {
#ifdef DRAFTSMITH_EMULATED_TILES
  return true;
#else
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  __builtin_cpu_init();
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         __builtin_cpu_supports("amx-int8") && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#endif
}

const Kernels* base() {
#ifdef DRAFTSMITH_EMULATED_TILES
  return portable_kernels();
#else
  return avx512bf16_kernels();
#endif
}

}  // namespace

const Kernels* amx_kernels() {
  static const bool here = base() != nullptr && tiles_are_ours();
  if (!here) return nullptr;
  interleave_rows = base()->interleave;
  static const Kernels table{"amx", gemm, gemm_int8, attend, attention_room, rms_norm, silu_times, narrow_row, add_row,
                             round_row, quantise, rotate, activate, sum_exponentials, argmax, all_finite,
                             base()->interleave};
  return &table;
}

}  // namespace draftsmith

#else
namespace draftsmith {
const Kernels* amx_kernels() { return nullptr; }
}  // namespace draftsmith
#endif
