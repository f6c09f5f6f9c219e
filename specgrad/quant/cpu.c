// The kernels of specgrad/quant/cpu.py, one per section, on portable vector types (AVX-512, AVX2, NEON, SSE alike).
// Sizes arrive as macros, positions by pointer. No libc: exp, log1p, sine and cosine are here.
// No output row depends on how many rows a call has: every sum has its own fixed order.
// at (2,B): the position of each sequence's first row, then the slot in which it lives of caches (SLOTS,...). Rows and results are those of
// sequence after sequence, PER of each. Of entries spread over RANKS devices this one, RANK, keeps entry j = RANK + i * RANKS in row i.
// W4A8: 1 where values are rounded as the official code does (bfloat16 between operations, e4m3 and e2m1 in caches and in
// front of quantised products), 0 for float32 throughout.
#ifndef W4A8
#define W4A8 0
#endif
#ifndef HADAMARD
#define HADAMARD 0.0f                                       // n^-1/2 for an indexer's n channels
#endif
typedef float v4 __attribute__((vector_size(16), aligned(4)));
typedef float v8 __attribute__((vector_size(32), aligned(4)));
typedef float v16 __attribute__((vector_size(64), aligned(4)));
typedef unsigned char u8;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned short half __attribute__((aligned(1), may_alias));
#define INF __builtin_inff()

#ifdef B
#define PER (T / B)
#endif
#ifndef RANKS
#define RANK 0
#define RANKS 1
#endif
// one parameter for each device
#define EACH1(X) X(0)
#define EACH2(X) EACH1(X), X(1)
#define EACH3(X) EACH2(X), X(2)
#define EACH4(X) EACH3(X), X(3)
#define EACH5(X) EACH4(X), X(4)
#define EACH6(X) EACH5(X), X(5)
#define EACH7(X) EACH6(X), X(6)
#define EACH8(X) EACH7(X), X(7)
#define JOINED(a, b) a##b
#define JOIN(a, b) JOINED(a, b)
#define EACH(X) JOIN(EACH, RANKS)(X)
#define IN(i) const float* restrict in##i
#define OUT(i) float* restrict out##i
#define IN_NAME(i) in##i
#define OUT_NAME(i) out##i
static inline int own(int n) { return (n + RANKS - 1 - RANK) / RANKS; }  // of n entries how many are kept here

static inline float hsum(v8 a) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }
static inline v8 ld(const float* p) { return *(const v8*)p; }
static inline v8 halves(v16 a) {
  return __builtin_shufflevector(a, a, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(a, a, 8, 9, 10, 11, 12, 13, 14, 15);
}
static inline v4 sums(v16 a, v16 b, v16 c, v16 d) {        // each one's lanes added up, by the same tree for all four
  v8 w = halves(a), x = halves(b), y = halves(c), z = halves(d);
  v8 p = __builtin_shufflevector(w, x, 0, 8, 1, 9, 4, 12, 5, 13) + __builtin_shufflevector(w, x, 2, 10, 3, 11, 6, 14, 7, 15);
  v8 q = __builtin_shufflevector(y, z, 0, 8, 1, 9, 4, 12, 5, 13) + __builtin_shufflevector(y, z, 2, 10, 3, 11, 6, 14, 7, 15);
  v8 r = __builtin_shufflevector(p, q, 0, 1, 8, 9, 4, 5, 12, 13) + __builtin_shufflevector(p, q, 2, 3, 10, 11, 6, 7, 14, 15);
  return __builtin_shufflevector(r, r, 0, 1, 2, 3) + __builtin_shufflevector(r, r, 4, 5, 6, 7);
}

static inline float dot(const float* a, const float* b, int n) {
  v8 s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0}; int i = 0;
  for (; i + 32 <= n; i += 32) {
    s0 += ld(a + i) * ld(b + i); s1 += ld(a + i + 8) * ld(b + i + 8);
    s2 += ld(a + i + 16) * ld(b + i + 16); s3 += ld(a + i + 24) * ld(b + i + 24);
  }
  for (; i + 8 <= n; i += 8) s0 += ld(a + i) * ld(b + i);
  float r = hsum((s0 + s1) + (s2 + s3));
  for (; i < n; i++) r += a[i] * b[i];
  return r;
}

static inline float expf_(float x) {            // Cody-Waite reduction and a degree-6 polynomial, about one ulp; e^-inf = 0
  union { u32 u; float f; } s;
  float c = x < -87.3f ? -87.3f : x > 88.7f ? 88.7f : x;
  float n = __builtin_rintf(c * 1.44269504f), r = (c - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f; p = p * r + 8.3334519073e-3f; p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f; p = p * r + 5.0000001201e-1f; p = p * r * r + r + 1.0f;
  s.u = (u32)((int)n + 126) << 23;
  return x < -87.3f ? 0.0f : p * s.f * 2.0f;
}
static inline float sigmoid(float x) { return 1.0f / (1.0f + expf_(-x)); }

static inline float softplus(float z) {         // max(z,0) + log1p(e^-|z|), log1p as the series of 2 atanh(y / (2 + y))
  float y = expf_(z < 0 ? z : -z), w = y / (2 + y), q = w * w, s = 1.0f / 15;
  s = s * q + 1.0f / 13; s = s * q + 1.0f / 11; s = s * q + 1.0f / 9; s = s * q + 1.0f / 7; s = s * q + 1.0f / 5;
  s = s * q + 1.0f / 3; s = s * q + 1.0f;
  return (z > 0 ? z : 0) + 2 * w * s;
}

static inline void sincos_(float angle, float* sn, float* cs) {   // in double: angles reach a million
  double x = angle, t = x * 0.63661977236758134308; i64 q = (i64)(t + (t >= 0 ? 0.5 : -0.5));
  double r = (x - q * 1.57079632673412561417) - q * 6.07710050650619224932e-11, z = r * r;
  double s = r + r * z * (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 + z * (1.0 / 362880 + z * (-1.0 / 39916800 + z / 6227020800.0)))));
  double c = 1 + z * (-0.5 + z * (1.0 / 24 + z * (-1.0 / 720 + z * (1.0 / 40320 + z * (-1.0 / 3628800 + z / 479001600.0)))));
  double a = q & 1 ? c : s, b = q & 1 ? s : c;
  *sn = (float)(q & 2 ? -a : a); *cs = (float)((q + 1) & 2 ? -b : b);
}

// ------------------------------------------------------------------------------------------------ formats
typedef union { float f; u32 u; } bits;
static inline float bf16(float x) {                         // to bfloat16, ties to even
  bits a = { x }; u32 r = (a.u + 0x7fffu + (a.u >> 16 & 1)) & 0xffff0000u;
  a.u = (a.u & 0x7fffffffu) > 0x7f800000u ? a.u : r; return a.f;
}
static inline float rnd(float x) { return W4A8 ? bf16(x) : x; }
static inline float pow2(int code) {                        // of an e8m0 code; 255 is NaN
  bits a; a.u = code == 255 ? 0x7fc00000u : code ? (u32)code << 23 : 1u << 22; return a.f;
}
static inline int scale_code(float amax, float inverse) {   // e8m0 code of 2^ceil(log2(amax * inverse)); 255 of what is not finite
  bits a = { amax * inverse }; int code = (int)(a.u >> 23) + ((a.u & 0x7fffffu) != 0);
  return code > 254 ? 255 : code;
}
static inline float amax(const float* x, int n, float least) {   // an integer maximum: the same order, and it vectorises
  bits best = { least };
  for (int i = 0; i < n; i++) { bits a = { x[i] }; u32 m = a.u & 0x7fffffffu; best.u = m > best.u ? m : best.u; }
  return best.f;
}
static inline u8 to_e4m3(float x) {                         // saturating, ties to even
  bits a = { x }, b; u32 sign = a.u >> 24 & 0x80; a.u &= 0x7fffffffu;
  if (a.f != a.f) return 0x7f;
  if (a.f > 448.0f) a.f = 448.0f;
  if (a.f < 0x1p-6f) { b.f = a.f * 512.0f + 0x1p23f; return (u8)(sign | (b.u & 0x7fffffu)); }
  return (u8)(sign | (((a.u + 0x7ffffu + (a.u >> 20 & 1)) >> 20) - (120u << 3)));
}
static inline float round_e4m3(float x) {                   // what to_e4m3 keeps of |x| <= 448; no branch, so that it vectorises
  bits a = { x }; float small = (x + 24576.0f) - 24576.0f; u32 m = a.u & 0x7fffffffu;
  a.u = (a.u + 0x7ffffu + (a.u >> 20 & 1)) & 0xfff00000u;
  return m < 0x3c800000u ? small : a.f;
}
static inline float of_e4m3(u8 c) { bits a; a.u = (u32)(c & 0x80) << 24 | (u32)(c & 0x7f) << 20; return a.f * 0x1p120f; }
static inline float round_e2m1(float x) {                   // |x| <= 6, ties to the even code
  float a = x < 0 ? -x : x, r = a > 5 ? 6 : a >= 3.5f ? 4 : a > 2.5f ? 3 : a >= 1.75f ? 2 : a > 1.25f ? 1.5f : a >= 0.75f ? 1 : a > 0.25f ? 0.5f : 0;
  return x < 0 ? -r : r;
}
static inline void act_quant(float* restrict y, const float* restrict x, int n, int group) {       // e4m3 and back
  for (int g = 0; g < n; g += group) {
    int m = n - g < group ? n - g : group, c = scale_code(amax(x + g, m, 1e-4f), 1.0f / 448); float s = pow2(c), inv = pow2(c == 255 ? 255 : 254 - c);
    for (int i = 0; i < m; i++) y[g + i] = round_e4m3(x[g + i] * inv) * s;
  }
}
static inline void fp4_quant(float* x, int n) {             // e2m1 in groups of 32 and back
  for (int g = 0; g < n; g += 32) {
    int c = scale_code(amax(x + g, 32, 6 * 0x1p-126f), 1.0f / 6); float s = pow2(c), inv = pow2(c == 255 ? 255 : 254 - c);
    for (int i = 0; i < 32; i++) { float v = x[g + i] * inv; x[g + i] = round_e2m1(v > 6 ? 6 : v < -6 ? -6 : v) * s; }
  }
}
#define SWAP(h) 0 ^ h, 1 ^ h, 2 ^ h, 3 ^ h, 4 ^ h, 5 ^ h, 6 ^ h, 7 ^ h, 8 ^ h, 9 ^ h, 10 ^ h, 11 ^ h, 12 ^ h, 13 ^ h, 14 ^ h, 15 ^ h
#define SIGN(h, i) ((i) & (h) ? -1.0f : 1.0f)
#define SIGNS(h) { SIGN(h, 0), SIGN(h, 1), SIGN(h, 2), SIGN(h, 3), SIGN(h, 4), SIGN(h, 5), SIGN(h, 6), SIGN(h, 7), SIGN(h, 8), SIGN(h, 9), \
  SIGN(h, 10), SIGN(h, 11), SIGN(h, 12), SIGN(h, 13), SIGN(h, 14), SIGN(h, 15) }
