// Many rows in bfloat16 on AMX tiles: 32 rows by 128 keys at a time, keys and values packed once for all rows.
//
// The softmax of one block of products runs between the tile steps of the next block's Q.K and the last block's P.V,
// so that both units are busy.

static constexpr int kBlock = 128, kPacked = 512;  // keys per softmax block; keys packed at a time

// Rows whose queries and accumulators stay in L2 beside the packed keys.
static inline int prefill_rows(int head_size, int head_size_v) {
  const int64_t widest = imax(128, imax(head_size, head_size_v));
  return static_cast<int>(imax(64, kMaxRows * 128 / widest / 32 * 32));
}

// One block of products: 32 rows from 32 `sub` on, `groups` times 32 keys from kBlock `j` on among those packed.
struct Block {
  int sub, j, groups;
  bool masked;
};

struct Prefill {
  bf *q, *keys, *values, *p[2], *key, *value;
  float *o, *s[2], *l, *m, *rescale[2], *key_scale, *value_scale;
  Bounds* bounds;
  Block* blocks;
  LogitRule* rules;  // one per row
  int width, width_v;
  int64_t t0;        // position of the first packed key
  bool scaled, must_rescale[2];
};

static inline size_t prefill_bytes(int head_size, int head_size_v) {
  const size_t rows = prefill_rows(head_size, head_size_v), d = round_up(head_size, 32), dv = round_up(head_size_v, 32);
  return rows * (2 * d + 4 * dv + 64 + 4 + sizeof(Bounds) + sizeof(LogitRule)) + kPacked * 2 * (d + dv) +
         2 * 32 * kBlock * 6 + kStep * 2 * (d + dv) + 2 * kPacked * 4 + 2 * 128 +
         (rows / 32) * (kPacked / kBlock) * sizeof(Block) + 24 * 64;
}
static inline Prefill prefill_in(char* scratch, const Call& c, const TileSource& src) {
  auto take = [&](size_t bytes) {
    char* p = scratch;
    scratch += round_up(static_cast<int64_t>(bytes), 64);
    return p;
  };
  auto words = [&](size_t n) { return reinterpret_cast<bf*>(take(n * 2)); };
  auto floats = [&](size_t n) { return reinterpret_cast<float*>(take(n * 4)); };
  const size_t rows = prefill_rows(c.head_size, c.head_size_v);
  Prefill x = {};
  x.width = src.width, x.width_v = src.width_v;
  x.q = words(rows * x.width), x.keys = words(kPacked * x.width), x.values = words(kPacked * x.width_v);
  for (bf*& p : x.p) p = words(32 * kBlock);
  x.key = words(kStep * x.width), x.value = words(kStep * x.width_v);
  x.o = floats(rows * x.width_v);
  for (float*& s : x.s) s = floats(32 * kBlock);
  x.l = floats(rows * 16), x.m = floats(rows);
  for (float*& f : x.rescale) f = floats(32);
  x.key_scale = floats(kPacked), x.value_scale = floats(kPacked);
  x.bounds = reinterpret_cast<Bounds*>(take(rows * sizeof(Bounds)));
  x.rules = reinterpret_cast<LogitRule*>(take(rows * sizeof(LogitRule)));
  x.blocks = reinterpret_cast<Block*>(take((rows / 32) * (kPacked / kBlock) * sizeof(Block)));
  x.scaled = c.kv_dtype == DType::kInt8;
  return x;
}

// 16 rows of 16 pairs transposed. Quarter rows are placed by masked broadcast loads, so that only two shuffle stages
// are left.
static inline void transpose_pairs(const bf* from, int64_t step, bf* to) {
  __m512i z[16];
  for (int i = 0; i < 4; i++)
    for (int c = 0; c < 4; c++) {
      auto part = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + row * step + c * 8)); };
      __m512i x = _mm512_castsi128_si512(part(i));
      x = _mm512_mask_broadcast_i32x4(x, 0x00f0, part(4 + i));
      x = _mm512_mask_broadcast_i32x4(x, 0x0f00, part(8 + i));
      z[c * 4 + i] = _mm512_mask_broadcast_i32x4(x, 0xf000, part(12 + i));
    }
  for (int c = 0; c < 4; c++) {
    const __m512i a = _mm512_unpacklo_epi32(z[4 * c], z[4 * c + 1]), b = _mm512_unpackhi_epi32(z[4 * c], z[4 * c + 1]);
    const __m512i d = _mm512_unpacklo_epi32(z[4 * c + 2], z[4 * c + 3]);
    const __m512i e = _mm512_unpackhi_epi32(z[4 * c + 2], z[4 * c + 3]);
    bf* row = to + c * 4 * 32;
    _mm512_store_si512(row, _mm512_unpacklo_epi64(a, d));
    _mm512_store_si512(row + 32, _mm512_unpackhi_epi64(a, d));
    _mm512_store_si512(row + 64, _mm512_unpacklo_epi64(b, e));
    _mm512_store_si512(row + 96, _mm512_unpackhi_epi64(b, e));
  }
}

