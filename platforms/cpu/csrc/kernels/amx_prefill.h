// Many rows in bfloat16 on AMX tiles: 32 rows by 128 keys at a time, keys and values packed once for all rows.
//
// The softmax of one block of products runs between the tile steps of the next block's Q.K and the last block's P.V,
// so that both units are busy. Queries and accumulators lie tile by tile, 1 KiB each.

static constexpr int kBlock = 128, kPacked = 512;  // keys per softmax block; keys packed at a time

// Rows whose queries and accumulators stay in L2 beside the packed keys.
static inline int prefill_rows(int head_size, int head_size_v) {
  const int64_t widest = imax(128, imax(head_size, head_size_v));
  return static_cast<int>(imax(64, kMaxRows * 128 / widest / 32 * 32));
}

// One block of products: 32 rows from 32 `sub` on, `groups` times 32 keys from kBlock `j` on among those packed.
struct Block {
  int sub, j, groups;
  bool masked, first;  // masked: or not whole; first: its rows have no accumulators yet
};

// What 32 rows see: keys that any of them does, and keys that all do.
struct SubSpan {
  Extent any, all;
  bool begun;  // they have accumulators
};

// Factors of the accumulators of 32 rows, before weights with a new reference are added.
struct Rescale {
  float factor[32];
  bool needed;
};

struct Prefill {
  bf *q, *keys, *values, *p[2], *key, *value;
  float *o, *s[2], *l, *m, *key_scale, *value_scale;
  Bounds* bounds;
  Block* blocks;
  LogitRule* rules;  // one per row
  SubSpan* spans;       // one per 32 rows
  Rescale rescale[2];
  int width, width_v;
  float factor;      // of rules that are plain
  int64_t t0;        // position of the first packed key
  bool scaled;
};

static inline size_t prefill_bytes(int head_size, int head_size_v) {
  const size_t rows = prefill_rows(head_size, head_size_v), d = round_up(head_size, 32), dv = round_up(head_size_v, 32);
  return rows * (2 * d + 4 * dv + 64 + 4 + sizeof(Bounds) + sizeof(LogitRule)) + kPacked * 2 * (d + dv) +
         2 * 32 * kBlock * 6 + kStep * 2 * (d + dv) + 2 * kPacked * 4 + rows / 32 * sizeof(SubSpan) +
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
  x.key_scale = floats(kPacked), x.value_scale = floats(kPacked);
  x.bounds = reinterpret_cast<Bounds*>(take(rows * sizeof(Bounds)));
  x.rules = reinterpret_cast<LogitRule*>(take(rows * sizeof(LogitRule)));
  x.blocks = reinterpret_cast<Block*>(take((rows / 32) * (kPacked / kBlock) * sizeof(Block)));
  x.spans = reinterpret_cast<SubSpan*>(take(rows / 32 * sizeof(SubSpan)));
  x.scaled = c.kv_dtype == DType::kInt8;
  return x;
}

#include "amx_pack.h"
#include "amx_weights.h"

// Vector v of row i of 32 among their accumulators: [width_v / 32][rows 0-15, 16-31][columns 0-15, 16-31] tiles.
static inline int accumulator_at(int i, int v) { return v / 2 * 1024 + i / 16 * 512 + v % 2 * 256 + i % 16 * 16; }

