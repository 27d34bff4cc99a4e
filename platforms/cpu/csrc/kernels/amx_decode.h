// Few rows (at most 16) over many keys, in bfloat16 on AMX tiles.
//
// S^T = K.Q^T: 16 keys as they lie in the page are the first operand, so that keys are never packed; S^T is stored
// as [key][row] and gathered into vectors of 16 keys of one row, so that only real rows cost exponentials. Pairs of
// V rows are interleaved between the tile products of K: the two units overlap, where one after the other their
// times add up.

static constexpr int kStep = 64;  // keys at a time

struct Decode {
  uint32_t (*q)[16][16];  // [width / 32][pair of columns][row]
  float *s, *o, *l, *m;   // s [kStep][rows], o [16][width_v], l [16][16 lanes], m [16]
  bf *p, *packed;         // p [16][kStep], packed V [2][width_v / 16][512]
  bf *key, *value;        // copies of tiles where the cache cannot be read directly
  Bounds* bounds;
  LogitRule* rules;
};

static inline size_t decode_bytes(int head_size, int head_size_v) {
  const size_t d = round_up(head_size, 32), dv = round_up(head_size_v, 32);
  return d / 32 * 1024 + kStep * 64 + 16 * dv * 4 + 16 * 64 + 64 + 16 * kStep * 2 + 2 * dv / 16 * 1024 +
         kStep * (d + dv) * 2 + 16 * (sizeof(Bounds) + sizeof(LogitRule)) + 16 * 64;
}
static inline Decode decode_in(char* scratch, const TileSource& src) {
  auto take = [&](size_t bytes) {
    char* p = scratch;
    scratch += round_up(static_cast<int64_t>(bytes), 64);
    return p;
  };
  Decode x;
  x.q = reinterpret_cast<uint32_t(*)[16][16]>(take(src.width / 32 * 1024));
  x.s = reinterpret_cast<float*>(take(kStep * 64));
  x.o = reinterpret_cast<float*>(take(16 * src.width_v * 4));
  x.l = reinterpret_cast<float*>(take(16 * 64));
  x.m = reinterpret_cast<float*>(take(64));
  x.p = reinterpret_cast<bf*>(take(16 * kStep * 2));
  x.packed = reinterpret_cast<bf*>(take(2 * src.width_v / 16 * 1024));
  x.key = reinterpret_cast<bf*>(take(kStep * src.width * 2));
  x.value = reinterpret_cast<bf*>(take(kStep * src.width_v * 2));
  x.bounds = reinterpret_cast<Bounds*>(take(16 * sizeof(Bounds)));
  x.rules = reinterpret_cast<LogitRule*>(take(16 * sizeof(LogitRule)));
  return x;
}

static inline void decode_start(const Call& c, const Item& it, const Decode& x, const TileSource& src) {
  const int rows = it.r1 - it.r0;
  memset(x.q, 0, src.width / 32 * 1024);
  for (int g = 0; g < rows; g++) {
    const int row = it.r0 + g, head = it.h * c.group + row % c.group;
    const int64_t token = c.query_start[it.b] + row / c.group;
    const char* from = c.query + (token * c.query_token + head * c.query_head) * 2;
    for (int d = 0; d < c.head_size; d += 2) memcpy(&x.q[d / 32][d % 32 / 2][g], from + 2 * d, 4);
    x.bounds[g] = bounds_of(c, it.b, row / c.group);
    x.rules[g] = logit_rule(c, it.h, head);
    x.m[g] = -INFINITY;
  }
  memset(x.o, 0, 16 * src.width_v * 4);
  memset(x.l, 0, 16 * 64);
  TileConfig tiles;
  for (int i = 0; i < 8; i++) tiles.bytes[i] = 64, tiles.rows[i] = 16;
  tiles.bytes[0] = tiles.bytes[1] = tiles.bytes[5] = static_cast<uint16_t>(rows * 4);
  tiles.rows[2] = tiles.rows[3] = tiles.rows[6] = static_cast<uint8_t>(rows);
  _tile_loadconfig(&tiles);
}

