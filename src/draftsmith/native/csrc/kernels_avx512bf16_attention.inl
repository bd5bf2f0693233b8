// Attention with AVX512-BF16; part of kernels_avx512bf16.cpp.

namespace draftsmith {
namespace {

// Sixteen sums of sixteen lanes each, in the order of the registers.
inline __m512 sums_of(const __m512 (&a)[16]) {
  __m512 b[8], c[4], d[2];
  for (int i = 0; i < 8; ++i)
    b[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    const __m512d low = _mm512_castps_pd(b[2 * i]), high = _mm512_castps_pd(b[2 * i + 1]);
    c[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  }
  for (int i = 0; i < 2; ++i)
    d[i] = _mm512_add_ps(_mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(d[0], d[1], 0x88), _mm512_shuffle_f32x4(d[0], d[1], 0xdd));
}

template <int kQueries>
struct Products {
  __m512 of[kQueries];
};
template <int kQueries>
inline Products<kQueries> operator+(const Products<kQueries>& a, const Products<kQueries>& b) {
  Products<kQueries> sums;
  for (int q = 0; q < kQueries; ++q) sums.of[q] = _mm512_add_ps(a.of[q], b.of[q]);
  return sums;
}

// The products of some queries with sixteen keys that lie as a panel of weights does, (pairs, 16, 2), to the same bits as
// one by one: `sums_of` adds up sixteen lanes, and here every lane of sixteen keys is one sum, added in the same order.
template <int kQueries, int kSteps>
struct KeyPanel {
  using Sums = Products<kQueries>;
  const bf16* keys;
  const bf16* queries[kQueries];
  int64_t width;

  [[gnu::always_inline]] Sums lane(int l) const {
    Sums sums;
    for (int q = 0; q < kQueries; ++q) sums.of[q] = _mm512_setzero_ps();
    const int64_t steps = kSteps > 0 ? kSteps : width / 32;
    for (int64_t d = 0; d < steps; ++d) {
      const __m512bh key = reinterpret_cast<__m512bh>(_mm512_loadu_si512(keys + (16 * d + l) * 2 * kPanel));
      for (int q = 0; q < kQueries; ++q) {
        int pair;
        __builtin_memcpy(&pair, queries[q] + 32 * d + 2 * l, sizeof pair);
        sums.of[q] = _mm512_dpbf16_ps(sums.of[q], key, reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)));
      }
    }
    return sums;
  }
  // One statement after the other, so that no more sums than needed are held at a time.
  [[gnu::always_inline]] Sums quarter(int i) const {
    Sums even = lane(4 * i);
    even = even + lane(4 * i + 2);
    Sums odd = lane(4 * i + 1);
    odd = odd + lane(4 * i + 3);
    return even + odd;
  }
  [[gnu::always_inline]] Sums all() const {
    Sums first = quarter(0);
    first = first + quarter(1);
    Sums second = quarter(2);
    second = second + quarter(3);
    return first + second;
  }
};

constexpr int64_t kManyQueries = 8;    // for which keys are turned into panels
constexpr int64_t kWidestPanel = 256;  // of heads

// At most kMostQueries.
template <int kSteps>
void score_panels(const AttentionTask& t, const Stretch& s, float* scores, int64_t stride) {
  alignas(64) bf16 rows[kKeys * kWidestPanel], panel[kKeys * kWidestPanel];
  const auto interleave = avx512_kernels()->interleave;
  const __m512 scale = _mm512_set1_ps(t.scale);
  const int64_t node = t.node(s.query);
  const bf16* queries[kMostQueries];
  for (int64_t q = 0; q < s.queries; ++q) queries[q] = t.query(s.query + q);
  for (int64_t p = s.from; p < s.to; p += kKeys) {
    const bf16* keys[kKeys];
    const int64_t count = s.to - p < kKeys ? s.to - p : kKeys;
    find(t, node, t.keys, t.key_stride, p, count, keys);
    for (int64_t i = 0; i < kKeys; ++i)  // past the last one, the last comes again
      for (int64_t d = 0; d < t.width; d += 32)
        _mm512_store_si512(rows + i * t.width + d, _mm512_loadu_si512(keys[i < count ? i : count - 1] + d));
    interleave(rows, t.width, t.width / 2, panel);
    fetch_behind(t, s, t.keys, t.key_stride, t.width, p, count);
    float* to = scores + s.query * stride + p;
    by_queries<4>(0, s.queries, [&](auto some, int64_t query) {
      constexpr int kQueries = decltype(some)::value;
      KeyPanel<kQueries, kSteps> product{panel, {}, t.width};
      for (int q = 0; q < kQueries; ++q) product.queries[q] = queries[query + q];
      asm volatile("" ::: "memory");  // or compilers read the panel once for all queries, and have no registers for it
      const auto sums = product.all();
      for (int q = 0; q < kQueries; ++q)
        _mm512_storeu_ps(to + (query + q) * stride, _mm512_mul_ps(scale, sums.of[q]));
    });
  }
}

// As `score_keys`, sixteen places at a time; past the last one, the last is read again, and its score means nothing.
void score_keys_by_pairs(const AttentionTask& t, const Stretch& s, float* scores, int64_t stride) {
  if (t.width % 32 != 0) return score_keys(t, s, scores, stride);
  if (s.queries >= kManyQueries && s.queries <= kMostQueries && t.width <= kWidestPanel) {
    if (t.width == 64) return score_panels<2>(t, s, scores, stride);
    if (t.width == 128) return score_panels<4>(t, s, scores, stride);
    return score_panels<0>(t, s, scores, stride);
  }
  const __m512 scale = _mm512_set1_ps(t.scale);
  const int64_t node = t.node(s.query);
  for (int64_t p = s.from; p < s.to; p += kKeys) {
    const bf16* keys[kKeys];
    const int64_t count = s.to - p < kKeys ? s.to - p : kKeys;
    find(t, node, t.keys, t.key_stride, p, count, keys);
    for (int64_t i = count; i < kKeys; ++i) keys[i] = keys[count - 1];
    fetch_behind(t, s, t.keys, t.key_stride, t.width, p, count);
    for (int64_t q = s.query; q < s.query + s.queries; ++q) {
      const bf16* query = t.query(q);
      __m512 lanes[kKeys];
      for (int i = 0; i < kKeys; ++i) lanes[i] = _mm512_setzero_ps();
      for (int64_t d = 0; d < t.width; d += 32) {
        const __m512bh part = reinterpret_cast<__m512bh>(_mm512_loadu_si512(query + d));
        for (int i = 0; i < kKeys; ++i)
          lanes[i] = _mm512_dpbf16_ps(lanes[i], reinterpret_cast<__m512bh>(_mm512_loadu_si512(keys[i] + d)), part);
      }
      _mm512_storeu_ps(scores + q * stride + p, _mm512_mul_ps(scale, sums_of(lanes)));
    }
  }
}

struct Line {
  using Type = __m512;
  static constexpr int kWidth = 16, kLines = 4, kQueries = 6, kLinesOfFew = 4, kFew = 6;
  static Type at(const float* from) { return _mm512_loadu_ps(from); }
  static void put(Type line, float* to) { _mm512_storeu_ps(to, line); }
  static Type all(float value) { return _mm512_set1_ps(value); }
  static Type widened(const bf16* from) {
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  }
  static Type plus(Type sum, Type a, Type b) { return _mm512_fmadd_ps(a, b, sum); }
};

}  // namespace
}  // namespace draftsmith
