// AVX512-BF16 and VNNI: two products and two sums for each lane in one instruction.
#include "kernels.h"

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,fma")
#include <immintrin.h>
#define DRAFTSMITH_AVX512
#define DRAFTSMITH_VNNI
#define DRAFTSMITH_WORDS_AT(values) \
  reinterpret_cast<Words>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values))))

#include "kernels_common.inl"
#include "kernels_int4.inl"

namespace draftsmith {
namespace {

// Both kinds of weights come in lines of 64 bytes, of which one instruction multiplies all with a few inputs of a row.
struct Pairs {
  using X = bf16;
  using Y = float;
  using Sum = __m512;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum add(Sum sum, __m512i weights, int xs) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights),
                            reinterpret_cast<__m512bh>(_mm512_set1_epi32(xs)));
  }
};

// The instruction multiplies unsigned by signed bytes: x is moved up by 128, which adds 128 · Σ w.
struct Quads {
  using X = int8_t;
  using Y = int32_t;
  using Sum = __m512i;
  static Sum zero() { return _mm512_setzero_si512(); }
  static Sum add(Sum sum, __m512i weights, int xs) {
    return _mm512_dpbusd_epi32(sum, _mm512_set1_epi32(xs ^ static_cast<int>(0x80808080)), weights);
  }
};

template <class Kind>
struct Of {
  using X = typename Kind::X;
  using Y = typename Kind::Y;

  template <int kRows, int kPanels>
  struct Block {
    static void run(const X* x, int64_t x_stride, const X* w, int64_t lines, Y* y, int64_t y_stride,
                    const Ahead& ahead) {
      constexpr int64_t kLine = kLineBytes / sizeof(X);
      typename Kind::Sum sum[kRows][kPanels];
      for (int r = 0; r < kRows; ++r)
        for (int p = 0; p < kPanels; ++p) sum[r][p] = Kind::zero();
      // Every block of rows asks for its part of what comes next, so that reading never waits for multiplying, nor the
      // other way round.
      const char* next = ahead.from;
      int64_t turn = ahead.number;
      for (int64_t k = 0; k < lines; ++k) {
        __m512i weights[kPanels];
        for (int p = 0; p < kPanels; ++p) weights[p] = _mm512_loadu_si512(w + (p * lines + k) * kLine);
        if (next != nullptr && turn-- == 0) {
          for (int p = 0; p < kPanels; ++p) _mm_prefetch(next + (k * kPanels + p) * kLineBytes, _MM_HINT_T1);
          turn = ahead.blocks - 1;
        }
        for (int r = 0; r < kRows; ++r) {
          int xs;
          __builtin_memcpy(&xs, x + r * x_stride + k * (kLine / kPanel), sizeof xs);
          for (int p = 0; p < kPanels; ++p) sum[r][p] = Kind::add(sum[r][p], weights[p], xs);
        }
      }
      for (int r = 0; r < kRows; ++r)
        for (int p = 0; p < kPanels; ++p)
          __builtin_memcpy(y + r * y_stride + p * kPanel, &sum[r][p], sizeof sum[r][p]);
    }
  };

  // Thirty-two registers: twenty-four sums, four lines of weights, and the inputs of a row.
  static void product(const X* x, int64_t x_stride, int64_t rows, const X* packed, int64_t lines, int64_t panels,
                      const void* ahead, Y* y, int64_t y_stride) {
    walk<Block, 6, 4>(x, x_stride, rows, packed, lines, panels, ahead, y, y_stride);
  }
};

void gemm_int8(const int8_t* x, int64_t x_stride, int64_t rows, const int8_t* packed, const int32_t* sums,
               int64_t quads, int64_t panels, const void* ahead, int32_t* y, int64_t y_stride) {
  Of<Quads>::product(x, x_stride, rows, packed, quads, panels, ahead, y, y_stride);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < panels * kPanel; ++n) y[r * y_stride + n] -= sums[n] * 128;
}

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

