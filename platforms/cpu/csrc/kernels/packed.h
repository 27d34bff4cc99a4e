// Many rows in float32, on any vector width: keys are packed once for all rows of an item, as panels of transposed keys,
// so that sums stay in registers over the whole head (products) and over a whole block of keys (values).

static constexpr int kPackRows = 6;                  // rows of one block of registers
static constexpr int kSubRows = 4 * kPackRows;       // rows whose logits, and sums of values, stay in the innermost cache
static constexpr int kPanel = kPanelVecs * W;        // keys of one panel, and columns of values taken at once
static constexpr int kPackBlock = 128;               // keys between two looks at a row's reference

// Keys packed at a time: what stays in the second cache. Sums run over as many before they are added to totals.
static inline int packed_keys(int head_size, int head_size_v) {
  const int64_t widest = imax(128, imax(head_size, head_size_v));
  return static_cast<int>(imax(kPackBlock, kSumKeys * 128 / widest / kPackBlock * kPackBlock));
}
static inline int packed_rows(int head_size, int head_size_v) {
  const int64_t widest = imax(128, imax(head_size, head_size_v));
  return static_cast<int>(imax(128, kMaxRows * 128 / widest / 64 * 64));
}

struct Packed {
  float *q, *keys, *values, *wide, *s;
  float *o, *l;              // of kSubRows rows, over the packed keys
  float *o_total, *l_total;  // over those before, by the same reference
  float *m, *key_scale, *value_scale;
  float *q_size, *key_size;  // lengths of queries, scaled, and of keys: their product bounds a logit before its cap
  double* q_exact;
  Bounds* bounds;
  LogitRule* rules;
  int width, width_v, most;
  int64_t t0;                // position of the first packed key
  float cap, key_most;       // key_most: the largest of key_size
  bool plain, scaled, exact, capped, keys_direct;
};

// Hands out a scratch in pieces of whole cache lines; from null it measures.
struct Pieces {
  char* at;
  template <class T>
  T* take(size_t n) {
    char* p = at;
    at += round_up(static_cast<int64_t>(n * sizeof(T)), 64);
    return reinterpret_cast<T*>(p);
  }
};

static inline char* place_packed(char* scratch, int head_size, int head_size_v, Packed& x) {
  const size_t rows = round_up(packed_rows(head_size, head_size_v), kSubRows);
  Pieces p = {scratch};
  x.width = static_cast<int>(round_up(head_size, W)), x.width_v = static_cast<int>(round_up(head_size_v, W));
  x.most = packed_keys(head_size, head_size_v);
  x.q = p.take<float>(rows * x.width);
  x.o_total = p.take<float>(rows * x.width_v);
  x.l_total = p.take<float>(rows * W), x.m = p.take<float>(rows);
  x.keys = p.take<float>(x.most * x.width), x.values = p.take<float>(x.most * round_up(x.width_v, kPanel));
  x.wide = p.take<float>(W * x.width);
  x.s = p.take<float>(kSubRows * kPackBlock);
  x.o = p.take<float>(kSubRows * x.width_v), x.l = p.take<float>(kSubRows * W);
  x.q_exact = p.take<double>(kSubRows * x.width);
  x.key_scale = p.take<float>(x.most), x.value_scale = p.take<float>(x.most);
  x.q_size = p.take<float>(rows), x.key_size = p.take<float>(x.most);
  x.bounds = p.take<Bounds>(rows), x.rules = p.take<LogitRule>(rows);
  return p.at;
}
static inline size_t packed_bytes(int head_size, int head_size_v) {
  Packed x;
  alignas(64) static char base[64];
  return static_cast<size_t>(place_packed(base, head_size, head_size_v, x) - base);
}

// s[r][N vectors] = q[r] . panel, over the whole head.
template <int N>
static inline void panel_products(const float* q, int step, const float* panel, int depth, float* s) {
  vf acc[kPackRows][N];
#pragma GCC unroll 8
  for (int r = 0; r < kPackRows; r++)
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) acc[r][i] = vzero();
  for (int d = 0; d < depth; d++) {
    vf k[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) k[i] = vload(panel + d * kPanel + i * W);
#pragma GCC unroll 8
    for (int r = 0; r < kPackRows; r++) {
      const vf x = vset(q[r * step + d]);
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) acc[r][i] = vfma(x, k[i], acc[r][i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kPackRows; r++)
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) vstore(s + r * kPackBlock + i * W, acc[r][i]);
}

