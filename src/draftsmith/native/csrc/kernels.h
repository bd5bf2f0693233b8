// The inner loops of few-row inference: one table of functions for each instruction set. Nothing here knows PyTorch.
//
// Words: R rows, N output features, K input features, panel = 16 output features, pair = 2 input features (bf16),
// quad = 4 input features (int8), group = 32 input features (int4).
//
// One promise holds for every function and every instruction set: what comes out for a row depends on that row alone,
// bit by bit, and never on how many rows are computed with it. Text decoded one token at a time and text verified
// eight at a time are therefore the same text, in bf16 too.
#pragma once
#include <cstdint>

namespace draftsmith {

using bf16 = uint16_t;           // the bits of a bfloat16
constexpr int64_t kPanel = 16;   // output features that are computed together
constexpr int64_t kGroup = 32;   // input features that share a scale and a zero point, in 4 bits
constexpr int64_t kTwoGroupBytes = 9 * 64;  // of two groups of a panel
constexpr int64_t kBlockEntries = 64;  // of a cache whose rows lie in blocks
constexpr int64_t kStretch = 256;  // scores that are summed up as one
constexpr int64_t kParts = 16;     // of a stretch, of which the largest scores are known
// Of an attention task, for which keys and values are read once; a single node may have more. With AMX there are more.
constexpr int64_t kMostQueries = 64, kMostQueriesOnTiles = 256;

// The queries of some nodes of one row of the batch, over the keys of one key head. Query q belongs to node q / groups.
//
// What a node sees is told by places, in the order of a text: place p before `shared` is entry p of the row of the
// cache, and the places from `shared` on are the entries of the node's own path. Where entries lie makes no difference to
// what comes out: one behind the other, or in blocks that lie anywhere.
struct AttentionTask {
  const bf16* queries;  // those of node n begin at queries + n * query_stride: (groups, width)
  int64_t query_stride;
  float scale;  // of the products
  int64_t nodes, groups, width, value_width;
  const bf16* keys;  // entry e begins at keys + line(e) * key_stride
  const bf16* values;
  const int32_t* blocks;  // entry e is entry e % kBlockEntries of block blocks[e / kBlockEntries]; null: e of all
  int64_t key_stride, value_stride;
  int64_t shared;
  const int64_t* first;  // node n sees the places first[n] … last[n] - 1, at least one; without paths, both never fall
  const int64_t* last;
  const int32_t* paths;  // node n has entry paths[n * path_stride + i] at place shared + i; null where it is shared + i
  int64_t path_stride;  // entries of paths are never below `shared`
  int64_t entries;  // all entries that are seen lie before this one
  float* scratch;   // of attention_room(…) values
  float* out;       // (nodes · groups, value_width)

  int64_t node(int64_t query) const { return query / groups; }
  const bf16* query(int64_t q) const { return queries + node(q) * query_stride + q % groups * width; }
  // The entry of the cache that a node has at a place.
  int64_t entry(int64_t n, int64_t place) const {
    return place < shared || paths == nullptr ? place : paths[n * path_stride + place - shared];
  }
  // Where an entry of the row lies in the storage.
  int64_t line(int64_t e) const {
    return blocks == nullptr ? e : blocks[e / kBlockEntries] * kBlockEntries + e % kBlockEntries;
  }
  const bf16* key(int64_t e) const { return keys + line(e) * key_stride; }
  const bf16* value(int64_t e) const { return values + line(e) * value_stride; }
};

// Where the parts of a panel of 4-bit weights lie, in lines of 64 bytes. Two groups lie together: four lines of levels
// each, and a line of details; of an odd number, the last one by itself, with 0 for what a second would have. Behind all
// groups is a line of units, in fp32.
//
// Line l of a group has the levels of the inputs 8 l … 8 l + 3 in the lower halves of the bytes 4 n … 4 n + 3, and the next
// four in the upper ones. The bytes 4 n … 4 n + 3 of the details are the zero points of both groups and their scales.
struct Int4Panel {
  int64_t groups;

