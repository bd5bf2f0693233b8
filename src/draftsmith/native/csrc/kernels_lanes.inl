// Sixteen values at a time, in as many registers as they take: one with AVX-512, two with AVX2, four elsewhere; part of
// kernels_common.inl.
//
// Compilers do have vectors that are wider than a processor's registers, but most of what is done with them they do value
// by value. So only vectors of one register are left to them, and wider ones are made of these here. Loops over single values
// with a choice in them would not do either: compilers work out the constant side of a choice for all values, and where that
// is a number too small for its format every one of them costs a hundred cycles.

namespace draftsmith {
namespace {

constexpr int kLanes = 16;

// Of what comparisons return: as wide as what is compared, all bits set for true.
template <class Element>
struct Truth {
  using Type = int32_t;
};
template <>
struct Truth<double> {
  using Type = int64_t;
};
template <>
struct Truth<bf16> {
  using Type = int16_t;
};

// Two halves, each a register or again two halves, with what vectors can do: each operation on every element by itself, and
// a number stands for a vector that is full of it.
template <class E, class H>
struct Two {
  using Element = E;
  using Half = H;
  using Mask = Two<typename Truth<E>::Type, decltype(H{} < H{})>;
  static constexpr int kHalf = sizeof(H) / sizeof(E);

  H low{}, high{};

  Two() = default;
  Two(H a, H b) : low(a), high(b) {}
  Two(E value) : low(value - H{}), high(low) {}  // less 0, which changes no number

  E operator[](int l) const { return l < kHalf ? low[l] : high[l - kHalf]; }

