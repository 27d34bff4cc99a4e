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
  memset(x.s, 0, kStep * 64);  // what lies past the last key is masked, but read
  TileConfig tiles;
  for (int i = 0; i < 8; i++) tiles.bytes[i] = 64, tiles.rows[i] = 16;
  tiles.bytes[0] = tiles.bytes[1] = tiles.bytes[5] = static_cast<uint16_t>(rows * 4);
  tiles.rows[2] = tiles.rows[3] = tiles.rows[6] = static_cast<uint8_t>(rows);
  use_tiles(tiles);
}

// Interleave 8 pairs of V rows of one tile, from pair `begin` on. Of the same tile of the next step all keys are
// prefetched, and every other value: the rest is asked for by decode_weigh, for memory answers best where it is asked
// evenly. To L2: into L1 is slower, probably for want of line fill buffers.
template <int ND, int NK, bool AHEAD>
static inline void pack_pairs(const bf* value, int64_t step, int begin, int end, int nd, bf* to, const StepTiles& next,
                              int tile) {
  const int columns = ND ? ND / 2 : nd / 2, ahead = NK;
  const int64_t key_step = next.key_step, pair_step = 2 * next.value_step;
  const bf *key = next.key[tile] + 2 * begin * key_step, *later = next.value[tile] + begin * pair_step;
  value += 2 * begin * step;
  for (int i = begin; i < end; i++, value += 2 * step, key += 2 * key_step, later += pair_step)
    for (int j = 0; j < columns; j++) {
      const __m512i e = _mm512_loadu_si512(value + j * 32), f = _mm512_loadu_si512(value + step + j * 32);
      if (AHEAD && j < ahead) {
        _mm_prefetch(key + j * 32, _MM_HINT_T1);
        _mm_prefetch(key + key_step + j * 32, _MM_HINT_T1);
      }
      if (AHEAD) _mm_prefetch(later + j * 32, _MM_HINT_T1);
      _mm512_store_si512(to + 2 * j * 512 + i * 32, _mm512_unpacklo_epi16(e, f));
      _mm512_store_si512(to + (2 * j + 1) * 512 + i * 32, _mm512_unpackhi_epi16(e, f));
    }
}

// The same from stored bytes: interleaved as bytes and then widened, which gives the same columns to the same tiles.
// Rows at `ahead`, if any, are prefetched.
static inline void pack_byte_pairs(const Widener<true>& w, const char* value, int64_t step, int begin, int end, int width,
                                   bf* to, const char* ahead) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  value += 2 * begin * step;
  for (int i = begin; i < end; i++, value += 2 * step)
    for (int d = 0; d < width; d += 64) {
      for (int j = 0; ahead && j < 2; j++) _mm_prefetch(ahead + (2 * i + j) * step + d, _MM_HINT_T1);
      const __m512i e = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(value + d));
      const __m512i f = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(value + step + d));
      __m512i pairs[4];
      w.words(_mm512_unpacklo_epi8(e, f), pairs[0], pairs[1]);
      w.words(_mm512_unpackhi_epi8(e, f), pairs[2], pairs[3]);
      for (int j = 0; j < 4; j++) _mm512_store_si512(to + (d / 16 + j) * 512 + i * 32, pairs[j]);
    }
}

// Products of 32 keys with all rows, while their values are packed, from bytes if there is a `widener`.
template <int NK, int ND, bool AHEAD>
static inline void decode_products(const Decode& x, const TileSource& src, int rows, const StepTiles& now,
                                   const StepTiles& next, int group, const Widener<true>* widener, int64_t slot) {
  const int nk = NK ? NK : src.width / 32, nd = ND ? ND : src.width_v / 16, first = 2 * group;
  bf* to = x.packed + group * nd * 512;
  _tile_zero(0);
  _tile_zero(1);
#pragma GCC unroll 8
  for (int y = 0; y < nk; y++) {
    _tile_loadd(5, x.q[y], 64);
    _tile_loadd(4, now.key[first] + y * 32, now.key_step * 2);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(4, now.key[first + 1] + y * 32, now.key_step * 2);
    _tile_dpbf16ps(1, 4, 5);
    // Pairs 0 to 7 are of the first tile, 8 to 15 of the second.
    const int begin = y * 16 / nk, end = (y + 1) * 16 / nk, cut = begin < 8 ? (end < 8 ? end : 8) : begin;
    if (!AHEAD && widener) {
      if (begin < cut)
        pack_byte_pairs(*widener, now.stored[first], slot, begin, cut, src.width_v, to, now.ahead[first]);
      if (cut < end)
        pack_byte_pairs(*widener, now.stored[first + 1], slot, cut - 8, end - 8, src.width_v, to + 8 * 32,
                        now.ahead[first + 1]);
      continue;
    }
    if (begin < cut)
      pack_pairs<ND, NK ? NK : 64, AHEAD>(now.value[first], now.value_step, begin, cut, nd, to, next, first);
    if (cut < end)
      pack_pairs<ND, NK ? NK : 64, AHEAD>(now.value[first + 1], now.value_step, cut - 8, end - 8, nd, to + 8 * 32, next,
                                          first + 1);
  }
  _tile_stored(0, x.s + group * 32 * rows, rows * 4);
  _tile_stored(1, x.s + (group * 32 + 16) * rows, rows * 4);
}

