// Every 8-bit format by table, for levels with byte permutations (AVX512_VBMI): no arithmetic, so that subnormal
// values, over which the conversion of halves stumbles, cost nothing.

static inline __mmask64 first64(int64_t n) {
  return n >= 64 ? ~__mmask64{0} : (__mmask64{1} << imax(n, 0)) - 1u;
}

// bfloat16 holds every e4m3, e5m2 and int8 value, so that a byte is looked up: 256 values as high and low bytes.
struct ByteTable {
  alignas(64) uint8_t high[256], low[256];
};
static inline void fill_table(DType t, ByteTable& table) {
  for (int i = 0; i < 256; i++) {
    const float x = t == DType::kE4M3   ? from_e4m3(static_cast<uint8_t>(i))
                    : t == DType::kE5M2 ? from_e5m2(static_cast<uint8_t>(i))
                                        : static_cast<float>(static_cast<int8_t>(i));
    const uint16_t bits = to_bf16(x);
    table.high[i] = static_cast<uint8_t>(bits >> 8);
    table.low[i] = static_cast<uint8_t>(bits);
  }
}
static inline const ByteTable& byte_table(DType t) {
  struct Tables {
    ByteTable of[3];
    Tables() {
      fill_table(DType::kE4M3, of[0]);
      fill_table(DType::kE5M2, of[1]);
      fill_table(DType::kInt8, of[2]);
    }
  };
  static const Tables tables;
  return tables.of[t == DType::kE4M3 ? 0 : t == DType::kE5M2 ? 1 : 2];
}

// FLOAT: a sign and a magnitude, so that half of the table does.
template <bool FLOAT>
struct Widener {
  __m512i high[4], low[4];
  explicit Widener(const ByteTable& t) {
    for (int i = 0; i < 4; i++) {
      high[i] = _mm512_load_si512(t.high + 64 * i);
      low[i] = _mm512_load_si512(t.low + 64 * i);
    }
  }
  static __m512i look_up(const __m512i* t, __m512i x) {
    const __m512i a = _mm512_permutex2var_epi8(t[0], x, t[1]);
    if (FLOAT) return a;
    return _mm512_mask_mov_epi8(a, _mm512_movepi8_mask(x), _mm512_permutex2var_epi8(t[2], x, t[3]));
  }
  // 64 bytes to 64 bfloat16: those of the lower and of the upper half of each 128-bit lane.
  void words(__m512i x, __m512i& lower, __m512i& upper) const {
    const __m512i l = look_up(low, x);
    __m512i h = look_up(high, x);
    if (FLOAT) h = _mm512_ternarylogic_epi64(h, x, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);  // h | (x & sign)
    lower = _mm512_unpacklo_epi8(l, h);
    upper = _mm512_unpackhi_epi8(l, h);
  }
  // 64 bytes to 64 bfloat16, in order.
  void widen(__m512i x, __m512i& first, __m512i& second) const {
    // Quadwords are placed so that the interleaving of bytes within lanes gives whole vectors in order.
    words(_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), x), first, second);
  }
  // 64 bytes to 64 floats, in order.
  void widen(__m512i x, vf* to) const {
    __m512i w[2];
    words(_mm512_permutexvar_epi8(float_order(), x), w[0], w[1]);
    for (int i = 0; i < 2; i++) {  // a bfloat16 is the upper half of its float
      to[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(w[i], 16));
      to[2 * i + 1] = _mm512_castsi512_ps(_mm512_and_si512(w[i], _mm512_set1_epi32(static_cast<int>(0xffff0000))));
    }
  }
  // Where byte 16 v + 4 l + e goes: `words` leaves lane l's bytes 8 (v / 2) + 2 e + v % 2 to vector v.
  static __m512i float_order() {
    alignas(64) static constexpr uint8_t order[64] = {
        0, 16, 1, 17, 2,  18, 3,  19, 32, 48, 33, 49, 34, 50, 35, 51, 4,  20, 5,  21, 6,  22, 7,  23, 36, 52, 37, 53, 38, 54, 39, 55,
        8, 24, 9, 25, 10, 26, 11, 27, 40, 56, 41, 57, 42, 58, 43, 59, 12, 28, 13, 29, 14, 30, 15, 31, 44, 60, 45, 61, 46, 62, 47, 63};
    return _mm512_load_si512(order);
  }
};

// One stored row of n elements as floats, zeros up to `padded`, a multiple of 16; past that up to a multiple of 64 nothing
// is written.
template <class W>
static inline void widen_with(const W& w, const char* from, float* to, int n, int padded) {
  vf x[4];
  int d = 0;
  for (; d + 64 <= n; d += 64) {
    w.widen(_mm512_loadu_si512(from + d), x);
    for (int i = 0; i < 4; i++) vstore(to + d + 16 * i, x[i]);
  }
  if (d >= padded) return;
  w.widen(_mm512_maskz_loadu_epi8(first64(n - d), from + d), x);
  for (int i = 0; d + 16 * i < padded; i++) vstore(to + d + 16 * i, x[i]);
}
template <class W>
static inline void widen_rows_with(const W& w, const char* const* from, int count, float* to, int n, int padded) {
  for (int j = 0; j < count; j++) widen_with(w, from[j], to + j * padded, n, padded);
}
// `count` rows, each `padded` floats from the one before: the table is loaded once.
static inline void widen_byte_rows(DType t, const char* const* from, int count, float* to, int n, int padded) {
  if (t == DType::kInt8) widen_rows_with(Widener<false>(byte_table(t)), from, count, to, n, padded);
  else widen_rows_with(Widener<true>(byte_table(t)), from, count, to, n, padded);
}
static inline void widen_bytes(DType t, const char* from, float* to, int n, int padded) {
  widen_byte_rows(t, &from, 1, to, n, padded);
}