// Pack keys [t0, t0 + n): K as transposed tiles [key / 16][width / 32], V as interleaved ones [key / 32][width_v / 16].
static void pack_keys(const Call& c, const Item& it, const Prefill& x, const TileSource& src, int n) {
  const int nk = x.width / 32, nd = x.width_v / 16;
  StepTiles tiles;
  for (int k = 0; k < n; k += kStep) {
    const int count = static_cast<int>(imin(kStep, n - k));
    tiles_at(c, it.b, it.h, x.t0 + k, count, x.t0 + n, x.key, x.value, src, tiles);
    for (int i = 0; i < (count + 31) / 32 * 2; i++) {
      for (int y = 0; y < nk; y++)
        transpose_pairs(tiles.key[i] + y * 32, tiles.key_step, x.keys + ((k / 16 + i) * nk + y) * 512);
      bf* to = x.values + (k / 32 + i / 2) * nd * 512 + i % 2 * 8 * 32;
      pack_pairs<0, 0, false>(tiles.value[i], tiles.value_step, 0, 8, nd, to, tiles.key[i], tiles.key_step);
    }
  }
  if (!x.scaled) return;
  for (int j = 0; j < kPacked; j++) {
    x.key_scale[j] = j < n ? scale_at(c, c.key_scales, it.b, it.h, x.t0 + j) : 0.f;
    x.value_scale[j] = j < n ? scale_at(c, c.value_scales, it.b, it.h, x.t0 + j) : 0.f;
  }
}

// One tile step of S = Q.K^T: 32 columns of the head, 32 rows, 32 keys.
template <int NK>
static inline void multiply_keys(const Prefill& x, const Block& b, float* s, int step) {
  const int nk = NK ? NK : x.width / 32, group = step / nk, y = step % nk, width = nk * 32;
  const bf* q = x.q + b.sub * 32 * width + y * 32;
  const bf* k = x.keys + ((b.j * kBlock / 16 + 2 * group) * nk + y) * 512;
  if (y == 0) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  _tile_loadd(4, q, width * 2);
  _tile_loadd(6, k, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, k + nk * 512, 64);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(5, q + 16 * width, width * 2);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
  if (y != nk - 1) return;
  float* to = s + group * 32;
  _tile_stored(0, to, kBlock * 4);
  _tile_stored(1, to + 16, kBlock * 4);
  _tile_stored(2, to + 16 * kBlock, kBlock * 4);
  _tile_stored(3, to + 16 * kBlock + 16, kBlock * 4);
}

// One tile step of O += P.V: 32 keys, 32 rows, 32 columns of the head.
template <int ND>
static inline void multiply_values(const Prefill& x, const Block& b, const bf* p, int step) {
  const int nd = ND ? ND : x.width_v / 16, pair = step / b.groups, group = step % b.groups, width = nd * 16;
  float* o = x.o + b.sub * 32 * width + pair * 32;
  const bf* v = x.values + ((b.j * kBlock / 32 + group) * nd + 2 * pair) * 512;
  p += group * 32;
  if (group == 0) {
    _tile_loadd(0, o, width * 4);
    _tile_loadd(1, o + 16, width * 4);
    _tile_loadd(2, o + 16 * width, width * 4);
    _tile_loadd(3, o + 16 * width + 16, width * 4);
  }
  _tile_loadd(4, p, kBlock * 2);
  _tile_loadd(6, v, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, v + 512, 64);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(5, p + 16 * kBlock, kBlock * 2);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
  if (group != b.groups - 1) return;
  _tile_stored(0, o, width * 4);
  _tile_stored(1, o + 16, width * 4);
  _tile_stored(2, o + 16 * width, width * 4);
  _tile_stored(3, o + 16 * width + 16, width * 4);
}

// 2^y to 1e-4, for weights that are rounded to bfloat16 and a denominator that nobody asks for.
static inline vf exp2_rough(vf y) {
  const vf f = _mm512_reduce_ps(y, 1);
  vf p = vset(7.802451826e-2f);
  p = vfma(p, f, vset(2.260671812e-1f));
  p = vfma(p, f, vset(6.958335205e-1f));
  p = vfma(p, f, vset(9.999252215e-1f));
  return _mm512_scalef_ps(p, y);
}

