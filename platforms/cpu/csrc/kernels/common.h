// What the kernels of one ISA level share: addressing of pages, who sees what, logits, and finished rows.

static inline vf vtanh(vf x) {
  // Near 0 the form with an exponential cancels; a polynomial of x^2 takes over (Cephes, tanhf).
  const vf z = x * x;
  vf p = vset(-5.70498872745e-3f);
  p = vfma(p, z, vset(2.06390887954e-2f));
  p = vfma(p, z, vset(-5.37397155531e-2f));
  p = vfma(p, z, vset(1.33314422036e-1f));
  p = vfma(p, z, vset(-3.33332819422e-1f));
  const vf small = vfma(p * z, x, x), size = vabs(x);
  // 1 - 2 / (e^2|x| + 1), by a negative exponent so that nothing overflows
  const vf e = vexp2(size * vset(-2.f * 1.44269504f)), large = vquotient(vset(1.f) - e, vset(1.f) + e);
  return vbelow(size, vset(0.625f), small, vsigned(large, x));
}

static inline vf vload_as(DType t, const char* p, int n) {
  switch (t) {
    case DType::kFloat32: return vload_n(reinterpret_cast<const float*>(p), n);
    case DType::kBFloat16: return vload_bf16(reinterpret_cast<const uint16_t*>(p), n);
    case DType::kFloat16: return vload_f16(reinterpret_cast<const uint16_t*>(p), n);
    case DType::kE4M3: return vload_e4m3(reinterpret_cast<const uint8_t*>(p), n);
    case DType::kE5M2: return vload_e5m2(reinterpret_cast<const uint8_t*>(p), n);
    default: return vload_i8(reinterpret_cast<const int8_t*>(p), n);
  }
}
static inline void vstore_as(DType t, char* p, vf x, int n) {
  switch (t) {
    case DType::kFloat32: return vstore_n(reinterpret_cast<float*>(p), x, n);
    case DType::kBFloat16: return vstore_bf16(reinterpret_cast<uint16_t*>(p), x, n);
    default: return vstore_f16(reinterpret_cast<uint16_t*>(p), x, n);
  }
}

// n elements as floats, followed by zeros up to `padded`, a multiple of W.
static inline void widen_row(DType t, const char* from, float* to, int n, int padded) {
#ifdef ATTN_BYTE_TABLE
  if (dtype_bytes(t) == 1) return widen_bytes(t, from, to, n, padded);
#endif
  const int64_t size = dtype_bytes(t);
  for (int d = 0; d < padded; d += W) vstore(to + d, d < n ? vload_as(t, from + d * size, n - d) : vzero());
}

// The same of `count` rows, which lie `padded` floats apart.
static inline void widen_rows(DType t, const char* const* from, int count, float* to, int n, int padded) {
#ifdef ATTN_BYTE_TABLE
  if (dtype_bytes(t) == 1) return widen_byte_rows(t, from, count, to, n, padded);
#endif
  for (int j = 0; j < count; j++) widen_row(t, from[j], to + j * padded, n, padded);
}

// A run of keys that lie a constant distance apart: those of one block.
struct Run {
  const char *key, *value;
  int64_t count;
};
static inline Run run_at(const Call& c, int b, int h, int64_t t) {
  Run r;
  const int64_t at_k = h * c.key.head, at_v = h * c.value.head;
  if (!c.table) {
    const int64_t token = c.key_start[b] + t;
    r.key = c.key.data + token * c.key.slot + at_k;
    r.value = c.value.data + token * c.value.slot + at_v;
    r.count = INT64_MAX;
    return r;
  }
  const uint32_t size = static_cast<uint32_t>(c.block_size), at = static_cast<uint32_t>(t);
  const int64_t block = c.table[b * c.table_row + at / size], slot = at % size;
  r.key = c.key.data + block * c.key.block + slot * c.key.slot + at_k;
  r.value = c.value.data + block * c.value.block + slot * c.value.slot + at_v;
  r.count = size - slot;
  return r;
}
static inline float scale_at(const Call& c, const ScaleView& s, int b, int h, int64_t t) {
  const int64_t block = c.table[b * c.table_row + t / c.block_size], slot = t % c.block_size;
  return s.data[block * s.block + slot * s.slot + h * s.head];
}

