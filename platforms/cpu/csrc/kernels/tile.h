// The float32 kernel: any dtype, head size, page and mask. Keys are read once for up to kTileRows rows, as
// float32 straight from the page or widened into a tile first.

static constexpr int kTileRows = 64, kTileKeys = 64;
// Keys whose sums share an accumulator, which is then added to the row's totals: the rounding errors of one float32
// accumulator over a whole context would outgrow those of a matrix product, which sums in blocks too.
static constexpr int64_t kSumKeys = 512;

// A level that multiplies pairs of bfloat16 defines ATTN_WORD_DOT and vdot_words; keys then stay as they are stored.
#ifdef ATTN_WORD_DOT
static constexpr bool kWordDot = true;
#else
static constexpr bool kWordDot = false;
static inline vf vdot_words(const char*, const char*, vf sum) { return sum; }
#endif
// A level without fused products rounds each of them: its float32 rows are multiplied in double precision, or large
// logits would err more than the contract allows.
#if defined(__FMA__) || defined(__aarch64__)
static constexpr bool kHasFused = true;
#else
static constexpr bool kHasFused = false;
#endif

struct Tile {
  float *q, *kv, *s, *m;
  float *o, *l;              // sums over the present kSumKeys keys
  float *o_total, *l_total;  // over those before, by the same reference
  Bounds* bounds;
  int width, width_v;  // head sizes rounded up to whole vectors
};

static inline size_t tile_bytes(int head_size, int head_size_v) {
  const size_t d = round_up(head_size, W), dv = round_up(head_size_v, W);
  return sizeof(float) * (kTileRows * (d + 2 * dv + kTileKeys + 3) + kTileKeys * imax(d, dv)) +
         sizeof(Bounds) * kTileRows + 16 * 64;
}
static inline Tile tile_in(char* scratch, const Call& c) {
  auto take = [&](size_t bytes) {
    char* p = scratch;
    scratch += round_up(static_cast<int64_t>(bytes), 64);
    return p;
  };
  auto floats = [&](size_t n) { return reinterpret_cast<float*>(take(n * sizeof(float))); };
  Tile t;
  t.width = static_cast<int>(round_up(c.head_size, W));
  t.width_v = static_cast<int>(round_up(c.head_size_v, W));
  t.q = floats(kTileRows * t.width);
  t.kv = floats(kTileKeys * imax(t.width, t.width_v));
  t.s = floats(kTileRows * kTileKeys);
  t.o = floats(kTileRows * t.width_v);
  t.o_total = floats(kTileRows * t.width_v);
  t.m = floats(kTileRows);
  t.l = floats(kTileRows);
  t.l_total = floats(kTileRows);
  t.bounds = reinterpret_cast<Bounds*>(take(sizeof(Bounds) * kTileRows));
  return t;
}

// Pointers to the rows of n keys from t on, then the last one again up to kTileKeys: what is computed for
// those is not used.
struct KeyRows {
  const char *key[kTileKeys], *value[kTileKeys];
};
static inline void find_rows(const Call& c, int b, int h, int64_t t, int n, KeyRows& rows) {
  for (int j = 0; j < n;) {
    const Run run = run_at(c, b, h, t + j);
    const int count = static_cast<int>(imin(run.count, n - j));
    for (int i = 0; i < count; i++) {
      rows.key[j + i] = run.key + i * c.key.slot;
      rows.value[j + i] = run.value + i * c.value.slot;
    }
    j += count;
  }
  for (int j = n; j < kTileKeys; j++) rows.key[j] = rows.key[n - 1], rows.value[j] = rows.value[n - 1];
}

// Rows to come: `bytes` of each per vector of columns are prefetched while the same columns of rows of now are used.
// Asked for one by one between loads: all lines of some rows at once keep loads waiting.
struct Ahead {
  const char* const* rows;
  int bytes;  // 0: nothing to come
  void prefetch(int row, int vec, int vecs) const {
    for (int i = 0; i < vecs * bytes; i += 64) __builtin_prefetch(rows[row] + vec * bytes + i, 0, 2);
  }
  Ahead from(int row) const { return Ahead{rows + row, bytes}; }
};

