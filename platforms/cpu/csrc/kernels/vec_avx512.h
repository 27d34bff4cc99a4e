// Sixteen float lanes: AVX-512 F, BW, DQ and VL.

typedef __m512 vf;
static constexpr int W = 16;
static constexpr int kDotRows = 4, kValueVecs = 4;
static constexpr int kPanelVecs = 4;  // of six rows each: 24 sums, four of these and a broadcast fit in 32 registers

static inline vf vload(const float* p) { return _mm512_loadu_ps(p); }
static inline void vstore(float* p, vf x) { _mm512_storeu_ps(p, x); }
static inline vf vset(float x) { return _mm512_set1_ps(x); }
static inline vf vzero() { return _mm512_setzero_ps(); }
static inline vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline float vrmax(vf x) { return _mm512_reduce_max_ps(x); }
static inline float vrsum(vf x) { return _mm512_reduce_add_ps(x); }
static inline __m512i lanes() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
static inline vf viota(int64_t base) {
  return _mm512_cvtepi32_ps(_mm512_add_epi32(lanes(), _mm512_set1_epi32(static_cast<int>(base))));
}
static inline vf vabs(vf x) { return _mm512_abs_ps(x); }
static inline bool vany_gt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
static inline __mmask16 first_lanes(int64_t n) {
  return static_cast<__mmask16>((1u << imin(imax(n, 0), 16)) - 1u);
}
static inline vf vbelow(vf x, vf limit, vf then, vf other) {  // other where x is NaN
  return _mm512_mask_mov_ps(other, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), then);
}
static inline vf vsigned(vf size, vf sign) { return _mm512_or_ps(size, _mm512_and_ps(sign, vset(-0.f))); }
// a / b for b in [1, 2]: a division takes as long as 16 products.
static inline vf vquotient(vf a, vf b) {
  vf r = _mm512_rcp14_ps(b);
  r = vfma(r, _mm512_fnmadd_ps(b, r, vset(1.f)), r);
  const vf q = a * r;
  return vfma(r, _mm512_fnmadd_ps(b, q, a), q);
}
static inline vf vclip(vf x, int64_t base, int64_t lo, int64_t hi, vf other) {
  const __mmask16 in = static_cast<__mmask16>(first_lanes(hi - base) & ~first_lanes(lo - base));
  return _mm512_mask_mov_ps(other, in, x);
}

// 2^y to 1e-7: by floor(y), so that -inf needs no special case.
static inline vf vexp2(vf y) {
  const vf f = _mm512_reduce_ps(y, 1);
  vf p = vset(1.877576625e-3f);
  p = vfma(p, f, vset(8.989340521e-3f));
  p = vfma(p, f, vset(5.582631736e-2f));
  p = vfma(p, f, vset(2.401536174e-1f));
  p = vfma(p, f, vset(6.931530731e-1f));
  p = vfma(p, f, vset(9.999999251e-1f));
  return _mm512_scalef_ps(p, y);
}

static inline vf pair_sums32(vf a, vf b) { return _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b); }
static inline vf pair_sums64(vf a, vf b) {
  const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
  return _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)) + _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
}
static inline vf vreduce(vf* a) {
  vf q[4];  // each 128-bit lane of q[i] holds partial sums of a[4i .. 4i + 3]
  for (int i = 0; i < 4; i++)
    q[i] = pair_sums64(pair_sums32(a[4 * i], a[4 * i + 1]), pair_sums32(a[4 * i + 2], a[4 * i + 3]));
  const vf x = _mm512_shuffle_f32x4(q[0], q[1], 0x88) + _mm512_shuffle_f32x4(q[0], q[1], 0xdd);
  const vf y = _mm512_shuffle_f32x4(q[2], q[3], 0x88) + _mm512_shuffle_f32x4(q[2], q[3], 0xdd);
  return _mm512_shuffle_f32x4(x, y, 0x88) + _mm512_shuffle_f32x4(x, y, 0xdd);
}

// Row i of W vectors becomes column i.
static inline void vtranspose(vf* x) {
  vf y[W], z[W];  // z[4i + c]: column 4 L + c of rows 4i .. 4i + 3 in 128-bit lane L
  for (int i = 0; i < W; i += 2) y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  auto pairs = [](vf a, vf b, bool high) {
    const __m512d p = _mm512_castps_pd(a), q = _mm512_castps_pd(b);
    return _mm512_castpd_ps(high ? _mm512_unpackhi_pd(p, q) : _mm512_unpacklo_pd(p, q));
  };
  for (int i = 0; i < W; i += 4)
    for (int c = 0; c < 4; c++) z[i + c] = pairs(y[i + c / 2], y[i + c / 2 + 2], c % 2);
  for (int c = 0; c < 4; c++) {
    const vf a = _mm512_shuffle_f32x4(z[c], z[4 + c], 0x88), b = _mm512_shuffle_f32x4(z[8 + c], z[12 + c], 0x88);
    const vf d = _mm512_shuffle_f32x4(z[c], z[4 + c], 0xdd), e = _mm512_shuffle_f32x4(z[8 + c], z[12 + c], 0xdd);
    x[c] = _mm512_shuffle_f32x4(a, b, 0x88), x[8 + c] = _mm512_shuffle_f32x4(a, b, 0xdd);
    x[4 + c] = _mm512_shuffle_f32x4(d, e, 0x88), x[12 + c] = _mm512_shuffle_f32x4(d, e, 0xdd);
  }
}

// Half as many lanes in double precision.
typedef __m512d vd;
static inline vd vset_d(double x) { return _mm512_set1_pd(x); }
static inline vd vload_d(const float* p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
static inline vd vfma_d(vd a, vd b, vd c) { return _mm512_fmadd_pd(a, b, c); }
static inline void vstore_d(float* p, vd x) { _mm256_storeu_ps(p, _mm512_cvtpd_ps(x)); }

static inline vf vload_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
static inline __m256i load16(const void* p, int n) { return _mm256_maskz_loadu_epi16(first_lanes(n), p); }
static inline __m128i load8(const void* p, int n) { return _mm_maskz_loadu_epi8(first_lanes(n), p); }
static inline vf vload_bf16(const uint16_t* p, int n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load16(p, n)), 16));
}
static inline vf vload_f16(const uint16_t* p, int n) { return _mm512_cvtph_ps(load16(p, n)); }
static inline vf vload_e4m3(const uint8_t* p, int n) {
  const __m256i x = _mm256_cvtepi8_epi16(load8(p, n)), rest = _mm256_and_si256(x, _mm256_set1_epi16(0x7f));
  __m256i half = _mm256_or_si256(_mm256_slli_epi16(rest, 7),
                                 _mm256_and_si256(x, _mm256_set1_epi16(static_cast<int16_t>(0x8000))));
  half = _mm256_mask_mov_epi16(half, _mm256_cmpeq_epi16_mask(rest, _mm256_set1_epi16(0x7f)),
                               _mm256_set1_epi16(0x7e00));
  return _mm512_cvtph_ps(half) * vset(256.f);
}
static inline vf vload_e5m2(const uint8_t* p, int n) {
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(load8(p, n)), 8));
}
static inline vf vload_i8(const int8_t* p, int n) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load8(p, n)));
}
static inline void vstore_n(float* p, vf x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
static inline __m256i round_bf16(vf x) {
  const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(r);
}
static inline void vstore_bf16(uint16_t* p, vf x, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), round_bf16(x));
}
static inline void vstore_f16(uint16_t* p, vf x, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