// The keys that one row sees: [lo, hi), and [xlo, xhi) by multimodal ranges. The ranges that hold a position
// all contain it, so that their union is one interval.
struct Bounds {
  int32_t lo, hi, xlo, xhi, position;
};
static inline Bounds bounds_of(const Call& c, int b, int token) {
  const int64_t len = c.seq_lens[b], position = len - (c.query_start[b + 1] - c.query_start[b]) + token;
  const bool causal = c.causal_of ? c.causal_of[b] : c.causal;
  int64_t lo = 0, hi = len, xlo = 0, xhi = 0;
  if (causal) hi = imin(hi, position + 1);
  if (c.left >= 0) lo = imax(lo, position - c.left);
  if (c.right >= 0) hi = imin(hi, position + c.right + 1);
  if (c.chunk > 0 && position >= 0) lo = imax(lo, position / c.chunk * c.chunk);
  for (int i = 0; i < c.num_ranges; i++) {
    const int32_t* r = c.ranges + 3 * i;
    if (r[0] != b || position < r[1] || position > r[2]) continue;
    xlo = xhi == 0 ? r[1] : imin(xlo, r[1]);
    xhi = imax(xhi, imin(int64_t{r[2]} + 1, len));
  }
  if (hi <= lo) lo = hi = 0;
  if (xhi <= xlo) xlo = xhi = 0;
  Bounds out = {static_cast<int32_t>(lo), static_cast<int32_t>(hi), static_cast<int32_t>(xlo),
                static_cast<int32_t>(xhi), static_cast<int32_t>(position)};
  return out;
}
static inline bool sees_all(const Bounds& b, int64_t from, int64_t to) {
  return (b.lo <= from && to <= b.hi) || (b.xlo <= from && to <= b.xhi);
}
static inline bool sees_none(const Bounds& b, int64_t from, int64_t to) {
  return (b.hi <= from || to <= b.lo) && (b.xhi <= from || to <= b.xlo);
}
static inline vf hide(vf x, int64_t base, const Bounds& b) {
  const vf none = vset(-INFINITY);
  const vf seen = vclip(x, base, b.lo, b.hi, none);
  return b.xhi ? vclip(x, base, b.xlo, b.xhi, seen) : seen;
}

// The keys that any of n rows sees, within [k0, k1).
struct Extent {
  int64_t from, to;
};
static inline Extent extent_of(const Bounds* rows, int n, int64_t k0, int64_t k1) {
  int64_t from = INT64_MAX, to = 0;
  for (int i = 0; i < n; i++) {
    if (rows[i].hi) from = imin(from, rows[i].lo), to = imax(to, rows[i].hi);
    if (rows[i].xhi) from = imin(from, rows[i].xlo), to = imax(to, rows[i].xhi);
  }
  Extent e = {imax(from, k0), imin(to, k1)};
  return e;
}

// How a product becomes a logit in base 2: plain is `factor * product`, where factor holds scale and log2(e).
struct LogitRule {
  float factor, scale, cap, slope;
  float inner, rest;  // together scale / cap: rounding it would shift all logits of a row alike
  bool plain;
};
static inline LogitRule logit_rule(const Call& c, int h, int head) {
  const float stored = c.k_scale ? c.k_scale[h * c.k_scale_step] : 1.f, scale = c.scale * stored;
  const float slope = c.alibi ? c.alibi[head] : 0.f;
  const double capped = c.softcap != 0.f ? static_cast<double>(scale) / c.softcap : 0.;
  const float inner = static_cast<float>(capped), rest = static_cast<float>(capped - inner);
  LogitRule r = {scale * 1.44269504f, scale, c.softcap, slope, inner, rest, c.softcap == 0.f && !c.alibi};
  return r;
}
static inline vf logit(const LogitRule& r, vf x, int64_t base, int64_t position) {
  if (r.plain) return x * vset(r.factor);
  x = r.cap != 0.f ? vset(r.cap) * vtanh(vfma(x, vset(r.inner), x * vset(r.rest))) : x * vset(r.scale);
  if (r.slope != 0.f) x = x - vset(r.slope) * vabs(viota(base - position));
  return x * vset(1.44269504f);
}