// Scales of the keys of a step, of an int8 cache.
struct StepScales {
  alignas(64) float key[kStep], value[kStep];
};

// Weights of one row from its products with the keys [t, t + n). Plain: no softcap, slope or scales, and `factor` for
// all rows.
template <bool PLAIN>
static inline void decode_softmax(const Decode& x, int g, int rows, int64_t t, int n, bool masked, int width_v,
                                  vf factor, __m512i at, const StepScales& scales, bool scaled) {
  const Bounds& b = x.bounds[g];
  vf s[4], top = vset(-INFINITY);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    s[i] = _mm512_i32gather_ps(at, x.s + i * 16 * rows + g, 4);
    if (!PLAIN && scaled) s[i] = s[i] * vload(scales.key + 16 * i);
    s[i] = PLAIN ? s[i] * factor : logit(x.rules[g], s[i], t + 16 * i, b.position);
    if (masked) s[i] = vclip(hide(s[i], t + 16 * i, b), t + 16 * i, t, t + n, vset(-INFINITY));
    top = vmax(top, s[i]);
  }
  float m = x.m[g];
  vf l = vload(x.l + g * 16);
  if (__builtin_expect(vany_gt(top, vset(m + 8.f)), 0)) {  // see softmax_row
    const float next = vrmax(top);
    const vf f = vset(exp2_of(m - next));
    l = l * f;
    x.m[g] = m = next;
    for (int d = 0; d < width_v; d += 16) vstore(x.o + g * width_v + d, f * vload(x.o + g * width_v + d));
  }
  const vf shift = vset(m == -INFINITY ? 0.f : m);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    s[i] = vexp2(s[i] - shift);
    l = l + s[i];
    if (!PLAIN && scaled) s[i] = s[i] * vload(scales.value + 16 * i);
  }
  vstore(x.l + g * 16, l);
  _mm512_store_si512(x.p + g * kStep, narrow(s[0], s[1]));
  _mm512_store_si512(x.p + g * kStep + 32, narrow(s[2], s[3]));
}

// Of the pairs of values of two tiles, from `tile` on.
static inline void prefetch_second_rows(const StepTiles& next, int tile, int begin, int end, int width_v) {
  for (int i = begin; i < end; i++) {
    const bf* p = next.value[tile + i / 8] + (i % 8 * 2 + 1) * next.value_step;
    for (int j = 0; j < width_v; j += 32) _mm_prefetch(p + j, _MM_HINT_T1);
  }
}

// o += P.V; of the values at `next`, those that pack_pairs has left are prefetched: row 1 of each pair of 32 keys in turn.
template <int ND, bool AHEAD>
static inline void decode_weigh(const Decode& x, const TileSource& src, int groups, const StepTiles& next) {
  const int nd = ND ? ND : src.width_v / 16, width_v = nd * 16;
#pragma GCC unroll 8
  for (int y = 0; y < nd; y += 2) {
    _tile_loadd(2, x.o + y * 16, width_v * 4);
    _tile_loadd(3, x.o + y * 16 + 16, width_v * 4);
    for (int g = 0; g < groups; g++) {
      const int pairs = 16 * y, half = 16 * (y + 1), last = 16 * (y + 2);  // over nd: what is asked for beside each product
      _tile_loadd(6, x.p + g * 32, kStep * 2);
      _tile_loadd(7, x.packed + (g * nd + y) * 512, 64);
      _tile_dpbf16ps(2, 6, 7);
      if (AHEAD) prefetch_second_rows(next, 2 * g, pairs / nd, half / nd, width_v);
      _tile_loadd(7, x.packed + (g * nd + y + 1) * 512, 64);
      _tile_dpbf16ps(3, 6, 7);
      if (AHEAD) prefetch_second_rows(next, 2 * g, half / nd, last / nd, width_v);
    }
    _tile_stored(2, x.o + y * 16, width_v * 4);
    _tile_stored(3, x.o + y * 16 + 16, width_v * 4);
  }
}