  friend Two operator+(Two a, Two b) { return {a.low + b.low, a.high + b.high}; }
  friend Two operator-(Two a, Two b) { return {a.low - b.low, a.high - b.high}; }
  friend Two operator*(Two a, Two b) { return {a.low * b.low, a.high * b.high}; }
  friend Two operator/(Two a, Two b) { return {a.low / b.low, a.high / b.high}; }
  friend Two operator&(Two a, Two b) { return {a.low & b.low, a.high & b.high}; }
  friend Two operator|(Two a, Two b) { return {a.low | b.low, a.high | b.high}; }
  friend Two operator^(Two a, Two b) { return {a.low ^ b.low, a.high ^ b.high}; }
  friend Two operator<<(Two a, int bits) { return {a.low << bits, a.high << bits}; }
  friend Two operator>>(Two a, int bits) { return {a.low >> bits, a.high >> bits}; }
  friend Two operator-(Two a) { return {-a.low, -a.high}; }
  friend Mask operator<(Two a, Two b) { return {a.low < b.low, a.high < b.high}; }
  friend Mask operator>(Two a, Two b) { return {a.low > b.low, a.high > b.high}; }
  friend Mask operator<=(Two a, Two b) { return {a.low <= b.low, a.high <= b.high}; }
  friend Mask operator==(Two a, Two b) { return {a.low == b.low, a.high == b.high}; }
  friend Mask operator!=(Two a, Two b) { return {a.low != b.low, a.high != b.high}; }
  Two& operator+=(Two other) { return *this = *this + other; }
  Two& operator-=(Two other) { return *this = *this - other; }
  Two& operator|=(Two other) { return *this = *this | other; }
};

// What is no operator: of a vector that is one register.
template <class V>
struct Register {
  static V at(const void* from) {
    V value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
  }
  static void put(V value, void* to) { __builtin_memcpy(to, &value, sizeof value); }
  template <class Mask>
  static V choose(Mask which, V yes, V no) {
    return which ? yes : no;
  }
  template <class From>
  static V converted(From from) {
    return __builtin_convertvector(from, V);
  }
  template <class From>
  static V same_bits(From from) {
    return reinterpret_cast<V>(from);
  }
};

// The same of two halves.
template <class E, class H>
struct Register<Two<E, H>> {
  using V = Two<E, H>;
  using Of = Register<H>;
  static V at(const void* from) { return {Of::at(from), Of::at(static_cast<const char*>(from) + sizeof(H))}; }
  static void put(V value, void* to) {
    Of::put(value.low, to), Of::put(value.high, static_cast<char*>(to) + sizeof(H));
  }
  template <class Mask>
  static V choose(Mask which, V yes, V no) {
    return {Of::choose(which.low, yes.low, no.low), Of::choose(which.high, yes.high, no.high)};
  }
  template <class From>
  static V converted(From from) {
    return {Of::converted(from.low), Of::converted(from.high)};
  }
  template <class From>
  static V same_bits(From from) {
    return {Of::same_bits(from.low), Of::same_bits(from.high)};
  }
};

#if defined(DRAFTSMITH_AVX512)
using Lanes = float __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Halves = bf16 __attribute__((vector_size(32)));
using Doubles = double __attribute__((vector_size(64)));  // eight of them, made of
using Eight = float __attribute__((vector_size(32)));
#elif defined(DRAFTSMITH_AVX2)
using Lanes = Two<float, float __attribute__((vector_size(32)))>;
using Words = Two<uint32_t, uint32_t __attribute__((vector_size(32)))>;
using Ints = Two<int32_t, int32_t __attribute__((vector_size(32)))>;
using Halves = Two<bf16, bf16 __attribute__((vector_size(16)))>;
using Doubles = Two<double, double __attribute__((vector_size(32)))>;
using Eight = Two<float, float __attribute__((vector_size(16)))>;
#else
template <class E, class Quarter>
using Four = Two<E, Two<E, Quarter>>;
using Lanes = Four<float, float __attribute__((vector_size(16)))>;
using Words = Four<uint32_t, uint32_t __attribute__((vector_size(16)))>;
using Ints = Four<int32_t, int32_t __attribute__((vector_size(16)))>;
using Halves = Four<bf16, bf16 __attribute__((vector_size(8)))>;
using Doubles = Four<double, double __attribute__((vector_size(16)))>;
using Eight = Four<float, float __attribute__((vector_size(8)))>;
#endif

// Where `which` is true the one, elsewhere the other.
template <class Mask>
inline Lanes choose(Mask which, Lanes yes, Lanes no) {
  return Register<Lanes>::choose(which, yes, no);
}
template <class Mask>
inline Words choose(Mask which, Words yes, Words no) {
  return Register<Words>::choose(which, yes, no);
}
template <class To, class From>
inline To converted(From from) {
  return Register<To>::converted(from);
}
template <class To, class From>
inline To same_bits(From from) {
  return Register<To>::same_bits(from);
}

inline Lanes lanes_at(const float* values) { return Register<Lanes>::at(values); }
inline void put_lanes(Lanes values, float* to) { Register<Lanes>::put(values, to); }
inline Lanes larger(Lanes a, Lanes b) { return choose(a > b, a, b); }  // b where one is NaN

// The lowest byte of each.
inline void put_bytes(Words words, int8_t* to) {
#if defined(DRAFTSMITH_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(words)));
#elif defined(DRAFTSMITH_AVX2)
  const __m256i lowest = _mm256_set1_epi32(0x0c080400);  // of four words each, into every word
  const __m256i low = _mm256_shuffle_epi8(reinterpret_cast<__m256i>(words.low), lowest);
  const __m256i high = _mm256_shuffle_epi8(reinterpret_cast<__m256i>(words.high), lowest);
  const __m256i halves = _mm256_unpacklo_epi32(low, high);  // words 0 … 3, 8 … 11; 4 … 7, 12 … 15
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_unpacklo_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
#else
  for (int l = 0; l < kLanes; ++l) to[l] = static_cast<int8_t>(words[l]);
#endif
}

// The upper halves of each, those of a first.
inline void put_upper_halves(Words a, Words b, bf16* to) {
#if defined(DRAFTSMITH_AVX512)
  alignas(64) static const uint16_t kUpper[2 * kLanes] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                          33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i halves = _mm512_permutex2var_epi16(reinterpret_cast<__m512i>(a), _mm512_load_si512(kUpper),
                                                   reinterpret_cast<__m512i>(b));
  _mm512_storeu_si512(to, halves);
#else
  Register<Halves>::put(converted<Halves>(a >> 16), to);
  Register<Halves>::put(converted<Halves>(b >> 16), to + kLanes);
#endif
}

// A bit for every lane in which all bits are set, and none for those of zero.
inline uint32_t bits_of(Words truths) {
#if defined(DRAFTSMITH_AVX512)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(truths));
#elif defined(DRAFTSMITH_AVX2)
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(truths.low))) |
         static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(truths.high))) << 8;
#else
  uint32_t bits = 0;
  for (int l = 0; l < kLanes; ++l) bits |= (truths[l] & 1) << l;
  return bits;
#endif
}

// The numbers of the lanes.
inline Words numbers() {
  alignas(64) static const uint32_t kNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return Register<Words>::at(kNumbers);
}

}  // namespace
}  // namespace draftsmith
