// Weights of many rows from their products with one block of keys, for amx_prefill.h.

// Products and weights lie row by row: tile by tile, vectors of a row would be 4 KiB apart, and each load would wait
// for a store that only looks alike.
static inline int product_at(int i, int v) { return i * kBlock + v * 16; }

// Beyond this sum of weights the reference moves. Weights are relative, so it only has to keep sums from overflow.
static constexpr float kMostWeight = 1099511627776.f, kMoveBy = 32.f;  // 2^40; in base 2

// 2^y to 1e-4, for weights that are rounded to bfloat16 and a denominator that nobody asks for.
static inline vf exp2_rough(vf y) {
  const vf f = _mm512_reduce_ps(y, 1);
  vf p = vset(7.802451826e-2f);
  p = vfma(p, f, vset(2.260671812e-1f));
  p = vfma(p, f, vset(6.958335205e-1f));
  p = vfma(p, f, vset(9.999252215e-1f));
  return _mm512_scalef_ps(p, y);
}

// cap * tanh(x * scale / cap) in base 2, to 3e-7 of the cap: by 1 - 2 / (1 + e^2x), which needs no sign.
static inline vf cap_roughly(const LogitRule& r, vf x) {
  const float in_base_2 = r.cap * 1.44269504f;
  const vf e = vexp2(_mm512_min_ps(vset(64.f), x * vset(2.f * r.factor / r.cap))), d = e + vset(1.f);  // NaN stays
  vf inverse = _mm512_rcp14_ps(d);
  inverse = inverse * _mm512_fnmadd_ps(d, inverse, vset(2.f));
  return vfma(inverse, vset(-2.f * in_base_2), vset(in_base_2));
}
static constexpr float kMostRoughCap = 1000.f;  // beyond it, errors would be seen in a weight

// Turn one row of products into logits and hide what it does not see.
template <bool PRECISE>
static inline void row_logits(const Prefill& x, const Block& b, int i, float* s) {
  const int row = b.sub * 32 + i;
  const LogitRule& r = x.rules[row];
  const Bounds& seen = x.bounds[row];
  const bool roughly = !PRECISE && r.cap <= kMostRoughCap;
  const vf slope = vset(-1.44269504f * r.slope);
  for (int v = 0; v < b.groups * 2; v++) {
    const int64_t key = b.j * kBlock + v * 16;
    float* at = s + product_at(i, v);
    vf y = vload(at);
    if (x.scaled) y = y * vload(x.key_scale + key);
    if (r.cap != 0.f && !roughly) {
      y = logit(r, y, x.t0 + key, seen.position);
    } else {
      y = r.cap != 0.f ? cap_roughly(r, y) : y * vset(r.factor);
      if (r.slope != 0.f) y = vfma(slope, vabs(viota(x.t0 + key - seen.position)), y);
    }
    vstore(at, b.masked ? hide(y, x.t0 + key, seen) : y);
  }
}

// Hide the products that one row does not see. Vectors outside [v0, v1), both even, are hidden whole: their weights
// are zeros, and their products are left.
static inline __attribute__((always_inline)) void hide_products(const Prefill& x, const Block& b, int i, float* s, bf* p,
                                                                int& v0, int& v1) {
  const Bounds& seen = x.bounds[b.sub * 32 + i];
  const int from = static_cast<int>(x.t0) + b.j * kBlock, n = b.groups * 32;
  if (seen.xhi) {
    for (int v = v0; v < v1; v++) vstore(s + product_at(i, v), hide(vload(s + product_at(i, v)), from + v * 16, seen));
    return;
  }
  const int lo = static_cast<int>(imin(imax(seen.lo - from, 0), n)), hi = static_cast<int>(imin(imax(seen.hi - from, 0), n));
  const bool any = lo < hi;
  v0 = any ? lo / 32 * 2 : 0, v1 = any ? (hi + 31) / 32 * 2 : 0;
  for (int v = 0; v < v0; v += 2) _mm512_store_si512(p + product_at(i, v), _mm512_setzero_si512());
  for (int v = v1; v < b.groups * 2; v += 2) _mm512_store_si512(p + product_at(i, v), _mm512_setzero_si512());
  auto clip_two = [&](int v) {
    float* at = s + product_at(i, v);
    vstore(at, vclip(vload(at), v * 16, lo, hi, vset(-INFINITY)));
    vstore(at + 16, vclip(vload(at + 16), v * 16 + 16, lo, hi, vset(-INFINITY)));
  };
  if (lo % 32) clip_two(v0);
  if (hi % 32) clip_two(v1 - 2);
}