  int64_t lines() const { return 4 * groups + (groups + 1) / 2 + 1; }
  int64_t bytes() const { return lines() * 64; }
  int64_t levels(int64_t group) const { return group / 2 * kTwoGroupBytes + group % 2 * 256; }
  int64_t details(int64_t group) const { return group / 2 * kTwoGroupBytes + (group / 2 * 2 + 1 < groups ? 512 : 256); }
  int64_t units() const { return bytes() - 64; }
};

// Rows in whole numbers, a scale for every group of a row, and minus the sum of every group's numbers; one row behind the
// other.
struct GroupedRows {
  const int8_t* values;  // (R, groups, 32), zero behind the last input
  const float* scales;   // (R, groups)
  const int32_t* minus;  // (R, groups)
};

struct Kernels {
  const char* name;
  // y[r, n] = Σ_k x[r, k] · w[n, k] for whole panels; packed is (panels, pairs, 16, 2), and x has 2 · pairs columns.
  // While some weights are multiplied, the next are fetched; `ahead` are those that this thread will most likely read next.
  // Null says that all of them are in a near cache, so that nothing needs to be fetched.
  void (*gemm)(const bf16* x, int64_t x_stride, int64_t rows, const bf16* packed, int64_t pairs, int64_t panels,
               const void* ahead, float* y, int64_t y_stride);
  // The same in whole numbers, exact: x is never -128 (see `quantise`), packed is (panels, quads, 16, 4), sums[n] = Σ_k w[n, k].
  void (*gemm_int8)(const int8_t* x, int64_t x_stride, int64_t rows, const int8_t* packed, const int32_t* sums,
                    int64_t quads, int64_t panels, const void* ahead, int32_t* y, int64_t y_stride);
  // y[r, n] = unit[n] · Σ over groups of (Σ_k x[r, k] · (8 · q[n, k] - zero[n])) · (scale[n] · scale[r]), the inner sum in
  // whole numbers, the outer one in fp32 and in the order of the groups: the same bits on every instruction set. packed is
  // (panels, lines, 64), see `Int4Panel`.
  void (*gemm_int4)(const GroupedRows& x, int64_t rows, const uint8_t* packed, int64_t groups, int64_t panels,
                    const void* ahead, float* y, int64_t y_stride);
  void (*attend)(const AttentionTask& task);
  int64_t most_queries;  // of a task of several nodes, at most kMostQueriesOnTiles
  // As the function of this name, for this table.
  int64_t (*attention_room)(int64_t queries, int64_t places, int64_t width, int64_t value_width);
  // out = bf16(bf16(x / rms(x)) · weight)
  void (*rms_norm)(const bf16* x, const bf16* weight, int64_t width, float epsilon, bf16* out);
  // out = bf16(bf16(silu(bf16(gate))) · bf16(up))
  void (*silu_times)(const float* gate, const float* up, int64_t count, bf16* out);
  // to = bf16(values)
  void (*narrow_row)(const float* values, int64_t count, bf16* to);
  // to = bf16(to + bf16(values))
  void (*add_row)(const float* values, int64_t count, bf16* to);
  // to = bf16(values), as floats; returns the largest, NaN left out
  float (*round_row)(const float* values, int64_t count, float* to);
  // to = x in whole numbers, -127 … 127, the largest magnitude being 127; returns the scale that turns them back, 0 for a
  // row of zeros (all of `to` is 0 then) and NaN where x is not finite (`to` is left as it was).
  float (*quantise)(const bf16* x, int64_t count, int8_t* to);
  // The same for every group of a row, and minus the sums of what comes out; behind the last input it is 0. Where a
  // group is not finite, its numbers and their sum mean nothing.
  void (*quantise_groups)(const bf16* x, int64_t count, int8_t* to, float* scales, int32_t* minus);
  // levels, scale and zero = the 32 weights of a group and an output, a weight being (8 · level - zero) · scale · unit: of
  // some scales and zero points, those with the least squared error. All are 0 where a weight is not finite.
  void (*round_group)(const float* values, float unit, uint8_t* levels, uint8_t* scale, uint8_t* zero);
  // The same for sixteen outputs and the first 32 of some inputs, one input after the other. values are (inputs, 16), a
  // number of inputs that is a multiple of 4; levels are (32, 16). Rounding an input leaves an error, and the inputs behind
  // it are changed so that they make up for it: factors[later][k] times the error of input k over factors[k][k] is taken
  // off. A row of factors is `stride` floats behind the one before; they are the lower Cholesky factor of the inverse of the
  // inputs' products with each other, from the first of these inputs on. Only the values behind the group are overwritten.
  // Of some scales and zero points, those with the least sum of squared errors, over the factors, are chosen. A group that
  // is not finite is all 0 and changes nothing behind it.
  void (*round_panel)(float* values, int64_t inputs, const float* factors, int64_t stride, const float* units,
                      uint8_t* levels, uint8_t* scales, uint8_t* zeros);
  // Rotary positions: pairs (d, d + half) of a head turned by their angles, every product and the sum rounded to bf16.
  void (*rotate)(const bf16* head, const float* cosines, const float* sines, int64_t half, bf16* to);
  // The columns first … last - 1 of out = bf16(GELU(bf16(norm(x) · scale + shift))), x = bf16(projected + ratio · token);
  // the norm is over all of x, of which mixed is left, and token may be null.
  void (*activate)(const bf16* projected, const bf16* token, float ratio, const float* scale, const float* shift,
                   int64_t width, float epsilon, int64_t first, int64_t last, float* mixed, bf16* out);
  // Σ e^(x - highest), highest being at least every x
  float (*sum_exponentials)(const float* x, int64_t count, float highest);
  // The index of the largest value, the first of equals; NaN counts as the largest.
  int64_t (*argmax)(const bf16* x, int64_t count);
  // Whether no value is NaN or infinite.
  bool (*all_finite)(const bf16* x, int64_t count);
  // to = x, as floats
  void (*widen_row)(const bf16* x, int64_t count, float* to);
  // most[16 s + l] = the largest of every sixteenth value of stretch s, from its value l on, NaN left out; minus infinity
  // where there is none. Returns the largest of all, or NaN where any value is.
  float (*maxima)(const float* x, int64_t count, float* most);
  // weights = e^(x / temperature - highest), no x / temperature being more than highest, with a relative error below
  // 3e-7 where they are above e^-87; and the sum of every stretch. Quotient and difference are rounded one by one.
  void (*weigh)(const float* x, int64_t count, float temperature, float highest, float* weights, float* sums);
  // The sum of every stretch in float64.
  void (*add_up)(const float* weights, int64_t count, double* sums);
  // rest[i] = max(w[i] · w_scale - q[i] · q_scale, 0) in float64, unless it is null, and the sum of every stretch.
  void (*rest)(const float* w, double w_scale, const float* q, double q_scale, int64_t count, double* rest, double* sums);
  // weights · factor, or 0 where a weight is below 1e-30, and the sum of every stretch of them in float64.
  void (*share)(float* weights, int64_t count, float factor, double* sums);
  // The tokens, numbered from `first` on and told by their places, that may arrive before `reach` in a race: those whose
  // word of 32 bits is at most 2^32 · reach · weight; see race.h. Some that may not can be among them. Without weights,
  // each of them weighs one.
  int64_t (*early)(const float* weights, int64_t count, uint32_t first, uint64_t key, float reach, int32_t* places);
  // Packs a panel: line k of `to` is the k-th pair of sixteen rows, of which row n begins at rows + n * stride. For
  // int8, a pair stands for a quad.
  void (*interleave)(const bf16* rows, int64_t stride, int64_t pairs, bf16* to);
};

// Null where this processor lacks the instructions.
const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512bf16_kernels();
const Kernels* amx_kernels();

// The best table for this processor, or the one that `use_kernels` chose.
const Kernels& kernels();
// Returns false where the name is unknown or its instructions are not here.
bool use_kernels(const char* name);
// How many floats of scratch are enough for an attention task with so many queries, its places and entries all being
// below `places`, whichever table computes it.
int64_t attention_room(int64_t queries, int64_t places, int64_t width, int64_t value_width);

static inline float widen(bf16 bits) {
  union { uint32_t u; float f; } value{static_cast<uint32_t>(bits) << 16};
  return value.f;
}

// The functions below are static: one copy for every file, because each is compiled for other instructions.
// Round to nearest, ties to even; NaN stays NaN.
static inline bf16 narrow(float x) {
  union { float f; uint32_t u; } value{x};
  const uint32_t rounded = value.u + 0x7fffu + ((value.u >> 16) & 1u);
  return static_cast<bf16>((x == x ? rounded : (value.u | 0x400000u)) >> 16);
}

// How far apart rows of so many bf16 values begin: an odd number of lines of the cache, so that what lies below each other
// falls into different sets of it. Rows of a tile would wait for each other.
static inline int64_t apart(int64_t width) {
  constexpr int64_t kLine = 32;
  return ((width + kLine - 1) / kLine | 1) * kLine;
}

static inline float through_bf16(float x) { return widen(narrow(x)); }

}  // namespace draftsmith
