// One pass over a tensor: extremes, sum, sum of squares and, where asked for, the signed bucket sums of its sketch.
//
// Sums are float32 over 1024 elements at most, float64 above. The sketch is that of alignment/numerics/sketch.py.
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;
constexpr int64_t kBlock = 1024;
constexpr int64_t kAhead = 512;

struct Totals {
  float high[kLanes], low[kLanes];
  uint32_t broken[kLanes];
  double sum, square;
};

inline float widened(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

inline float widened(float value) { return value; }

// The nearest bfloat16, ties to even; a NaN stays one.
inline uint16_t narrowed(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

// As torch adds two tensors: in float32, rounded to their own format.
inline void add_up(const float* a, const float* b, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

inline void add_up(const uint16_t* a, const uint16_t* b, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = narrowed(widened(a[i]) + widened(b[i]));
}

// ±v: the sign bit of a byte, turned or not, moved onto a number.
inline float turned(float v, int8_t sign, uint32_t turn) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  bits ^= (static_cast<uint32_t>(static_cast<int32_t>(sign)) & 0x80000000u) ^ turn;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

// sums[i] ± v[i] of kWide numbers. Written out for x86: compilers widen signs of one byte in several steps.
#if defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int64_t kWide = 16;

inline __m512i bits_at(const float* x) { return _mm512_loadu_si512(x); }

inline __m512i bits_at(const uint16_t* x) {
  return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))), 16);
}

template <typename T>
inline void add_wide(const T* x, const int8_t* signs, uint32_t turn, float* sums) {
  const __mmask16 negative = _mm_movepi8_mask(_mm_loadu_si128(reinterpret_cast<const __m128i*>(signs)));
  const __mmask16 flipped = negative ^ static_cast<__mmask16>(turn ? 0xffff : 0);
  const __m512i bits = bits_at(x);
  const __m512i v = _mm512_mask_xor_epi32(bits, flipped, bits, _mm512_set1_epi32(INT32_MIN));
  _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_loadu_ps(sums), _mm512_castsi512_ps(v)));
}
#elif defined(__AVX2__)
constexpr int64_t kWide = 8;

inline __m256i bits_at(const float* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }

inline __m256i bits_at(const uint16_t* x) {
  return _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))), 16);
}

template <typename T>
inline void add_wide(const T* x, const int8_t* signs, uint32_t turn, float* sums) {
  const __m256i bytes = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(signs)));
  const __m256i sign = _mm256_xor_si256(_mm256_and_si256(bytes, _mm256_set1_epi32(INT32_MIN)),
                                        _mm256_set1_epi32(static_cast<int32_t>(turn)));
  const __m256i v = _mm256_xor_si256(bits_at(x), sign);
  _mm256_storeu_ps(sums, _mm256_add_ps(_mm256_loadu_ps(sums), _mm256_castsi256_ps(v)));
}
#else
constexpr int64_t kWide = 16;

template <typename T>
inline void add_wide(const T* __restrict x, const int8_t* __restrict signs, uint32_t turn, float* __restrict sums) {
  for (int64_t i = 0; i < kWide; ++i) sums[i] += turned(widened(x[i]), signs[i], turn);
}
#endif

template <typename T>
void add_signed(const T* __restrict x, int64_t n, const int8_t* __restrict signs, uint32_t turn,
                float* __restrict sums) {
  int64_t i = 0;
  for (; i + kWide <= n; i += kWide) add_wide(x + i, signs + i, turn, sums + i);
  for (; i < n; ++i) sums[i] += turned(widened(x[i]), signs[i], turn);
}