// Move the reference of a row, up to where no weight of these logits passes 1, and what it was relative to.
static __attribute__((noinline)) void move_reference(const Prefill& x, int row, const float* s, int i, int v0, int v1,
                                                     float factor, Rescale& rescale) {
  vf top = vload(s + product_at(i, v0));
  for (int v = v0 + 1; v < v1; v++) top = vmax(top, vload(s + product_at(i, v)));
  const float old = x.m[row];
  float next = vrmax(top) * factor;
  if (old != -INFINITY && next < old + kMoveBy) next = old + kMoveBy;  // many weights below 2^40 add up
  if (!(next > old)) return;                                           // nothing is seen, or a NaN
  x.m[row] = next;
  if (old == -INFINITY) return;
  const float f = exp2f(old - next);
  vstore(x.l + row * 16, vload(x.l + row * 16) * vset(f));
  rescale.factor[i] = f, rescale.needed = true;
}

// Weights of one row; returns its denominator, 16 lanes.
template <bool PRECISE, bool SCALED>
static inline __attribute__((always_inline)) vf weights_of(const float* s, bf* p, int i, int v0, int v1, float factor,
                                                           float m, const float* scale, vf l) {
  const vf by = vset(factor), shift = vset(m == -INFINITY ? 0.f : -m);
  vf l2 = vzero();
#pragma GCC unroll 4
  for (int v = v0; v < v1; v += 2) {
    const vf y = vfma(vload(s + product_at(i, v)), by, shift), z = vfma(vload(s + product_at(i, v + 1)), by, shift);
    vf a = PRECISE ? vexp2(y) : exp2_rough(y), e = PRECISE ? vexp2(z) : exp2_rough(z);
    l = l + a, l2 = l2 + e;
    if (SCALED) a = a * vload(scale + v * 16), e = e * vload(scale + v * 16 + 16);
    _mm512_store_si512(p + product_at(i, v), narrow(a, e));
  }
  return l + l2;
}

// Weights of one row of one block, whatever it sees and whatever its logits are.
//
// The reference of a row is what the first block that it sees any of gives it. It moves again only if a sum of weights
// passes 2^40, which is found when they are summed: then they are made anew.
template <bool PRECISE, bool PLAIN>
static __attribute__((noinline)) void any_row_weights(const Prefill& x, const Block& b, int i, float* s, bf* p,
                                                      Rescale& rescale) {
  const int row = b.sub * 32 + i;
  int v0 = 0, v1 = 2 * b.groups;
  if (!PLAIN) row_logits<PRECISE>(x, b, i, s);
  else if (b.masked) hide_products(x, b, i, s, p, v0, v1);
  if (v0 == v1) return;
  const float factor = PLAIN ? x.factor : 1.f, *scale = x.value_scale + b.j * kBlock;
  if (x.m[row] == -INFINITY) move_reference(x, row, s, i, v0, v1, factor, rescale);
  for (int turn = 0; turn < 2; turn++) {
    const vf before = vload(x.l + row * 16);
    const vf l = !PLAIN && x.scaled ? weights_of<PRECISE, true>(s, p, i, v0, v1, factor, x.m[row], scale, before)
                                    : weights_of<PRECISE, false>(s, p, i, v0, v1, factor, x.m[row], scale, before);
    if (turn || !vany_gt(l, vset(kMostWeight))) return vstore(x.l + row * 16, l);
    move_reference(x, row, s, i, v0, v1, factor, rescale);
  }
}

// The same where products are logits but for a positive factor and what a row sees is one interval.
template <bool PRECISE, bool MASKED>
static inline __attribute__((always_inline)) void plain_row_weights(const Prefill& x, const Block& b, int i, float* s, bf* p,
                                                                    Rescale& rescale) {
  const int row = b.sub * 32 + i;
  int v0 = 0, v1 = kBlock / 16;
  if (MASKED) {
    v1 = 2 * b.groups;
    if (x.bounds[row].xhi) return any_row_weights<PRECISE, true>(x, b, i, s, p, rescale);
    hide_products(x, b, i, s, p, v0, v1);
    if (v0 == v1) return;
  }
  float m = x.m[row];
  if (m == -INFINITY) {
    vf top = vload(s + product_at(i, v0));
    for (int v = v0 + 1; v < v1; v++) top = vmax(top, vload(s + product_at(i, v)));
    const float first = vrmax(top) * x.factor;
    if (first > m) x.m[row] = m = first;
  }
  const vf l = weights_of<PRECISE, false>(s, p, i, v0, v1, x.factor, m, nullptr, vload(x.l + row * 16));
  if (__builtin_expect(vany_gt(l, vset(kMostWeight)), 0)) return any_row_weights<PRECISE, true>(x, b, i, s, p, rescale);
  vstore(x.l + row * 16, l);
}
