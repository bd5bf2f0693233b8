// AMX: sixteen rows by sixteen outputs in one instruction, over the same packed weights as everywhere else. Sixteen
// lines of a panel are a tile as they lie, and so are rows, so nothing is packed anew.
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
#define DRAFTSMITH_AVX512
#define DRAFTSMITH_BF16
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

// The instruction set that this one adds to.
const Kernels* base() {
#ifdef DRAFTSMITH_EMULATED_TILES
  return portable_kernels();
#else
  return avx512bf16_kernels();
#endif
}

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
    const char* last = kTwoPanels ? w + panel : w;
    const int64_t whole = lines / kTile * kTile;
    for (int64_t k = 0; k < whole; k += kTile) {
      if (next != nullptr) {
        // Few rows wait for the memory alone, and it is quicker where what follows the first panel is left to it.
        if constexpr (kTwoPanels) kTwoBlocks ? fetch_ahead(w, next, k) : fetch(w + (k + kAhead) * kLineBytes);
        fetch_ahead(last, kTwoPanels && kTwoBlocks ? next + panel : next, k);
      }
      step<kTwoBlocks, kTwoPanels>(above + 4 * k, below + 4 * k, x_stride, w + k * kLineBytes, last + k * kLineBytes);
    }
    if (whole < lines) finish<kTwoBlocks, kTwoPanels>(above, rows, w, last, whole);
    // All sums are stored at once. To take the last steps panel by panel, so that work lies in between, gains nothing where
    // the core is ours alone; and it loads rows twice, which takes longer where another program uses tiles on that core.
    store_tile<0>(to, y_stride);
    if constexpr (kTwoBlocks) store_tile<2>(to_below, y_stride);
    if constexpr (kTwoPanels) store_tile<1>(to + kLineBytes, y_stride);
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

  // Fetches what will be multiplied some steps behind line k of a panel: in this panel, or in the next one for it.
  void fetch_ahead(const char* w, const char* next, int64_t k) const {
    const int64_t soon = k + kAhead;
    fetch(soon < lines ? w + soon * kLineBytes : next + (soon - lines) * kLineBytes);
  }

  // The lines from `from` on, less than a tile of each panel: tiles are filled up with zeros.
  template <bool kTwoBlocks, bool kTwoPanels>
  void finish(const char* above, int64_t rows, const char* first, const char* second, int64_t from) const {
    alignas(64) char few_rows[kBlock * kLineBytes] = {};
    alignas(64) char few_lines[2][kTile * kLineBytes] = {};
    for (int64_t r = 0; r < rows; ++r)
      __builtin_memcpy(few_rows + r * kLineBytes, above + r * x_stride + 4 * from, 4 * (lines - from));
    for (int p = 0; p < (kTwoPanels ? 2 : 1); ++p)
      __builtin_memcpy(few_lines[p], (p == 0 ? first : second) + from * kLineBytes, (lines - from) * kLineBytes);
    tiles_will_read();
    step<kTwoBlocks, kTwoPanels>(few_rows, few_rows + kTile * kLineBytes, kLineBytes, few_lines[0], few_lines[1]);
  }

  template <int kSum, int kA, int kB>
  static void add() {
    if constexpr (kWhole)
      multiply_int8_tiles<kSum, kA, kB>();
    else
      multiply_bf16_tiles<kSum, kA, kB>();
  }

  // Adds sixteen lines of every panel to the sums.
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

// A single row waits for the memory alone, and vectors read it sooner than tiles do. They do what tiles do, bit by bit: of
// every sixteen lines, the first values of the words are summed apart from the second ones, and both sums are added to what
// was before. Products of two bf16 are exact, and numbers below the normal ones are zero. Attention has two rows for every
// query.
constexpr int64_t kFewRows = 2, kFewWholeRows = 4;
constexpr int64_t kLongPanel = 768;  // lines of a panel from which vectors were slower than tiles, by 6 %