// As `score_keys`, sixteen places at a time; past the last one, the last is read again and its score thrown away.
void score_keys_by_pairs(const AttentionTask& t, const Stretch& s, float* scores, int64_t stride) {
  if (t.width % 32 != 0) return score_keys(t, s, scores, stride);
  const __m512 scale = _mm512_set1_ps(t.scale);
  const int64_t node = t.node(s.query);
  for (int64_t p = s.from; p < s.to; p += kKeys) {
    const bf16* keys[kKeys];
    const int64_t count = s.to - p < kKeys ? s.to - p : kKeys;
    find(t, node, t.keys, t.key_stride, p, count, keys);
    for (int64_t i = count; i < kKeys; ++i) keys[i] = keys[count - 1];
    const __mmask16 inside = static_cast<__mmask16>(s.to - p >= kKeys ? 0xffff : (1 << (s.to - p)) - 1);
    for (int64_t q = s.query; q < s.query + s.queries; ++q) {
      const bf16* query = t.query(q);
      __m512 lanes[kKeys];
      for (int i = 0; i < kKeys; ++i) lanes[i] = _mm512_setzero_ps();
      for (int64_t d = 0; d < t.width; d += 32) {
        const __m512bh part = reinterpret_cast<__m512bh>(_mm512_loadu_si512(query + d));
        for (int i = 0; i < kKeys; ++i)
          lanes[i] = _mm512_dpbf16_ps(lanes[i], reinterpret_cast<__m512bh>(_mm512_loadu_si512(keys[i] + d)), part);
      }
      _mm512_mask_storeu_ps(scores + q * stride + p, inside, _mm512_mul_ps(scale, sums_of(lanes)));
    }
  }
}

// As `mix_values` for some of the queries and a stretch of columns: values are widened once for all of these queries.
// `values` are those of the places of the stretch.
template <int kQueries, int kLines>
inline void mix(const AttentionTask& t, const Stretch& s, const bf16* const* values, const float* scores, int64_t stride,
                int64_t query, int64_t column) {
  __m512 sum[kQueries][kLines];
  for (int q = 0; q < kQueries; ++q)
    for (int l = 0; l < kLines; ++l) sum[q][l] = _mm512_loadu_ps(t.out + (query + q) * t.value_width + column + 16 * l);
  for (int64_t p = s.from; p < s.to; ++p) {
    const bf16* value = values[p - s.from] + column;
    __m512 wide[kLines];
    for (int l = 0; l < kLines; ++l)
      wide[l] = _mm512_castsi512_ps(_mm512_slli_epi32(
          _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(value) + l)), 16));
    for (int q = 0; q < kQueries; ++q) {
      const __m512 weight = _mm512_set1_ps(scores[(query + q) * stride + p]);
      for (int l = 0; l < kLines; ++l) sum[q][l] = _mm512_fmadd_ps(weight, wide[l], sum[q][l]);
    }
  }
  for (int q = 0; q < kQueries; ++q)
    for (int l = 0; l < kLines; ++l) _mm512_storeu_ps(t.out + (query + q) * t.value_width + column + 16 * l, sum[q][l]);
}

template <int kLines>
inline void mix_columns(const AttentionTask& t, const Stretch& s, const bf16* const* values, const float* scores,
                        int64_t stride, int64_t column) {
  int64_t q = s.query;
  const int64_t end = s.query + s.queries;
  for (; q + 4 <= end; q += 4) mix<4, kLines>(t, s, values, scores, stride, q, column);
  if (end - q == 3) mix<3, kLines>(t, s, values, scores, stride, q, column);
  if (end - q == 2) mix<2, kLines>(t, s, values, scores, stride, q, column);
  if (end - q == 1) mix<1, kLines>(t, s, values, scores, stride, q, column);
}

void mix_values_by_lines(const AttentionTask& t, const Stretch& s, const float* scores, int64_t stride) {
  if (t.value_width % 16 != 0) return mix_values(t, s, scores, stride);
  constexpr int64_t kPlaces = 128;  // whose values stay in the nearest cache for all queries
  const bf16* values[kPlaces];
  for (int64_t from = s.from, to = 0; from < s.to; from = to) {
    to = (from / kPlaces + 1) * kPlaces;
    to = to < s.to ? to : s.to;
    const Stretch part{s.query, s.queries, from, to};
    find(t, t.node(s.query), t.values, t.value_stride, part.from, part.to - part.from, values);
    int64_t column = 0;
    for (; column + 64 <= t.value_width; column += 64) mix_columns<4>(t, part, values, scores, stride, column);
    for (; column < t.value_width; column += 16) mix_columns<1>(t, part, values, scores, stride, column);
  }
}

}  // namespace

const Kernels* avx512bf16_kernels() {
  const Kernels* base = avx512_kernels();
  if (base == nullptr || !__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni")) return nullptr;
  static const Kernels table{"avx512bf16", Of<Pairs>::product, gemm_int8, gemm_int4_by<Int4Lines>, attend_by<score_keys_by_pairs, mix_values_by_lines>,
                             room_for_scores, rms_norm, silu_times, narrow_row, add_row, round_row, quantise, quantise_groups, round_group, round_panel, rotate, activate,
                             sum_exponentials, argmax, all_finite, widen_row, maxima, weigh, rest, share, base->interleave};
  return &table;
}

}  // namespace draftsmith

#else
namespace draftsmith {
const Kernels* avx512bf16_kernels() { return nullptr; }
}  // namespace draftsmith
#endif
