// Attention with AVX2; part of kernels_avx2.cpp.

namespace draftsmith {
namespace {

constexpr int64_t kWidestKeys = 256;  // of which some are turned into panels
constexpr int64_t kKeyPanels = 4;     // at a time

// Sixteen keys as a panel of weights, (pairs, 16, 2).
inline void pack_keys(const bf16* const* keys, int64_t width, bf16* panel) {
  for (int64_t d = 0; d < width; d += 16, panel += 8 * 2 * kPanel)
    interleave_eight([&](int n) { return keys[n] + d; }, panel);
}

// As `score_keys`, sixteen places at a time, by the product that layers use; past the last place, the last is read again,
// and its score means nothing.
void score_panels(const AttentionTask& t, const Stretch& s, float* scores, int64_t stride) {
  if (t.width % 16 != 0 || t.width > kWidestKeys) return score_keys(t, s, scores, stride);
  alignas(32) bf16 queries[kMostQueries * kWidestKeys], panels[kKeyPanels * kKeys * kWidestKeys];
  const int64_t node = t.node(s.query), end = s.query + s.queries;
  const __m256 scale = _mm256_set1_ps(t.scale);
  for (int64_t query = s.query; query < end; query += kMostQueries) {
    const int64_t count = end - query < kMostQueries ? end - query : kMostQueries;
    for (int64_t q = 0; q < count; ++q)
      __builtin_memcpy(queries + q * t.width, t.query(query + q), t.width * sizeof(bf16));
    for (int64_t from = s.from, to = 0; from < s.to; from = to) {
      to = from + kKeyPanels * kKeys < s.to ? from + kKeyPanels * kKeys : s.to;
      const int64_t used = (to - from + kKeys - 1) / kKeys;
      for (int64_t i = 0; i < used; ++i) {
        const bf16* keys[kKeys];
        const int64_t first = from + i * kKeys, some = to - first < kKeys ? to - first : kKeys;
        find(t, node, t.keys, t.key_stride, first, some, keys);
        for (int64_t k = some; k < kKeys; ++k) keys[k] = keys[some - 1];
        fetch_behind(t, s, t.keys, t.key_stride, t.width, first, some);
        pack_keys(keys, t.width, panels + i * t.width * kKeys);
      }
      float* to_scores = scores + query * stride + from;
      gemm(queries, t.width, count, panels, t.width / 2, used, nullptr, to_scores, stride);
      for (int64_t q = 0; q < count; ++q)
        for (int64_t i = 0; i < used * kKeys; i += 8)
          _mm256_storeu_ps(to_scores + q * stride + i, _mm256_mul_ps(scale, _mm256_loadu_ps(to_scores + q * stride + i)));
    }
  }
}

struct Line {
  using Type = __m256;
  static constexpr int kWidth = 8, kLines = 2, kQueries = 6, kLinesOfFew = 4, kFew = 2;
  static Type at(const float* from) { return _mm256_loadu_ps(from); }
  static void put(Type line, float* to) { _mm256_storeu_ps(to, line); }
  static Type all(float value) { return _mm256_set1_ps(value); }
  static Type widened(const bf16* from) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
  }
  static Type plus(Type sum, Type a, Type b) { return _mm256_fmadd_ps(a, b, sum); }
};

}  // namespace
}  // namespace draftsmith