#define BUTTERFLY(h) a = __builtin_shufflevector(a, a, SWAP(h)) + a * (v16)SIGNS(h)
static inline void hadamard(float* x, int n, float norm) {
  if (n % 16 == 0) for (int i = 0; i < n; i += 16) {       // the first four steps, without leaving a register
    v16 a = *(v16*)(x + i);
    BUTTERFLY(1); BUTTERFLY(2); BUTTERFLY(4); BUTTERFLY(8);
    *(v16*)(x + i) = a;
  }
  for (int h = n % 16 ? 1 : 16; h < n; h *= 2)
    for (int i = 0; i < n; i += 2 * h) for (int j = i; j < i + h; j++) { float a = x[j], b = x[j + h]; x[j] = a + b; x[j + h] = a - b; }
  for (int i = 0; i < n; i++) x[i] = rnd(x[i] * norm);
}
// A cached row of n+r channels: float32, or n e4m3 codes, r bfloat16, one e8m0 code for 64 of the n; padded to 4 bytes.
#define ROW_BYTES(n, r) (W4A8 ? ((n) + 2 * (r) + ((n) + 63) / 64 + 3) / 4 * 4 : 4 * ((n) + (r)))
static inline void put_row(u8* row, const float* x, int n, int r) {
  if (!W4A8) { for (int i = 0; i < n + r; i++) ((float*)row)[i] = x[i]; return; }
  u8* scale = row + n + 2 * r;
  for (int g = 0; g < n; g += 64) {
    int m = n - g < 64 ? n - g : 64, c = scale_code(amax(x + g, m, 1e-4f), 1.0f / 448); float inv = pow2(c == 255 ? 255 : 254 - c);
    for (int i = 0; i < m; i++) row[g + i] = to_e4m3(x[g + i] * inv);
    scale[g / 64] = (u8)c;
  }
  for (int i = 0; i < r; i++) { bits a = { bf16(x[n + i]) }; row[n + 2 * i] = a.u >> 16 & 255; row[n + 2 * i + 1] = a.u >> 24; }
  for (int i = n + 2 * r + (n + 63) / 64; i < ROW_BYTES(n, r); i++) row[i] = 0;           // a row says nothing of what was there before
}
static inline void get_row(float* restrict x, const u8* restrict row, int n, int r) {
  if (!W4A8) { for (int i = 0; i < n + r; i++) x[i] = ((const float*)row)[i]; return; }
  for (int g = 0; g < n; g += 64) {
    float s = pow2(row[n + 2 * r + g / 64]);
    for (int i = g; i < n && i < g + 64; i++) x[i] = of_e4m3(row[i]) * s;
  }
  for (int i = 0; i < r; i++) { bits a = { .u = (u32)((const half*)(row + n))[i] << 16 }; x[n + i] = a.f; }
}
// An indexer's key of n channels: float32, or n/2 bytes of e2m1 pairs (low nibble first) and an e8m0 code for each 32.
#define KEY_BYTES(n) (W4A8 ? (n) / 2 + (n) / 32 : 4 * (n))
static inline void put_key(u8* row, float* x, int n) {
  if (!W4A8) { for (int i = 0; i < n; i++) ((float*)row)[i] = x[i]; return; }
  hadamard(x, n, HADAMARD);
  for (int g = 0; g < n; g += 32) {
    int c = scale_code(amax(x + g, 32, 6 * 0x1p-126f), 1.0f / 6); float inv = pow2(c == 255 ? 255 : 254 - c); row[n / 2 + g / 32] = (u8)c;
    for (int i = g; i < g + 32; i += 2) {
      int code[2];
      for (int b = 0; b < 2; b++) {
        float v = x[i + b] * inv, a = v < 0 ? -v : v;
        code[b] = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5) + (v < 0 ? 8 : 0);
      }
      row[i / 2] = (u8)(code[0] | code[1] << 4);
    }
  }
}
static const float E2M1[16] = { 0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6 };
static inline void get_key(float* restrict x, const u8* restrict row, int n) {
  if (!W4A8) { for (int i = 0; i < n; i++) x[i] = ((const float*)row)[i]; return; }
  for (int i = 0; i < n; i += 2) {
    float s = pow2(row[n / 2 + i / 32]);
    x[i] = E2M1[row[i / 2] & 15] * s; x[i + 1] = E2M1[row[i / 2] >> 4] * s;
  }
}

static inline float rms(const float* x, int n, float eps) { return 1.0f / __builtin_sqrtf(dot(x, x, n) / n + eps); }

static inline void rotate(float* x, const float* table, int r, float sign) {     // adjacent pairs of x[0..r)
  for (int i = 0; i < r / 2; i++) {
    float c = table[2 * i], s = table[2 * i + 1] * sign, a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = rnd(a * c - b * s); x[2 * i + 1] = rnd(a * s + b * c);
  }
}

#ifdef KERNEL_embed    // out (T,S,D); table (V,D) from id FIRST on, ids (T,)
void NAME(float* restrict out, const void* restrict table, const int* restrict ids) {
  for (int t = 0; t < T; t++) for (int s = 0; s < S; s++) for (int d = 0; d < D; d++) {
    int row = ids[t] - FIRST; i64 i = (i64)row * D + d, o = ((i64)t * S + s) * D + d;
    if (row < 0 || row >= V) out[o] = 0;
    else out[o] = HALF ? ((bits){ .u = (u32)((const unsigned short*)table)[i] << 16 }).f : ((const float*)table)[i];
  }
}
#endif

#ifdef KERNEL_rope_table      // out (T,R/2,2); freqs (R/2,), at (2,B): positions (position / STRIDE + i) * STRIDE
void NAME(float* restrict out, const float* restrict freqs, const int* restrict at) {
  for (int t = 0; t < T; t++) for (int j = 0; j < R / 2; j++) {
    float p = (float)((at[t / PER] / STRIDE + t % PER) * STRIDE);
    sincos_(p * freqs[j], out + ((i64)t * (R / 2) + j) * 2 + 1, out + ((i64)t * (R / 2) + j) * 2);
  }
}
#endif

#ifdef KERNEL_hc_post         // out (T,S,D); shares of z (T,D), h (T,S,D), post (T,S), comb (T,S,S)
void NAME(float* restrict out, EACH(IN), const float* restrict h, const float* restrict post, const float* restrict comb) {
  const float* z[] = { EACH(IN_NAME) };
  for (int t = 0; t < T; t++) for (int k = 0; k < S; k++) for (int d = 0; d < D; d++) {
    float all = in0[(i64)t * D + d];
    for (int r = 1; r < RANKS; r++) all += z[r][(i64)t * D + d];
    float a = post[t * S + k] * (RANKS > 1 ? rnd(all) : all);
    for (int j = 0; j < S; j++) a += comb[(t * S + j) * S + k] * h[((i64)t * S + j) * D + d];
    out[((i64)t * S + k) * D + d] = rnd(a);
  }
}
#endif

#ifdef KERNEL_hc_head         // y (T,D), x (T,D) = y normed; h (T,S,D), fn (S,SD), scale (1,), base (S,), norm (D,)
void NAME(float* restrict y, float* restrict x, const float* restrict h, const float* restrict fn, const float* restrict scale,
          const float* restrict base, const float* restrict norm) {
  for (int t = 0; t < T; t++) {
    const float* v = h + (i64)t * S * D; float pre[S], rho = rms(v, S * D, EPS), *o = y + (i64)t * D;
    for (int i = 0; i < S; i++) pre[i] = sigmoid(dot(fn + (i64)i * S * D, v, S * D) * rho * scale[0] + base[i]) + HC_EPS;
    for (int d = 0; d < D; d++) { float a = 0; for (int s = 0; s < S; s++) a += pre[s] * v[s * D + d]; o[d] = rnd(a); }
    float r = rms(o, D, EPS);
    for (int d = 0; d < D; d++) x[(i64)t * D + d] = rnd(o[d] * r * norm[d]);
  }
}
#endif

#ifdef KERNEL_rms_norm        // out (T,D); x (T,D), norm (D,)
void NAME(float* restrict out, const float* restrict x, const float* restrict norm) {
  for (int t = 0; t < T; t++) {
    float r = rms(x + (i64)t * D, D, EPS);
    for (int d = 0; d < D; d++) out[(i64)t * D + d] = rnd(x[(i64)t * D + d] * r * norm[d]);
  }
}
#endif