template <bool kOnto>
struct ByVectors {
  template <int kRows, int kPanels>
  struct Block {
    static void run(const bf16* x, int64_t x_stride, const bf16* w, const Reach& reach, float* y, int64_t y_stride,
                    const Ahead& ahead) {
      Lanes sum[kRows][kPanels];
      for (int r = 0; r < kRows; ++r)
        for (int p = 0; p < kPanels; ++p) sum[r][p] = kOnto ? lanes_at(y + r * y_stride + p * kPanel) : Lanes{};
      for (int64_t begin = 0; begin < reach.lines; begin += kTile) {
        Lanes first[kRows][kPanels], second[kRows][kPanels];
        for (int r = 0; r < kRows; ++r)
          for (int p = 0; p < kPanels; ++p) first[r][p] = second[r][p] = Lanes{};
        for (int64_t k = begin; k < least(begin + kTile, reach.lines); ++k)
          for (int p = 0; p < kPanels; ++p) {
            const Words words = Register<Words>::at(w + (p * reach.lines + k) * (kLineBytes / 2));
            if (ahead.from != nullptr) __builtin_prefetch(ahead.from + (k * kPanels + p) * kLineBytes, 0, 2);
            const Lanes evens = same_bits<Lanes>(words << 16), odds = same_bits<Lanes>(words & 0xffff0000u);
            for (int r = 0; r < kRows; ++r) {
              const bf16* two = x + r * x_stride + 2 * k;
              first[r][p] = multiply_add(evens, widen(two[0]) - Lanes{}, first[r][p]);  // less 0: also where it is -0
              second[r][p] = multiply_add(odds, widen(two[1]) - Lanes{}, second[r][p]);
            }
          }
        const bool filled = begin + kTile > reach.lines;  // tiles are filled up with zeros, which make 0 of -0
        for (int r = 0; r < kRows; ++r)
          for (int p = 0; p < kPanels; ++p)
            sum[r][p] += filled ? (first[r][p] + Lanes{}) + (second[r][p] + Lanes{}) : first[r][p] + second[r][p];
      }
      for (int r = 0; r < kRows; ++r)
        for (int p = 0; p < kPanels; ++p) put_lanes(sum[r][p], y + r * y_stride + p * kPanel);
    }
  };
};

// As `Product`. A call of its own, so that no arithmetic of other code comes between its two changes of what is zero.
template <bool kOnto>
[[gnu::noinline]] void multiply_few(const bf16* x, int64_t x_stride, int64_t rows, const bf16* packed, int64_t pairs,
                                    int64_t panels, const void* ahead, float* y, int64_t y_stride) {
  const NoDenormals as_tiles;
  walk<ByVectors<kOnto>::template Block, kFewRows, 4>(x, x_stride, rows, packed, pairs, panels, ahead, y, y_stride);
}

void gemm(const bf16* x, int64_t x_stride, int64_t rows, const bf16* packed, int64_t pairs, int64_t panels,
          const void* ahead, float* y, int64_t y_stride) {
  if (rows == 1 && pairs < kLongPanel)
    return multiply_few<false>(x, x_stride, rows, packed, pairs, panels, ahead, y, y_stride);
  Product<false>{reinterpret_cast<const char*>(x), reinterpret_cast<const char*>(packed), reinterpret_cast<char*>(y),
                 2 * x_stride, 4 * y_stride, pairs, false}
      .run(rows, panels, static_cast<const char*>(ahead));
}

void gemm_int8(const int8_t* x, int64_t x_stride, int64_t rows, const int8_t* packed, const int32_t* sums, int64_t quads,
               int64_t panels, const void* ahead, int32_t* y, int64_t y_stride) {
  // Whole numbers are exact either way.
  if (rows <= kFewWholeRows)
    return base()->gemm_int8(x, x_stride, rows, packed, sums, quads, panels, ahead, y, y_stride);
  Product<true>{reinterpret_cast<const char*>(x), reinterpret_cast<const char*>(packed), reinterpret_cast<char*>(y),
                x_stride, 4 * y_stride, quads, false}
      .run(rows, panels, static_cast<const char*>(ahead));
}

}  // namespace
}  // namespace draftsmith

#include "kernels_amx_attention.inl"
#include "kernels_amx_chains.inl"

namespace draftsmith {
namespace {

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

}  // namespace

const Kernels* amx_kernels() {
  static const bool here = base() != nullptr && tiles_are_ours();
  if (!here) return nullptr;
  static const Kernels table{"amx", gemm, gemm_int8, base()->gemm_int4, attend, kMostQueriesOnTiles, room_on_tiles, rms_norm, silu_times, narrow_row, add_row,
                             round_row, quantise, base()->quantise_groups, base()->round_group, base()->round_panel, rotate, activate, sum_exponentials, argmax, all_finite, widen_row, maxima, weigh, add_up, rest, share, early,
                             base()->interleave};
  return &table;
}

}  // namespace draftsmith

#else
namespace draftsmith {
const Kernels* amx_kernels() { return nullptr; }
}  // namespace draftsmith
#endif