// Products of R query rows and W / R keys; W accumulators hide the latency and fold into one vector. Words: rows and
// keys are bfloat16, and `width` counts pairs of them, so that it is the same number of bytes.
template <int R, bool WORDS>
static inline void dot_block(const float* q, int width, const char* const* keys, float* s, const Ahead& ahead) {
  constexpr int K = W / R;
  vf acc[W];
  for (int i = 0; i < W; i++) acc[i] = vzero();
  for (int d = 0; d < width; d += W) {
    for (int j = 0; j < K && ahead.bytes; j++) ahead.prefetch(j, d / W, 1);
    if (WORDS) {
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int j = 0; j < K; j++)
          acc[r * K + j] = vdot_words(reinterpret_cast<const char*>(q + r * width + d), keys[j] + d * 4, acc[r * K + j]);
      continue;
    }
    vf k[K];
    for (int j = 0; j < K; j++) k[j] = vload(reinterpret_cast<const float*>(keys[j]) + d);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const vf x = vload(q + r * width + d);
#pragma GCC unroll 16
      for (int j = 0; j < K; j++) acc[r * K + j] = vfma(x, k[j], acc[r * K + j]);
    }
  }
  float sums[W];
  vstore(sums, vreduce(acc));
  for (int r = 0; r < R; r++) memcpy(s + r * kTileKeys, sums + r * K, K * sizeof(float));
}

// The same of one row, key by key: memory is read in its order.
template <bool WORDS>
static inline void dot_row(const float* q, int width, const char* const* keys, float* s, const Ahead& ahead) {
  vf acc[W];
#pragma GCC unroll 16
  for (int j = 0; j < W; j++) {
    acc[j] = vzero();
    for (int d = 0; d < width; d += W) {
      if (ahead.bytes) ahead.prefetch(j, d / W, 1);
      if (WORDS) acc[j] = vdot_words(reinterpret_cast<const char*>(q + d), keys[j] + d * 4, acc[j]);
      else acc[j] = vfma(vload(q + d), vload(reinterpret_cast<const float*>(keys[j]) + d), acc[j]);
    }
  }
  vstore(s, vreduce(acc));
}

// One product in double precision. A cap flattens all logits but those near 0, where products cancel: there the error
// of a float32 sum would be most of the logit.
static inline float dot_exact(const float* q, const float* k, int width) {
  double acc[8] = {0};
  for (int d = 0; d + 8 <= width; d += 8)
    for (int i = 0; i < 8; i++) acc[i] += static_cast<double>(q[d + i]) * k[d + i];
  return static_cast<float>(((acc[0] + acc[1]) + (acc[2] + acc[3])) + ((acc[4] + acc[5]) + (acc[6] + acc[7])));
}

