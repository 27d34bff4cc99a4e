// Eight float lanes: AVX2, FMA and F16C.

typedef __m256 vf;
static constexpr int W = 8;
static constexpr int kDotRows = 4, kValueVecs = 2;
static constexpr int kPanelVecs = 2;  // of six rows each: 12 sums, two of these and a broadcast fit in 16 registers

static inline vf vload(const float* p) { return _mm256_loadu_ps(p); }
static inline void vstore(float* p, vf x) { _mm256_storeu_ps(p, x); }
static inline vf vset(float x) { return _mm256_set1_ps(x); }
static inline vf vzero() { return _mm256_setzero_ps(); }
static inline vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline float vrmax(vf x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
static inline float vrsum(vf x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
static inline __m256i lanes() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
static inline vf viota(int64_t base) {
  return _mm256_cvtepi32_ps(_mm256_add_epi32(lanes(), _mm256_set1_epi32(static_cast<int>(base))));
}
static inline vf vabs(vf x) { return _mm256_andnot_ps(vset(-0.f), x); }
static inline bool vany_gt(vf a, vf b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
static inline vf vbelow(vf x, vf limit, vf then, vf other) {  // other where x is NaN
  return _mm256_blendv_ps(other, then, _mm256_cmp_ps(x, limit, _CMP_LT_OQ));
}
static inline vf vsigned(vf size, vf sign) { return _mm256_or_ps(size, _mm256_and_ps(sign, vset(-0.f))); }
static inline vf vquotient(vf a, vf b) { return a / b; }
static inline vf vclip(vf x, int64_t base, int64_t lo, int64_t hi, vf other) {
  const int l = static_cast<int>(imin(imax(lo - base, 0), W)), h = static_cast<int>(imin(imax(hi - base, 0), W));
  const __m256i in = _mm256_and_si256(_mm256_cmpgt_epi32(lanes(), _mm256_set1_epi32(l - 1)),
                                      _mm256_cmpgt_epi32(_mm256_set1_epi32(h), lanes()));
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(in));
}

static inline vf vexp2(vf y) {
  const vf keep = _mm256_cmp_ps(y, vset(-126.f), _CMP_NLT_UQ);  // so that NaN stays
  y = _mm256_max_ps(vset(-126.f), y);
  const vf whole = _mm256_round_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = y - whole;
  vf p = vset(1.546144746e-4f);
  p = vfma(p, f, vset(1.339086735e-3f));
  p = vfma(p, f, vset(9.618056670e-3f));
  p = vfma(p, f, vset(5.550357104e-2f));
  p = vfma(p, f, vset(2.402265092e-1f));
  p = vfma(p, f, vset(6.931471880e-1f));
  p = vfma(p, f, vset(1.f));
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
  const vf x = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
  return _mm256_and_ps(keep, _mm256_blendv_ps(x, y, _mm256_cmp_ps(y, y, _CMP_UNORD_Q)));
}

static inline vf vreduce(vf* a) {
  const vf x = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
  const vf y = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
  return _mm256_permute2f128_ps(x, y, 0x20) + _mm256_permute2f128_ps(x, y, 0x31);
}

// Row i of W vectors becomes column i.
static inline void vtranspose(vf* x) {
  vf y[W], z[W];  // z[4i + c]: column 4 L + c of rows 4i .. 4i + 3 in 128-bit lane L
  for (int i = 0; i < W; i += 2) y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]), y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  for (int i = 0; i < W; i += 4)
    for (int c = 0; c < 4; c += 2) {
      const vf a = y[i + c / 2], b = y[i + c / 2 + 2];
      z[i + c] = _mm256_shuffle_ps(a, b, 0x44), z[i + c + 1] = _mm256_shuffle_ps(a, b, 0xee);
    }
  for (int c = 0; c < 4; c++)
    x[c] = _mm256_permute2f128_ps(z[c], z[4 + c], 0x20), x[4 + c] = _mm256_permute2f128_ps(z[c], z[4 + c], 0x31);
}

// Half as many lanes in double precision.
typedef __m256d vd;
static inline vd vset_d(double x) { return _mm256_set1_pd(x); }
static inline vd vload_d(const float* p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
static inline vd vfma_d(vd a, vd b, vd c) { return _mm256_fmadd_pd(a, b, c); }
static inline void vstore_d(float* p, vd x) { _mm_storeu_ps(p, _mm256_cvtpd_ps(x)); }

static inline vf vload_n(const float* p, int n) {
  if (n >= W) return vload(p);
  return _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes()));
}
// Widths are multiples of 8, so that a row of stored elements has no part of a vector.
static inline vf vload_bf16(const uint16_t* p, int n) {
  if (n <= 0) return vzero();
  const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}
static inline vf vload_f16(const uint16_t* p, int n) {
  if (n <= 0) return vzero();
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline vf vload_e4m3(const uint8_t* p, int n) {
  if (n <= 0) return vzero();
  const __m128i x = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i rest = _mm_and_si128(x, _mm_set1_epi16(0x7f));
  __m128i half = _mm_or_si128(_mm_slli_epi16(rest, 7), _mm_and_si128(x, _mm_set1_epi16(int16_t(0x8000))));
  half = _mm_or_si128(half, _mm_and_si128(_mm_cmpeq_epi16(rest, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7e00)));
  return _mm256_cvtph_ps(half) * vset(256.f);
}
static inline vf vload_e5m2(const uint8_t* p, int n) {
  if (n <= 0) return vzero();
  const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_cvtph_ps(_mm_slli_epi16(x, 8));
}
static inline vf vload_i8(const int8_t* p, int n) {
  if (n <= 0) return vzero();
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
static inline void vstore_n(float* p, vf x, int n) {
  if (n > 0) vstore(p, x);
}
static inline void vstore_bf16(uint16_t* p, vf x, int n) {
  if (n <= 0) return;
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
static inline void vstore_f16(uint16_t* p, vf x, int n) {
  if (n > 0) _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
