// Noise without state, as verify/noise.py defines it: the same numbers for the same purposes.
#pragma once

#include <cstdint>

namespace draftsmith {

// What a number is for; verify/noise.py says what the names mean.
enum class Stream : int64_t { kTarget = 0, kAccept = 1, kResidual = 2, kDraft = 3, kBlockAccept = 4, kBlockDraft = 5 };

// SplitMix64 over (seed, position, purpose and index).
inline uint64_t hash(int64_t seed, int64_t position, Stream stream, int64_t index) {
  constexpr int64_t kStreams = 8;
  const auto mix = [](uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  };
  const uint64_t seeded = mix(static_cast<uint64_t>(seed) ^ 0x9E3779B97F4A7C15u);
  const uint64_t placed = mix(seeded ^ static_cast<uint64_t>(position));
  return mix(placed ^ static_cast<uint64_t>(index * kStreams + static_cast<int64_t>(stream)));
}

// In [0, 1).
inline double uniform(int64_t seed, int64_t position, Stream stream, int64_t index) {
  return static_cast<double>(hash(seed, position, stream, index) >> 11) * 0x1p-53;
}

}  // namespace draftsmith
