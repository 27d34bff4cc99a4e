// Scalar conversions and small arithmetic, in whatever namespace includes this. All static inline: each ISA's
// translation unit keeps its own copies, compiled with its own flags.

static inline int64_t imin(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t imax(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

static inline float float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
static inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

static inline float from_bf16(uint16_t x) { return float_of_bits(uint32_t{x} << 16); }

static inline uint16_t to_bf16(float x) {
  uint32_t bits = bits_of_float(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float from_f16(uint16_t h) {
  const uint32_t sign = uint32_t{h & 0x8000u} << 16, rest = h & 0x7fffu;
  if (rest >= 0x7c00) return float_of_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // Halves, subnormal ones too, are small floats whose exponent is 112 too low.
  return float_of_bits(sign | bits_of_float(float_of_bits(rest << 13) * 0x1p112f));
}

static inline uint16_t to_f16(float x) {
  const uint32_t bits = bits_of_float(x), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (rest >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds to 65536
  if (rest < 0x38800000) {  // subnormal: the addition rounds at the last bit of a subnormal half
    const uint32_t sum = bits_of_float(float_of_bits(rest) + 0.5f);
    return static_cast<uint16_t>(sign | (sum - 0x3f000000));
  }
  const uint32_t rounded = rest + 0xfff + ((rest >> 13) & 1) - 0x38000000;
  return static_cast<uint16_t>(sign | rounded >> 13);
}

static inline float from_e5m2(uint8_t x) { return from_f16(static_cast<uint16_t>(x << 8)); }

static inline float from_e4m3(uint8_t x) {
  if ((x & 0x7f) == 0x7f) return float_of_bits(0x7fc00000);
  // Shifted into a half the exponent is 8 too low.
  return from_f16(static_cast<uint16_t>((x & 0x80) << 8 | (x & 0x7f) << 7)) * 256.f;
}

// Round |x| to nearest even in a format of `mantissa` bits whose smallest normal exponent is `low`.
static inline uint8_t to_fp8(float x, int mantissa, int low, float limit, uint8_t nan) {
  const uint8_t sign = static_cast<uint8_t>((bits_of_float(x) >> 24) & 0x80);
  float a = fabsf(x);
  if (!(a == a)) return sign | nan;
  if (a > limit) a = limit;
  int exponent = static_cast<int>(bits_of_float(a) >> 23) - 127;
  if (exponent < low) exponent = low;
  // One unit in the last place at this exponent; the sum with 1.5 * 2^23 units rounds to whole units.
  const float unit = float_of_bits(static_cast<uint32_t>(exponent - mantissa + 127) << 23);
  const float units = (a / unit + 0x1.8p23f) - 0x1.8p23f;
  const uint32_t whole = static_cast<uint32_t>(units);
  // A normal number has 2^mantissa <= whole; rounding up to 2^(mantissa + 1) carries into the exponent.
  const uint32_t code = static_cast<uint32_t>(exponent - low) * (1u << mantissa) + whole;
  return static_cast<uint8_t>(sign | code);
}
static inline uint8_t to_e4m3(float x) { return to_fp8(x, 3, -6, 448.f, 0x7f); }
static inline uint8_t to_e5m2(float x) { return to_fp8(x, 2, -14, 57344.f, 0x7f); }

static inline int64_t dtype_bytes(DType t) {
  return t == DType::kFloat32 ? 4 : t == DType::kBFloat16 || t == DType::kFloat16 ? 2 : 1;
}
