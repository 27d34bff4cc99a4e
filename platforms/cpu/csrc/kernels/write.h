// Writing new keys and values into their slots.

static inline void store_plain(const WriteCall& w, const char* from, char* to, int n) {
  memcpy(to, from, n * dtype_bytes(w.dtype));
}
static inline void store_fp8(const WriteCall& w, const char* from, char* to, int n, float scale) {
  const int64_t size = dtype_bytes(w.dtype);
  float x[W];
  for (int d = 0; d < n; d += W) {
    vstore(x, vload_as(w.dtype, from + d * size, n - d) / vset(scale));
    for (int i = 0; i < W && d + i < n; i++)
      to[d + i] = static_cast<char>(w.kv_dtype == DType::kE4M3 ? to_e4m3(x[i]) : to_e5m2(x[i]));
  }
}
// Symmetric, scale = largest magnitude / 127; a row of zeros keeps scale 0. Returns the scale.
static inline float store_int8(const WriteCall& w, const char* from, char* to, int n) {
  const int64_t size = dtype_bytes(w.dtype);
  vf top = vzero();
  for (int d = 0; d < n; d += W) top = vmax(top, vabs(vload_as(w.dtype, from + d * size, n - d)));
  const float scale = vrmax(top) / 127.f, divisor = scale > 0.f ? scale : 1.f;
  float x[W];
  for (int d = 0; d < n; d += W) {
    vstore(x, vload_as(w.dtype, from + d * size, n - d) / vset(divisor));
    for (int i = 0; i < W && d + i < n; i++) {
      const float whole = nearbyintf(x[i]);
      to[d + i] = static_cast<char>(static_cast<int>(whole > 127.f ? 127.f : whole < -127.f ? -127.f : whole));
    }
  }
  return scale;
}

static inline void store_row(const WriteCall& w, const char* from, const KvView& cache, const ScaleView& scales,
                             const float* scale, int scale_step, int64_t slot, int h, int n) {
  const int64_t block = slot / w.block_size, at = slot % w.block_size;
  char* to = cache.data + block * cache.block + at * cache.slot + h * cache.head;
  if (w.kv_dtype == w.dtype) return store_plain(w, from, to, n);
  if (w.kv_dtype != DType::kInt8) return store_fp8(w, from, to, n, scale ? scale[h * scale_step] : 1.f);
  scales.data[block * scales.block + at * scales.slot + h * scales.head] = store_int8(w, from, to, n);
}

static void write_slots(const WriteCall& w, int64_t begin, int64_t end) {
  const int64_t size = dtype_bytes(w.dtype);
  for (int64_t i = begin; i < end; i++) {
    if (w.slots[i] < 0) continue;
    for (int h = 0; h < w.num_kv_heads; h++) {
      store_row(w, w.key + (i * w.key_token + h * w.key_head) * size, w.key_cache, w.key_scales, w.k_scale,
                w.k_scale_step, w.slots[i], h, w.head_size);
      store_row(w, w.value + (i * w.value_token + h * w.value_head) * size, w.value_cache, w.value_scales,
                w.v_scale, w.v_scale_step, w.slots[i], h, w.head_size_v);
    }
  }
}