// The same for half of the keys in double precision; see dot_exact.
static inline void panel_products_exact(const double* q, int step, const float* panel, int depth, float* s) {
  vd acc[kPackRows][kPanelVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kPackRows; r++)
#pragma GCC unroll 8
    for (int i = 0; i < kPanelVecs; i++) acc[r][i] = vset_d(0.);
  for (int d = 0; d < depth; d++) {
    vd k[kPanelVecs];
#pragma GCC unroll 8
    for (int i = 0; i < kPanelVecs; i++) k[i] = vload_d(panel + d * kPanel + i * W / 2);
#pragma GCC unroll 8
    for (int r = 0; r < kPackRows; r++) {
      const vd x = vset_d(q[r * step + d]);
#pragma GCC unroll 8
      for (int i = 0; i < kPanelVecs; i++) acc[r][i] = vfma_d(x, k[i], acc[r][i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kPackRows; r++)
#pragma GCC unroll 8
    for (int i = 0; i < kPanelVecs; i++) vstore_d(s + r * kPackBlock + i * W / 2, acc[r][i]);
}

// o[r][N vectors] += s[r][n] . panel
template <int N>
static inline void add_values(const float* s, const float* panel, int n, float* o, int width) {
  vf acc[kPackRows][N];
#pragma GCC unroll 8
  for (int r = 0; r < kPackRows; r++)
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) acc[r][i] = vload(o + r * width + i * W);
  for (int j = 0; j < n; j++) {
    vf x[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) x[i] = vload(panel + j * kPanel + i * W);
#pragma GCC unroll 8
    for (int r = 0; r < kPackRows; r++) {
      const vf w = vset(s[r * kPackBlock + j]);
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) acc[r][i] = vfma(w, x[i], acc[r][i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kPackRows; r++)
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) vstore(o + r * width + i * W, acc[r][i]);
}

// Lengths of the W keys in one vector of a panel's columns.
static inline vf lengths_of(const float* panel, int width) {
  vf sum = vzero();
  for (int d = 0; d < width; d++) sum = vfma(vload(panel + d * kPanel), vload(panel + d * kPanel), sum);
  float size[W];
  vstore(size, sum);
  for (float& y : size) y = sqrtf(y);
  return vload(size);
}

// Pack keys [t0, t0 + n): K in panels [key / kPanel][head size][kPanel], past n the last one again, and V in panels
// [column / kPanel][key][kPanel], so that no stride of the cache makes rows compete for the same sets of a cache.
static void pack_panels(const Call& c, const Item& it, const Packed& x, int n) {
  const int64_t size = dtype_bytes(c.kv_dtype);
  KeyRows rows;
  for (int j = 0; j < n; j += kTileKeys) {
    const int count = static_cast<int>(imin(kTileKeys, n - j));
    find_rows(c, it.b, it.h, x.t0 + j, count, rows);
    for (int i = 0; i < count; i++) {
      for (int d = 0; d < x.width_v; d += kPanel) {
        const int wide = static_cast<int>(imin(kPanel, x.width_v - d)), most = static_cast<int>(imin(wide, c.head_size_v - d));
        widen_row(c.kv_dtype, rows.value[i] + d * size, x.values + d * x.most + (j + i) * kPanel, most, wide);
      }
    }
    for (int i = 0; i < round_up(count, kPanel); i += W) {
      const float* from[W];
      for (int r = 0; r < W; r++) {
        from[r] = x.keys_direct ? reinterpret_cast<const float*>(rows.key[i + r]) : x.wide + r * x.width;
        if (!x.keys_direct) widen_row(c.kv_dtype, rows.key[i + r], x.wide + r * x.width, c.head_size, x.width);
      }
      float* to = x.keys + (j + i) / kPanel * kPanel * x.width + (j + i) % kPanel;
      for (int d = 0; d < x.width; d += W) {
        vf y[W];
        for (int r = 0; r < W; r++) y[r] = vload(from[r] + d);
        vtranspose(y);
        for (int r = 0; r < W; r++) vstore(to + (d + r) * kPanel, y[r]);
      }
      if (x.capped) vstore(x.key_size + j + i, lengths_of(to, x.width));
    }
  }
  for (int j = 0; j < x.most && x.scaled; j++) {
    x.key_scale[j] = j < n ? scale_at(c, c.key_scales, it.b, it.h, x.t0 + j) : 0.f;
    x.value_scale[j] = j < n ? scale_at(c, c.value_scales, it.b, it.h, x.t0 + j) : 0.f;
    x.key_size[j] *= fabsf(x.key_scale[j]);
  }
}

// The packed keys [from, to) that some row of a block sees: from is a multiple of kPanel.
struct Span {
  int from, to;
};

// The products of one block of rows and one panel, or half of it, into s.
static inline void any_products(const Call& c, const Packed& x, int row, const double* exact, const float* panel, bool half,
                                float* s) {
  const float* q = x.q + row * x.width;
  if (exact) {
    panel_products_exact(exact, x.width, panel, c.head_size, s);
    if (!half) panel_products_exact(exact, x.width, panel + kPanel / 2, c.head_size, s + kPanel / 2);
  } else if (half) {
    panel_products<kPanelVecs / 2>(q, x.width, panel, c.head_size, s);
  } else {
    panel_products<kPanelVecs>(q, x.width, panel, c.head_size, s);
  }
}

static inline float largest(const float* x, int n) {
  float y = x[0];
  for (int i = 1; i < n; i++) y = x[i] > y || x[i] != x[i] ? x[i] : y;  // NaN, if there is one
  return y;
}

// Under a cap. A logit that cannot reach it is hardly flattened, so that a float32 product errs as it does without a cap;
// any other is taken in double precision. Each row and key decides for itself, whatever else is multiplied with them.
static inline void capped_products(const Call& c, const Packed& x, int row, const double* exact, int j, bool half, float* s) {
  const float *panel = x.keys + j * x.width, *size = x.key_size + j;
  const int n = half ? kPanel / 2 : kPanel;
  any_products(c, x, row, nullptr, panel, half, s);
  if (largest(x.q_size + row, kPackRows) * largest(size, n) < x.cap) return;
  alignas(64) float better[kPackRows * kPackBlock];
  any_products(c, x, row, exact, panel, half, better);
  for (int r = 0; r < kPackRows; r++)
    for (int i = r * kPackBlock, k = 0; k < n; i += W, k += W)
      vstore(s + i, vbelow(vset(x.q_size[row + r]) * vload(size + k), vset(x.cap), vload(s + i), vload(better + i)));
}

static inline void multiply_panels(const Call& c, const Packed& x, const Span& k, int row, int groups, bool doubles) {
  for (int j = k.from; j < k.to; j += kPanel)
    for (int g = 0; g < groups; g++) {
      const bool half = k.to - j <= kPanel / 2;  // at the edge of causality
      const double* exact = doubles ? x.q_exact + g * kPackRows * x.width : nullptr;
      float* s = x.s + g * kPackRows * kPackBlock + j % kPackBlock;
      if (doubles && x.capped) capped_products(c, x, row + g * kPackRows, exact, j, half, s);
      else any_products(c, x, row + g * kPackRows, exact, x.keys + j * x.width, half, s);
    }
}

// Weights of row i of a block; see softmax_row for the lazy reference. Where all logits are plain multiples of their
// products, the products stay as they are until the exponential.
static inline void packed_softmax(const Packed& x, const Span& k, int row, int i) {
  float* s = x.s + i * kPackBlock;
  const Bounds& b = x.bounds[row];
  const int from = k.from % kPackBlock, to = from + static_cast<int>(round_up(k.to - k.from, W));
  const int64_t key0 = x.t0 + k.from / kPackBlock * kPackBlock;
  const bool masked = !sees_all(b, key0 + from, key0 + to);
  const float factor = x.plain ? x.rules[row].factor : 1.f;
  vf top = vset(-INFINITY);
  for (int v = from; v < to; v += W) {
    vf y = vload(s + v);
    if (!x.plain) {
      if (x.scaled) y = y * vload(x.key_scale + key0 - x.t0 + v);
      y = logit(x.rules[row], y, key0 + v, b.position);
    }
    if (masked) y = hide(y, key0 + v, b);
    if (masked || !x.plain) vstore(s + v, y);
    top = vmax(top, y);
  }
  vf l = vload(x.l + i * W);
  float m = x.m[row];
  if (__builtin_expect(vany_gt(top * vset(factor), vset(m + 8.f)), 0)) {
    const float next = vrmax(top) * factor, f = exp2_of(m - next);
    float *o = x.o + i * x.width_v, *total = x.o_total + row * x.width_v, *l_total = x.l_total + row * W;
    for (int d = 0; d < x.width_v; d += W)
      vstore(o + d, vload(o + d) * vset(f)), vstore(total + d, vload(total + d) * vset(f));
    l = l * vset(f);
    vstore(l_total, vload(l_total) * vset(f));
    x.m[row] = m = next;
  }
  const vf scale = vset(factor), shift = vset(m == -INFINITY ? 0.f : -m);
  for (int v = from; v < to; v += W) {
    vf p = vexp2(vfma(vload(s + v), scale, shift));
    l = l + p;
    if (x.scaled) p = p * vload(x.value_scale + key0 - x.t0 + v);
    vstore(s + v, p);
  }
  vstore(x.l + i * W, l);
}

static inline void weigh_values(const Packed& x, const Span& k, int groups) {
  const int n = k.to - k.from;
  for (int d = 0; d < x.width_v; d += kPanel) {
    const float* panel = x.values + d * x.most + k.from * kPanel;
    for (int g = 0; g < groups; g++) {
      const float* s = x.s + g * kPackRows * kPackBlock + k.from % kPackBlock;
      float* o = x.o + g * kPackRows * x.width_v + d;
      switch (imin(kPanel, x.width_v - d) / W) {
        case 1: add_values<1>(s, panel, n, o, x.width_v); break;
        case 2: add_values<2>(s, panel, n, o, x.width_v); break;
        case 3: add_values<kPanelVecs == 4 ? 3 : 1>(s, panel, n, o, x.width_v); break;
        default: add_values<kPanelVecs>(s, panel, n, o, x.width_v);
      }
    }
  }
}

// What `rows` rows from `row` on see of the packed keys [0, n).
static void run_sub(const Call& c, const Packed& x, int row, int rows, int n) {
  const Bounds* bounds = x.bounds + row;
  const int groups = (rows + kPackRows - 1) / kPackRows;
  const Extent e = extent_of(bounds, rows, x.t0, x.t0 + n);
  if (e.from >= e.to) return;
  memset(x.o, 0, sizeof(float) * kSubRows * x.width_v);
  memset(x.l, 0, sizeof(float) * kSubRows * W);
  const bool doubles = x.exact || (x.capped && !(largest(x.q_size + row, rows) * x.key_most < x.cap));
  for (int i = 0; i < groups * kPackRows * x.width && doubles; i++) x.q_exact[i] = x.q[row * x.width + i];
  const int first = static_cast<int>(e.from - x.t0), last = static_cast<int>(e.to - x.t0);
  for (int j = first / kPackBlock * kPackBlock; j < last; j += kPackBlock) {
    bool seen = false;
    for (int i = 0; i < rows && !seen; i++) seen = !sees_none(bounds[i], x.t0 + j, x.t0 + j + kPackBlock);
    if (!seen) continue;
    const Span k = {static_cast<int>(imax(first, j)) / kPanel * kPanel, static_cast<int>(imin(last, j + kPackBlock))};
    multiply_panels(c, x, k, row, groups, doubles);
    for (int i = 0; i < groups * kPackRows; i++) packed_softmax(x, k, row + i, i);
    weigh_values(x, k, groups);
  }
  float *o = x.o_total + row * x.width_v, *l = x.l_total + row * W;
  for (int d = 0; d < groups * kPackRows * x.width_v; d += W) vstore(o + d, vload(o + d) + vload(x.o + d));
  for (int i = 0; i < groups * kPackRows * W; i += W) vstore(l + i, vload(l + i) + vload(x.l + i));
}

// What a row sees of the keys of an item.
static inline Bounds clipped(Bounds b, const Item& it) {
  auto clip = [&](int32_t& lo, int32_t& hi) {
    lo = lo > it.k0 ? lo : it.k0, hi = hi < it.k1 ? hi : it.k1;
    if (hi <= lo) lo = hi = 0;
  };
  clip(b.lo, b.hi);
  clip(b.xlo, b.xhi);
  return b;
}

static inline float length_of(const float* q, int width) {
  vf sum = vzero();
  for (int d = 0; d < width; d += W) sum = vfma(vload(q + d), vload(q + d), sum);
  return sqrtf(vrsum(sum));
}

static inline void packed_start(const Call& c, const Item& it, const Packed& x, int rows, int padded) {
  const int64_t size = dtype_bytes(c.dtype);
  for (int i = 0; i < padded; i++) {
    const int row = it.r0 + (i < rows ? i : rows - 1), head = it.h * c.group + row % c.group;
    const int64_t token = c.query_start[it.b] + row / c.group;
    const char* from = c.query + (token * c.query_token + head * c.query_head) * size;
    widen_row(c.dtype, from, x.q + i * x.width, c.head_size, x.width);
    const bool known = i && row / c.group == (it.r0 + i - 1) / c.group;
    x.bounds[i] = known ? x.bounds[i - 1] : clipped(bounds_of(c, it.b, row / c.group), it);
    x.rules[i] = logit_rule(c, it.h, head);
    x.q_size[i] = x.capped ? fabsf(x.rules[i].scale) * length_of(x.q + i * x.width, x.width) : 0.f;
    x.m[i] = -INFINITY;
  }
  memset(x.o_total, 0, sizeof(float) * padded * x.width_v);
  memset(x.l_total, 0, sizeof(float) * padded * W);
}

static void run_packed(const Call& c, const Item& it, char* scratch) {
  Packed x;
  place_packed(scratch, c.head_size, c.head_size_v, x);
  const int rows = it.r1 - it.r0, padded = static_cast<int>(round_up(rows, kPackRows));
  x.keys_direct = c.kv_dtype == DType::kFloat32 && c.head_size % W == 0;
  x.scaled = c.kv_dtype == DType::kInt8;
  x.exact = c.dtype == DType::kFloat32 && !kHasFused;
  x.cap = c.softcap;
  x.capped = c.dtype == DType::kFloat32 && kHasFused && c.softcap != 0.f;
  packed_start(c, it, x, rows, padded);
  // A raw maximum is the maximum of the logits only if they rise together.
  x.plain = x.rules[0].plain && !x.scaled && x.rules[0].factor > 0.f;
  const Extent e = extent_of(x.bounds, padded, it.k0, it.k1);
  // Sums start at multiples of the packed keys whatever the rows, so that those of a row never depend on its neighbours.
  for (int64_t at = e.from < e.to ? e.from / x.most * x.most : e.to; at < e.to; at += x.most) {
    x.t0 = imax(at, e.from / kPackBlock * kPackBlock);
    const int n = static_cast<int>(imin(at + x.most, e.to) - x.t0);
    pack_panels(c, it, x, n);
    x.key_most = x.capped ? largest(x.key_size, n) : 0.f;
    for (int row = 0; row < rows; row += kSubRows)
      run_sub(c, x, row, static_cast<int>(imin(kSubRows, padded - row)), n);
  }
  for (int i = 0; i < rows; i++)
    put_row(c, it, it.r0 + i, x.o_total + i * x.width_v, x.m[i], vrsum(vload(x.l_total + i * W)));
}

static void attend_packed(const Call& c, const Item& whole, char* scratch) {
  const int step = packed_rows(c.head_size, c.head_size_v);
  for (int r = whole.r0; r < whole.r1; r += step) {
    Item it = whole;
    it.r0 = r, it.r1 = static_cast<int>(imin(whole.r1, r + step));
    if (whole.partial) it.partial = whole.partial + (r - whole.r0) * partial_step(c);
    run_packed(c, it, scratch);
  }
}

// Rows of a request and kv head. They alone choose a kernel, never those of an item, which depend on the batch.
static inline int64_t request_rows(const Call& c, const Item& it) {
  return (int64_t{c.query_start[it.b + 1]} - c.query_start[it.b]) * c.group;
}

// Rows from which packing brings more than it costs: it has to make up for reading float32 where it lies, and does so
// sooner for small heads, whose sums tile.h folds most often.
static inline int64_t packed_from(const Call& c) {
  return c.kv_dtype == DType::kFloat32 && imax(c.head_size, c.head_size_v) > 96 ? 40 : 20;
}

static inline size_t float_bytes(int head_size, int head_size_v) {
  return imax(tile_bytes(head_size, head_size_v), packed_bytes(head_size, head_size_v));
}
static void attend_float(const Call& c, const Item& it, char* scratch) {
  if (request_rows(c, it) < packed_from(c)) attend_tile(c, it, scratch);
  else attend_packed(c, it, scratch);
}
