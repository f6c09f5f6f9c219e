// The float32 kernels of specgrad/quant/cpu.py, one per section, on portable vector types (AVX2, NEON, SSE alike).
// Sizes arrive as macros, positions by pointer. No libc: exp, log1p, sine and cosine are here.
// No output row depends on how many rows a call has: every sum has its own fixed order.
typedef float v8 __attribute__((vector_size(32), aligned(4)));
typedef unsigned char u8;
typedef unsigned int u32;
typedef long long i64;
#define INF __builtin_inff()

static inline float hsum(v8 a) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }
static inline v8 ld(const float* p) { return *(const v8*)p; }

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

static inline float rms(const float* x, int n, float eps) { return 1.0f / __builtin_sqrtf(dot(x, x, n) / n + eps); }

static inline void rotate(float* x, const float* table, int r, float sign) {     // adjacent pairs of x[0..r)
  for (int i = 0; i < r / 2; i++) {
    float c = table[2 * i], s = table[2 * i + 1] * sign, a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * c - b * s; x[2 * i + 1] = a * s + b * c;
  }
}

// one block of up to 4 rows of x times 4 rows of w; each product keeps one chain of 8 lanes over k, whatever the block
static inline void tile(float* out, i64 out_stride, const float* x, i64 x_stride, int rows, const float* w, i64 w_stride, int cols, int k) {
  v8 acc[4][4]; float tail[4][4]; int i = 0;
  for (int r = 0; r < 4; r++) for (int c = 0; c < 4; c++) { acc[r][c] = (v8){0}; tail[r][c] = 0; }
  if (rows == 4 && cols == 4) {
    for (; i + 8 <= k; i += 8) {
      v8 a0 = ld(x + i), a1 = ld(x + x_stride + i), a2 = ld(x + 2 * x_stride + i), a3 = ld(x + 3 * x_stride + i);
      for (int c = 0; c < 4; c++) {
        v8 b = ld(w + c * w_stride + i);
        acc[0][c] += a0 * b; acc[1][c] += a1 * b; acc[2][c] += a2 * b; acc[3][c] += a3 * b;
      }
    }
  } else if (rows == 1 && cols == 4) {
    for (; i + 8 <= k; i += 8) {
      v8 a = ld(x + i);
      for (int c = 0; c < 4; c++) acc[0][c] += a * ld(w + c * w_stride + i);
    }
  } else {
    for (; i + 8 <= k; i += 8)
      for (int r = 0; r < rows; r++) { v8 a = ld(x + r * x_stride + i); for (int c = 0; c < cols; c++) acc[r][c] += a * ld(w + c * w_stride + i); }
  }
  for (; i < k; i++) for (int r = 0; r < rows; r++) for (int c = 0; c < cols; c++) tail[r][c] += x[r * x_stride + i] * w[c * w_stride + i];
  for (int r = 0; r < rows; r++) for (int c = 0; c < cols; c++) out[r * out_stride + c] = hsum(acc[r][c]) + tail[r][c];
}
static inline void matmul(float* out, i64 out_stride, const float* x, i64 x_stride, int rows, const float* w, int n, int k) {
  for (int c = 0; c < n; c += 4)
    for (int r = 0; r < rows; r += rows - r >= 4 ? 4 : 1)
      tile(out + r * out_stride + c, out_stride, x + r * x_stride, x_stride, rows - r >= 4 ? 4 : 1, w + (i64)c * k, k, n - c >= 4 ? 4 : n - c, k);
}

#ifdef KERNEL_embed           // out (T,S,D); table (V,D), ids (T,)
void NAME(float* restrict out, const float* restrict table, const int* restrict ids) {
  for (int t = 0; t < T; t++) for (int s = 0; s < S; s++) for (int d = 0; d < D; d++) out[((i64)t * S + s) * D + d] = table[(i64)ids[t] * D + d];
}
#endif

#ifdef KERNEL_rope_table      // out (N,R/2,2); freqs (R/2,), pos (1,): positions (pos / STRIDE + i) * STRIDE
void NAME(float* restrict out, const float* restrict freqs, const int* restrict pos) {
  for (int i = 0; i < N; i++) for (int j = 0; j < R / 2; j++) {
    float p = (float)((pos[0] / STRIDE + i) * STRIDE);
    sincos_(p * freqs[j], out + ((i64)i * (R / 2) + j) * 2 + 1, out + ((i64)i * (R / 2) + j) * 2);
  }
}
#endif

