// Keys and values of many rows as tiles of AMX, for amx_prefill.h.

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
template <int NK, int ND>
static void pack_keys(const Call& c, const Item& it, const Prefill& x, const TileSource& src, int n) {
  const int nk = NK ? NK : x.width / 32, nd = ND ? ND : x.width_v / 16;
  const Widener<true> widener(byte_table(c.kv_dtype == DType::kE5M2 ? DType::kE5M2 : DType::kE4M3));
  StepTiles tiles;
  for (int k = 0; k < n; k += kStep) {
    const int count = static_cast<int>(imin(kStep, n - k));
    const bool bytes = src.bytes && count == kStep;
    tiles_at(c, it.b, it.h, x.t0 + k, count, x.t0 + n, x.key, x.value, src, tiles, true);
    for (int i = 0; i < (count + 31) / 32 * 2; i++) {
      for (int y = 0; y < nk; y++)
        transpose_pairs(tiles.key[i] + y * 32, tiles.key_step, x.keys + ((k / 16 + i) * nk + y) * 512);
      bf* to = x.values + (k / 32 + i / 2) * nd * 512 + i % 2 * 8 * 32;
      if (bytes)
        pack_byte_pairs(widener, tiles.stored[i], c.value.slot, 0, 8, x.width_v, to, tiles.ahead[i]);
      else pack_pairs<ND, 0, false>(tiles.value[i], tiles.value_step, 0, 8, nd, to, tiles, i);
    }
  }
  if (!x.scaled) return;
  for (int j = 0; j < kPacked; j++) {
    x.key_scale[j] = j < n ? scale_at(c, c.key_scales, it.b, it.h, x.t0 + j) : 0.f;
    x.value_scale[j] = j < n ? scale_at(c, c.value_scales, it.b, it.h, x.t0 + j) : 0.f;
  }
}