// o[R][N vectors] += p[R][n] . values
template <int R, int N>
static inline void weigh_block(const float* p, const char* const* values, int d, int n, float* o, int width,
                               const Ahead& ahead) {
  vf acc[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) acc[r][i] = vload(o + r * width + d + i * W);
  for (int j = 0; j < n; j++) {
    const float* v = reinterpret_cast<const float*>(values[j]) + d;
    if (ahead.bytes) ahead.prefetch(j, d / W, N);
    vf x[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) x[i] = vload(v + i * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const vf w = vset(p[r * kTileKeys + j]);
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) acc[r][i] = vfma(w, x[i], acc[r][i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) vstore(o + r * width + d + i * W, acc[r][i]);
}
template <int R>
static inline void weigh_rows(const float* p, const char* const* values, int n, float* o, int width,
                              const Ahead& ahead) {
  constexpr int N = R == 1 ? 2 * kValueVecs : kValueVecs;
  int d = 0;
  for (; d + N * W <= width; d += N * W) weigh_block<R, N>(p, values, d, n, o, width, ahead);
  for (; d < width; d += W) weigh_block<R, 1>(p, values, d, n, o, width, ahead);
}

// The heads of a row block of a decode: what stays the same over its keys.
struct Work {
  const Call& c;
  const Item& it;
  const Tile& t;
  int rows, r0;        // rows of this tile, the first of which is row r0 of the request
  int padded;          // rounded up to whole row blocks
  bool keys_direct, values_direct, words, exact;
  int key_width;       // floats, or pairs of words, from row to row of t.q and t.k
};

// Turn the products of one row into weights, keep its running reference and denominator.
static inline void softmax_row(const Work& w, int i, int64_t t0, int n, const float* key_scale,
                               const float* value_scale) {
  const Tile& t = w.t;
  float* s = t.s + i * kTileKeys;
  const Bounds& b = t.bounds[i];
  const LogitRule rule = logit_rule(w.c, w.it.h, w.it.h * w.c.group + (w.r0 + i) % w.c.group);
  const int nv = (n + W - 1) / W;
  const bool masked = !sees_all(b, t0, t0 + nv * W);
  vf y[kTileKeys / W], top = vset(-INFINITY);
  for (int v = 0; v < nv; v++) {
    vf x = vload(s + v * W);
    if (key_scale) x = x * vload(key_scale + v * W);
    x = logit(rule, x, t0 + v * W, b.position);
    if (masked) x = vclip(hide(x, t0 + v * W, b), t0 + v * W, t0, t0 + n, vset(-INFINITY));
    y[v] = x;
    top = vmax(top, x);
  }
  float m = t.m[i], l = t.l[i];
  // The reference moves only when a weight would pass 2^8, so that the accumulator is rarely rescaled.
  if (vany_gt(top, vset(m + 8.f))) {
    const float next = vrmax(top), f = exp2_of(m - next);
    float* const sums[] = {t.o, t.o_total};
    for (float* o : sums)
      for (int d = i * t.width_v; d < (i + 1) * t.width_v; d += W) vstore(o + d, vload(o + d) * vset(f));
    l *= f;
    t.l_total[i] *= f;
    t.m[i] = m = next;
  }
  const vf shift = vset(m == -INFINITY ? 0.f : m);
  vf sum = vzero();
  for (int v = 0; v < nv; v++) {
    vf p = vexp2(y[v] - shift);
    sum = sum + p;
    if (value_scale) p = p * vload(value_scale + v * W);
    vstore(s + v * W, p);
  }
  t.l[i] = l + vrsum(sum);
}

static inline void dot_rows_exact(const Work& w, const KeyRows& rows, int n) {
  for (int j = 0; j < n; j++)
    for (int r = 0; r < w.rows; r++)
      w.t.s[r * kTileKeys + j] =
          dot_exact(w.t.q + r * w.key_width, reinterpret_cast<const float*>(rows.key[j]), w.key_width);
}

template <int R, bool WORDS>
static inline void dot_rows(const Work& w, const KeyRows& rows, int n, const Ahead& ahead) {
  constexpr int K = W / R;
  for (int j = 0; j < n; j += K) {
    if (R == 1) {
      dot_row<WORDS>(w.t.q, w.key_width, rows.key + j, w.t.s + j, ahead.from(j));
      continue;
    }
    for (int r = 0; r < w.padded; r += R)
      dot_block<R, WORDS>(w.t.q + r * w.key_width, w.key_width, rows.key + j, w.t.s + r * kTileKeys + j,
                          r ? Ahead{nullptr, 0} : ahead.from(j));
  }
}

static inline void load_scales(const Work& w, const ScaleView& view, int64_t t0, int n, float* out) {
  for (int j = 0; j < kTileKeys; j++) out[j] = j < n ? scale_at(w.c, view, w.it.b, w.it.h, t0 + j) : 0.f;
}

// n bfloat16 and zeros up to `width` pairs.
static inline void copy_words(const char* from, float* to, int n, int width) {
  memset(to, 0, width * 4);
  memcpy(to, from, n * 2);
}

// Widen what is not float32 in whole vectors; `rows` then points into the tile, which keys and then values use, so that
// it stays in the innermost cache.
static inline void widen_keys(const Work& w, int n, KeyRows& rows) {
  const Call& c = w.c;
  const Tile& t = w.t;
  if (!w.keys_direct) {
    if (!w.words) widen_rows(c.kv_dtype, rows.key, n, t.kv, c.head_size, t.width);
    for (int j = 0; j < n; j++) {
      if (w.words) copy_words(rows.key[j], t.kv + j * t.width, c.head_size, w.key_width);
      rows.key[j] = reinterpret_cast<const char*>(t.kv + j * t.width);
    }
  }
  for (int j = n; j < kTileKeys; j++) rows.key[j] = rows.key[n - 1];
}
static inline void widen_values(const Work& w, int n, KeyRows& rows) {
  if (w.values_direct) return;
  widen_rows(w.c.kv_dtype, rows.value, n, w.t.kv, w.c.head_size_v, w.t.width_v);
  for (int j = 0; j < n; j++) rows.value[j] = reinterpret_cast<const char*>(w.t.kv + j * w.t.width_v);
}

template <int R>
static inline void weigh_keys(const Work& w, const KeyRows& rows, int64_t t0, int n, Ahead ahead) {
  const Tile& t = w.t;
  for (int r = 0; r < w.padded; r += R) {
    bool any = false;
    for (int i = r; i < r + R && i < w.rows; i++) any |= !sees_none(t.bounds[i], t0, t0 + n);
    if (!any) continue;
    weigh_rows<R>(t.s + r * kTileKeys, rows.value, n, t.o + r * t.width_v, t.width_v, ahead);
    ahead.bytes = 0;  // once is enough
  }
}

static inline void add_totals(const Work& w) {
  const Tile& t = w.t;
  for (int d = 0; d < w.padded * t.width_v; d += W) {
    vstore(t.o_total + d, vload(t.o_total + d) + vload(t.o + d));
    vstore(t.o + d, vzero());
  }
  for (int i = 0; i < w.rows; i++) t.l_total[i] += t.l[i], t.l[i] = 0.f;
}

template <int R>
static void run_tile(const Work& w) {
  const Call& c = w.c;
  const Tile& t = w.t;
  const Extent e = extent_of(t.bounds, w.rows, w.it.k0, w.it.k1);
  const int64_t size = dtype_bytes(c.kv_dtype);
  const bool scaled = c.kv_dtype == DType::kInt8;
  alignas(64) float key_scale[kTileKeys], value_scale[kTileKeys];
  KeyRows rows[2];
  int now = 0;
  // Steps start at multiples of kTileKeys whatever the rows, so that a row's sums never depend on its neighbours.
  const int64_t first = e.from < e.to ? e.from / kTileKeys * kTileKeys : e.to;
  auto count_at = [&](int64_t t0) { return static_cast<int>(imin(kTileKeys, e.to - t0)); };
  if (first < e.to) find_rows(c, w.it.b, w.it.h, first, count_at(first), rows[0]);
  for (int64_t t0 = first; t0 < e.to; t0 += kTileKeys, now ^= 1) {
    const int n = count_at(t0);
    KeyRows &here = rows[now], &next = rows[now ^ 1];
    const bool more = t0 + kTileKeys < e.to;
    if (more) find_rows(c, w.it.b, w.it.h, t0 + kTileKeys, count_at(t0 + kTileKeys), next);
    widen_keys(w, n, here);
    if (scaled) load_scales(w, c.key_scales, t0, n, key_scale), load_scales(w, c.value_scales, t0, n, value_scale);
    if (w.exact) dot_rows_exact(w, here, n);
    else if (kWordDot && w.words) dot_rows<R, kWordDot>(w, here, n, Ahead{next.key, more ? W * 4 : 0});
    else dot_rows<R, false>(w, here, n, Ahead{next.key, more ? static_cast<int>(W * size) : 0});
    for (int i = 0; i < w.rows; i++)
      softmax_row(w, i, t0, n, scaled ? key_scale : nullptr, scaled ? value_scale : nullptr);
    widen_values(w, n, here);
    weigh_keys<R>(w, here, t0, n, Ahead{next.value, more ? static_cast<int>(W * size) : 0});
    if (!more || (t0 + kTileKeys) % kSumKeys == 0) add_totals(w);
  }
}

static void attend_rows(const Call& c, const Item& it, const Tile& t, int r0, int rows) {
  const int size = static_cast<int>(dtype_bytes(c.dtype)), block = rows > 2 ? kDotRows : rows;
  const int padded = static_cast<int>(round_up(rows, block));
  const bool words = kWordDot && c.dtype == DType::kBFloat16 && c.kv_dtype == DType::kBFloat16;
  const int key_width = words ? static_cast<int>(round_up(c.head_size, 2 * W)) / 2 : t.width;
  for (int i = 0; i < padded; i++) {
    const int row = r0 + (i < rows ? i : rows - 1), head = it.h * c.group + row % c.group;
    const int64_t token = c.query_start[it.b] + row / c.group;
    const char* from = c.query + (token * c.query_token + head * c.query_head) * size;
    if (words) copy_words(from, t.q + i * key_width, c.head_size, key_width);
    else widen_row(c.dtype, from, t.q + i * key_width, c.head_size, t.width);
    t.bounds[i] = bounds_of(c, it.b, row / c.group);
    t.m[i] = -INFINITY;
    t.l[i] = t.l_total[i] = 0.f;
  }
  for (int i = 0; i < padded * t.width_v; i += W) vstore(t.o + i, vzero()), vstore(t.o_total + i, vzero());
  for (int i = 0; i < padded * kTileKeys; i += W) vstore(t.s + i, vzero());
  const bool direct = c.kv_dtype == DType::kFloat32;
  const bool keys_direct = words ? c.head_size % (2 * W) == 0 : direct && c.head_size % W == 0;
  const Work w = {c, it, t, rows, r0, padded, keys_direct, direct && c.head_size_v % W == 0, words,
                  c.dtype == DType::kFloat32 && (!kHasFused || c.softcap != 0.f), key_width};
  if (block == 1) run_tile<1>(w);
  else if (block == 2) run_tile<2>(w);
  else run_tile<kDotRows>(w);
  for (int i = 0; i < rows; i++) put_row(c, it, r0 + i, t.o_total + i * t.width_v, t.m[i], t.l_total[i]);
}

static void attend_tile(const Call& c, const Item& it, char* scratch) {
  const Tile t = tile_in(scratch, c);
  for (int r = it.r0; r < it.r1; r += kTileRows)
    attend_rows(c, it, t, r, static_cast<int>(imin(kTileRows, it.r1 - r)));
}