#ifdef KERNEL_hc_pre          // x (T,D), post (T,S), comb (T,S,S); h (T,S,D), fn (2S+SS,SD), scale (3,), base (2S+SS,), norm (D,)
void NAME(float* restrict x, float* restrict post, float* restrict comb, const float* restrict h, const float* restrict fn,
          const float* restrict scale, const float* restrict base, const float* restrict norm) {
  for (int t = 0; t < T; t++) {
    const float* v = h + (i64)t * S * D; float m[2 * S + S * S], pre[S], *c = comb + t * S * S;
    float rho = rms(v, S * D, EPS);
    for (int i = 0; i < 2 * S + S * S; i++) m[i] = dot(fn + (i64)i * S * D, v, S * D) * rho;
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
    for (int d = 0; d < D; d++) { float a = 0; for (int s = 0; s < S; s++) a += pre[s] * v[s * D + d]; y[d] = a; }
    float r = rms(y, D, EPS);
    for (int d = 0; d < D; d++) y[d] = y[d] * r * norm[d];
  }
}
#endif

#ifdef KERNEL_hc_post         // out (T,S,D); z (T,D), h (T,S,D), post (T,S), comb (T,S,S)
void NAME(float* restrict out, const float* restrict z, const float* restrict h, const float* restrict post, const float* restrict comb) {
  for (int t = 0; t < T; t++) for (int k = 0; k < S; k++) for (int d = 0; d < D; d++) {
    float a = post[t * S + k] * z[(i64)t * D + d];
    for (int j = 0; j < S; j++) a += comb[(t * S + j) * S + k] * h[((i64)t * S + j) * D + d];
    out[((i64)t * S + k) * D + d] = a;
  }
}
#endif

#ifdef KERNEL_hc_head         // y (T,D), x (T,D) = y normed; h (T,S,D), fn (S,SD), scale (1,), base (S,), norm (D,)
void NAME(float* restrict y, float* restrict x, const float* restrict h, const float* restrict fn, const float* restrict scale,
          const float* restrict base, const float* restrict norm) {
  for (int t = 0; t < T; t++) {
    const float* v = h + (i64)t * S * D; float pre[S], rho = rms(v, S * D, EPS), *o = y + (i64)t * D;
    for (int i = 0; i < S; i++) pre[i] = sigmoid(dot(fn + (i64)i * S * D, v, S * D) * rho * scale[0] + base[i]) + HC_EPS;
    for (int d = 0; d < D; d++) { float a = 0; for (int s = 0; s < S; s++) a += pre[s] * v[s * D + d]; o[d] = a; }
    float r = rms(o, D, EPS);
    for (int d = 0; d < D; d++) x[(i64)t * D + d] = o[d] * r * norm[d];
  }
}
#endif

#ifdef KERNEL_rms_norm        // out (T,D); x (T,D), norm (D,)
void NAME(float* restrict out, const float* restrict x, const float* restrict norm) {
  for (int t = 0; t < T; t++) {
    float r = rms(x + (i64)t * D, D, EPS);
    for (int d = 0; d < D; d++) out[(i64)t * D + d] = x[(i64)t * D + d] * r * norm[d];
  }
}
#endif

#ifdef KERNEL_linear          // out (T,G*N); x (T,G*K), w (G*N,K): G independent products
void NAME(float* restrict out, const float* restrict x, const float* restrict w) {
  for (int g = 0; g < G; g++) matmul(out + (i64)g * N, (i64)G * N, x + (i64)g * K, (i64)G * K, T, w + (i64)g * N * K, N, K);
}
#endif

#ifdef KERNEL_head_rope       // out (T,H,D); q (T,H,D), rope (T,R/2,2); NORM: rms of every head first, without a weight
void NAME(float* restrict out, const float* restrict q, const float* restrict rope) {
  for (int t = 0; t < T; t++) for (int h = 0; h < H; h++) {
    const float* a = q + ((i64)t * H + h) * D; float* o = out + ((i64)t * H + h) * D, r = NORM ? rms(a, D, EPS) : 1.0f;
    for (int d = 0; d < D; d++) o[d] = a[d] * r;
    rotate(o + D - R, rope + (i64)t * R, R, 1);
  }
}
#endif