// Products of 32 keys with all rows, while their values are packed; the keys `ahead` are prefetched. To L2: into L1
// is slower, probably for want of line fill buffers.
template <int NK, int ND>
static inline void decode_products(const Decode& x, const TileSource& src, int rows, const KeyTile* tiles,
                                   const KeyTile* ahead, int group) {
  const int nk = NK ? NK : src.width / 32, nd = ND ? ND : src.width_v / 16;
  bf* to = x.packed + group * nd * 512;
  _tile_zero(0);
  _tile_zero(1);
  for (int y = 0; y < nk; y++) {
    _tile_loadd(5, x.q[y], 64);
    _tile_loadd(4, tiles[0].key + y * 32, tiles[0].key_step * 2);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(4, tiles[1].key + y * 32, tiles[1].key_step * 2);
    _tile_dpbf16ps(1, 4, 5);
    for (int i = y * 16 / nk; i < (y + 1) * 16 / nk; i++) {
      const KeyTile& t = tiles[i / 8];
      const bf *a = t.value + (2 * i % 16) * t.value_step, *b = a + t.value_step;
      const KeyTile& n = ahead[i / 8];
      const bf* next = n.key + (2 * i % 16) * n.key_step;
      for (int j = 0; j < nd / 2; j++) {
        const __m512i e = _mm512_loadu_si512(a + j * 32), f = _mm512_loadu_si512(b + j * 32);
        if (j < nk) {
          _mm_prefetch(next + j * 32, _MM_HINT_T1);
          _mm_prefetch(next + n.key_step + j * 32, _MM_HINT_T1);
        }
        _mm512_store_si512(to + 2 * j * 512 + i * 32, _mm512_unpacklo_epi16(e, f));
        _mm512_store_si512(to + (2 * j + 1) * 512 + i * 32, _mm512_unpackhi_epi16(e, f));
      }
    }
  }
  _tile_stored(0, x.s + group * 32 * rows, rows * 4);
  _tile_stored(1, x.s + (group * 32 + 16) * rows, rows * 4);
}

// Weights of one row from its products with the keys [t, t + n).
static inline void decode_softmax(const Decode& x, int g, int rows, int64_t t, int n, int width_v,
                                  const float* key_scale, const float* value_scale) {
  const __m512i at = _mm512_mullo_epi32(lanes(), _mm512_set1_epi32(rows));
  const Bounds& b = x.bounds[g];
  const bool masked = !sees_all(b, t, t + kStep) || n < kStep;
  vf s[4], top = vset(-INFINITY);
  for (int i = 0; i < 4; i++) {
    s[i] = i * 16 < n ? _mm512_i32gather_ps(at, x.s + i * 16 * rows + g, 4) : vzero();
    if (key_scale) s[i] = s[i] * vload(key_scale + 16 * i);
    s[i] = logit(x.rules[g], s[i], t + 16 * i, b.position);
    if (masked) s[i] = vclip(hide(s[i], t + 16 * i, b), t + 16 * i, t, t + n, vset(-INFINITY));
    top = vmax(top, s[i]);
  }
  float m = x.m[g];
  vf l = vload(x.l + g * 16);
  if (vany_gt(top, vset(m + 8.f))) {  // see softmax_row
    const float next = vrmax(top);
    const vf f = vset(exp2_of(m - next));
    l = l * f;
    x.m[g] = m = next;
    for (int d = 0; d < width_v; d += 16) vstore(x.o + g * width_v + d, f * vload(x.o + g * width_v + d));
  }
  for (int i = 0; i < 4; i++) {
    s[i] = m == -INFINITY ? vzero() : vexp2(s[i] - vset(m));
    l = l + s[i];
    if (value_scale) s[i] = s[i] * vload(value_scale + 16 * i);
  }
  vstore(x.l + g * 16, l);
  _mm512_store_si512(x.p + g * kStep, narrow(s[0], s[1]));
  _mm512_store_si512(x.p + g * kStep + 32, narrow(s[2], s[3]));
}