static inline void load_step_scales(const Call& c, const Item& it, int64_t t, int n, StepScales& s) {
  for (int j = 0; j < kStep; j++) {
    s.key[j] = j < n ? scale_at(c, c.key_scales, it.b, it.h, t + j) : 0.f;
    s.value[j] = j < n ? scale_at(c, c.value_scales, it.b, it.h, t + j) : 0.f;
  }
}

// The keys that every row sees by its own interval: steps inside need no mask.
static inline Extent common_extent(const Bounds* rows, int n) {
  Extent e = {0, INT64_MAX};
  for (int i = 0; i < n; i++) e.from = imax(e.from, rows[i].lo), e.to = imin(e.to, rows[i].hi);
  return e;
}

// DIRECT: tiles are read where they are stored, and those of the next step are prefetched as the step goes.
template <int NK, int ND, bool PLAIN, bool DIRECT>
static void decode_steps(const Call& c, const Item& it, const Decode& x, const TileSource& src) {
  const int rows = it.r1 - it.r0;
  const Extent e = extent_of(x.bounds, rows, it.k0, it.k1), common = common_extent(x.bounds, rows);
  const bool scaled = c.kv_dtype == DType::kInt8;
  const __m512i at = _mm512_mullo_epi32(lanes(), _mm512_set1_epi32(rows));
  const vf factor = vset(x.rules[0].factor);
  const Widener<true> widener(byte_table(c.kv_dtype == DType::kE5M2 ? DType::kE5M2 : DType::kE4M3));
  StepScales scales;
  StepTiles tiles[2];
  int now = 0;
  const int64_t first = e.from < e.to ? e.from / kStep * kStep : e.to;
  auto count_at = [&](int64_t t) { return static_cast<int>(imin(kStep, e.to - t)); };
  auto find = [&](int64_t t, StepTiles& to) {
    tiles_at(c, it.b, it.h, t, count_at(t), e.to, x.key, x.value, src, to, true);
  };
  if (DIRECT && first < e.to) find(first, tiles[0]);
  for (int64_t t = first; t < e.to; t += kStep, now ^= 1) {
    const int n = count_at(t), groups = (n + 31) / 32;
    const bool more = DIRECT && t + kStep < e.to;
    if (!DIRECT) find(t, tiles[now]);
    if (more) find(t + kStep, tiles[now ^ 1]);
    const StepTiles& next = tiles[more ? now ^ 1 : now];
    if (!PLAIN && scaled) load_step_scales(c, it, t, n, scales);
    ATTN_TILE_FENCE;
    const Widener<true>* bytes = !DIRECT && src.bytes && n == kStep ? &widener : nullptr;
    for (int g = 0; g < groups; g++)
      decode_products<NK, ND, DIRECT>(x, src, rows, tiles[now], next, g, bytes, c.value.slot);
    ATTN_TILE_FENCE;
    const bool masked = t < common.from || t + kStep > common.to || t + kStep > e.to;
    for (int g = 0; g < rows; g++)
      decode_softmax<PLAIN>(x, g, rows, t, n, masked, src.width_v, factor, at, scales, scaled);
    ATTN_TILE_FENCE;
    decode_weigh<ND, DIRECT>(x, src, groups, next);
    ATTN_TILE_FENCE;
  }
}

template <int NK, int ND>
static void decode_run(const Call& c, const Item& it, char* scratch) {
  const TileSource src = tile_source(c);
  const Decode x = decode_in(scratch, src);
  decode_start(c, it, x, src);
  const bool plain = x.rules[0].plain && c.kv_dtype != DType::kInt8;
  const bool direct = src.key_direct && src.value_direct && c.table;
  if (plain && direct) decode_steps<NK, ND, true, true>(c, it, x, src);
  else if (plain) decode_steps<NK, ND, true, false>(c, it, x, src);
  else if (direct) decode_steps<NK, ND, false, true>(c, it, x, src);
  else decode_steps<NK, ND, false, false>(c, it, x, src);
  _tile_release();
  for (int g = 0; g < it.r1 - it.r0; g++)
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