#ifdef KERNEL_kv_write        // ring (RING,D) in place; kv (T,D), norm (D,), rope (T,R/2,2), pos (1,)
void NAME(float* restrict ring, const float* restrict kv, const float* restrict norm, const float* restrict rope, const int* restrict pos) {
  for (int t = 0; t < T; t++) {
    float *o = ring + (i64)((pos[0] + t) % RING) * D, r = rms(kv + (i64)t * D, D, EPS);
    for (int d = 0; d < D; d++) o[d] = kv[(i64)t * D + d] * r * norm[d];
    rotate(o + D - R, rope + (i64)t * R, R, 1);
  }
}
#endif

#ifdef KERNEL_kv_rows  // out (T,D); kv (T,D), norm (D,), rope (T,R/2,2)
void NAME(float* restrict out, const float* restrict kv, const float* restrict norm, const float* restrict rope) {
  for (int t = 0; t < T; t++) {
    float *o = out + (i64)t * D, r = rms(kv + (i64)t * D, D, EPS);
    for (int d = 0; d < D; d++) o[d] = kv[(i64)t * D + d] * r * norm[d];
    rotate(o + D - R, rope + (i64)t * R, R, 1);
  }
}
#endif

#ifdef KERNEL_compress        // ring (RING,2W), entries (C,D) in place; proj (T,2W), ape (RATIO,W), norm (D,), rope (n,R/2,2), pos (1,)
void NAME(float* restrict ring, float* restrict entries, const float* restrict proj, const float* restrict ape, const float* restrict norm,
          const float* restrict rope, const int* restrict pos) {
  const int p0 = pos[0], W = OVERLAP ? 2 * D : D;
  for (int t = 0; t < T; t++) {
    float* o = ring + (i64)((p0 + t) % RING) * 2 * W; const float *a = proj + (i64)t * 2 * W, *b = ape + (i64)((p0 + t) % RATIO) * W;
    for (int c = 0; c < W; c++) { o[c] = a[c]; o[W + c] = a[W + c] + b[c]; }
  }
  for (int j = p0 / RATIO; (j + 1) * RATIO <= p0 + T; j++) {
    float top[D], sum[D], *o = entries + (i64)j * D; const int first = OVERLAP && j ? -RATIO : 0;
    for (int c = 0; c < D; c++) { top[c] = -INF; sum[c] = 0; o[c] = 0; }
    for (int i = first; i < RATIO; i++) {
      const float* g = ring + (i64)((j * RATIO + i) % RING) * 2 * W + W + (OVERLAP && i >= 0 ? D : 0);
      for (int c = 0; c < D; c++) top[c] = g[c] > top[c] ? g[c] : top[c];
    }
    for (int i = first; i < RATIO; i++) {
      const float *k = ring + (i64)((j * RATIO + i) % RING) * 2 * W + (OVERLAP && i >= 0 ? D : 0), *g = k + W;
      for (int c = 0; c < D; c++) { float e = expf_(g[c] - top[c]); sum[c] += e; o[c] += e * k[c]; }
    }
    for (int c = 0; c < D; c++) o[c] /= sum[c];
    float r = rms(o, D, EPS);
    for (int c = 0; c < D; c++) o[c] = o[c] * r * norm[c];
    rotate(o + D - R, rope + (i64)(j - p0 / RATIO) * R, R, 1);
  }
}
#endif

#ifdef KERNEL_index_topk      // out (T,N) bytes; q (T,H,D), keys (C,D), weight (T,H), pos (1,): the TOPK best of the visible entries
static inline u32 key(float f) { union { float f; u32 u; } a = { f + 0.0f }; return a.u & 0x80000000u ? ~a.u : a.u | 0x80000000u; }
void NAME(u8* restrict out, const float* restrict q, const float* restrict keys, const float* restrict weight, const int* restrict pos) {
  for (int t = 0; t < T; t++) {
    int n = (pos[0] + t + 1) / RATIO, left = TOPK; u32 s[N], prefix = 0; u8* o = out + (i64)t * N;
    if (n > N) n = N;
    for (int j = 0; j < N; j++) o[j] = j < n;
    if (n <= TOPK) continue;
    for (int j = 0; j < n; j++) {
      float a = 0;
      for (int h = 0; h < H; h++) { float x = dot(q + ((i64)t * H + h) * D, keys + (i64)j * D, D); a += (x > 0 ? x : 0) * (weight[t * H + h] * SCALE); }
      s[j] = key(a);
    }
    for (int shift = 24; shift >= 0; shift -= 8) {         // radix select: the key of the last one chosen, a byte at a time
      int count[256]; for (int b = 0; b < 256; b++) count[b] = 0;
      u32 mask = shift == 24 ? 0 : ~0u << (shift + 8); int b = 255;
      for (int j = 0; j < n; j++) if ((s[j] & mask) == prefix) count[s[j] >> shift & 255]++;
      while (count[b] < left) left -= count[b--];
      prefix |= (u32)b << shift;
    }
    for (int j = 0; j < n; j++) o[j] = s[j] > prefix || (s[j] == prefix && left-- > 0);      // of equals the lower index first
  }
}
#endif

