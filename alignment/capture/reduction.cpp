// One pass over a tensor: extremes, sum, sum of squares and, where asked for, the signed bucket sums of its sketch.
//
// Sums are float32 over 1024 elements at most, float64 above. The sketch is that of alignment/numerics/sketch.py.
#include <cstdint>
#include <cstring>

namespace {

constexpr int kLanes = 16;
constexpr int64_t kBlock = 1024;

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

// sums[i] ± v[i]: the sign bit of signs[i] is moved onto the number.
template <typename T>
void add_signed(const T* __restrict x, int64_t n, const int8_t* __restrict signs, uint32_t turn,
                float* __restrict sums) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = widened(x[i]);
    uint32_t bits;
    std::memcpy(&bits, &v, sizeof bits);
    bits ^= (static_cast<uint32_t>(static_cast<int32_t>(signs[i])) & 0x80000000u) ^ turn;
    float turned;
    std::memcpy(&turned, &bits, sizeof turned);
    sums[i] += turned;
  }
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
    }
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
    // The block is in the first cache by now.
    if (kSketch) add_signed(x + begin, end - begin, signs + begin, turn, sums + begin);
    std::memcpy(totals.high, high, sizeof high);
    std::memcpy(totals.low, low, sizeof low);
    std::memcpy(totals.broken, broken, sizeof broken);
    for (int k = 0; k < kLanes; ++k) {
      totals.sum += sum[k];
      totals.square += square[k];
    }
  }
}

template <typename T>
int reduce(const T* x, int64_t n, const int8_t* signs, const uint8_t* flips, int64_t prime, int64_t rows, int64_t step,
           int64_t first_group, float* sums, double* out) {
  Totals totals;
  for (int k = 0; k < kLanes; ++k) {
    totals.high[k] = -__builtin_inff();
    totals.low[k] = __builtin_inff();
    totals.broken[k] = 0;
  }
  totals.sum = totals.square = 0.0;
  if (signs == nullptr) {
    reduce_run<T, false>(x, n, nullptr, 0u, nullptr, totals);
  } else {
    const int64_t group_size = rows * prime;
    for (int64_t begin = 0, group = first_group; begin < n; begin += group_size, ++group) {
      const int8_t* table = signs + group * step % prime;
      const uint32_t turn = flips[group - first_group] ? 0x80000000u : 0u;
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t at = begin + row * prime;
        if (at >= n) break;
        reduce_run<T, true>(x + at, n - at < prime ? n - at : prime, table + row * prime, turn, sums, totals);
      }
    }
  }
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

// Sums and differences of pairs of rows, [rows, width] in place: a Hadamard matrix applied from the left.
void butterflies(float* z, int64_t rows, int64_t width) {
  for (int64_t half = width; half < rows * width; half *= 2) {
    for (int64_t at = 0; at < rows * width; at += 2 * half) {
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

// The rotation of a sketch: out = Σ after[k] · H · (before[k] · sums[k]) over the blocks that hold anything, a block
// being a matrix of `rows` times `columns`. `room` takes two blocks.
void mix(float* sums, int64_t rows, int64_t columns, int64_t blocks, const int8_t* before, const float* after,
         float* room, float* out) {
  const int64_t size = rows * columns;
  float* __restrict turned = room;
  float* __restrict total = room + size;
  for (int64_t i = 0; i < size; ++i) total[i] = 0.0f;
  for (int64_t block = 0; block < blocks; ++block) {
    float* __restrict z = sums + block * size;
    const int8_t* __restrict signs = before + block * size;
    for (int64_t i = 0; i < size; ++i) z[i] *= static_cast<float>(signs[i]);
    butterflies(z, rows, columns);
    // On its side the other half of the butterflies runs along memory, too.
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) turned[c * rows + r] = z[r * columns + c];
    butterflies(turned, columns, rows);
    const float* __restrict scaled = after + block * size;
    for (int64_t i = 0; i < size; ++i) total[i] += scaled[i] * turned[i];
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) out[r * columns + c] = total[c * rows + r];
}

}  // namespace

// `after` comes with every block on its side.
extern "C" void alignment_mix(float* sums, int64_t rows, int64_t columns, int64_t blocks, const int8_t* before,
                              const float* after, float* room, float* out) {
  mix(sums, rows, columns, blocks, before, after, room, out);
}

extern "C" int alignment_reduce_float32(const float* x, int64_t n, const int8_t* signs, const uint8_t* flips,
                                        int64_t prime, int64_t rows, int64_t step, int64_t first_group, float* sums,
                                        double* out) {
  return reduce(x, n, signs, flips, prime, rows, step, first_group, sums, out);
}

extern "C" int alignment_reduce_bfloat16(const uint16_t* x, int64_t n, const int8_t* signs, const uint8_t* flips,
                                         int64_t prime, int64_t rows, int64_t step, int64_t first_group, float* sums,
                                         double* out) {
  return reduce(x, n, signs, flips, prime, rows, step, first_group, sums, out);
}