// ------------------------------------------------------------------------------------------------ products with stored weights
// A product is 16 lanes over k, 64 bytes of a row of w at a time. A lane multiplies the weights of one word of four bytes and adds
// them up; the order depends on k alone, not on how many rows of x there are. Weights are decoded once for several rows of x.
// Their scales multiply the sums of a group, in float32, or go into the exponents of decoded weights (`fold`).
#if defined(KERNEL_linear) || defined(KERNEL_experts) || defined(KERNEL_hc_pre)
enum { F32, BF16, FP8, FP4 };  // how a weight is stored: its scales are e8m0, one for 128 (FP8) or 32 (FP4) of K
typedef int w16 __attribute__((vector_size(64), aligned(1)));
typedef u32 word __attribute__((aligned(1)));
typedef unsigned short u16;
typedef unsigned long long u64;
typedef u64 eight __attribute__((aligned(1), may_alias));
// What the processor has, W4A8 or not, settles what a row of x is turned into: see `line`. PAIRS: AVX512_BF16 adds up products of
// pairs of bfloat16, which hold codes of all formats and what W4A8 keeps of x.
#if W4A8 && defined(__AVX512BF16__) && defined(__AVX512VBMI__) && __clang_major__ >= 16
#define PAIRS 1
typedef __bf16 y32 __attribute__((vector_size(64), aligned(2)));
typedef short s32 __attribute__((vector_size(64)));
typedef char b64 __attribute__((vector_size(64)));
typedef unsigned short h16 __attribute__((vector_size(32), aligned(2)));
typedef unsigned short h32 __attribute__((vector_size(64), aligned(2)));
typedef i64 l8 __attribute__((vector_size(64)));
#else
#define PAIRS 0
#endif
#ifdef KERNEL_linear
#define EVEN (K % 128 == 0)                                // rows of w are whole blocks of 64 bytes
#elif defined(KERNEL_hc_pre)
#define K_MOST (S * D)
#define EVEN (S * D % 128 == 0)
#else
#define EVEN (D % 128 == 0 && I % 128 == 0 && J % 128 == 0)
#endif
#ifdef __AVX512F__
#define FEW 6                                              // rows of x for which nothing is kept decoded
enum { ROWS = K_MOST > 1024 ? 4 : 2, COLS = 4 };           // rows and columns at once of more: long ones are read less often
#else
#define FEW 2                                              // there are fewer and smaller registers
enum { ROWS = 2, COLS = 2 };
#endif
enum { MOST = FEW < ROWS ? ROWS : FEW, LINES = 64 };                                       // rows of x that are taken together
#define CEIL(a, b) (((a) + (b) - 1) / (b))
#define LESS(a, b) ((a) < (b) ? (a) : (b))
#define PAIRED(kind) (PAIRS && (kind) != F32)
#define IN_WORD(kind) ((kind) == FP4 ? 8 : (kind) == FP8 ? 4 : (kind) == BF16 ? 2 : 1)     // weights in four bytes
#define STEPS(kind) (PAIRED(kind) ? IN_WORD(kind) / 2 : IN_WORD(kind))                     // registers that 64 bytes become
#define SCALED(kind) ((kind) == FP8 || (kind) == FP4)
#define FOLDED(kind) (PAIRED(kind) && (kind) == FP4)
#define GROUPS (BLOCKS(FP4, K_MOST) * 4)                                                  // of a row of FP4, in whole blocks
#define BLOCKS(kind, k) CEIL(k, 16 * IN_WORD(kind))                                        // of 64 bytes in a row of w
#define GROUP(kind) ((kind) == FP8 ? 2 : 1)                                                // blocks that are scaled together
static inline i64 bytes_of(int kind, i64 k) { return kind == F32 ? 4 * k : kind == BF16 ? 2 * k : kind == FP8 ? k : k / 2; }
static inline i64 scales_of(int kind, i64 k) { return kind == FP8 ? (k + 127) / 128 : kind == FP4 ? k / 32 : 0; }
typedef struct { const u8 *data, *scale; } Matrix;
static inline Matrix from_row(Matrix w, int kind, i64 k, i64 row) {
  return (Matrix){ w.data + row * bytes_of(kind, k), w.scale + row * scales_of(kind, k) };
}

// ---- x
#define EVERY2(o) o, o + 2, o + 4, o + 6, o + 8, o + 10, o + 12, o + 14, o + 16, o + 18, o + 20, o + 22, o + 24, o + 26, o + 28, o + 30, \
  o + 32, o + 34, o + 36, o + 38, o + 40, o + 42, o + 44, o + 46, o + 48, o + 50, o + 52, o + 54, o + 56, o + 58, o + 60, o + 62
// A row of x in registers as they meet those of w: e4m3 and back in groups of 128 if `quantise`, zeros behind k, float32. With PAIRS,
// bfloat16: the first of three terms that add up to the row, or another one. Returns whether there are more; with W4A8 there are none.
static inline int line(w16* y, const float* x, int k, int kind, int quantise, int term) {
  float z[K_MOST + 128]; const int n = BLOCKS(kind, k) * 16 * IN_WORD(kind), in = IN_WORD(kind);
  if (quantise) act_quant(z, x, k, 128); else for (int i = 0; i < k; i++) z[i] = x[i];
  for (int i = k; i < n; i++) z[i] = 0;
#if PAIRS
  if (kind != F32) {
    w16 rest = {0}; h32* to = (h32*)y;
    for (int i = 0; i < n; i += 16) {
      v16 a = *(v16*)(z + i);
      for (int t = 0; t < term; t++) {                     // without what earlier terms hold; infinity and NaN have only one
        const w16 top = (w16)a & (int)0xffff0000, whole = (top & 0x7f800000) == 0x7f800000;
        a = (v16)(~whole & (w16)(a - (v16)top));
      }
      const w16 nan = a != a, top = (nan & 0x7fc00000) | (~nan & (w16)a);
      rest |= top & 0xffff;
      *(h16*)((unsigned short*)y + i) = __builtin_convertvector(top >> 16, h16);
    }
    if (kind == FP8) for (int i = 0; i < n / 32; i += 2) {                 // words of four as pairs (0,2) and (1,3)
      const h32 a = to[i], b = to[i + 1];
      to[i] = __builtin_shufflevector(a, b, EVERY2(0)); to[i + 1] = __builtin_shufflevector(a, b, EVERY2(1));
    }
    if (kind == FP4) for (int i = 0; i < n / 32; i += 4) {                 // words of eight as (0,4), (1,5), (2,6), (3,7)
      const h32 a = __builtin_shufflevector(to[i], to[i + 1], EVERY2(0)), b = __builtin_shufflevector(to[i], to[i + 1], EVERY2(1));
      const h32 c = __builtin_shufflevector(to[i + 2], to[i + 3], EVERY2(0)), d = __builtin_shufflevector(to[i + 2], to[i + 3], EVERY2(1));
      to[i] = __builtin_shufflevector(a, c, EVERY2(0)); to[i + 1] = __builtin_shufflevector(b, d, EVERY2(0));
      to[i + 2] = __builtin_shufflevector(a, c, EVERY2(1)); to[i + 3] = __builtin_shufflevector(b, d, EVERY2(1));
    }
    for (int i = 1; i < 16; i++) rest[0] |= rest[i];
    return rest[0] != 0;
  }
#endif
  if (in == 1) for (int g = 0; g < n; g += 16) y[g / 16] = *(w16*)(z + g);
  else for (int g = 0; g < n; g += 16 * in) for (int i = 0; i < in; i++)
    for (int l = 0; l < 16; l++) ((float*)y)[g + 16 * i + l] = z[g + in * l + i];
  return 0;
}

// ---- w
static inline v16 look_up(v16 table, w16 code) {           // table[code & 15] in each lane
#if defined(__AVX512F__)
  return __builtin_ia32_permvarsf512(table, code);
#elif defined(__AVX2__)                                    // eight magnitudes by the low three bits, the sign by the fourth
  typedef float f8 __attribute__((vector_size(32))); typedef int i8 __attribute__((vector_size(32)));
  f8 t = __builtin_shufflevector(table, table, 0, 1, 2, 3, 4, 5, 6, 7);
  i8 lo = __builtin_shufflevector(code, code, 0, 1, 2, 3, 4, 5, 6, 7);
  i8 hi = __builtin_shufflevector(code, code, 8, 9, 10, 11, 12, 13, 14, 15);
  f8 a = __builtin_ia32_permvarsf256(t, lo), b = __builtin_ia32_permvarsf256(t, hi);
  w16 r = (w16)__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (v16)(r ^ ((code & 8) << 28));
#else
  v16 r; for (int i = 0; i < 16; i++) r[i] = table[code[i] & 15];
  return r;
#endif
}
static inline __attribute__((always_inline)) u32 codes_of(Matrix w, i64 k, i64 block) {            // the scales of a block of FP4
  const u8* p = w.scale + 4 * block; const i64 n = scales_of(FP4, k) - 4 * block;
  return EVEN || n > 3 ? *(const word*)p : p[0] | (n > 1 ? p[1] : 0) << 8 | (n > 2 ? p[2] : 0) << 16;
}
// Scales that go into exponents are 64 to 191, so that no weight leaves the range of bfloat16: the two upper bits differ.
static inline u8 odd_one(u8 code) { return (u8)~(code ^ code << 1) & 0x80; }
static inline int usual(Matrix w, i64 rows, i64 k) {        // whether all of these rows of w are
  u8 odd = 0;
  for (i64 i = 0; i < rows * scales_of(FP4, k); i++) odd |= odd_one(w.scale[i]);
  return !odd;
}
// What the weights of a block's four groups lose, in exponents of bfloat16, from the greatest that the table of `decode` holds
#define GREATEST 252
#if PAIRS
#define BYTE(g) g, g, g, g, g, g, g, g, g, g, g, g, g, g, g, g
#define PAIR(g) g, g + 1, g, g + 1, g, g + 1, g, g + 1, g, g + 1, g, g + 1, g, g + 1, g, g + 1
static inline __attribute__((always_inline)) w16 loss(u32 codes) {
  const h32 none = {0}; const b64 where = { BYTE(0), BYTE(1), BYTE(2), BYTE(3) };
  const b64 each = __builtin_ia32_pshufb512((b64)((w16){0} + (int)codes), where);                  // a code twice in 16 bits: 64 c + 64 c
  return (w16)((GREATEST << 7) - (h32)__builtin_ia32_pmaddubsw512(each, (b64)(none + 0x4040)));
}
static inline __attribute__((always_inline)) w16 loss_of(const u16* groups) {                      // from what `losses` left
  const b64 where = { PAIR(0), PAIR(2), PAIR(4), PAIR(6) };
  return (w16)__builtin_ia32_pshufb512((b64)((l8){0} + (i64)*(const eight*)groups), where);
}
#else
#define loss(codes) ((w16){0})
#define loss_of(groups) ((w16){0})
#endif
static inline __attribute__((always_inline)) int losses(u16* to, Matrix w, i64 k) {                // of a whole row of w, if it is `usual`
  u8 odd = 0;
  for (i64 i = 0; i < scales_of(FP4, k); i++) {
    odd |= odd_one(w.scale[i]); to[i] = (u16)((GREATEST - w.scale[i]) << 7);
  }
  return !odd;
}
// The weights of 16 words, without their scales or, folded, with them: less `lost`
static inline __attribute__((always_inline)) void decode(w16* out, int kind, w16 w, w16 lost) {
#if PAIRS
#define E4M3(c) ((c) == 127 ? 0x7fc0 : (c) > 7 ? ((c) + 960) << 4 : (c) > 3 ? 120 << 7 | ((c) & 3) << 5 : \
                 (c) > 1 ? 119 << 7 | ((c) & 1) << 6 : (c) ? 118 << 7 : 0)   // a magnitude's bits as bfloat16