#if defined(KERNEL_attend) || defined(KERNEL_attend_block)
// o (D,) = softmax over n rows and the sink, of rows that are keys and values; s holds the n weights on the way
static inline void mix_rows(float* restrict o, const float* restrict q, const float* const* row, float* restrict s, int n, float sink) {
  float top = -INF, sum = 0; int c = 0;
  for (int i = 0; i < n; i++) { s[i] = dot(q, row[i], D) * SCALE; top = s[i] > top ? s[i] : top; }
  for (int i = 0; i < n; i++) { s[i] = expf_(s[i] - top); sum += s[i]; }
  sum += expf_(sink - top);
  for (; c + 32 <= D; c += 32) {
    v8 a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0};
    for (int i = 0; i < n; i++) { const float* r = row[i] + c; a0 += s[i] * ld(r); a1 += s[i] * ld(r + 8); a2 += s[i] * ld(r + 16); a3 += s[i] * ld(r + 24); }
    *(v8*)(o + c) = a0 / sum; *(v8*)(o + c + 8) = a1 / sum; *(v8*)(o + c + 16) = a2 / sum; *(v8*)(o + c + 24) = a3 / sum;
  }
  for (; c < D; c++) { float b = 0; for (int i = 0; i < n; i++) b += s[i] * row[i][c]; o[c] = b / sum; }
}
#endif

#ifdef KERNEL_attend   // out (T,H,D); q (T,H,D), ring (RING,D), entries (C,D), chosen (T,N), sink (H,), rope (T,R/2,2), pos (1,)
void NAME(float* restrict out, const float* restrict q, const float* restrict ring, const float* restrict entries,
          const u8* restrict chosen, const float* restrict sink, const float* restrict rope, const int* restrict pos) {
  for (int t = 0; t < T; t++) {
    const float* row[WINDOW + N]; float s[WINDOW + N]; int n = 0, p = pos[0] + t;
    for (int i = p - WINDOW + 1 < 0 ? 0 : p - WINDOW + 1; i <= p; i++) row[n++] = ring + (i64)(i % RING) * D;
    for (int j = 0; j < N && j < (p + 1) / RATIO; j++) if (!CHOSEN || chosen[(i64)t * N + j]) row[n++] = entries + (i64)j * D;
    for (int h = 0; h < H; h++) {
      float* o = out + ((i64)t * H + h) * D;
      mix_rows(o, q + ((i64)t * H + h) * D, row, s, n, sink[h]);
      rotate(o + D - R, rope + (i64)t * R, R, -1);
    }
  }
}
#endif