// No key was seen. A row whose logits were all NaN has no reference either, but a denominator of NaN.
static inline bool is_empty(float m, float l) { return m == -INFINITY && l == l; }

static inline float exp2_of(float x) { return x == -INFINITY ? 0.f : exp2f(x); }

// Where a row goes, and the factor of its accumulator. No factor: it saw no key.
struct Finish {
  char* out;
  float factor;
  bool empty;
};

// Finish a row with reference m (base 2) and denominator l, but for its output. An empty row has m = -inf.
static inline Finish finish_of(const Call& c, int h, int head, int64_t token, float m, float l) {
  float weight = 1.f;
  if (c.sinks) {
    const float sink = c.sinks[head] * 1.44269504f, top = sink > m ? sink : m;
    if (top != -INFINITY) {
      weight = exp2_of(m - top);
      l = l * weight + exp2_of(sink - top);
      m = top;
    }
  }
  if (c.lse)
    c.lse[head * c.lse_head + token * c.lse_token] =
        is_empty(m, l) ? -INFINITY : static_cast<float>((m + log2((double)l)) * 0.69314718055994531);
  const float stored = c.v_scale ? c.v_scale[h * c.v_scale_step] : 1.f;
  Finish f = {c.out + (token * c.out_token + head * c.out_head) * dtype_bytes(c.dtype),
              l > 0.f || l != l ? weight * stored / l : 0.f, is_empty(m, l)};
  return f;
}

// Write a finished row from its accumulator o.
static inline void finish_row(const Call& c, int b, int h, int row, const float* o, float m, float l) {
  const int head = h * c.group + row % c.group;
  const Finish f = finish_of(c, h, head, c.query_start[b] + row / c.group, m, l);
  const int64_t size = dtype_bytes(c.dtype);
  for (int d = 0; d < c.head_size_v; d += W)
    vstore_as(c.dtype, f.out + d * size, f.empty ? vzero() : vload(o + d) * vset(f.factor), c.head_size_v - d);
}

static inline int64_t partial_step(const Call& c) { return round_up(c.head_size_v, 16) + 16; }

static inline void put_row(const Call& c, const Item& it, int row, const float* o, float m, float l) {
  if (!it.partial) return finish_row(c, it.b, it.h, row, o, m, l);
  const int64_t width = round_up(c.head_size_v, 16);
  float* p = it.partial + (row - it.r0) * partial_step(c);
  for (int d = 0; d < c.head_size_v; d += W) vstore_n(p + d, vload(o + d), static_cast<int>(width - d));
  p[width] = m;
  p[width + 1] = l;
}

static void merge_rows(const Call& c, const Merge& g) {
  const int64_t width = round_up(c.head_size_v, 16), step = partial_step(c);
  alignas(64) float o[576 + 16];
  for (int row = g.r0; row < g.r1; row++) {
    const float* p = g.partial + (row - g.r0) * step;
    float m = -INFINITY, l = 0.f;
    for (int i = 0; i < g.count; i++)
      if (p[i * g.step + width] > m) m = p[i * g.step + width];
    for (int d = 0; d < width; d += W) vstore(o + d, vzero());
    for (int i = 0; i < g.count; i++) {
      const float* part = p + i * g.step;
      if (is_empty(part[width], part[width + 1])) continue;
      const float f = part[width] == m ? 1.f : exp2f(part[width] - m);
      l += f * part[width + 1];
      for (int d = 0; d < width; d += W) vstore(o + d, vfma(vset(f), vload(part + d), vload(o + d)));
    }
    finish_row(c, g.b, g.h, row, o, m, l);
  }
}
