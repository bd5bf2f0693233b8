// The tile instructions of AMX; or, where DRAFTSMITH_EMULATED_TILES is defined, C++ that does what they do, so that code
// over tiles can be tested on any processor.
//
// There are eight tiles of up to sixteen rows of 64 bytes. A product takes a (R, 16 words) and b (16 words, 16) and adds
// to c (R, 16) the sums over words k of a[r, k] · b[k, n]; a word is two bf16 or four int8.
//
// The compiler does not see what tiles read: between writing memory and loading tiles from it stands `tiles_will_read`.
#pragma once
#include <cstdint>

#ifdef DRAFTSMITH_EMULATED_TILES
#include "kernels.h"
#endif

namespace draftsmith {
namespace {

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row of every tile
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64, "the processor reads 64 bytes");

#ifndef DRAFTSMITH_EMULATED_TILES

// While it lives, vectors take numbers below the normal ones for zero, as tiles always do.
class NoDenormals {
 public:
  NoDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlush | kTakenForZero); }
  ~NoDenormals() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kFlush = 0x8000, kTakenForZero = 0x40;
  unsigned before_;
};

inline void tiles_will_read() { asm volatile("" ::: "memory"); }
inline void shape_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
inline void release_tiles() { asm volatile("tilerelease"); }

template <int kNumber>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kNumber));
}
template <int kNumber>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kNumber));
}
template <int kNumber>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kNumber) : "memory");
}
template <int kSum, int kA, int kB>
inline void multiply_bf16_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
}
template <int kSum, int kA, int kB>
inline void multiply_int8_tiles() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
}

#else

struct EmulatedTiles {
  TileShapes shapes;
  bool shaped = false;
  char data[8][16][64];
};
thread_local EmulatedTiles tiles;

// What a processor would refuse ends the program.
inline void insist(bool right) {
  if (!right) __builtin_trap();
}

struct NoDenormals {
  NoDenormals() {}  // what is emulated has them too
};

inline void tiles_will_read() {}

inline void shape_tiles(const TileShapes& shapes) {
  for (int t = 0; t < 8; ++t)
    insist(shapes.rows[t] > 0 && shapes.rows[t] <= 16 && shapes.bytes[t] > 0 && shapes.bytes[t] <= 64);
  tiles.shapes = shapes, tiles.shaped = true;
  __builtin_memset(tiles.data, 0, sizeof tiles.data);
}

inline void release_tiles() { tiles.shaped = false; }

template <int kNumber>
inline void zero_tile() {
  insist(tiles.shaped);
  __builtin_memset(tiles.data[kNumber], 0, sizeof tiles.data[kNumber]);
}
template <int kNumber>
inline void load_tile(const void* from, int64_t stride) {
  insist(tiles.shaped);
  for (int r = 0; r < tiles.shapes.rows[kNumber]; ++r)
    __builtin_memcpy(tiles.data[kNumber][r], static_cast<const char*>(from) + r * stride, tiles.shapes.bytes[kNumber]);
}
template <int kNumber>
inline void store_tile(void* to, int64_t stride) {
  insist(tiles.shaped);
  for (int r = 0; r < tiles.shapes.rows[kNumber]; ++r)
    __builtin_memcpy(static_cast<char*>(to) + r * stride, tiles.data[kNumber][r], tiles.shapes.bytes[kNumber]);
}

template <class T>
inline T in_tile(int tile, int row, int index) {
  T value;
  __builtin_memcpy(&value, tiles.data[tile][row] + index * static_cast<int>(sizeof(T)), sizeof value);
  return value;
}

// Calls with every place of the sum and its value, and keeps what comes back.
template <class T, int kSum, int kA, int kB, class Sum>
inline void for_sums(const Sum& sum) {
  const TileShapes& s = tiles.shapes;
  insist(tiles.shaped && s.rows[kSum] == s.rows[kA] && s.bytes[kSum] == s.bytes[kB] && s.bytes[kA] == 4 * s.rows[kB]);
  for (int r = 0; r < s.rows[kSum]; ++r)
    for (int n = 0; n < s.bytes[kSum] / 4; ++n) {
      const T total = sum(r, n, in_tile<T>(kSum, r, n));
      __builtin_memcpy(tiles.data[kSum][r] + 4 * n, &total, sizeof total);
    }
}

// The first values of the words are summed apart from the second ones.
template <int kSum, int kA, int kB>
inline void multiply_bf16_tiles() {
  for_sums<float, kSum, kA, kB>([](int r, int n, float before) {
    float sums[2] = {};
    for (int k = 0; k < tiles.shapes.rows[kB]; ++k)
      for (int i = 0; i < 2; ++i) sums[i] += widen(in_tile<bf16>(kA, r, 2 * k + i)) * widen(in_tile<bf16>(kB, k, 2 * n + i));
    return before + (sums[0] + sums[1]);
  });
}
template <int kSum, int kA, int kB>
inline void multiply_int8_tiles() {
  for_sums<int32_t, kSum, kA, kB>([](int r, int n, int32_t sum) {
    for (int k = 0; k < tiles.shapes.rows[kB]; ++k)
      for (int i = 0; i < 4; ++i) sum += in_tile<int8_t>(kA, r, 4 * k + i) * in_tile<int8_t>(kB, k, 4 * n + i);
    return sum;
  });
}

#endif

}  // namespace
}  // namespace draftsmith