#ifdef KERNEL_attend_block // out (T,H,D); q (T,H,D), ring (RING,D), block (T,D), sink (H,), rope (T,R/2,2), pos (1,)
void NAME(float* restrict out, const float* restrict q, const float* restrict ring, const float* restrict block,
          const float* restrict sink, const float* restrict rope, const int* restrict pos) {
  const float* row[WINDOW + T]; float s[WINDOW + T]; int n = 0;
  for (int i = pos[0] - WINDOW < 0 ? 0 : pos[0] - WINDOW; i < pos[0]; i++) row[n++] = ring + (i64)(i % RING) * D;
  for (int t = 0; t < T; t++) row[n++] = block + (i64)t * D;
  for (int t = 0; t < T; t++) for (int h = 0; h < H; h++) {
    float* o = out + ((i64)t * H + h) * D;
    mix_rows(o, q + ((i64)t * H + h) * D, row, s, n, sink[h]);
    rotate(o + D - R, rope + (i64)t * R, R, -1);
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

#ifdef KERNEL_experts         // out (T,D); x (T,D), w13 (E,2I,D), w2 (E,D,I), s13 (2J,D), s2 (D,J), ids (T,TOPK), weights (T,TOPK)
typedef struct { float *y; const float* x; float weight; } Job;
static inline void ffn(const Job* job, int rows, const float* restrict w13, const float* restrict w2, int inner) {
  float x[4 * D], u[4 * 2 * (I > J ? I : J)], v[4 * D];
  for (int r = 0; r < rows; r++) for (int d = 0; d < D; d++) x[r * D + d] = job[r].x[d];
  matmul(u, 2 * inner, x, D, rows, w13, 2 * inner, D);
  for (int r = 0; r < rows; r++) for (int i = 0; i < inner; i++) {
    float a = u[r * 2 * inner + i], b = u[r * 2 * inner + inner + i];
    a = a > LIMIT ? LIMIT : a; b = b > LIMIT ? LIMIT : b < -LIMIT ? -LIMIT : b;
    u[r * 2 * inner + i] = a * sigmoid(a) * b * job[r].weight;
  }
  matmul(v, D, u, 2 * inner, rows, w2, D, inner);
  for (int r = 0; r < rows; r++) for (int d = 0; d < D; d++) job[r].y[d] += v[r * D + d];
}
void NAME(float* restrict out, const float* restrict x, const float* restrict w13, const float* restrict w2, const float* restrict s13,
          const float* restrict s2, const int* restrict ids, const float* restrict weights) {
  for (i64 i = 0; i < (i64)T * D; i++) out[i] = 0;
  for (int e = 0; e <= E; e++) {                           // by expert, the shared one last: its weights are read once for all rows
    Job job[4]; int n = 0;
    for (int t = 0; t < T; t++) for (int k = 0; k < (e == E ? 1 : TOPK); k++) {
      if (e < E && ids[t * TOPK + k] != e) continue;
      job[n++] = (Job){ out + (i64)t * D, x + (i64)t * D, e == E ? 1.0f : weights[t * TOPK + k] };
      if (n == 4) { ffn(job, 4, e == E ? s13 : w13 + (i64)e * 2 * I * D, e == E ? s2 : w2 + (i64)e * D * I, e == E ? J : I); n = 0; }
    }
    if (n) ffn(job, n, e == E ? s13 : w13 + (i64)e * 2 * I * D, e == E ? s2 : w2 + (i64)e * D * I, e == E ? J : I);
  }
}
#endif

#ifdef KERNEL_markov    // out (1,V); base (K,V), w1 (V,R), w2 (V,R), token (1,): row ROW of base plus w2 . w1[token]
void NAME(float* restrict out, const float* restrict base, const float* restrict w1, const float* restrict w2, const int* restrict token) {
  const float* e = w1 + (i64)(token[0] < 0 ? 0 : token[0]) * R;
  for (int i = 0; i < V; i++) out[i] = base[(i64)ROW * V + i] + dot(w2 + (i64)i * R, e, R);
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

#ifdef KERNEL_probs    // out (T,V); logits (T,V), settings (4,) = temperature, top_p, top_k, min_p
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
void NAME(float* restrict out, const float* restrict logits, const float* restrict settings) {
  for (int t = 0; t < T; t++) {
    const float* x = logits + (i64)t * V; float* w = out + (i64)t * V; int top = best(x), k = (int)settings[2]; u32 least = 0;
    if (top < 0) { for (int i = 0; i < V; i++) w[i] = __builtin_nanf(""); continue; }
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

#ifdef KERNEL_pick     // ids (T,) int; weights (T,V), seed (2,) int, pos (1,)
static inline u32 mix(u32 h) { h ^= h >> 16; h *= 0x7feb352du; h ^= h >> 15; h *= 0x846ca68bu; return h ^ h >> 16; }
static inline float logf_(float x) {                       // of positive normal numbers
  union { float f; u32 u; } a = { x }; int e = (int)(a.u >> 23) - 126; a.u = (a.u & 0x7fffffu) | 0x3f000000u;
  float m = a.f; if (m < 0.707106781f) { e--; m = m + m - 1; } else m -= 1;
  float z = m * m, p = 7.0376836292e-2f;
  p = p * m - 1.1514610310e-1f; p = p * m + 1.1676998740e-1f; p = p * m - 1.2420140846e-1f; p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f; p = p * m + 2.0000714765e-1f; p = p * m - 2.4999993993e-1f; p = p * m + 3.3333331174e-1f;
  return m + (m * z * p - 0.5f * z + e * -2.12194440e-4f) + e * 0.693359375f;
}
void NAME(int* restrict ids, const float* restrict weights, const int* restrict seed, const int* restrict pos) {
  for (int t = 0; t < T; t++) {
    const float* w = weights + (i64)t * V; float most = -INF; int id = -1;
    u32 h = mix(mix(mix(mix((u32)seed[0]) ^ (u32)seed[1]) + (u32)(pos[0] + 1 + OFFSET + t)) + USE);
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