#define EIGHT(F, c) F(c), F(c + 1), F(c + 2), F(c + 3), F(c + 4), F(c + 5), F(c + 6), F(c + 7)
#define ALL64(F, c) EIGHT(F, c), EIGHT(F, c + 8), EIGHT(F, c + 16), EIGHT(F, c + 24), EIGHT(F, c + 32), EIGHT(F, c + 40), \
  EIGHT(F, c + 48), EIGHT(F, c + 56)
#define LOW(c) (char)(E4M3(c) & 255)
#define HIGH(c) (char)(E4M3(c) >> 8)
#define E2M1_ALL 0, 0x7d80, 0x7e00, 0x7e40, 0x7e80, 0x7ec0, 0x7f00, 0x7f40, 0, 0xfd80, 0xfe00, 0xfe40, 0xfe80, 0xfec0, 0xff00, 0xff40
  if (kind == BF16) out[0] = w;
  if (kind == FP8) {
    const b64 low[2] = { { ALL64(LOW, 0) }, { ALL64(LOW, 64) } }, high[2] = { { ALL64(HIGH, 0) }, { ALL64(HIGH, 64) } };
    const w16 l = (w16)__builtin_ia32_vpermi2varqi512(low[0], (b64)w, low[1]);
    const w16 h = (w16)__builtin_ia32_vpermi2varqi512(high[0], (b64)w, high[1]) | (w & (int)0x80808080);
    out[0] = (l & 0x00ff00ff) | (h << 8 & (int)0xff00ff00); out[1] = (l >> 8 & 0x00ff00ff) | (h & (int)0xff00ff00);
  }
  if (kind == FP4) {                                       // zeros saturate, and stay
    const h32 table = { E2M1_ALL, E2M1_ALL };
    for (int i = 0; i < 4; i++)
      out[i] = (w16)__builtin_elementwise_sub_sat((h32)__builtin_ia32_permvarhi512((s32)table, (s32)(w >> 4 * i)), (h32)lost);
  }
#else
  const v16 e2m1 = { 0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6 };
  if (kind == BF16) { out[0] = w << 16; out[1] = w & (int)0xffff0000; }
  if (kind == FP8) for (int i = 0; i < 4; i++) out[i] = (w16)((v16)(w << (24 - 8 * i) >> 4 & (int)0x87f00000) * 0x1p120f);
  if (kind == FP4) for (int i = 0; i < 8; i++) out[i] = (w16)look_up(e2m1, w >> 4 * i);
#endif
  if (kind == F32) out[0] = w;
}
static inline __attribute__((always_inline)) w16 load(Matrix w, int kind, i64 k, i64 block) {
  const u8* p = w.data + 64 * block; const i64 left = bytes_of(kind, k) - 64 * block; u8 z[64];
  if (EVEN || left >= 64) { __builtin_prefetch(p + 1024); return *(const w16*)p; }
  for (int i = 0; i < 64; i++) z[i] = i < left ? p[i] : 0;
  return *(w16*)z;
}
static inline __attribute__((always_inline)) v16 factors(Matrix w, int kind, i64 k, i64 block) {   // of the lanes of a block or two
  if (kind == FP8) return (v16){0} + pow2(w.scale[block / 2]);
  const w16 shift = { 0, 0, 0, 0, 8, 8, 8, 8, 16, 16, 16, 16, 24, 24, 24, 24 }, c = ((w16){0} + (int)codes_of(w, k, block)) >> shift & 255;
  return (v16)(c << 23 | ((c == 0 | c == 255) & 1 << 22)); // pow2 of each
}

// ---- x times w
// out[r * stride + c * far] = line r of x, `size` registers apart, times row c * far of w, or what was there plus that with `more`.
// Only `live` of the rows count. Weights come from w or, decoded before, from `kept` and their scales from `scales`. `fold`: scales go
// into the weights; `lost`, or 0, is then what `losses` gave for each of the rows of w.
static inline __attribute__((always_inline)) void product(float* out, i64 stride, i64 far, const w16* x, i64 size, const int rows, int live,
                                                          int more, int kind, Matrix w, const w16* kept, const v16* scales,
                                                          const u16* lost, const int fold, const int cols, i64 k) {
  const int steps = STEPS(kind); v16 acc[MOST][COLS];
  for (int r = 0; r < rows; r++) for (int c = 0; c < cols; c++) acc[r][c] = (v16){0};
  _Pragma("clang loop unroll_count(2)")
  for (i64 g = 0; g < BLOCKS(kind, k); g += GROUP(kind)) {
    v16 part[MOST][COLS], f[COLS];
    for (int r = 0; r < rows; r++) for (int c = 0; c < cols; c++) part[r][c] = SCALED(kind) && !fold ? (v16){0} : acc[r][c];
    for (i64 b = g; b < g + GROUP(kind) && b < BLOCKS(kind, k); b++) {
      w16 a[COLS][8];
      if (!kept) _Pragma("clang loop unroll(full)") for (int c = 0; c < cols; c++) {
        const Matrix own = from_row(w, kind, k, c * far); w16 less = {0};
        if (kind == FP4) less = !fold ? loss(0x7f7f7f7f) : lost ? loss_of(lost + c * GROUPS + 4 * b) : loss(codes_of(own, k, b));
        decode(a[c], kind, load(own, kind, k, b), less);
      }
      for (int i = 0; i < steps; i++) {
        if (kept) for (int c = 0; c < cols; c++) a[c][i] = kept[(b * steps + i) * cols + c];
        for (int r = 0; r < rows; r++) {
          const w16 z = x[r * size + b * steps + i];
          for (int c = 0; c < cols; c++)
#if PAIRS
            if (kind != F32) part[r][c] = __builtin_ia32_dpbf16ps_512(part[r][c], (y32)z, (y32)a[c][i]); else
#endif
            part[r][c] += (v16)z * (v16)a[c][i];
        }
      }
    }
    if (SCALED(kind) && !fold) for (int c = 0; c < cols; c++)
      f[c] = kept ? scales[g / GROUP(kind) * cols + c] : factors(from_row(w, kind, k, c * far), kind, k, g);
    for (int r = 0; r < rows; r++) for (int c = 0; c < cols; c++)
      acc[r][c] = SCALED(kind) && !fold ? acc[r][c] + part[r][c] * f[c] : part[r][c];
  }
  for (int j = 0; j < rows * cols; j += 4) {
#define ACC(j) acc[LESS(j, rows * cols - 1) / cols][LESS(j, rows * cols - 1) % cols]
    const v4 t = sums(ACC(j), ACC(j + 1), ACC(j + 2), ACC(j + 3));
    if (kept && cols == 4) { if (j / 4 < live) { v4* to = (v4*)(out + j / 4 * stride); *to = more ? *to + t : t; } }
    else for (int m = 0; m < 4 && j + m < rows * cols; m++) if ((j + m) / cols < live) {
      float* to = out + (j + m) / cols * stride + (j + m) % cols * far;
      *to = more ? *to + t[m] : t[m];
    }
  }
}
// The same for n rows of w of which some have other scales: one by one, since which they are must hang on w alone
static __attribute__((noinline)) void singly(float* out, i64 stride, const w16* x, i64 size, int rows, int more, Matrix w, i64 n, i64 k) {
  for (i64 c = 0; c < n; c++) for (int r = 0; r < rows; r++) {
    const Matrix own = from_row(w, FP4, k, c); float* to = out + r * stride + c;
    if (usual(own, 1, k)) product(to, stride, 1, x + r * size, size, 1, 1, more, FP4, own, 0, 0, 0, PAIRS, 1, k);
    else product(to, stride, 1, x + r * size, size, 1, 1, more, FP4, own, 0, 0, 0, 0, 1, k);
  }
}
// NAME(out, stride, x, size, rows, more, w, n, k): out (rows,n) = lines of x times w (n,k). For M rows or fewer: nothing is decoded
// twice, and the columns of a product lie n / C apart, as a processor reads ahead in a few long streams, not in many short ones.
#define DEFINE_FEW(NAME, KIND, M, C) \
  static __attribute__((noinline)) void NAME(float* out, i64 stride, const w16* x, i64 size, int rows, int more, Matrix w, i64 n, i64 k) { \
    const i64 far = n / (C); const int before = FOLDED(KIND) && (M) > 2; u16 lost[(C) * GROUPS]; \
    if (FOLDED(KIND) && !before && !usual(w, n, k)) { singly(out, stride, x, size, rows, more, w, n, k); return; } \
    for (i64 c = 0; c < far; c++) { \
      const Matrix own = from_row(w, KIND, k, c); int all = 1; \
      for (int i = 0; before && i < (C); i++) all &= losses(lost + i * GROUPS, from_row(own, KIND, k, i * far), k); \
      if (!all) for (int i = 0; i < (C); i++) singly(out + c + i * far, stride, x, size, rows, more, from_row(own, KIND, k, i * far), 1, k); \
      else product(out + c, stride, far, x, size, M, rows, more, KIND, own, 0, 0, before ? lost : 0, FOLDED(KIND), C, k); \
    } \
    for (i64 c = far * (C); c < n; c++) \
      if (before) singly(out + c, stride, x, size, rows, more, from_row(w, KIND, k, c), 1, k); \
      else product(out + c, stride, 1, x, size, M, rows, more, KIND, from_row(w, KIND, k, c), 0, 0, 0, FOLDED(KIND), 1, k); \
  }
// The same for any number of rows: COLS rows of w are decoded, and then all rows of x meet them.
#define DEFINE_MANY(NAME, KIND) \
  static __attribute__((noinline)) void NAME(float* out, i64 stride, const w16* x, i64 size, int rows, int more, Matrix w, i64 n, i64 k) { \
    w16 kept[BLOCKS(KIND, K_MOST) * STEPS(KIND) * COLS] __attribute__((aligned(64))); \
    v16 scales[BLOCKS(KIND, K_MOST) * COLS] __attribute__((aligned(64))); i64 c = 0; \
    if (FOLDED(KIND) && !usual(w, n, k)) { singly(out, stride, x, size, rows, more, w, n, k); return; } \
    for (; c + COLS <= n; c += COLS) { \
      for (int i = 0; i < COLS; i++) { \
        const Matrix own = from_row(w, KIND, k, c + i); \
        for (i64 b = 0; b < BLOCKS(KIND, k); b++) { \
          w16 a[8]; decode(a, KIND, load(own, KIND, k, b), FOLDED(KIND) ? loss(codes_of(own, k, b)) : (w16){0}); \
          for (int j = 0; j < STEPS(KIND); j++) kept[(b * STEPS(KIND) + j) * COLS + i] = a[j]; \
          if (SCALED(KIND) && !FOLDED(KIND) && b % GROUP(KIND) == 0) scales[b / GROUP(KIND) * COLS + i] = factors(own, KIND, k, b); \
        } \
      } \
      for (int r = 0; r < rows; r += ROWS) \
        product(out + r * stride + c, stride, 1, x + r * size, size, ROWS, rows - r, more, KIND, w, kept, scales, 0, FOLDED(KIND), COLS, k); \
    } \
    for (; c < n; c++) for (int r = 0; r < rows; r++) \
      product(out + r * stride + c, stride, 1, x + r * size, size, 1, 1, more, KIND, from_row(w, KIND, k, c), 0, 0, 0, FOLDED(KIND), 1, k); \
  }
