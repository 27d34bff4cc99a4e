// Four float lanes by the compiler's own vector type: SSE2 on x86-64, NEON on AArch64.
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
static constexpr int W = 4;
static constexpr int kDotRows = 4, kValueVecs = 4;
#if defined(__aarch64__)
static constexpr int kPanelVecs = 4;  // of six rows each: 24 sums, four of these and a broadcast fit in 32 registers
#else
static constexpr int kPanelVecs = 2;  // of six rows each, in 16 registers
#endif

static inline vf vload(const float* p) { vf x; memcpy(&x, p, sizeof x); return x; }
static inline void vstore(float* p, vf x) { memcpy(p, &x, sizeof x); }
static inline vf vset(float x) { return vf{x, x, x, x}; }
static inline vf vzero() { return vset(0.f); }
static inline vf vfma(vf a, vf b, vf c) { return a * b + c; }
static inline vf vmax(vf a, vf b) { return a > b ? a : b; }
static inline vf vsel(vi mask, vf a, vf b) { return mask ? a : b; }
static inline float vrmax(vf x) {
  const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}
static inline float vrsum(vf x) { return (x[0] + x[1]) + (x[2] + x[3]); }
static inline vf viota(int64_t base) {
  return vf{static_cast<float>(base), static_cast<float>(base + 1), static_cast<float>(base + 2),
            static_cast<float>(base + 3)};
}
static inline vf vabs(vf x) { return (vf)((vi)x & 0x7fffffff); }
static inline bool vany_gt(vf a, vf b) {
  const vi m = a > b;
  return m[0] | m[1] | m[2] | m[3];
}
static inline vf vbelow(vf x, vf limit, vf then, vf other) {  // other where x is NaN
  return vsel(x < limit, then, other);
}
static inline vf vsigned(vf size, vf sign) { return (vf)((vi)size | ((vi)sign & (vi)vset(-0.f))); }
static inline vf vquotient(vf a, vf b) { return a / b; }
// Lanes whose key, base + lane, is outside [lo, hi) become `other`.
static inline vf vclip(vf x, int64_t base, int64_t lo, int64_t hi, vf other) {
  const int l = static_cast<int>(imin(imax(lo - base, 0), W)), h = static_cast<int>(imin(imax(hi - base, 0), W));
  const vi lane = {0, 1, 2, 3};
  return vsel((lane >= l) & (lane < h), x, other);
}

// 2^y by 2^round(y) * polynomial; below -126 the result is 0.
static inline vf vexp2(vf y) {
  const vi tiny = y < -126.f;
  y = tiny ? vset(-126.f) : y;
  const vf shifted = y + 0x1.8p23f, whole = shifted - 0x1.8p23f, f = y - whole;
  vf p = vset(1.546144746e-4f);
  p = vfma(p, f, vset(1.339086735e-3f));
  p = vfma(p, f, vset(9.618056670e-3f));
  p = vfma(p, f, vset(5.550357104e-2f));
  p = vfma(p, f, vset(2.402265092e-1f));
  p = vfma(p, f, vset(6.931471880e-1f));
  p = vfma(p, f, vset(1.f));
  const vi exponent = ((vi)shifted - 0x4b400000) << 23;
  const vf x = y == y ? (vf)((vi)p + exponent) : y;
  return tiny ? vzero() : x;
}

static inline vf vreduce(vf* a) {  // lane i of the result is the sum of the lanes of a[i]
  return vf{vrsum(a[0]), vrsum(a[1]), vrsum(a[2]), vrsum(a[3])};
}

// Row i of W vectors becomes column i.
static inline void vtranspose(vf* x) {
  vf y[W];
  for (int i = 0; i < W; i++) y[i] = vf{x[0][i], x[1][i], x[2][i], x[3][i]};
  for (int i = 0; i < W; i++) x[i] = y[i];
}

// Half as many lanes in double precision.
typedef double vd __attribute__((vector_size(16)));
static inline vd vset_d(double x) { return vd{x, x}; }
static inline vd vload_d(const float* p) { return vd{p[0], p[1]}; }
static inline vd vfma_d(vd a, vd b, vd c) { return a * b + c; }
static inline void vstore_d(float* p, vd x) { p[0] = static_cast<float>(x[0]), p[1] = static_cast<float>(x[1]); }

#define ATTN_LANES(EXPR) \
  vf x;                  \
  for (int i = 0; i < W && i < n; i++) x[i] = EXPR; \
  for (int i = n < 0 ? 0 : n; i < W; i++) x[i] = 0.f; \
  return x
static inline vf vload_n(const float* p, int n) { ATTN_LANES(p[i]); }
static inline vf vload_bf16(const uint16_t* p, int n) { ATTN_LANES(from_bf16(p[i])); }
static inline vf vload_f16(const uint16_t* p, int n) { ATTN_LANES(from_f16(p[i])); }
static inline vf vload_e4m3(const uint8_t* p, int n) { ATTN_LANES(from_e4m3(p[i])); }
static inline vf vload_e5m2(const uint8_t* p, int n) { ATTN_LANES(from_e5m2(p[i])); }
static inline vf vload_i8(const int8_t* p, int n) { ATTN_LANES(static_cast<float>(p[i])); }
#undef ATTN_LANES
static inline void vstore_n(float* p, vf x, int n) {
  for (int i = 0; i < W && i < n; i++) p[i] = x[i];
}
static inline void vstore_bf16(uint16_t* p, vf x, int n) {
  for (int i = 0; i < W && i < n; i++) p[i] = to_bf16(x[i]);
}
static inline void vstore_f16(uint16_t* p, vf x, int n) {
  for (int i = 0; i < W && i < n; i++) p[i] = to_f16(x[i]);
}