static inline void zero_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
static inline void load_tiles(const float* from) {
  _tile_loadd(0, from, 64);
  _tile_loadd(1, from + 256, 64);
  _tile_loadd(2, from + 512, 64);
  _tile_loadd(3, from + 768, 64);
}
static inline void store_tiles(float* to) {
  _tile_stored(0, to, 64);
  _tile_stored(1, to + 256, 64);
  _tile_stored(2, to + 512, 64);
  _tile_stored(3, to + 768, 64);
}
static inline void store_products(float* to) {
  _tile_stored(0, to, kBlock * 4);
  _tile_stored(1, to + 16, kBlock * 4);
  _tile_stored(2, to + 16 * kBlock, kBlock * 4);
  _tile_stored(3, to + 16 * kBlock + 16, kBlock * 4);
}
// 32 rows, as tiles at a and a2 of rows `row` elements apart, by 32 columns, at b and b2.
static inline void multiply_tiles(const bf* a, const bf* a2, int row, const bf* b, const bf* b2) {
  _tile_loadd(4, a, row * 2);
  _tile_loadd(6, b, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, b2, 64);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(5, a2, row * 2);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// S = Q.K^T of a block; `after` runs after each of the groups * NK tile steps.
template <int NK, class After>
static inline __attribute__((always_inline)) void multiply_keys(const Prefill& x, const Block& b, float* s, After after) {
  const int nk = NK ? NK : x.width / 32;
  const bf *q = x.q + b.sub * nk * 1024, *k = x.keys + b.j * (kBlock / 16) * nk * 512;
  for (int group = 0; group < b.groups; group++, k += 2 * nk * 512) {
    zero_tiles();
    for (int y = 0; y < nk; y++) {
      multiply_tiles(q + y * 512, q + (nk + y) * 512, 32, k + y * 512, k + (nk + y) * 512);
      if (y == nk - 1) store_products(s + group * 32);
      after();
    }
  }
}

// O += P.V of a block; `after` runs after each of the groups * ND / 2 tile steps.
template <int ND, class After>
static inline __attribute__((always_inline)) void multiply_values(const Prefill& x, const Block& b, const bf* p, After after) {
  const int nd = ND ? ND : x.width_v / 16;
  float* o = x.o + b.sub * nd * 512;
  const bf* v = x.values + b.j * (kBlock / 32) * nd * 512;
  for (int pair = 0; pair < nd / 2; pair++, o += 1024, v += 1024) {
    if (b.first) zero_tiles();
    else load_tiles(o);
    for (int group = 0; group < b.groups; group++) {
      multiply_tiles(p + group * 32, p + group * 32 + 16 * kBlock, kBlock, v + group * nd * 512, v + group * nd * 512 + 512);
      if (group == b.groups - 1) store_tiles(o);
      after();
    }
  }
}

static inline void rescale_rows(const Prefill& x, const Block& b, Rescale& rescale) {
  for (int i = 0; i < 32 && !b.first; i++) {
    if (rescale.factor[i] == 1.f) continue;
    float* o = x.o + b.sub * 32 * x.width_v;
    for (int v = 0; v < x.width_v / 16; v++) {
      float* at = o + accumulator_at(i, v);
      vstore(at, vload(at) * vset(rescale.factor[i]));
    }
  }
  for (float& f : rescale.factor) f = 1.f;
  rescale.needed = false;
}

// How the weights of a block's rows are made.
enum class Weighing { kAny, kWhole, kMasked };

template <Weighing HOW, bool PRECISE>
static inline __attribute__((always_inline)) void weigh(Prefill& x, int block, int row, int at) {
  const Block& b = x.blocks[block];
  if (HOW == Weighing::kAny) any_row_weights<PRECISE, false>(x, b, row, x.s[at], x.p[at], x.rescale[at]);
  else plain_row_weights<PRECISE, HOW == Weighing::kMasked>(x, b, row, x.s[at], x.p[at], x.rescale[at]);
}

// Weights of block i, between the tile steps of Q.K of the next one and P.V of the one before, of those there are.
template <int NK, int ND, Weighing HOW, bool PRECISE>
static inline __attribute__((always_inline)) void run_block(Prefill& x, int i, int n) {
  const int nk = NK ? NK : x.width / 32, np = ND ? ND / 2 : x.width_v / 32, now = i & 1, other = now ^ 1;
  const int steps = (i + 1 < n ? x.blocks[i + 1].groups * nk : 0) + (i > 0 ? x.blocks[i - 1].groups * np : 0);
  int row = i < n ? 0 : 32, due = 0;
  auto some_rows = [&]() __attribute__((always_inline)) {
    for (due += 32; due >= steps && row < 32; due -= steps, row++) weigh<HOW, PRECISE>(x, i, row, now);
  };
  if (i + 1 < n) multiply_keys<NK>(x, x.blocks[i + 1], x.s[other], some_rows);
  if (i > 0) multiply_values<ND>(x, x.blocks[i - 1], x.p[other], some_rows);
  if (steps == 0) due = 32, some_rows();
}

// The blocks of the packed keys, in turn.
template <int NK, int ND, bool PRECISE, bool PLAIN>
static void run_blocks(Prefill& x, int n) {
  if (!n) return;
  multiply_keys<NK>(x, x.blocks[0], x.s[0], [] {});
  for (int i = 0; i <= n; i++) {
    Rescale& before = x.rescale[i & 1 ^ 1];
    ATTN_TILE_FENCE;
    if (i > 0 && before.needed) {
      rescale_rows(x, x.blocks[i - 1], before);
      ATTN_TILE_FENCE;
    }
    if (!PLAIN) run_block<NK, ND, Weighing::kAny, PRECISE>(x, i, n);
    else if (i < n && x.blocks[i].masked) run_block<NK, ND, Weighing::kMasked, PRECISE>(x, i, n);
    else run_block<NK, ND, Weighing::kWhole, PRECISE>(x, i, n);
  }
  ATTN_TILE_FENCE;
}

static inline SubSpan sub_span_of(const Bounds* rows, int64_t k0, int64_t k1) {
  SubSpan s = {extent_of(rows, 32, k0, k1), {0, INT64_MAX}, false};
  for (int i = 0; i < 32; i++) {
    const bool both = rows[i].xhi;  // two intervals: each block is looked at key by key
    s.all.from = imax(s.all.from, both ? INT64_MAX : rows[i].lo), s.all.to = imin(s.all.to, rows[i].hi);
  }
  return s;
}

// The blocks that the rows need of the packed keys [t0, t0 + n).
static int list_blocks(const Prefill& x, int subs, int n) {
  int count = 0;
  for (int sub = 0; sub < subs; sub++) {
    SubSpan& s = x.spans[sub];
    for (int j = 0; j * kBlock < n; j++) {
      const int64_t from = x.t0 + j * kBlock, to = imin(imin(s.any.to, from + kBlock), x.t0 + n);
      if (to <= from || from + kBlock <= s.any.from) continue;
      const int groups = static_cast<int>((to - from + 31) / 32);
      const bool whole = groups * 32 == kBlock && s.all.from <= from && from + kBlock <= s.all.to;
      x.blocks[count++] = Block{sub, j, groups, !whole, !s.begun};
      s.begun = true;
    }
  }
  return count;
}

template <int NK>
static inline void prefill_start(const Call& c, const Item& it, Prefill& x, int rows, int padded) {
  const int nk = NK ? NK : x.width / 32;
  int g = it.r0 % c.group, token = it.r0 / c.group;
  const char* q = nullptr;
  for (int i = 0; i < padded; i++) {
    if (i == 0 || g == 0) {
      q = c.query + ((c.query_start[it.b] + token) * c.query_token + int64_t{it.h * c.group + g} * c.query_head) * 2;
      if (i < rows) x.bounds[i] = bounds_of(c, it.b, token);
    }
    if (i && (g || i >= rows)) x.bounds[i] = x.bounds[i - 1];
    bf* to = x.q + (i / 16 * nk * 16 + i % 16) * 32;
    for (int y = 0; y < nk; y++)
      _mm512_store_si512(to + y * 512, _mm512_maskz_loadu_epi16(first32(c.head_size - y * 32), q + y * 64));
    x.rules[i] = i < c.group ? logit_rule(c, it.h, it.h * c.group + g) : x.rules[i - c.group];
    if (i >= rows - 1) continue;  // rows that fill a tile repeat the last one
    q += 2 * c.query_head;
    if (++g == c.group) g = 0, token++;
  }
  for (int i = 0; i < padded; i += 16) vstore(x.m + i, vset(-INFINITY));
  x.factor = x.rules[0].factor;
  memset(x.l, 0, sizeof(float) * padded * 16);
  for (int i = 0; i < padded; i += 32) x.spans[i / 32] = sub_span_of(x.bounds + i, it.k0, it.k1);
  for (Rescale& r : x.rescale)
    for (float& f : r.factor) f = 1.f;
  TileConfig tiles;
  for (int i = 0; i < 8; i++) tiles.bytes[i] = 64, tiles.rows[i] = 16;
  use_tiles(tiles);
}

static inline void put_prefill_row(const Call& c, const float* o, int at, char* out, float factor) {
  for (int d = 0; d < c.head_size_v; d += 32) {
    vf a, e;
    in_order(o + accumulator_at(at, d / 16), o + accumulator_at(at, d / 16 + 1), a, e);
    _mm512_mask_storeu_epi16(out + 2 * d, first32(c.head_size_v - d), narrow(a * vset(factor), e * vset(factor)));
  }
}
static inline void put_prefill_partial(const Call& c, const Item& it, const Prefill& x, int row, const float* o, float l) {
  alignas(64) float in_row[576];
  for (int d = 0; d < x.width_v; d += 32) {
    vf a, e;
    in_order(o + accumulator_at(row % 32, d / 16), o + accumulator_at(row % 32, d / 16 + 1), a, e);
    vstore(in_row + d, a), vstore(in_row + d + 16, e);
  }
  put_row(c, it, it.r0 + row, in_row, x.m[row], l);
}

// Write the rows, or their partial results.
static inline void prefill_finish(const Call& c, const Item& it, const Prefill& x, int rows) {
  const bool short_way = !c.sinks && !c.lse && !it.partial;
  const vf stored = vset(c.v_scale ? c.v_scale[it.h * c.v_scale_step] : 1.f);
  int g = it.r0 % c.group;
  int64_t token = c.query_start[it.b] + it.r0 / c.group;
  alignas(64) float sums[16], factors[16];
  for (int i = 0; i < rows; i++) {
    if (i % 16 == 0) {
      vf lanes_of[16];
      for (int j = 0; j < 16; j++) lanes_of[j] = vload(x.l + (i + j) * 16);
      const vf l = vreduce(lanes_of);
      vstore(sums, l), vstore(factors, stored / l);
    }
    const float* o = x.o + i / 32 * 32 * x.width_v;
    const int head = it.h * c.group + g;
    char* out = c.out + (token * c.out_token + head * c.out_head) * 2;
    if (short_way && x.m[i] != -INFINITY) {
      put_prefill_row(c, o, i % 32, out, factors[i % 16]);
    } else if (it.partial) {
      put_prefill_partial(c, it, x, i, o, sums[i % 16]);
    } else {
      const Finish f = finish_of(c, it.h, head, token, x.m[i], sums[i % 16]);
      if (f.empty) memset(out, 0, 2 * c.head_size_v);
      else put_prefill_row(c, o, i % 32, out, f.factor);
    }
    if (++g == c.group) g = 0, token++;
  }
}

template <int NK, int ND>
static void prefill_run(const Call& c, const Item& it, char* scratch) {
  const TileSource src = tile_source(c);
  Prefill x = prefill_in(scratch, c, src);
  const int rows = it.r1 - it.r0, padded = static_cast<int>(round_up(rows, 32));
  prefill_start<NK>(c, it, x, rows, padded);
  // A raw sum of weights passes its limit only if products and logits rise together.
  const bool plain = x.rules[0].plain && !x.scaled && x.factor > 0.f, precise = c.lse || it.partial;
  const auto run = plain ? precise ? run_blocks<NK, ND, true, true> : run_blocks<NK, ND, false, true>
                         : precise ? run_blocks<NK, ND, true, false> : run_blocks<NK, ND, false, false>;
  Extent e = x.spans[0].any;
  for (int i = 1; i < padded / 32; i++) e.from = imin(e.from, x.spans[i].any.from), e.to = imax(e.to, x.spans[i].any.to);
  // Starts are multiples of kBlock whatever the rows, so that a row's sums never depend on its neighbours.
  for (x.t0 = e.from < e.to ? e.from / kBlock * kBlock : e.to; x.t0 < e.to; x.t0 += kPacked) {
    const int n = static_cast<int>(imin(kPacked, e.to - x.t0));
    pack_keys<NK, ND>(c, it, x, src, n);
    run(x, list_blocks(x, padded / 32, n));
  }
  _tile_release();
  prefill_finish(c, it, x, rows);
}

static void attend_prefill(const Call& c, const Item& whole, char* scratch) {
  const int nk = (c.head_size + 31) / 32, nd = (c.head_size_v + 31) / 32;
  const int step = prefill_rows(c.head_size, c.head_size_v);
  const auto run = nk == 4 && nd == 4   ? prefill_run<4, 8>
                   : nk == 2 && nd == 2 ? prefill_run<2, 4>
                   : nk == 3 && nd == 3 ? prefill_run<3, 6>
                   : nk == 6 && nd == 6 ? prefill_run<6, 12>
                   : nk == 8 && nd == 8 ? prefill_run<8, 16>
                   : nk == 6 && nd == 4 ? prefill_run<6, 8>
                                        : prefill_run<0, 0>;
  for (int r = whole.r0; r < whole.r1; r += step) {
    Item it = whole;
    it.r0 = r, it.r1 = static_cast<int>(imin(whole.r1, r + step));
    if (whole.partial) it.partial = whole.partial + (r - whole.r0) * partial_step(c);
    run(c, it, scratch);
  }
}