// NAME(out, stride, x, rows, quantise, w, n, k): out (rows,n) = up to LINES rows of x, float32 (k,), times w (n,k)
#define DEFINE_ROWS(NAME, TIMES, KIND) \
  static void NAME(float* out, i64 stride, const float* const* x, int rows, int quantise, Matrix w, i64 n, i64 k) { \
    w16 y[(LINES + ROWS) * BLOCKS(KIND, K_MOST) * STEPS(KIND)] __attribute__((aligned(64))); \
    const i64 size = BLOCKS(KIND, k) * STEPS(KIND); u8 left[LINES]; \
    for (int r = 0; r < rows; r++) left[r] = (u8)line(y + r * size, x[r], (int)k, KIND, quantise, 0); \
    TIMES(out, stride, y, size, rows, 0, w, n, k); \
    for (int r = 0; r < rows; r++) for (int t = 1; left[r] && t < 3; t++) { \
      line(y, x[r], (int)k, KIND, quantise, t); \
      TIMES(out + r * stride, stride, y, size, 1, 1, w, n, k); \
    } \
  }
#endif

#ifdef KERNEL_linear   // out (T,G*N); x (T,G*K), w (G*N,K) and its scales: G independent products. QUANTISE: x to e4m3 first
#define AT_ONCE (T < 3 ? COLS : FOLDED(KIND) && T * K > 16384 ? 3 : 2)                     // more where x does not fit the first cache
#if T <= FEW
DEFINE_FEW(times, KIND, T, AT_ONCE)
#else
DEFINE_MANY(times, KIND)
#endif
DEFINE_ROWS(matmul, times, KIND)
void NAME(float* restrict out, const float* restrict x, const u8* restrict w, const u8* restrict scale) {
  for (int t = 0; t < T; t += LINES) for (int g = 0; g < G; g++) {
    const float* row[LINES]; const int rows = LESS(T - t, LINES);
    for (int r = 0; r < rows; r++) row[r] = x + ((i64)(t + r) * G + g) * K;
    matmul(out + (i64)t * G * N + (i64)g * N, (i64)G * N, row, rows, QUANTISE, from_row((Matrix){ w, scale }, KIND, K, (i64)g * N), N, K);
  }
  if (ROUND) for (i64 i = 0; i < (i64)T * G * N; i++) out[i] = bf16(out[i]);
}
#endif

#ifdef KERNEL_hc_pre          // x (T,D), post (T,S), comb (T,S,S); h (T,S,D), fn (2S+SS,SD), scale (3,), base (2S+SS,), norm (D,)
enum { TOGETHER = LESS(T, LESS(FEW, 4)) };                 // rows of h
DEFINE_FEW(few, F32, TOGETHER, COLS)
#if S * D % 16
DEFINE_ROWS(matmul, few, F32)
#endif
void NAME(float* restrict x, float* restrict post, float* restrict comb, const float* restrict h, const float* restrict fn,
          const float* restrict scale, const float* restrict base, const float* restrict norm) {
  enum { MIX = 2 * S + S * S };
  float all[T * MIX]; const Matrix mix = { (const u8*)fn, 0 };
#if S * D % 16
  for (int t = 0; t < T; t++) { const float* row = h + (i64)t * S * D; matmul(all + t * MIX, MIX, &row, 1, 0, mix, MIX, S * D); }
#else                                                      // rows of h are lines of x as they are
  for (int t = 0; t < T; t += TOGETHER) {
    const int r = LESS(t, T - TOGETHER);                   // the last rows once more rather than fewer at once
    few(all + r * MIX, MIX, (const w16*)h + (i64)r * S * D / 16, S * D / 16, TOGETHER, 0, mix, MIX, S * D);
  }
#endif
  for (int t = 0; t < T; t++) {
    const float* v = h + (i64)t * S * D; float *m = all + t * MIX, pre[S], *c = comb + t * S * S, rho = rms(v, S * D, EPS);
    for (int i = 0; i < MIX; i++) m[i] *= rho;
    for (int i = 0; i < S; i++) {
      pre[i] = sigmoid(m[i] * scale[0] + base[i]) + HC_EPS;
      post[t * S + i] = 2 * sigmoid(m[S + i] * scale[1] + base[S + i]);
    }
    for (int i = 0; i < S; i++) {
      float top = -INF, sum = 0;
      for (int j = 0; j < S; j++) { int q = i * S + j; c[q] = m[2 * S + q] * scale[2] + base[2 * S + q]; top = c[q] > top ? c[q] : top; }
      for (int j = 0; j < S; j++) { c[i * S + j] = expf_(c[i * S + j] - top); sum += c[i * S + j]; }
      for (int j = 0; j < S; j++) c[i * S + j] = c[i * S + j] / sum + HC_EPS;
    }
    for (int it = 0; it < ITERS; it++) {
      if (it) for (int i = 0; i < S; i++) {
        float sum = HC_EPS; for (int j = 0; j < S; j++) sum += c[i * S + j];
        for (int j = 0; j < S; j++) c[i * S + j] /= sum;
      }
      for (int j = 0; j < S; j++) {
        float sum = HC_EPS; for (int i = 0; i < S; i++) sum += c[i * S + j];
        for (int i = 0; i < S; i++) c[i * S + j] /= sum;
      }
    }
    float* y = x + (i64)t * D;
    for (int d = 0; d < D; d++) { float a = 0; for (int s = 0; s < S; s++) a += pre[s] * v[s * D + d]; y[d] = rnd(a); }
    float r = rms(y, D, EPS);
    for (int d = 0; d < D; d++) y[d] = rnd(y[d] * r * norm[d]);
  }
}
#endif

#ifdef KERNEL_head_rope // out (T,H,D); q (T,H,D), rope (T,R/2,2); NORM: rms of every head first, no weight; INDEX: an indexer's query
void NAME(float* restrict out, const float* restrict q, const float* restrict rope) {
  for (int t = 0; t < T; t++) for (int h = 0; h < H; h++) {
    const float* a = q + ((i64)t * H + h) * D; float *o = out + ((i64)t * H + h) * D, r = 1.0f;
    if (NORM && !W4A8) r = rms(a, D, EPS);
    if (NORM && W4A8) {                                    // the official order: square, mean, rsqrt, product, each in bfloat16
      float square[D], one[D];
      for (int d = 0; d < D; d++) { square[d] = bf16(a[d] * a[d]); one[d] = 1; }
      r = bf16(1.0f / __builtin_sqrtf(bf16(bf16(dot(square, one, D) / D) + EPS)));
    }
    for (int d = 0; d < D; d++) o[d] = rnd(a[d] * r);
    rotate(o + D - R, rope + (i64)t * R, R, 1);
    if (INDEX && W4A8) { hadamard(o, D, HADAMARD); fp4_quant(o, D); }
  }
}
#endif

#if defined(KERNEL_kv_write) || defined(KERNEL_kv_rows)
static inline void kv_row(float* o, const float* restrict kv, const float* restrict norm, const float* restrict rope) {
  float r = rms(kv, D, EPS);
  for (int d = 0; d < D; d++) o[d] = rnd(kv[d] * r * norm[d]);
  rotate(o + D - R, rope, R, 1);
}
#endif

#ifdef KERNEL_kv_write // ring (SLOTS,RING,row) in place; kv (T,D), norm (D,), rope (T,R/2,2), at (2,B)
void NAME(u8* restrict ring, const float* restrict kv, const float* restrict norm, const float* restrict rope, const int* restrict at) {
  for (int t = 0; t < T; t++) {
    float o[D]; const int b = t / PER, place = (at[b] + t % PER) % RING;
    kv_row(o, kv + (i64)t * D, norm, rope + (i64)t * R);
    put_row(ring + ((i64)at[B + b] * RING + place) * ROW_BYTES(D - R, R), o, D - R, R);
  }
}
#endif

#ifdef KERNEL_kv_rows  // out (T,D) as kv_write would cache it; kv (T,D), norm (D,), rope (T,R/2,2)
void NAME(float* restrict out, const float* restrict kv, const float* restrict norm, const float* restrict rope) {
  for (int t = 0; t < T; t++) {
    float row[D], *o = out + (i64)t * D;
    kv_row(row, kv + (i64)t * D, norm, rope + (i64)t * R);
    for (int d = 0; d < D; d++) o[d] = row[d];
    if (W4A8) act_quant(o, row, D - R, 64);                // it must not write where it reads
  }
}
#endif

#ifdef KERNEL_compress        // ring (SLOTS,RING,2W), entries (SLOTS,C,row or key) in place; proj (T,2W), ape (RATIO,W), norm (D,),
// rope (B*BLOCKS,R/2,2), at (2,B)
void NAME(float* restrict rings, u8* restrict all, const float* restrict proj, const float* restrict ape, const float* restrict norm,
          const float* restrict rope, const int* restrict at) {
  enum { W = OVERLAP ? 2 * D : D };
  for (int b = 0; b < B; b++) {
    const int p0 = at[b]; float* ring = rings + (i64)at[B + b] * RING * 2 * W;
    u8* entries = all + (i64)at[B + b] * C * (INDEX ? KEY_BYTES(D) : ROW_BYTES(D - R, R));
    for (int t = 0; t < PER; t++) {
      float* o = ring + (i64)((p0 + t) % RING) * 2 * W;
      const float *a = proj + ((i64)b * PER + t) * 2 * W, *add = ape + (i64)((p0 + t) % RATIO) * W;
      for (int c = 0; c < W; c++) { o[c] = a[c]; o[W + c] = a[W + c] + add[c]; }
    }
    for (int j = p0 / RATIO; (j + 1) * RATIO <= p0 + PER; j++) {
      float top[D], sum[D], o[D]; const int first = OVERLAP && j ? -RATIO : 0; const i64 e = j / RANKS;
      if (j % RANKS != RANK) continue;
      for (int c = 0; c < D; c++) { top[c] = -INF; sum[c] = 0; o[c] = 0; }
      for (int i = first; i < RATIO; i++) {
        const float* g = ring + (i64)((j * RATIO + i) % RING) * 2 * W + W + (OVERLAP && i >= 0 ? D : 0);
        for (int c = 0; c < D; c++) top[c] = g[c] > top[c] ? g[c] : top[c];
      }
      for (int i = first; i < RATIO; i++) {
        const float *k = ring + (i64)((j * RATIO + i) % RING) * 2 * W + (OVERLAP && i >= 0 ? D : 0), *g = k + W;
        for (int c = 0; c < D; c++) { float x = expf_(g[c] - top[c]); sum[c] += x; o[c] += x * k[c]; }
      }
      for (int c = 0; c < D; c++) o[c] = rnd(o[c] / sum[c]);
      float r = rms(o, D, EPS);
      for (int c = 0; c < D; c++) o[c] = rnd(o[c] * r * norm[c]);
      rotate(o + D - R, rope + ((i64)b * BLOCKS + j - p0 / RATIO) * R, R, 1);
      if (INDEX) put_key(entries + e * KEY_BYTES(D), o, D); else put_row(entries + e * ROW_BYTES(D - R, R), o, D - R, R);
    }
  }
}
#endif