// Turn one row of products into logits and hide what it does not see.
static inline void prefill_logits(const Prefill& x, const Block& b, int i, float* s) {
  const int row = b.sub * 32 + i;
  for (int v = 0; v < b.groups * 2; v++) {
    const int64_t key = b.j * kBlock + v * 16;
    vf y = vload(s + v * 16);
    if (x.scaled) y = y * vload(x.key_scale + key);
    y = logit(x.rules[row], y, x.t0 + key, x.bounds[row].position);
    vstore(s + v * 16, b.masked ? hide(y, x.t0 + key, x.bounds[row]) : y);
  }
}

// Weights of one row of one block. The products in s are raw where `factor` is their rule and nothing is hidden, else
// logits. See softmax_row for the lazy reference.
template <bool PRECISE>
static inline void prefill_softmax(const Prefill& x, const Block& b, int i, float* s, bf* p, float* rescale,
                                   bool& must_rescale, bool plain) {
  const int row = b.sub * 32 + i, nv = b.groups * 2;
  float factor = x.rules[row].factor;
  if (!plain || b.masked) prefill_logits(x, b, i, s), factor = 1.f;
  vf top = vload(s);
  for (int v = 1; v < nv; v++) top = vmax(top, vload(s + v * 16));
  vf l = vload(x.l + row * 16), l2 = vzero();
  float m = x.m[row];
  if (__builtin_expect(vany_gt(top * vset(factor), vset(m + 8.f)), 0)) {
    const float next = vrmax(top) * factor, f = exp2_of(m - next);
    rescale[i] = f;
    must_rescale = true;
    l = l * vset(f);
    x.m[row] = m = next;
  }
  const vf scale = vset(factor), shift = vset(m == -INFINITY ? 0.f : -m);
  auto weight = [&](int v) {
    const vf y = vfma(vload(s + v * 16), scale, shift);
    return PRECISE ? vweight(y) : exp2_rough(y);
  };
#pragma GCC unroll 2
  for (int v = 0; v < nv; v += 2) {
    vf a = weight(v), e = weight(v + 1);
    l = l + a, l2 = l2 + e;
    if (x.scaled) a = a * vload(x.value_scale + b.j * kBlock + v * 16), e = e * vload(x.value_scale + b.j * kBlock + v * 16 + 16);
    _mm512_store_si512(p + v * 16, narrow(a, e));
  }
  vstore(x.l + row * 16, l + l2);
}

static inline void rescale_rows(const Prefill& x, const Block& b, float* factors) {
  for (int i = 0; i < 32; i++) {
    if (factors[i] == 1.f) continue;
    float* o = x.o + (b.sub * 32 + i) * x.width_v;
    for (int d = 0; d < x.width_v; d += 16) vstore(o + d, vload(o + d) * vset(factors[i]));
    factors[i] = 1.f;
  }
}

template <int NK, int ND, bool PRECISE>
static void run_blocks(Prefill& x, int n, bool plain) {
  const int nk = NK ? NK : x.width / 32, np = ND ? ND / 2 : x.width_v / 32;
  if (!n) return;
  for (int s = 0; s < x.blocks[0].groups * nk; s++) multiply_keys<NK>(x, x.blocks[0], x.s[0], s);
  for (int i = 0; i <= n; i++) {
    const int now = i & 1, other = now ^ 1;
    ATTN_TILE_FENCE;
    if (i > 0 && x.must_rescale[other]) {
      rescale_rows(x, x.blocks[i - 1], x.rescale[other]);
      x.must_rescale[other] = false;
      ATTN_TILE_FENCE;
    }
    const int steps_k = i + 1 < n ? x.blocks[i + 1].groups * nk : 0, steps_v = i > 0 ? x.blocks[i - 1].groups * np : 0;
    const int total = steps_k + steps_v;
    int row = i < n ? 0 : 32;
    auto rows_upto = [&](int upto) {
      for (; row < upto; row++)
        prefill_softmax<PRECISE>(x, x.blocks[i], row, x.s[now] + row * kBlock, x.p[now] + row * kBlock, x.rescale[now],
                                 x.must_rescale[now], plain);
    };
    for (int s = 0; s < steps_k; s++) {
      multiply_keys<NK>(x, x.blocks[i + 1], x.s[other], s);
      rows_upto(32 * (s + 1) / total);
    }
    for (int s = 0; s < steps_v; s++) {
      multiply_values<ND>(x, x.blocks[i - 1], x.p[other], s);
      rows_upto(32 * (steps_k + s + 1) / total);
    }
    rows_upto(32);
  }
  ATTN_TILE_FENCE;
}

