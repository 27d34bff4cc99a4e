// What both AMX kernels need: tiles of keys and values as bfloat16, wherever and however they are stored.

typedef uint16_t bf;

// GCC's tile loads are volatile asm without a memory clobber: ordinary stores before them need a barrier.
#define ATTN_TILE_FENCE asm volatile("" ::: "memory")

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, unused[14] = {0};
  uint16_t bytes[16] = {0};
  uint8_t rows[16] = {0};
};

// GCC 12 believes that ldtilecfg reads 8 bytes, and would drop the stores to the others.
static inline void use_tiles(const TileConfig& tiles) {
  asm volatile("" ::"r"(&tiles) : "memory");
  _tile_loadconfig(&tiles);
}

static inline __m512i narrow(vf low, vf high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
static inline __mmask32 first32(int64_t n) {
  return n >= 32 ? ~__mmask32{0} : static_cast<__mmask32>((uint32_t{1} << imax(n, 0)) - 1u);
}

// One stored row of n elements as bfloat16, zeros up to `padded`, a multiple of 32; the row at `ahead` is prefetched.
template <class W>
static inline void stage_bytes(const W& w, const char* from, bf* to, int n, int padded, const char* ahead) {
  int d = 0;
  __m512i a, b;
  for (; d + 64 <= n; d += 64) {
    if (ahead) _mm_prefetch(ahead + d, _MM_HINT_T1);
    w.widen(_mm512_loadu_si512(from + d), a, b);
    _mm512_store_si512(to + d, a);
    _mm512_store_si512(to + d + 32, b);
  }
  if (d >= padded) return;
  w.widen(_mm512_maskz_loadu_epi8(first64(n - d), from + d), a, b);
  _mm512_store_si512(to + d, a);
  if (d + 32 < padded) _mm512_store_si512(to + d + 32, b);
}
static inline void stage_words(const char* from, bf* to, int n, int padded) {
  for (int d = 0; d < padded; d += 32)
    _mm512_store_si512(to + d, _mm512_maskz_loadu_epi16(first32(n - d), from + 2 * d));
}
static inline void stage_rows(DType t, const char* from, int64_t stride, int count, bf* to, int n, int padded,
                              const char* ahead) {
  auto next = [&](int i) { return ahead ? ahead + i * stride : nullptr; };
  if (t == DType::kBFloat16) {
    for (int i = 0; i < count; i++) stage_words(from + i * stride, to + i * padded, n, padded);
  } else if (t == DType::kInt8) {
    const Widener<false> w(byte_table(t));
    for (int i = 0; i < count; i++) stage_bytes(w, from + i * stride, to + i * padded, n, padded, next(i));
  } else {
    const Widener<true> w(byte_table(t));
    for (int i = 0; i < count; i++) stage_bytes(w, from + i * stride, to + i * padded, n, padded, next(i));
  }
}

// Where the four 16-key tiles of one step begin; their rows are a fixed distance apart, in elements.
struct StepTiles {
  const bf *key[4], *value[4];
  int64_t key_step, value_step;
  const char* stored[4];  // values as they are stored, a slot apart, where `TileSource::bytes` leaves them there
  const char* ahead[4];   // those of 64 keys later, to be prefetched then; null: there are none
};

// Where tiles come from in one call.
struct TileSource {
  bool words, key_direct, value_direct;  // direct: tiles are loaded from the cache itself
  bool bytes;                            // values of full steps are widened as they are packed, not before
  int width, width_v;                    // head sizes rounded up to 32
};
static inline TileSource tile_source(const Call& c) {
  TileSource s;
  s.words = c.kv_dtype == DType::kBFloat16;
  // A tile of 16 keys must lie in one block, and its rows in whole groups of 32 columns.
  const bool whole = s.words && (!c.table || c.block_size % 16 == 0);
  s.key_direct = whole && c.head_size % 32 == 0;
  s.value_direct = whole && c.head_size_v % 32 == 0;
  s.bytes = (c.kv_dtype == DType::kE4M3 || c.kv_dtype == DType::kE5M2) && c.table && c.block_size % 16 == 0 &&
            c.head_size_v % 64 == 0;
  s.width = static_cast<int>(round_up(c.head_size, 32));
  s.width_v = static_cast<int>(round_up(c.head_size_v, 32));
  return s;
}

// Copy `count` keys from t on, which may lie in several blocks, into a tile of 16; its other rows become zeros. Rows at
// `ahead`, if any, are prefetched while keys are copied.
static inline void stage_keys(const Call& c, int b, int h, int64_t t, int count, bf* key, bf* value,
                              const TileSource& s, const char* ahead) {
  int done = 0;
  while (done < count) {
    const Run run = run_at(c, b, h, t + done);
    const int n = static_cast<int>(imin(run.count, count - done));
    if (key) stage_rows(c.kv_dtype, run.key, c.key.slot, n, key + done * s.width, c.head_size, s.width, ahead);
    if (value) stage_rows(c.kv_dtype, run.value, c.value.slot, n, value + done * s.width_v, c.head_size_v, s.width_v,
                          nullptr);
    done += n;
  }
  if (count == 16) return;
  if (key) memset(key + count * s.width, 0, sizeof(bf) * (16 - count) * s.width);
  if (value) memset(value + count * s.width_v, 0, sizeof(bf) * (16 - count) * s.width_v);
}

// Prefetch the stored rows of up to 16 keys from t on, of those before `end`.
static inline void prefetch_stored(const Call& c, int b, int h, int64_t t, int64_t end) {
  const int64_t size = dtype_bytes(c.kv_dtype), count = imin(16, end - t);
  for (int64_t done = 0; done < count;) {
    const Run run = run_at(c, b, h, t + done);
    const int64_t n = imin(run.count, count - done);
    for (int64_t i = 0; i < n; i++) {
      for (int64_t d = 0; d < c.head_size * size; d += 64) _mm_prefetch(run.key + i * c.key.slot + d, _MM_HINT_T1);
      for (int64_t d = 0; d < c.head_size_v * size; d += 64) _mm_prefetch(run.value + i * c.value.slot + d, _MM_HINT_T1);
    }
    done += n;
  }
}

// The tiles of keys [t, t + n), n <= 64; past n the last tile again, whose products are masked. `key` and `value` are
// memory for copies where the cache cannot be read directly; `leave_bytes` leaves the values of a full step where they
// are, if the source allows it. While one tile is copied, the one 64 keys later, if it is
// before `end`, is prefetched.
static inline void tiles_at(const Call& c, int b, int h, int64_t t, int n, int64_t end, bf* key, bf* value,
                            const TileSource& s, StepTiles& tiles, bool leave_bytes = false) {
  // Without blocks the memory may end with the last key; a block always has room for its 16.
  const bool inside = c.table || n % 16 == 0;
  const bool key_direct = s.key_direct && inside, value_direct = s.value_direct && inside;
  tiles.key_step = key_direct ? c.key.slot / 2 : s.width;
  tiles.value_step = value_direct ? c.value.slot / 2 : s.width_v;
  Run run = {nullptr, nullptr, 0};
  for (int i = 0; i < 4; i++) {
    if (16 * i >= n) {
      tiles.key[i] = tiles.key[i - 1], tiles.value[i] = tiles.value[i - 1];
      continue;
    }
    if (run.count < 16) run = run_at(c, b, h, t + 16 * i);
    bf *to_key = key + 16 * i * s.width, *to_value = value + 16 * i * s.width_v;
    tiles.key[i] = key_direct ? reinterpret_cast<const bf*>(run.key) : to_key;
    tiles.value[i] = value_direct ? reinterpret_cast<const bf*>(run.value) : to_value;
    tiles.stored[i] = run.value;
    if (!key_direct || !value_direct) {
      // Values that are packed later have their own time; else all 16 rows are prefetched here.
      const bool later = leave_bytes && s.bytes && n == 64, more = t + 80 + 16 * i <= end;
      const Run next = later && more ? run_at(c, b, h, t + 64 + 16 * i) : Run{nullptr, nullptr, 0};
      tiles.ahead[i] = next.value;
      if (!next.key) prefetch_stored(c, b, h, t + 64 + 16 * i, end);
      stage_keys(c, b, h, t + 16 * i, static_cast<int>(imin(16, n - 16 * i)), key_direct ? nullptr : to_key,
                 value_direct || later ? nullptr : to_value, s, next.key);
    }
    run.key += 16 * c.key.slot, run.value += 16 * c.value.slot, run.count -= 16;
  }
}

// Interleaving 16-bit pairs within lanes leaves the columns of two tiles in this order; undone once per row.
static inline void in_order(const float* first_tile, const float* second_tile, vf& x, vf& y) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  const vf a = vload(first_tile), b = vload(second_tile);
  x = _mm512_permutex2var_ps(a, first, b);
  y = _mm512_permutex2var_ps(a, second, b);
}
static inline void put_unordered_row(const Call& c, const Item& it, int row, float* o, int width_v, float m, float l) {
  for (int d = 0; d < width_v; d += 32) {
    vf x, y;
    in_order(o + d, o + d + 16, x, y);
    vstore(o + d, x);
    vstore(o + d + 16, y);
  }
  put_row(c, it, row, o, m, l);
}