#if defined(KERNEL_index_topk) || defined(KERNEL_index_best)
static inline u32 key(float f) { union { float f; u32 u; } a = { f + 0.0f }; return a.u & 0x80000000u ? ~a.u : a.u | 0x80000000u; }
// Entry i of n visible ones is among the TOPK best if s[i] > *least, or if it is among the first *left of those with s[i] == *least.
// q (H,D), keys (n,key), weight (H,) of one row
static void best_of(u32* restrict s, u32* least, int* left, int n, const float* restrict q, const u8* restrict keys, const float* restrict weight) {
  float w[H]; for (int h = 0; h < H; h++) w[h] = rnd(weight[h] * SCALE);
  for (int j = 0; j < n; j++) {
    float a = 0, k[D];
    get_key(k, keys + (i64)j * KEY_BYTES(D), D);
    for (int h = 0; h < H; h++) { float x = rnd(dot(q + (i64)h * D, k, D)); a += rnd((x > 0 ? x : 0) * w[h]); }
    s[j] = key(rnd(a));
  }
  *least = 0; *left = TOPK;
  if (n <= TOPK) return;
  for (int shift = 24; shift >= 0; shift -= 8) {           // radix select: the key of the last one chosen, a byte at a time
    int count[256]; for (int b = 0; b < 256; b++) count[b] = 0;
    u32 mask = shift == 24 ? 0 : ~0u << (shift + 8); int b = 255;
    for (int j = 0; j < n; j++) if ((s[j] & mask) == *least) count[s[j] >> shift & 255]++;
    while (count[b] < *left) *left -= count[b--];
    *least |= (u32)b << shift;
  }
}
#endif

#ifdef KERNEL_index_topk      // out (T,N) bytes; q (T,H,D), keys (SLOTS,C,key), weight (T,H), at (2,B): the TOPK best of the visible entries
void NAME(u8* restrict out, const float* restrict q, const u8* restrict keys, const float* restrict weight, const int* restrict at) {
  for (int t = 0; t < T; t++) {
    const int b = t / PER; int n = (at[b] + t % PER + 1) / RATIO, left; u32 s[N], least; u8* o = out + (i64)t * N;
    if (n > N) n = N;
    for (int j = 0; j < N; j++) o[j] = j < n;
    if (n <= TOPK) continue;
    best_of(s, &least, &left, n, q + (i64)t * H * D, keys + (i64)at[B + b] * C * KEY_BYTES(D), weight + t * H);
    for (int j = 0; j < n; j++) o[j] = s[j] > least || (s[j] == least && left-- > 0);      // of equals the lower index first
  }
}
#endif

#ifdef KERNEL_index_best      // out (T,2,TOPK): scores, best first, and numbers; the rest as in index_topk
void NAME(float* restrict out, const float* restrict q, const u8* restrict keys, const float* restrict weight, const int* restrict at) {
  for (int t = 0; t < T; t++) {
    const int b = t / PER; int n = (at[b] + t % PER + 1) / RATIO, left, m = 0; u32 s[KEPT], least; float *o = out + (i64)t * 2 * TOPK;
    n = own(n < N ? n : N);
    best_of(s, &least, &left, n, q + (i64)t * H * D, keys + (i64)at[B + b] * C * KEY_BYTES(D), weight + t * H);
    for (int j = 0; j < n; j++) if (s[j] > least || (s[j] == least && left-- > 0)) {       // put where it belongs, behind its equals
      int i = m++; u32 u = s[j] & 0x80000000u ? s[j] & 0x7fffffffu : ~s[j]; float f = ((bits){ .u = u }).f;
      for (; i && o[i - 1] < f; i--) { o[i] = o[i - 1]; o[TOPK + i] = o[TOPK + i - 1]; }
      o[i] = f; o[TOPK + i] = (float)(j * RANKS + RANK);
    }
    for (; m < TOPK; m++) { o[m] = -INF; o[TOPK + m] = 0; }
  }
}
#endif

#ifdef KERNEL_index_choose    // out (T,KEPT) bytes; for each rank (T,2,TOPK): the own ones of the TOPK best of all
void NAME(u8* restrict out, EACH(IN)) {
  const float* list[] = { EACH(IN_NAME) };
  for (int t = 0; t < T; t++) {
    int at[RANKS]; u8* o = out + (i64)t * KEPT;
    for (int r = 0; r < RANKS; r++) at[r] = 0;
    for (int j = 0; j < KEPT; j++) o[j] = 0;
    for (int left = TOPK; left; left--) {                  // the heads of the lists: each time the best, of equals the lower number
      float most = -INF, id = 0; int best = -1;
      for (int r = 0; r < RANKS; r++) if (at[r] < TOPK) {
        const float *p = list[r] + (i64)t * 2 * TOPK + at[r], s = p[0], j = p[TOPK];
        if (s > most || (s == most && best >= 0 && j < id)) { most = s; id = j; best = r; }
      }
      if (best < 0) break;
      at[best]++;
      if (best == RANK) o[(int)id / RANKS] = 1;
    }
  }
}
#endif

#if defined(KERNEL_attend) || defined(KERNEL_attend_block) || defined(KERNEL_attend_part) || defined(KERNEL_attend_merge)
enum { BLOCK = 64, GROUP = 8, HT = H % 4 ? 1 : 4 };         // cached rows, and queries, taken together; heads that share a load
static inline v16 ld16(const float* p) { return *(const v16*)p; }
typedef struct { float top[H], sum[H], o[H * D]; } Mix;     // a query's running maximum, sum of weights and weighted rows

static void mix_start(Mix* a) {
  for (int h = 0; h < H; h++) { a->top[h] = -INF; a->sum[h] = 0; }
  for (int i = 0; i < H * D; i++) a->o[i] = 0;
}
// adds m rows, which are keys and values, to a query's softmax; their order and number per call follow from positions alone
static void mix_add(Mix* a, const float* restrict q, const float* const* kv, int m) {
  if (!m) return;
  for (int h = 0; h < H; h += HT) {
    float s[BLOCK * HT], keep[HT], best[16], sum[HT];       // s: HT of each row
    for (int i = 0; i < m; i++) {
      v16 x[HT], y[HT]; int c = 0; float tail[HT];
      for (int j = 0; j < HT; j++) { x[j] = (v16){0}; y[j] = (v16){0}; tail[j] = 0; }
      for (; c + 32 <= D; c += 32) {
        v16 k0 = ld16(kv[i] + c), k1 = ld16(kv[i] + c + 16);
        for (int j = 0; j < HT; j++) { const float* r = q + (i64)(h + j) * D + c; x[j] += ld16(r) * k0; y[j] += ld16(r + 16) * k1; }
      }
      for (; c < D; c++) for (int j = 0; j < HT; j++) tail[j] += q[(i64)(h + j) * D + c] * kv[i][c];
      for (int j = 0; j < HT; j++) x[j] += y[j];
      const v4 all = sums(x[0], x[1 % HT], x[2 % HT], x[3 % HT]);
      for (int j = 0; j < HT; j++) s[i * HT + j] = (all[j] + tail[j]) * SCALE;
    }
    for (int i = m * HT; i % 16; i++) s[i] = 0;
    for (int j = 0; j < HT; j++) { best[j] = a->top[h + j]; sum[j] = 0; }
    for (int i = 0; i < m; i++) for (int j = 0; j < HT; j++) best[j] = s[i * HT + j] > best[j] ? s[i * HT + j] : best[j];
    for (int j = HT; j < 16; j++) best[j] = best[j % HT];
    for (int i = 0; i < m * HT; i += 16) for (int l = 0; l < 16; l++) s[i + l] = expf_(s[i + l] - best[l]);
    for (int i = 0; i < m; i++) for (int j = 0; j < HT; j++) sum[j] += s[i * HT + j];
    for (int j = 0; j < HT; j++) {
      keep[j] = expf_(a->top[h + j] - best[j]); a->sum[h + j] = a->sum[h + j] * keep[j] + sum[j]; a->top[h + j] = best[j];
    }
    if (W4A8) for (int i = 0; i < m * HT; i++) s[i] = bf16(s[i]);
    int c = 0;
    for (; c + 32 <= D; c += 32) {
      v16 x[HT], y[HT];
      for (int j = 0; j < HT; j++) { float* o = a->o + (h + j) * D + c; x[j] = ld16(o) * keep[j]; y[j] = ld16(o + 16) * keep[j]; }
      for (int i = 0; i < m; i++) {
        v16 k0 = ld16(kv[i] + c), k1 = ld16(kv[i] + c + 16);
        for (int j = 0; j < HT; j++) { x[j] += s[i * HT + j] * k0; y[j] += s[i * HT + j] * k1; }
      }
      for (int j = 0; j < HT; j++) { float* o = a->o + (h + j) * D + c; *(v16*)o = x[j]; *(v16*)(o + 16) = y[j]; }
    }
    for (; c < D; c++) for (int j = 0; j < HT; j++) {
      float b = a->o[(h + j) * D + c] * keep[j]; for (int i = 0; i < m; i++) b += s[i * HT + j] * kv[i][c];
      a->o[(h + j) * D + c] = b;
    }
  }
}
// a row's H heads, rounded and rotated back
static void mix_end(float* restrict out, const Mix* a, const float* restrict sink, const float* restrict rope) {
  for (int h = 0; h < H; h++) {
    float *o = out + (i64)h * D, all = a->sum[h] + expf_(sink[h] - a->top[h]);
    for (int c = 0; c < D; c++) o[c] = rnd(a->o[h * D + c] / all);
    rotate(o + D - R, rope, R, -1);
  }
}
// where a cached row can be read as floats: in place, or decoded into `room`
static inline const float* as_floats(float* room, const u8* row) {
  if (!W4A8) return (const float*)row;
  get_row(room, row, D - R, R); return room;
}
#endif