// Elements x[0 … n) against buckets [0 … n): `signs` and `sums` are null for statistics alone.
template <typename T, bool kSketch>
void reduce_run(const T* x, int64_t n, const int8_t* signs, uint32_t turn, float* sums, Totals& totals) {
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = begin + kBlock < n ? begin + kBlock : n;
    float sum[kLanes] = {}, square[kLanes] = {};
    float high[kLanes], low[kLanes];
    uint32_t broken[kLanes];
    std::memcpy(high, totals.high, sizeof high);
    std::memcpy(low, totals.low, sizeof low);
    std::memcpy(broken, totals.broken, sizeof broken);
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (int k = 0; k < kLanes; ++k) {
        const float v = widened(x[i + k]);
        uint32_t bits;
        std::memcpy(&bits, &v, sizeof bits);
        broken[k] |= ((bits & 0x7f800000u) == 0x7f800000u) ? 1u : 0u;
        high[k] = v > high[k] ? v : high[k];
        low[k] = v < low[k] ? v : low[k];
        sum[k] += v;
        square[k] += v * v;
      }
      if (kSketch) {
        // The machine sees fewer of the loads to come here than in a loop that does nothing else.
        __builtin_prefetch(x + i + kAhead);
        for (int64_t j = i; j < i + kLanes; j += kWide) add_wide(x + j, signs + j, turn, sums + j);
      }
    }
    if (kSketch) add_signed(x + i, end - i, signs + i, turn, sums + i);
    for (int k = 0; i < end; ++i, ++k) {
      const float v = widened(x[i]);
      uint32_t bits;
      std::memcpy(&bits, &v, sizeof bits);
      broken[k] |= ((bits & 0x7f800000u) == 0x7f800000u) ? 1u : 0u;
      high[k] = v > high[k] ? v : high[k];
      low[k] = v < low[k] ? v : low[k];
      sum[k] += v;
      square[k] += v * v;
    }
    std::memcpy(totals.high, high, sizeof high);
    std::memcpy(totals.low, low, sizeof low);
    std::memcpy(totals.broken, broken, sizeof broken);
    for (int k = 0; k < kLanes; ++k) {
      totals.sum += sum[k];
      totals.square += square[k];
    }
  }
}

// What is reduced: one tensor, or the sum of several of one layout, which is made piece by piece in a room that stays in
// the cache. `others` are where the summands after the first lie, in elements from it on.
template <typename T>
struct Source {
  const T* x;
  const int64_t* others;
  int64_t count;
  T* room;

  const T* at(int64_t begin, int64_t n) const {
    if (count == 0) return x + begin;
    add_up(x + begin, x + begin + others[0], n, room);
    for (int64_t i = 1; i < count; ++i) add_up(room, x + begin + others[i], n, room);
    return room;
  }
};

// One run of a sketch: the first element, their number, the group it begins at, the bucket that the first element of a
// group is added to, and the address of its groups' turns.
struct Run {
  int64_t begin, n, group, shift, turns;
};

template <typename T>
void reduce_one(const Source<T>& source, const Run& run, const int8_t* signs, int64_t prime, int64_t rows, int64_t step,
                float* sums, Totals& totals) {
  const int64_t end = run.begin + run.n;
  if (signs == nullptr) {
    const int64_t piece = source.count == 0 ? run.n : prime;
    for (int64_t at = run.begin; at < end; at += piece) {
      const int64_t n = end - at < piece ? end - at : piece;
      reduce_run<T, false>(source.at(at, n), n, nullptr, 0u, nullptr, totals);
    }
    return;
  }
  const uint8_t* flips = reinterpret_cast<const uint8_t*>(run.turns);
  for (int64_t begin = run.begin, group = 0; begin < end; begin += rows * prime, ++group) {
    const int8_t* table = signs + (run.group + group) * step % prime;
    const uint32_t turn = flips[group] ? 0x80000000u : 0u;
    for (int64_t row = 0; row < rows && begin + row * prime < end; ++row) {
      const int64_t at = begin + row * prime, n = end - at < prime ? end - at : prime;
      const int64_t last = prime - run.shift < n ? prime - run.shift : n;
      const T* x = source.at(at, n);
      const int8_t* signed_by = table + row * prime;
      reduce_run<T, true>(x, last, signed_by, turn, sums + run.shift, totals);
      if (last < n) reduce_run<T, true>(x + last, n - last, signed_by + last, turn, sums, totals);
    }
  }
}

template <typename T>
int reduce(const Source<T>& source, const Run* runs, int64_t count, const int8_t* signs, int64_t prime, int64_t rows,
           int64_t step, float* sums, double* out) {
  Totals totals;
  for (int k = 0; k < kLanes; ++k) {
    totals.high[k] = -__builtin_inff();
    totals.low[k] = __builtin_inff();
    totals.broken[k] = 0;
  }
  totals.sum = totals.square = 0.0;
  for (int64_t i = 0; i < count; ++i) reduce_one(source, runs[i], signs, prime, rows, step, sums, totals);
  uint32_t broken = 0;
  float high = totals.high[0], low = totals.low[0];
  for (int k = 0; k < kLanes; ++k) {
    broken |= totals.broken[k];
    high = totals.high[k] > high ? totals.high[k] : high;
    low = totals.low[k] < low ? totals.low[k] : low;
  }
  out[0] = high;
  out[1] = low;
  out[2] = totals.sum;
  out[3] = totals.square;
  return broken != 0;
}