// o += P.V; the values `ahead` are prefetched.
template <int ND>
static inline void decode_weigh(const Decode& x, const TileSource& src, int groups, const KeyTile* ahead) {
  const int nd = ND ? ND : src.width_v / 16, width_v = nd * 16;
  for (int y = 0; y < nd; y += 2) {
    _tile_loadd(2, x.o + y * 16, width_v * 4);
    _tile_loadd(3, x.o + y * 16 + 16, width_v * 4);
    for (int g = 0; g < groups; g++) {
      for (int i = y * 32 / nd; i < (y + 2) * 32 / nd; i++) {
        const KeyTile& n = ahead[2 * g + i / 16];
        for (int j = 0; j < width_v; j += 32) _mm_prefetch(n.value + i % 16 * n.value_step + j, _MM_HINT_T1);
      }
      _tile_loadd(6, x.p + g * 32, kStep * 2);
      _tile_loadd(7, x.packed + (g * nd + y) * 512, 64);
      _tile_dpbf16ps(2, 6, 7);
      _tile_loadd(7, x.packed + (g * nd + y + 1) * 512, 64);
      _tile_dpbf16ps(3, 6, 7);
    }
    _tile_stored(2, x.o + y * 16, width_v * 4);
    _tile_stored(3, x.o + y * 16 + 16, width_v * 4);
  }
}

// The four tiles of [t, t + n); past n the last tile again, whose products are masked.
static inline void decode_tiles(const Call& c, const Item& it, const Decode& x, const TileSource& src, int64_t t, int n,
                                KeyTile* tiles) {
  for (int i = 0; i < 4; i++) {
    if (16 * i >= n) {
      tiles[i] = tiles[i - 1];
      continue;
    }
    const int count = static_cast<int>(imin(16, n - 16 * i));
    tiles[i] = tile_at(c, it.b, it.h, t + 16 * i, count, x.key + 16 * i * src.width, x.value + 16 * i * src.width_v, src);
  }
}

template <int NK, int ND>
static void decode_run(const Call& c, const Item& it, char* scratch) {
  const TileSource src = tile_source(c);
  const Decode x = decode_in(scratch, src);
  const int rows = it.r1 - it.r0;
  decode_start(c, it, x, src);
  const Extent e = extent_of(x.bounds, rows, it.k0, it.k1);
  const bool scaled = c.kv_dtype == DType::kInt8, direct = src.key_direct && src.value_direct && c.table;
  alignas(64) float key_scale[kStep], value_scale[kStep];
  KeyTile tiles[4], ahead[4];
  const int64_t first = e.from < e.to ? e.from / kStep * kStep : e.to;
  auto count_at = [&](int64_t t) { return static_cast<int>(imin(kStep, e.to - t)); };
  for (int64_t t = first; t < e.to; t += kStep) {
    const int n = count_at(t), groups = (n + 31) / 32;
    if (direct && t > first) memcpy(tiles, ahead, sizeof tiles);
    else decode_tiles(c, it, x, src, t, n, tiles);
    if (direct && t + kStep < e.to) decode_tiles(c, it, x, src, t + kStep, count_at(t + kStep), ahead);
    else memcpy(ahead, tiles, sizeof ahead);
    if (scaled)
      for (int j = 0; j < kStep; j++) {
        key_scale[j] = j < n ? scale_at(c, c.key_scales, it.b, it.h, t + j) : 0.f;
        value_scale[j] = j < n ? scale_at(c, c.value_scales, it.b, it.h, t + j) : 0.f;
      }
    ATTN_TILE_FENCE;
    for (int g = 0; g < groups; g++)
      decode_products<NK, ND>(x, src, rows, tiles + 2 * g, ahead + 2 * g, g);
    ATTN_TILE_FENCE;
    for (int g = 0; g < rows; g++)
      decode_softmax(x, g, rows, t, n, src.width_v, scaled ? key_scale : nullptr, scaled ? value_scale : nullptr);
    ATTN_TILE_FENCE;
    decode_weigh<ND>(x, src, groups, ahead);
    ATTN_TILE_FENCE;
  }
  _tile_release();
  for (int g = 0; g < rows; g++)
    put_unordered_row(c, it, it.r0 + g, x.o + g * src.width_v, src.width_v, x.m[g], vrsum(vload(x.l + g * 16)));
}

static void attend_decode(const Call& c, const Item& it, char* scratch) {
  const int nk = (c.head_size + 31) / 32, nd = (c.head_size_v + 31) / 32;
  if (nk == 4 && nd == 4) return decode_run<4, 8>(c, it, scratch);
  if (nk == 2 && nd == 2) return decode_run<2, 4>(c, it, scratch);
  if (nk == 8 && nd == 8) return decode_run<8, 16>(c, it, scratch);
  if (nk == 3 && nd == 3) return decode_run<3, 6>(c, it, scratch);
  if (nk == 6 && nd == 6) return decode_run<6, 12>(c, it, scratch);
  decode_run<0, 0>(c, it, scratch);
}