// Keys are taken in blocks of 64 columns, as the official kernel takes them: column c < WINDOW is the c-th visible position, column
// WINDOW + e the e-th entry a query sees. What shares a block, and so a maximum, follows from the query alone.
#if defined(KERNEL_attend) || defined(KERNEL_attend_part)
// The rows of one sequence from position `start` on, q (PER,H,D), into done(t, mix) for each; `near`: the window counts
static inline __attribute__((always_inline)) void attend_rows(const float* restrict q, const u8* restrict ring, const u8* restrict entries,
    const u8* restrict chosen, int start, int window, void (*done)(int t, const Mix*, void*), void* to) {
  enum { ROWS = WINDOW + GROUP - 1 };
  Mix mix[PER < GROUP ? PER : GROUP]; float near[W4A8 ? ROWS * D : 1], far[W4A8 ? BLOCK * D : 1]; const float *kv[ROWS], *see[BLOCK];
  for (int t0 = 0; t0 < PER; t0 += GROUP) {                // a row of the window is decoded once for all queries of a group
    int g = PER - t0 < GROUP ? PER - t0 : GROUP, p0 = start + t0, first = p0 - WINDOW + 1 < 0 ? 0 : p0 - WINDOW + 1, next[GROUP] = { 0 }, more = 1;
    if (window) for (int i = first; i < p0 + g; i++) kv[i - first] = as_floats(near + W4A8 * (i - first) * D, ring + (i64)(i % RING) * ROW_BYTES(D - R, R));
    for (int t = 0; t < g; t++) mix_start(mix + t);
    for (int b = 0; b < WINDOW || more; b += BLOCK) {
      more = 0;
      for (int t = 0; t < g; t++) {
        int m = 0, p = p0 + t, low = p - WINDOW + 1 < 0 ? 0 : p - WINDOW + 1, n = own((p + 1) / RATIO < N ? (p + 1) / RATIO : N), *e = next + t;
        for (int c = b; window && c < b + BLOCK && c < WINDOW; c++) if (low + c <= p) see[m++] = kv[low + c - first];
        for (int c = b > WINDOW ? b : WINDOW; c < b + BLOCK && *e < n; (*e)++) {
          if (CHOSEN && !chosen[(i64)(t0 + t) * KEPT + *e]) continue;
          float* room = far + W4A8 * (c - b) * D;          // where all queries see the same entries, the group's last one decodes them
          if (CHOSEN || !W4A8 || t == 0 || *e >= own(p0 / RATIO)) as_floats(room, entries + (i64)*e * ROW_BYTES(D - R, R));
          see[m++] = W4A8 ? room : as_floats(room, entries + (i64)*e * ROW_BYTES(D - R, R)); c++;
        }
        more |= *e < n;
        mix_add(mix + t, q + (i64)(t0 + t) * H * D, see, m);
      }
    }
    for (int t = 0; t < g; t++) done(t0 + t, mix + t, to);
  }
}
#endif

#ifdef KERNEL_attend   // out (T,H,D); q (T,H,D), ring (SLOTS,RING,row), entries (SLOTS,C,row), chosen (T,N), sink (H,), rope (T,R/2,2), at (2,B)
typedef struct { float* out; const float *sink, *rope; } To;
static inline void done(int t, const Mix* mix, void* to) { To* a = to; mix_end(a->out + (i64)t * H * D, mix, a->sink, a->rope + (i64)t * R); }
void NAME(float* restrict out, const float* restrict q, const u8* restrict ring, const u8* restrict entries,
          const u8* restrict chosen, const float* restrict sink, const float* restrict rope, const int* restrict at) {
  for (int b = 0; b < B; b++) {
    const i64 t = (i64)b * PER, slot = at[B + b]; To to = { out + t * H * D, sink, rope + t * R };
    attend_rows(q + t * H * D, ring + slot * RING * ROW_BYTES(D - R, R), entries + slot * C * ROW_BYTES(D - R, R), chosen + t * N, at[b], 1, done, &to);
  }
}
#endif

#ifdef KERNEL_attend_part // for each rank out (T,H,D+2): sums of a softmax, top, sum of weights; q (T,H,D); then as attend, chosen (T,KEPT)
static inline void done(int t, const Mix* mix, void* to) {
  float* o = (float*)to + (i64)t * H * (D + 2);
  for (int h = 0; h < H; h++, o += D + 2) {
    for (int c = 0; c < D; c++) o[c] = mix->o[h * D + c];
    o[D] = mix->top[h]; o[D + 1] = mix->sum[h];
  }
}
void NAME(EACH(OUT), EACH(IN), const u8* restrict ring, const u8* restrict entries, const u8* restrict chosen, const int* restrict at) {
  float* out[] = { EACH(OUT_NAME) }; const float* q[] = { EACH(IN_NAME) };
  for (int b = 0; b < B; b++) for (int r = 0; r < RANKS; r++) {
    const i64 t = (i64)b * PER, slot = at[B + b];
    attend_rows(q[r] + t * H * D, ring + slot * RING * ROW_BYTES(D - R, R), entries + slot * C * ROW_BYTES(D - R, R), chosen + t * KEPT, at[b],
                r == RANK, done, out[r] + t * H * (D + 2));
  }
}
#endif

#ifdef KERNEL_attend_merge // out (T,H,D); of each rank (T,H,D+2) as attend_part leaves them; sink (H,), rope (T,R/2,2)
void NAME(float* restrict out, EACH(IN), const float* restrict sink, const float* restrict rope) {
  const float* part[] = { EACH(IN_NAME) }; Mix mix;
  for (int t = 0; t < T; t++) {
    mix_start(&mix);
    for (int h = 0; h < H; h++) {
      const i64 at = ((i64)t * H + h) * (D + 2);
      for (int r = 0; r < RANKS; r++) mix.top[h] = part[r][at + D] > mix.top[h] ? part[r][at + D] : mix.top[h];
      for (int r = 0; r < RANKS; r++) if (part[r][at + D] > -INF) {
        const float w = expf_(part[r][at + D] - mix.top[h]);
        mix.sum[h] += w * part[r][at + D + 1];
        for (int c = 0; c < D; c++) mix.o[h * D + c] += w * part[r][at + c];
      }
    }
    mix_end(out + (i64)t * H * D, &mix, sink, rope + (i64)t * R);
  }
}
#endif

#ifdef KERNEL_attend_block // out (T,H,D); q (T,H,D), ring (SLOTS,RING,row), block (T,D), sink (H,), rope (T,R/2,2), at (2,B)
void NAME(float* restrict out, const float* restrict q, const u8* restrict rings, const float* restrict blocks,
          const float* restrict sink, const float* restrict rope, const int* restrict at) {
  Mix mix[PER]; float room[W4A8 ? BLOCK * D : 1]; const float* kv[BLOCK];
  for (int s = 0; s < B; s++) {
    const i64 row = (i64)s * PER; const int p = at[s], first = p < WINDOW ? 0 : p - WINDOW;
    const u8* ring = rings + (i64)at[B + s] * RING * ROW_BYTES(D - R, R); const float* block = blocks + row * D;
    for (int t = 0; t < PER; t++) mix_start(mix + t);
    for (int b = 0; b < WINDOW + PER; b += BLOCK) {
      int m = 0;
      for (int c = b; c < b + BLOCK && c < WINDOW; c++)
        if (first + c < p) { kv[m] = as_floats(room + W4A8 * m * D, ring + (i64)((first + c) % RING) * ROW_BYTES(D - R, R)); m++; }
      for (int c = b > WINDOW ? b : WINDOW; c < b + BLOCK && c < WINDOW + PER; c++) kv[m++] = block + (i64)(c - WINDOW) * D;
      for (int t = 0; t < PER; t++) mix_add(mix + t, q + (row + t) * H * D, kv, m);
    }
    for (int t = 0; t < PER; t++) mix_end(out + (row + t) * H * D, mix + t, sink, rope + (row + t) * R);
  }
}
#endif

#ifdef KERNEL_route           // ids (T,TOPK) int, weights (T,TOPK); z (T,E), bias (E,) or tid2eid (V,TOPK), tokens (T,)
void NAME(int* restrict ids, float* restrict weights, const float* restrict z, const void* restrict choice, const int* restrict tokens) {
  for (int t = 0; t < T; t++) {
    float score[E], rank[E], sum = 0; int* e = ids + t * TOPK;
    for (int i = 0; i < E; i++) score[i] = __builtin_sqrtf(softplus(z[(i64)t * E + i]));
    if (HASH) for (int k = 0; k < TOPK; k++) e[k] = ((const int*)choice)[(i64)tokens[t] * TOPK + k];
    else {
      for (int i = 0; i < E; i++) rank[i] = score[i] + ((const float*)choice)[i];
      for (int k = 0; k < TOPK; k++) {
        int best = 0; for (int i = 1; i < E; i++) if (rank[i] > rank[best]) best = i;
        e[k] = best; rank[best] = -INF;
      }
    }
    for (int k = 0; k < TOPK; k++) sum += score[e[k]];
    for (int k = 0; k < TOPK; k++) weights[t * TOPK + k] = score[e[k]] / sum * FACTOR;
  }
}
#endif

#ifdef KERNEL_experts  // out (T,D); x (T,D), w13 (E,2I,D), w2 (E,D,I), s13 (2J,D), s2 (D,J), scales behind each; ids, weights (T,TOPK)
// Experts FIRST .. FIRST+E-1 are here. ROUND 0: a share of a sum over devices, without the roundings that follow the shared product
enum { JOBS = LESS(T * TOPK, 32) };                        // rows that one expert takes at once; a row may name an expert twice
DEFINE_FEW(routed1, KIND, 1, COLS)
DEFINE_FEW(routed2, KIND, 2, COLS)
DEFINE_MANY(routed_many, KIND)
DEFINE_FEW(shared1, SHARED, 1, COLS)
DEFINE_FEW(shared2, SHARED, 2, COLS)
DEFINE_MANY(shared_many, SHARED)
#define DEFINE_CHOICE(NAME) \
  static void NAME##_any(float* out, i64 stride, const w16* x, i64 size, int rows, int more, Matrix w, i64 n, i64 k) { \
    if (rows == 1) NAME##1(out, stride, x, size, rows, more, w, n, k); \
    else if (rows == 2) NAME##2(out, stride, x, size, rows, more, w, n, k); \
    else NAME##_many(out, stride, x, size, rows, more, w, n, k); \
  }