// Sums and differences of elements `half` apart, for every half from `first` on: a Hadamard matrix applied to what is
// `first` elements wide.
void butterflies(float* z, int64_t size, int64_t first) {
  for (int64_t half = first; half < size; half *= 2) {
    for (int64_t at = 0; at < size; at += 2 * half) {
      float* __restrict a = z + at;
      float* __restrict b = z + at + half;
      for (int64_t i = 0; i < half; ++i) {
        const float sum = a[i] + b[i], difference = a[i] - b[i];
        a[i] = sum;
        b[i] = difference;
      }
    }
  }
}

// The same inside sixteen numbers, for halves of 1, 2, 4 and 8.
typedef float Numbers __attribute__((vector_size(64)));
typedef float NumbersAt __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(64)));

inline void inside(Numbers& v) {
  const Bits lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#define ALIGNMENT_HALF(half)                                                                   \
  {                                                                                            \
    const Bits turn = (lane & half) << (31 - __builtin_ctz(half));                             \
    v = ALIGNMENT_SWAP(v, half) + reinterpret_cast<Numbers>(reinterpret_cast<Bits>(v) ^ turn); \
  }
#if defined(__clang__)
#define ALIGNMENT_SWAP(v, h)                                                                                  \
  __builtin_shufflevector(v, v, 0 ^ h, 1 ^ h, 2 ^ h, 3 ^ h, 4 ^ h, 5 ^ h, 6 ^ h, 7 ^ h, 8 ^ h, 9 ^ h, 10 ^ h, \
                          11 ^ h, 12 ^ h, 13 ^ h, 14 ^ h, 15 ^ h)
#else
#define ALIGNMENT_SWAP(v, h) __builtin_shuffle(v, lane ^ h)
#endif
  ALIGNMENT_HALF(1)
  ALIGNMENT_HALF(2)
  ALIGNMENT_HALF(4)
  ALIGNMENT_HALF(8)
#undef ALIGNMENT_HALF
#undef ALIGNMENT_SWAP
}

// The rotation of a sketch: out = Σ after[k] · H · (before[k] · sums[k]) over the blocks that hold anything, where a
// block is a matrix of `rows` times `columns` and H applies a Hadamard matrix to both its sides.
void mix(float* sums, int64_t rows, int64_t columns, int64_t blocks, const int8_t* before, const float* after,
         float* __restrict out) {
  const int64_t size = rows * columns;
  for (int64_t i = 0; i < size; ++i) out[i] = 0.0f;
  for (int64_t block = 0; block < blocks; ++block) {
    float* __restrict z = sums + block * size;
    const int8_t* __restrict signs = before + block * size;
    const float* __restrict scaled = after + block * size;
    for (int64_t i = 0; i < size; ++i) z[i] *= static_cast<float>(signs[i]);
    butterflies(z, size, columns);
    if (columns % kLanes == 0) {
      for (int64_t i = 0; i < size; i += kLanes) {
        Numbers v = *reinterpret_cast<NumbersAt*>(z + i);
        inside(v);
        *reinterpret_cast<NumbersAt*>(z + i) = v;
      }
      for (int64_t at = 0; at < size; at += columns) butterflies(z + at, columns, kLanes);
    } else {
      for (int64_t at = 0; at < size; at += columns) butterflies(z + at, columns, 1);
    }
    for (int64_t i = 0; i < size; ++i) out[i] += scaled[i] * z[i];
  }
}

}  // namespace

extern "C" void alignment_mix(float* sums, int64_t rows, int64_t columns, int64_t blocks, const int8_t* before,
                              const float* after, float* out) {
  mix(sums, rows, columns, blocks, before, after, out);
}

// `runs` holds five numbers for each of `count` runs, see Run. `signs` is null for statistics alone.
#define ALIGNMENT_REDUCE(name, T)                                                                                    \
  extern "C" int alignment_reduce_##name(const T* x, const int64_t* others, int64_t more, T* room,                   \
                                         const int64_t* runs, int64_t count, const int8_t* signs, int64_t prime,     \
                                         int64_t rows, int64_t step, float* sums, double* out) {                     \
    return reduce(Source<T>{x, others, more, room}, reinterpret_cast<const Run*>(runs), count, signs, prime, rows,   \
                  step, sums, out);                                                                                  \
  }
ALIGNMENT_REDUCE(float32, float)
ALIGNMENT_REDUCE(bfloat16, uint16_t)
#undef ALIGNMENT_REDUCE