// The blocks that the rows need of the packed keys [t0, t0 + n).
static int list_blocks(const Prefill& x, int subs, int n, int64_t k0) {
  int count = 0;
  for (int sub = 0; sub < subs; sub++) {
    const Bounds* rows = x.bounds + sub * 32;
    const Extent e = extent_of(rows, 32, imax(x.t0, k0), x.t0 + n);
    for (int j = 0; j * kBlock < n; j++) {
      const int64_t from = x.t0 + j * kBlock, to = imin(e.to, from + kBlock);
      if (to <= from || from + kBlock <= e.from) continue;
      const int groups = static_cast<int>((to - from + 31) / 32);
      bool masked = false;
      for (int i = 0; i < 32 && !masked; i++) masked = !sees_all(rows[i], from, from + groups * 32);
      x.blocks[count++] = Block{sub, j, groups, masked};
    }
  }
  return count;
}

static inline void prefill_start(const Call& c, const Item& it, const Prefill& x, int rows, int padded) {
  for (int i = 0; i < padded; i++) {
    const int row = it.r0 + (i < rows ? i : rows - 1), head = it.h * c.group + row % c.group;
    const int64_t token = c.query_start[it.b] + row / c.group;
    stage_words(c.query + (token * c.query_token + head * c.query_head) * 2, x.q + i * x.width, c.head_size, x.width);
    const bool known = i && row / c.group == (it.r0 + i - 1) / c.group;
    x.bounds[i] = known ? x.bounds[i - 1] : bounds_of(c, it.b, row / c.group);
    x.rules[i] = logit_rule(c, it.h, head);
    x.m[i] = -INFINITY;
  }
  memset(x.o, 0, sizeof(float) * padded * x.width_v);
  memset(x.l, 0, sizeof(float) * padded * 16);
  for (int i = 0; i < 32; i++) x.rescale[0][i] = x.rescale[1][i] = 1.f;
  TileConfig tiles;
  for (int i = 0; i < 8; i++) tiles.bytes[i] = 64, tiles.rows[i] = 16;
  use_tiles(tiles);
}

template <int NK, int ND>
static void prefill_run(const Call& c, const Item& it, char* scratch) {
  const TileSource src = tile_source(c);
  Prefill x = prefill_in(scratch, c, src);
  const int rows = it.r1 - it.r0, padded = static_cast<int>(round_up(rows, 32));
  prefill_start(c, it, x, rows, padded);
  // A raw maximum is the maximum of the logits only if they rise together.
  const bool plain = x.rules[0].plain && !x.scaled && x.rules[0].factor > 0.f;
  const Extent e = extent_of(x.bounds, padded, it.k0, it.k1);
  // Starts are multiples of kBlock whatever the rows, so that a row's sums never depend on its neighbours.
  for (x.t0 = e.from < e.to ? e.from / kBlock * kBlock : e.to; x.t0 < e.to; x.t0 += kPacked) {
    const int n = static_cast<int>(imin(kPacked, e.to - x.t0));
    pack_keys(c, it, x, src, n);
    const int count = list_blocks(x, padded / 32, n, it.k0);
    if (c.lse || it.partial) run_blocks<NK, ND, true>(x, count, plain);
    else run_blocks<NK, ND, false>(x, count, plain);
  }
  _tile_release();
  for (int i = 0; i < rows; i++)
    put_unordered_row(c, it, it.r0 + i, x.o + i * x.width_v, x.width_v, x.m[i], vrsum(vload(x.l + i * 16)));
}

static void attend_prefill(const Call& c, const Item& whole, char* scratch) {
  const int nk = (c.head_size + 31) / 32, nd = (c.head_size_v + 31) / 32;
  const int step = prefill_rows(c.head_size, c.head_size_v);
  for (int r = whole.r0; r < whole.r1; r += step) {
    Item it = whole;
    it.r0 = r, it.r1 = static_cast<int>(imin(whole.r1, r + step));
    if (whole.partial) it.partial = whole.partial + (r - whole.r0) * partial_step(c);
    if (nk == 4 && nd == 4) prefill_run<4, 8>(c, it, scratch);
    else if (nk == 2 && nd == 2) prefill_run<2, 4>(c, it, scratch);
    else prefill_run<0, 0>(c, it, scratch);
  }
}