DEFINE_CHOICE(routed)
DEFINE_CHOICE(shared)
DEFINE_ROWS(routed, routed_any, KIND)
DEFINE_ROWS(shared, shared_any, SHARED)
typedef struct { float *y; const float* x; float weight; } Job;
static void ffn(const Job* job, int rows, int is_shared, Matrix w13, Matrix w2, int inner) {
  float u[JOBS * 2 * (I > J ? I : J)], v[JOBS * D]; const float* row[JOBS]; const int kind = is_shared ? SHARED : KIND;
  const int quantise = W4A8 && SCALED(kind);
  for (int r = 0; r < rows; r++) row[r] = job[r].x;
  (is_shared ? shared : routed)(u, 2 * inner, row, rows, quantise, w13, 2 * inner, D);
  for (int r = 0; r < rows; r++) {
    float* a = u + r * 2 * inner; row[r] = a;
    for (int i = 0; i < inner; i++) {
      float g = rnd(a[i]), b = rnd(a[inner + i]);
      g = g > LIMIT ? LIMIT : g; b = b > LIMIT ? LIMIT : b < -LIMIT ? -LIMIT : b;
      a[i] = rnd(g * sigmoid(g) * b * job[r].weight);
    }
  }
  (is_shared ? shared : routed)(v, D, row, rows, quantise, w2, D, inner);
  for (int r = 0; r < rows; r++) for (int d = 0; d < D; d++) job[r].y[d] += is_shared && !ROUND ? v[r * D + d] : rnd(v[r * D + d]);
}
void NAME(float* restrict out, const float* restrict x, const u8* restrict w13, const u8* restrict w13s, const u8* restrict w2,
          const u8* restrict w2s, const u8* restrict s13, const u8* restrict s13s, const u8* restrict s2, const u8* restrict s2s,
          const int* restrict ids, const float* restrict weights) {
  for (i64 i = 0; i < (i64)T * D; i++) out[i] = 0;
  for (i64 e = 0; e < E; e++) {                            // by expert: its weights are read once for all rows
    const Matrix up = from_row((Matrix){ w13, w13s }, KIND, D, e * 2 * I), down = from_row((Matrix){ w2, w2s }, KIND, I, e * D);
    Job job[JOBS]; int n = 0;
    for (int t = 0; t < T; t++) for (int k = 0; k < TOPK; k++) {
      if (ids[t * TOPK + k] != FIRST + e) continue;
      job[n++] = (Job){ out + (i64)t * D, x + (i64)t * D, weights[t * TOPK + k] };
      if (n == JOBS) { ffn(job, n, 0, up, down, I); n = 0; }
    }
    if (n) ffn(job, n, 0, up, down, I);
  }
  for (int t = 0; t < T; t += JOBS) {
    Job job[JOBS]; const int n = LESS(T - t, JOBS);
    for (int r = 0; r < n; r++) job[r] = (Job){ out + (i64)(t + r) * D, x + (i64)(t + r) * D, 1.0f };
    ffn(job, n, 1, (Matrix){ s13, s13s }, (Matrix){ s2, s2s }, J);
  }
  if (ROUND) for (i64 i = 0; i < (i64)T * D; i++) out[i] = bf16(out[i]);
}
#endif

#ifdef KERNEL_markov   // out (B,V); base (B*K,V), w1 (V,R), w2 (V,R), token (B,): row ROW of each base plus w2 . w1[token]
void NAME(float* restrict out, const float* restrict base, const void* restrict w1, const void* restrict w2, const int* restrict token) {
  enum { WIDE = (R + 15) / 16, Q = B < 4 ? B : 4 };        // zeros behind R, and for sequences that there are not
  v16 e[(B + 3) / 4 * 4][WIDE] = { 0 }, w[WIDE] = { 0 };
  for (int b = 0; b < B; b++) {
    const i64 from = (i64)(token[b] < 0 ? 0 : token[b]) * R;
    for (int j = 0; j < R; j++) ((float*)e[b])[j] = HALF ? ((bits){ .u = (u32)((const half*)w1)[from + j] << 16 }).f : ((const float*)w1)[from + j];
  }
  for (i64 from = 0; from < V; from += 16) {               // 16 of V for each sequence in turn: rows of V share few lines of the cache
    const int n = V - from < 16 ? (int)(V - from) : 16; float add[(B + 3) / 4 * 4][16];
    for (int i = 0; i < n; i++) {
      const i64 at = (from + i) * R;
      for (int j = 0; j < R; j++) ((float*)w)[j] = HALF ? ((bits){ .u = (u32)((const half*)w2)[at + j] << 16 }).f : ((const float*)w2)[at + j];
      for (int b = 0; b < B; b += 4) {
        v16 a[4] = { 0 };
        for (int j = 0; j < WIDE; j++) for (int q = 0; q < Q; q++) a[q] += w[j] * e[b + q][j];
        const v4 all = sums(a[0], a[1], a[2], a[3]);
        for (int q = 0; q < 4; q++) add[b + q][i] = all[q];
      }
    }
    for (int b = 0; b < B; b++) for (int i = 0; i < n; i++) add[b][i] += base[((i64)b * K + ROW) * V + from + i];
    for (int b = 0; b < B; b++) for (int i = 0; i < n; i++) out[(i64)b * V + from + i] = add[b][i];
  }
}
#endif

#if defined(KERNEL_argmax) || defined(KERNEL_probs)
// the maximum's lowest index, or -1 where a logit is NaN or infinite, or none is finite
static inline int best(const float* x) {
  int b = -1;
  for (int i = 0; i < V; i++) { if (x[i] != x[i] || x[i] == INF) return -1; if (x[i] > -INF && (b < 0 || x[i] > x[b])) b = i; }
  return b;
}
#endif

#ifdef KERNEL_argmax   // ids (T,) int; logits (T,V)
void NAME(int* restrict ids, const float* restrict logits) { for (int t = 0; t < T; t++) ids[t] = best(logits + (i64)t * V); }
#endif

#ifdef KERNEL_probs    // out (T,V); logits (T,V), settings (B,4) = temperature, top_p, top_k, min_p
static inline u32 key(float f) { union { float f; u32 u; } a = { f + 0.0f }; return a.u & 0x80000000u ? ~a.u : a.u | 0x80000000u; }
// the largest key whose strictly better ones weigh less than `want`: radix selection, a byte of the key at a time
static u32 threshold(const float* x, const float* weight, double want) {
  u32 prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    double sum[256]; for (int b = 0; b < 256; b++) sum[b] = 0;
    u32 mask = shift == 24 ? 0 : ~0u << (shift + 8); int b = 255;
    for (int i = 0; i < V; i++) { u32 k = key(x[i]); if ((k & mask) == prefix) sum[k >> shift & 255] += weight ? weight[i] : 1; }
    while (b > 0 && sum[b] < want) want -= sum[b--];
    prefix |= (u32)b << shift;
  }
  return prefix;
}
void NAME(float* restrict out, const float* restrict logits, const float* restrict all) {
  for (int t = 0; t < T; t++) {
    const float *x = logits + (i64)t * V, *settings = all + t / PER * 4; float* w = out + (i64)t * V; int top = best(x), k = (int)settings[2]; u32 least = 0;
    if (top < 0) { for (int i = 0; i < V; i++) w[i] = __builtin_nanf(""); continue; }
    if (!(settings[0] > 0)) { for (int i = 0; i < V; i++) w[i] = i == top; continue; }
    if (k > 0 && k < V) least = threshold(x, 0, k);
    double total = 0;
    for (int i = 0; i < V; i++) { w[i] = key(x[i]) >= least ? expf_((x[i] - x[top]) / settings[0]) : 0; total += w[i]; }
    if (settings[1] < 1) least = threshold(x, w, settings[1] * total);
    total = 0;
    for (int i = 0; i < V; i++) { w[i] = key(x[i]) >= least && w[i] >= settings[3] ? w[i] : 0; total += w[i]; }
    for (int i = 0; i < V; i++) w[i] = (float)(w[i] / total);
  }
}
#endif

#ifdef KERNEL_pick     // ids (T,) int; weights (T,V), seed (B,2) int, at (2,B)
static inline u32 mix(u32 h) { h ^= h >> 16; h *= 0x7feb352du; h ^= h >> 15; h *= 0x846ca68bu; return h ^ h >> 16; }
static inline float logf_(float x) {                       // of positive normal numbers
  union { float f; u32 u; } a = { x }; int e = (int)(a.u >> 23) - 126; a.u = (a.u & 0x7fffffu) | 0x3f000000u;
  float m = a.f; if (m < 0.707106781f) { e--; m = m + m - 1; } else m -= 1;
  float z = m * m, p = 7.0376836292e-2f;
  p = p * m - 1.1514610310e-1f; p = p * m + 1.1676998740e-1f; p = p * m - 1.2420140846e-1f; p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f; p = p * m + 2.0000714765e-1f; p = p * m - 2.4999993993e-1f; p = p * m + 3.3333331174e-1f;
  return m + (m * z * p - 0.5f * z + e * -2.12194440e-4f) + e * 0.693359375f;
}
void NAME(int* restrict ids, const float* restrict weights, const int* restrict seed, const int* restrict at) {
  for (int t = 0; t < T; t++) {
    const float* w = weights + (i64)t * V; float most = -INF; int id = -1; const int b = t / PER;
    u32 h = mix(mix(mix(mix((u32)seed[2 * b]) ^ (u32)seed[2 * b + 1]) + (u32)(at[b] + 1 + OFFSET + t % PER)) + USE);
    for (int i = 0; i < V; i++) {
      if (w[i] != w[i]) { id = -1; break; }
      if (!(w[i] > 1e-37f)) continue;
      float u = (mix(h + (u32)i * 0x9e3779b9u) >> 8) * 0x1p-24f + 0x1p-25f, g = logf_(w[i]) - logf_(-logf_(u));
      if (g > most) { most = g; id = i; }
    }
    ids[t] = id;
  }
}
#endif
