// The kernels of specgrad/quant/cuda.py, one per section. Sizes arrive as macros, positions by pointer, so one program serves
// any number of rows unless a section says otherwise. Written in C: tests compile it for a CPU too (tests/cuda_on_cpu.h).
// No output row depends on how many rows a call has, and nothing is added up in an order that chance decides: every sum is
// either of integers or has its own fixed order.
// at (2,B): the position of each sequence's first row, then the slot in which it lives of caches (SLOTS,...). Rows and results are those of
// sequence after sequence. Of entries spread over RANKS devices this one, RANK, keeps entry j = RANK + i * RANKS in row i.
// W4A8: 1 where values are rounded as the official code does, 0 for float32 throughout. THREADS: of a block.
#ifdef __cplusplus
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 1)  // one block a processor will do: no spills for the sake of more
#else
#define KERNEL __global__ void
#endif
#define FN __device__ __forceinline__
#define IN const float* __restrict__
#define OUT float* __restrict__
#define ALL 0xffffffffu
#define INF __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fc00000)
#define WARPS (THREADS / 32)
#define LANE (threadIdx.x & 31)
#define WARP (threadIdx.x >> 5)
#ifndef W4A8
#define W4A8 0
#endif
#ifndef B
#define B 1
#endif
#ifndef RANKS
#define RANK 0
#define RANKS 1
#endif
#ifdef D
#if D % 4 == 0
#define VN 4                                               // channels that a thread moves at once
#else
#define VN 1
#endif
#endif
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// ------------------------------------------------------------------------------------------------ sequences and ranks
FN int sequence(int t, int rows) { return B == 1 ? 0 : t / (rows / B); }             // of row t of a call's rows
FN int place_in(int t, int rows) { return B == 1 ? t : t % (rows / B); }              // of row t in its sequence
FN int position(const int* at, int t, int rows) { return at[sequence(t, rows)] + place_in(t, rows); }
FN i64 slot(const int* at, int t, int rows) { return at[B + sequence(t, rows)]; }
FN int kept(int n) { return (n + RANKS - 1 - RANK) / RANKS; }                         // of n entries how many are here
// one parameter for each rank
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
#define INS(i) IN in##i
#define OUTS(i) OUT out##i
#define IN_NAME(i) in##i
#define OUT_NAME(i) out##i

// ------------------------------------------------------------------------------------------------ numbers
FN float bf16(float x) {                                   // to bfloat16, ties to even
  const u32 u = __float_as_uint(x);
  return x != x ? x : __uint_as_float((u + 0x7fffu + (u >> 16 & 1)) & 0xffff0000u);
}
FN float rnd(float x) { return W4A8 ? bf16(x) : x; }
FN float of_bf16(u32 bits) { return __uint_as_float(bits << 16); }
FN float pow2(u32 code) { return __uint_as_float(code == 0 ? 1u << 22 : code == 255 ? 0x7fc00000u : code << 23); } // of an e8m0 code
FN u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
FN u32 scale_code(u32 a, u32 largest) {                    // e8m0 code of 2^ceil(log2(a / largest)), both as bits; 255 for NaN and infinity
  const int code = (int)(a >> 23) - (int)(largest >> 23) + 127 + ((a & 0x7fffffu) > (largest & 0x7fffffu));
  return a >= 0x7f800000u ? 255u : code > 0 ? (u32)code : 0u;
}
#define E4M3_MOST 0x43e00000u                              // 448
#define E4M3_LEAST 0x38d1b717u                             // 1e-4
#define E2M1_MOST 0x40c00000u                              // 6
#define E2M1_LEAST 0x01c00000u                             // 6 * 2^-126
FN float inverse(u32 code) { return pow2(code == 255 ? 255 : 254 - code); }
FN u32 to_e4m3(float x) {                                  // saturating, ties to even
  const u32 sign = __float_as_uint(x) >> 24 & 0x80u; u32 a = magnitude(x);
  if (a > 0x7f800000u) return 0x7fu;
  if (a > E4M3_MOST) a = E4M3_MOST;
  if (a < 0x3c800000u) return sign | (__float_as_uint(__uint_as_float(a) * 512.0f + 8388608.0f) & 0x7fffffu);   // below 2^-6
  return sign | (((a + 0x7ffffu + (a >> 20 & 1)) >> 20) - (120u << 3));
}
FN float of_e4m3(u32 c) { return __uint_as_float((c & 0x80u) << 24 | (c & 0x7fu) << 20) * 0x1p120f; }
FN u32 to_e2m1(float x) {                                  // saturating, ties to even; NaN is 6
  const float a = fabsf(x);
  const u32 code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return x != x ? 7u : code | (__float_as_uint(x) >> 31) << 3;
}
FN float of_e2m1(u32 c) {
  const u32 m = c & 7u, value = m < 2 ? m * 0x3f000000u : (m << 22) + 0x3f000000u;     // 0, 0.5, then exponent and one bit
  return __uint_as_float(value | (c & 8u) << 28);
}
FN float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
FN u32 order(float f) {                                    // float -> unsigned of the same order; -0 equals 0
  const u32 u = __float_as_uint(f + 0.0f);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
FN float disorder(u32 u) { return __uint_as_float(u & 0x80000000u ? u & 0x7fffffffu : ~u); }

// ------------------------------------------------------------------------------------------------ warps and blocks
FN float warp_sum(float a) {
#pragma unroll
  for (int d = 16; d; d >>= 1) a += __shfl_xor_sync(ALL, a, d);
  return a;
}
FN float warp_max(float a) {
#pragma unroll
  for (int d = 16; d; d >>= 1) a = fmaxf(a, __shfl_xor_sync(ALL, a, d));
  return a;
}
FN u32 warp_umax(u32 a) {
#pragma unroll
  for (int d = 16; d; d >>= 1) { const u32 b = __shfl_xor_sync(ALL, a, d); a = a > b ? a : b; }
  return a;
}
FN int warp_count(int a) {
#pragma unroll
  for (int d = 16; d; d >>= 1) a += __shfl_xor_sync(ALL, a, d);
  return a;
}
FN float block_sum(float a, float* room) {                 // room: one number for each warp
  a = warp_sum(a);
  if (LANE == 0) room[WARP] = a;
  __syncthreads();
  a = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) a += room[i];
  __syncthreads();
  return a;
}
FN int block_count(int a, int* room) {
  a = warp_count(a);
  if (LANE == 0) room[WARP] = a;
  __syncthreads();
  a = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) a += room[i];
  __syncthreads();
  return a;
}
FN int block_before(int a, int* room, int* total) {        // the sum over all threads before this one
  int sum = a, before = 0, all = 0;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) { const int b = __shfl_up_sync(ALL, sum, d); if (LANE >= d) sum += b; }
  if (LANE == 31) room[WARP] = sum;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < WARPS; i++) { before += i < WARP ? room[i] : 0; all += room[i]; }
  __syncthreads();
  *total = all;
  return before + sum - a;
}

#ifdef VN
FN void load_vec(float* a, IN p) {
#if VN == 4
  const float4 v = *(const float4*)p;
  a[0] = v.x; a[1] = v.y; a[2] = v.z; a[3] = v.w;
#else
  a[0] = *p;
#endif
}
FN void store_vec(float* p, const float* a) {
#if VN == 4
  *(float4*)p = make_float4(a[0], a[1], a[2], a[3]);
#else
  *p = a[0];
#endif
}
#endif

// ------------------------------------------------------------------------------------------------ a row of D channels in shared memory
#if defined(KERNEL_head_rope) || defined(KERNEL_kv_write) || defined(KERNEL_kv_rows) || defined(KERNEL_compress) || \
    defined(KERNEL_attend_end) || defined(KERNEL_attend_merge)
#define ROW_BYTES (W4A8 ? ((D - R) + 2 * R + ((D - R) + 63) / 64 + 3) / 4 * 4 : 4 * D)
#define KEY_BYTES (W4A8 ? D / 2 + D / 32 : 4 * D)
FN float row_rms(const float* row, float* room) {
  float a = 0;
  for (int i = threadIdx.x; i < D; i += THREADS) a += row[i] * row[i];
  return 1.0f / sqrtf(block_sum(a, room) / D + EPS);
}
FN void row_rotate(float* row, IN rope, float sign) {      // adjacent pairs of the last R channels; the caller waits on both sides
  for (int i = threadIdx.x; i < R / 2; i += THREADS) {
    const float c = rope[2 * i], s = rope[2 * i + 1] * sign, a = row[D - R + 2 * i], b = row[D - R + 2 * i + 1];
    row[D - R + 2 * i] = rnd(a * c - b * s);
    row[D - R + 2 * i + 1] = rnd(a * s + b * c);
  }
}
FN void row_put_e4m3(u8* out, OUT back, const float* row) {  // the first D - R channels in groups of 64: encoded, or (back) there and back
  for (int g = WARP; g < (D - R) / 64; g += WARPS) {
    const float a = row[64 * g + LANE], b = row[64 * g + 32 + LANE];
    u32 most = magnitude(a) > magnitude(b) ? magnitude(a) : magnitude(b), code;
    most = warp_umax(most); code = scale_code(most > E4M3_LEAST ? most : E4M3_LEAST, E4M3_MOST);
    const u32 x = to_e4m3(a * inverse(code)), y = to_e4m3(b * inverse(code));
    if (back) { back[64 * g + LANE] = of_e4m3(x) * pow2(code); back[64 * g + 32 + LANE] = of_e4m3(y) * pow2(code); }
    else {
      out[64 * g + LANE] = (u8)x; out[64 * g + 32 + LANE] = (u8)y;
      if (LANE == 0) out[D + R + g] = (u8)code;
    }
  }
}
FN void row_put(u8* out, const float* row) {               // as the cache holds it
#if W4A8
  row_put_e4m3(out, 0, row);
  for (int i = threadIdx.x; i < R; i += THREADS) {
    const u32 b = __float_as_uint(bf16(row[D - R + i])) >> 16;
    out[D - R + 2 * i] = (u8)b; out[D - R + 2 * i + 1] = (u8)(b >> 8);
  }
  for (int i = D + R + (D - R) / 64 + threadIdx.x; i < ROW_BYTES; i += THREADS) out[i] = 0;
#else
  for (int i = threadIdx.x; i < D; i += THREADS) ((float*)out)[i] = row[i];
#endif
}
#if W4A8 && INDEX
FN float* row_hadamard(float* row, float* other) {         // butterflies between two rows; returns the one that holds the result
  for (int h = 1; h < D; h <<= 1) {
    for (int i = threadIdx.x; i < D; i += THREADS) other[i] = i & h ? row[i ^ h] - row[i] : row[i] + row[i ^ h];
    __syncthreads();
    float* swap = row; row = other; other = swap;
  }
  for (int i = threadIdx.x; i < D; i += THREADS) row[i] = rnd(row[i] * HADAMARD);
  __syncthreads();
  return row;
}
FN void row_put_e2m1(u8* out, OUT back, const float* row) {  // in groups of 32: an indexer's key, or (back) there and back
  for (int g = WARP; g < D / 32; g += WARPS) {
    const float a = row[32 * g + LANE];
    const u32 most = warp_umax(magnitude(a)), code = scale_code(most > E2M1_LEAST ? most : E2M1_LEAST, E2M1_MOST);
    const u32 x = to_e2m1(a * inverse(code)), next = __shfl_down_sync(ALL, x, 1);
    if (back) back[32 * g + LANE] = of_e2m1(x) * pow2(code);
    else {
      if (LANE % 2 == 0) out[16 * g + LANE / 2] = (u8)(x | next << 4);
      if (LANE == 0) out[D / 2 + g] = (u8)code;
    }
  }
}
#endif
#endif

#ifdef KERNEL_embed    // out (T,S,D); table (V,D) from id FIRST on, ids (T,). Grid: parts of a row, T
KERNEL NAME(OUT out, const void* __restrict__ table, const int* __restrict__ ids) {
  const int i = (blockIdx.x * THREADS + threadIdx.x) * VN; const i64 t = blockIdx.y, id = ids[t] - FIRST;
  float a[VN];
  if (i >= D) return;
  if (id < 0 || id >= V) {
    for (int j = 0; j < VN; j++) a[j] = 0;
  } else {
#if HALF && VN == 4
  const uint2 v = *(const uint2*)((const unsigned short*)table + id * D + i);
  a[0] = of_bf16(v.x & 0xffffu); a[1] = of_bf16(v.x >> 16); a[2] = of_bf16(v.y & 0xffffu); a[3] = of_bf16(v.y >> 16);
#elif HALF
  a[0] = of_bf16(((const unsigned short*)table)[id * D + i]);
#else
  load_vec(a, (const float*)table + id * D + i);
#endif
  }
#pragma unroll
  for (int s = 0; s < S; s++) store_vec(out + (t * S + s) * D + i, a);
}
#endif

#ifdef KERNEL_rope_table      // out (N,R/2,2); freqs (R/2,), at (2,B): positions (position / STRIDE + i) * STRIDE. Grid: N
FN void sincos_exact(float angle, float* sn, float* cs) {  // in double: angles reach a million
  const double x = angle, t = x * 0.63661977236758134308; const i64 q = (i64)(t + (t >= 0 ? 0.5 : -0.5));
  const double r = (x - q * 1.57079632673412561417) - q * 6.07710050650619224932e-11, z = r * r;
  const double s = r + r * z * (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 + z * (1.0 / 362880 + z * (-1.0 / 39916800
                   + z / 6227020800.0)))));
  const double c = 1 + z * (-0.5 + z * (1.0 / 24 + z * (-1.0 / 720 + z * (1.0 / 40320 + z * (-1.0 / 3628800 + z / 479001600.0)))));
  const double a = q & 1 ? c : s, b = q & 1 ? s : c;
  *sn = (float)(q & 2 ? -a : a); *cs = (float)((q + 1) & 2 ? -b : b);
}
KERNEL NAME(OUT out, IN freqs, const int* __restrict__ at) {
  const int i = blockIdx.x, rows = gridDim.x; const float p = (float)((at[sequence(i, rows)] / STRIDE + place_in(i, rows)) * STRIDE);
  for (int j = threadIdx.x; j < R / 2; j += THREADS) {
    float s, c;
    sincos_exact(p * freqs[j], &s, &c);
    out[((i64)i * (R / 2) + j) * 2] = c; out[((i64)i * (R / 2) + j) * 2 + 1] = s;
  }
}
#endif

// ------------------------------------------------------------------------------------------------ hyper-connections
// Products of a row of S*D with M of `fn` and with itself, in pieces of 128 channels: as many blocks as there are pieces, and
// `fn` is read once for up to 8 rows. hc_pre and hc_head add the pieces up.
#define PIECES ((S * D + 127) / 128)
#ifdef KERNEL_hc_mix          // part (T,M+1,PIECES); h (T,S,D), fn (M,SD). Grid: PIECES, T / ROWS
KERNEL NAME(OUT part, IN h, IN fn) {
  const int k = blockIdx.x * 128 + LANE * 4; float w[(M + WARPS) / WARPS][4];
#pragma unroll
  for (int c = 0; c < (M + WARPS) / WARPS; c++) {
    const int o = WARP + c * WARPS;
    w[c][0] = w[c][1] = w[c][2] = w[c][3] = 0;
#if S * D % 4 == 0
    if (o < M && k < S * D) {
      const float4 v = *(const float4*)(fn + (i64)o * S * D + k);
      w[c][0] = v.x; w[c][1] = v.y; w[c][2] = v.z; w[c][3] = v.w;
    }
#else
    for (int j = 0; j < 4; j++) if (o < M && k + j < S * D) w[c][j] = fn[(i64)o * S * D + k + j];
#endif
  }
  for (int t = blockIdx.y * ROWS; t < T && t < (int)(blockIdx.y + 1) * ROWS; t++) {
    float v[4] = { 0, 0, 0, 0 };
#if S * D % 4 == 0
    if (k < S * D) { const float4 a = *(const float4*)(h + (i64)t * S * D + k); v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w; }
#else
    for (int j = 0; j < 4; j++) if (k + j < S * D) v[j] = h[(i64)t * S * D + k + j];
#endif
#pragma unroll
    for (int c = 0; c < (M + WARPS) / WARPS; c++) {
      const int o = WARP + c * WARPS; float a = 0;
#pragma unroll
      for (int j = 0; j < 4; j++) a += v[j] * (o == M ? v[j] : w[c][j]);
      a = warp_sum(a);
      if (LANE == 0 && o <= M) part[((i64)t * (M + 1) + o) * PIECES + blockIdx.x] = a;
    }
  }
}
#endif

#if defined(KERNEL_hc_pre) || defined(KERNEL_hc_head)
FN void mixes(float* mix, IN part) {                       // mix[o], o < M: the products, scaled by the joint rms
  for (int o = WARP; o <= M; o += WARPS) {
    float a = 0;
    for (int i = LANE; i < PIECES; i += 32) a += part[o * PIECES + i];
    a = warp_sum(a);
    if (LANE == 0) mix[o] = a;
  }
  __syncthreads();
  const float rho = 1.0f / sqrtf(mix[M] / (S * D) + EPS);
  for (int o = threadIdx.x; o < M; o += THREADS) mix[o] *= rho;
  __syncthreads();
}
#endif
#if defined(KERNEL_hc_pre) || defined(KERNEL_hc_head) || defined(KERNEL_rms_norm)
#define STEPS ((D + THREADS * VN - 1) / (THREADS * VN))
FN void normed(OUT out, float (*a)[VN], float square, float* room, IN norm) {  // out = a / rms(a) * norm, a in the threads' registers
  const float r = 1.0f / sqrtf(block_sum(square, room) / D + EPS);
#pragma unroll
  for (int c = 0; c < STEPS; c++) {
    const int d = (c * THREADS + threadIdx.x) * VN; float w[VN];
    if (d >= D) continue;
    load_vec(w, norm + d);
#pragma unroll
    for (int j = 0; j < VN; j++) w[j] = rnd(a[c][j] * r * w[j]);
    store_vec(out + d, w);
  }
}
#endif
#if defined(KERNEL_hc_pre) || defined(KERNEL_hc_head)
FN float mixed_streams(float (*a)[VN], const float* pre, IN h) {  // a = sum of pre[s] * h[s]; returns the sum of this thread's squares
  float square = 0;
#pragma unroll
  for (int c = 0; c < STEPS; c++) {
    const int d = (c * THREADS + threadIdx.x) * VN; float v[S][VN];
    if (d >= D) continue;
#pragma unroll
    for (int s = 0; s < S; s++) load_vec(v[s], h + (i64)s * D + d);
#pragma unroll
    for (int j = 0; j < VN; j++) {
      a[c][j] = 0;
#pragma unroll
      for (int s = 0; s < S; s++) a[c][j] += pre[s] * v[s][j];
      a[c][j] = rnd(a[c][j]);
      square += a[c][j] * a[c][j];
    }
  }
  return square;
}
#endif

#ifdef KERNEL_hc_pre          // x (T,D), post (T,S), comb (T,S,S); part, h (T,S,D), scale (3,), base (M,), norm (D,). Grid: 2, T
KERNEL NAME(OUT x, OUT post, OUT comb, IN part, IN h, IN scale, IN base, IN norm) {
  __shared__ float mix[M + 1], pre[S], room[WARPS];
  const i64 t = blockIdx.y;
  mixes(mix, part + t * (M + 1) * PIECES);
  if (blockIdx.x) {                                        // Sinkhorn takes as long as all the rest: a block of its own
    if (WARP) return;
    const int l = LANE < S * S ? LANE : 0, i = l / S, j = l % S;
    float c = mix[2 * S + l] * scale[2] + base[2 * S + l], top = -INF, sum = 0;
    if (LANE < S) post[t * S + LANE] = 2 * sigmoid(mix[S + LANE] * scale[1] + base[S + LANE]);
#pragma unroll
    for (int k = 0; k < S; k++) top = fmaxf(top, __shfl_sync(ALL, c, i * S + k));
    c = expf(c - top);
#pragma unroll
    for (int k = 0; k < S; k++) sum += __shfl_sync(ALL, c, i * S + k);
    c = c / sum + HC_EPS;
    for (int it = 0; it < ITERS; it++) {
      if (it) {
        sum = HC_EPS;
#pragma unroll
        for (int k = 0; k < S; k++) sum += __shfl_sync(ALL, c, i * S + k);
        c /= sum;
      }
      sum = HC_EPS;
#pragma unroll
      for (int k = 0; k < S; k++) sum += __shfl_sync(ALL, c, k * S + j);
      c /= sum;
    }
    if (LANE < S * S) comb[t * S * S + LANE] = c;
    return;
  }
  float a[STEPS][VN];
  if (threadIdx.x < S) pre[threadIdx.x] = sigmoid(mix[threadIdx.x] * scale[0] + base[threadIdx.x]) + HC_EPS;
  __syncthreads();
  normed(x + t * D, a, mixed_streams(a, pre, h + t * S * D), room, norm);
}
#endif

#ifdef KERNEL_hc_head         // y (T,D), x (T,D) = y normed; part, h (T,S,D), scale (1,), base (S,), norm (D,). Grid: T
KERNEL NAME(OUT y, OUT x, IN part, IN h, IN scale, IN base, IN norm) {
  __shared__ float mix[M + 1], pre[S], room[WARPS];
  const i64 t = blockIdx.x; float a[STEPS][VN];
  mixes(mix, part + t * (M + 1) * PIECES);
  if (threadIdx.x < S) pre[threadIdx.x] = sigmoid(mix[threadIdx.x] * scale[0] + base[threadIdx.x]) + HC_EPS;
  __syncthreads();
  const float square = mixed_streams(a, pre, h + t * S * D);
#pragma unroll
  for (int c = 0; c < STEPS; c++) { const int d = (c * THREADS + threadIdx.x) * VN; if (d < D) store_vec(y + t * D + d, a[c]); }
  normed(x + t * D, a, square, room, norm);
}
#endif

#ifdef KERNEL_hc_post         // out (T,S,D); shares of z (T,D), h (T,S,D), post (T,S), comb (T,S,S). Grid: parts of a row, T
KERNEL NAME(OUT out, EACH(INS), IN h, IN post, IN comb) {
  const float* z[RANKS] = { EACH(IN_NAME) };
  const int d = (blockIdx.x * THREADS + threadIdx.x) * VN; const i64 t = blockIdx.y; float a[VN], v[S][VN], o[VN];
  if (d >= D) return;
  load_vec(a, in0 + t * D + d);
#pragma unroll
  for (int r = 1; r < RANKS; r++) {
    load_vec(o, z[r] + t * D + d);
    for (int e = 0; e < VN; e++) a[e] += o[e];
  }
  for (int e = 0; e < VN; e++) a[e] = RANKS > 1 ? rnd(a[e]) : a[e];
#pragma unroll
  for (int j = 0; j < S; j++) load_vec(v[j], h + (t * S + j) * D + d);
#pragma unroll
  for (int k = 0; k < S; k++) {
#pragma unroll
    for (int e = 0; e < VN; e++) {
      o[e] = post[t * S + k] * a[e];
#pragma unroll
      for (int j = 0; j < S; j++) o[e] += comb[(t * S + j) * S + k] * v[j][e];
      o[e] = rnd(o[e]);
    }
    store_vec(out + (t * S + k) * D + d, o);
  }
}
#endif

#ifdef KERNEL_rms_norm        // out (T,D); x (T,D), norm (D,). Grid: T
KERNEL NAME(OUT out, IN x, IN norm) {
  __shared__ float room[WARPS];
  float a[STEPS][VN], square = 0;
#pragma unroll
  for (int c = 0; c < STEPS; c++) {
    const int d = (c * THREADS + threadIdx.x) * VN;
    if (d >= D) continue;
    load_vec(a[c], x + (i64)blockIdx.x * D + d);
#pragma unroll
    for (int j = 0; j < VN; j++) square += a[c][j] * a[c][j];
  }
  normed(out + (i64)blockIdx.x * D, a, square, room, norm);
}
#endif

// ------------------------------------------------------------------------------------------------ caches
#ifdef KERNEL_head_rope // out (T,H,D); q (T,H,D), rope (T,R/2,2). NORM: each head's rms first; INDEX: an indexer's query. Grid: H, T
KERNEL NAME(OUT out, IN q, IN rope) {
  __shared__ float row[D];
#if NORM
  __shared__ float room[WARPS];
#endif
#if W4A8 && INDEX
  __shared__ float other[D];
#endif
  const i64 at = ((i64)blockIdx.y * H + blockIdx.x) * D; float r = 1.0f, square = 0;
  for (int d = threadIdx.x * VN; d < D; d += THREADS * VN) {
    float a[VN];
    load_vec(a, q + at + d);
#pragma unroll
    for (int j = 0; j < VN; j++) { row[d + j] = a[j]; square += rnd(a[j] * a[j]); }
  }
#if NORM
  r = block_sum(square, room) / D;                         // the official order: square, mean, rsqrt, product, each in bfloat16
  r = rnd(1.0f / sqrtf(rnd(rnd(r) + EPS)));
#endif
  __syncthreads();
  for (int d = threadIdx.x; d < D; d += THREADS) row[d] = rnd(row[d] * r);
  __syncthreads();
  row_rotate(row, rope + (i64)blockIdx.y * R, 1.0f);
  __syncthreads();
#if W4A8 && INDEX
  row_put_e2m1(0, out + at, row_hadamard(row, other));
#else
  for (int d = threadIdx.x * VN; d < D; d += THREADS * VN) store_vec(out + at + d, row + d);
#endif
}
#endif

#if defined(KERNEL_kv_write) || defined(KERNEL_kv_rows)
FN void kv_row(float* row, float* room, IN kv, IN norm, IN rope) {
  for (int d = threadIdx.x; d < D; d += THREADS) row[d] = kv[d];
  __syncthreads();
  const float r = row_rms(row, room);
  for (int d = threadIdx.x; d < D; d += THREADS) row[d] = rnd(row[d] * r * norm[d]);
  __syncthreads();
  row_rotate(row, rope, 1.0f);
  __syncthreads();
}
#endif

#ifdef KERNEL_kv_write // ring (SLOTS,RING,row) in place; kv (T,D), norm (D,), rope (T,R/2,2), at (2,B). Grid: T
KERNEL NAME(u8* __restrict__ ring, IN kv, IN norm, IN rope, const int* __restrict__ at) {
  __shared__ float room[WARPS], row[D];
  const int t = blockIdx.x;
  kv_row(row, room, kv + (i64)t * D, norm, rope + (i64)t * R);
  row_put(ring + (slot(at, t, gridDim.x) * RING + position(at, t, gridDim.x) % RING) * ROW_BYTES, row);
}
#endif

#ifdef KERNEL_kv_rows  // out (T,D) as kv_write would cache it; kv (T,D), norm (D,), rope (T,R/2,2). Grid: T
KERNEL NAME(OUT out, IN kv, IN norm, IN rope) {
  __shared__ float room[WARPS], row[D];
  const i64 t = blockIdx.x;
  kv_row(row, room, kv + t * D, norm, rope + t * R);
  if (W4A8) row_put_e4m3(0, out + t * D, row);
  for (int d = threadIdx.x + (W4A8 ? D - R : 0); d < D; d += THREADS) out[t * D + d] = row[d];
}
#endif

#ifdef KERNEL_compress // ring (SLOTS,RING,2W), entries (SLOTS,C,row or key) in place; proj (T,2W), ape (RATIO,W), norm (D,),
// rope (B*NB,R/2,2), at (2,B). Grid: B*NB + T.
// The first B*NB blocks make an entry each, if these rows finish it; the others put the rows into the ring. An entry takes new
// rows from `proj`, so no block waits for another; the ring has room for both what is read and what is written.
#define W (OVERLAP ? 2 * D : D)
#define GROUP 8                                            // rows in flight
KERNEL NAME(float* rings, u8* __restrict__ entries, IN projs, IN ape, IN norm, IN rope, const int* __restrict__ at) {
  const int rows = (gridDim.x - B * NB) / B;
  if (blockIdx.x >= B * NB) {
    const int t = blockIdx.x - B * NB, p = position(at, t, rows * B);
    float* o = rings + (slot(at, t, rows * B) * RING + p % RING) * 2 * W; const float* a = projs + (i64)t * 2 * W;
    for (int c = threadIdx.x; c < W; c += THREADS) { o[c] = a[c]; o[W + c] = a[W + c] + ape[(i64)(p % RATIO) * W + c]; }
    return;
  }
  __shared__ float room[WARPS], row[D];
#if W4A8 && INDEX
  __shared__ float other[D];
#endif
  const int b = blockIdx.x / NB, p0 = at[b], j = p0 / RATIO + blockIdx.x % NB;
  const int first = (j - (OVERLAP && j ? 1 : 0)) * RATIO, last = (j + 1) * RATIO; const i64 in = at[B + b], row_at = in * C + j / RANKS;
  const float *ring = rings + in * RING * 2 * W, *proj = projs + (i64)b * rows * 2 * W;
  if (last > p0 + rows || j % RANKS != RANK) return;
  for (int c = threadIdx.x; c < D; c += THREADS) {
    float top = -INF, sum = 0, o = 0;
    for (int p = first; p < last; p += GROUP) {
      float g[GROUP], k[GROUP], best = top;
#pragma unroll
      for (int i = 0; i < GROUP; i++) {
        const int x = p + i, off = c + (OVERLAP && x >= j * RATIO ? D : 0);
        g[i] = -INF; k[i] = 0;
        if (x < last && x >= p0) {
          k[i] = proj[(i64)(x - p0) * 2 * W + off];
          g[i] = proj[(i64)(x - p0) * 2 * W + W + off] + ape[(i64)(x % RATIO) * W + off];
        } else if (x < last) { k[i] = ring[(i64)(x % RING) * 2 * W + off]; g[i] = ring[(i64)(x % RING) * 2 * W + W + off]; }
      }
#pragma unroll
      for (int i = 0; i < GROUP; i++) best = fmaxf(best, g[i]);
      const float keep = expf(top - best);
      sum *= keep; o *= keep; top = best;
#pragma unroll
      for (int i = 0; i < GROUP; i++) if (p + i < last) { const float e = expf(g[i] - best); sum += e; o += e * k[i]; }
    }
    row[c] = rnd(o / sum);
  }
  __syncthreads();
  const float r = row_rms(row, room);
  for (int c = threadIdx.x; c < D; c += THREADS) row[c] = rnd(row[c] * r * norm[c]);
  __syncthreads();
  row_rotate(row, rope + (i64)blockIdx.x * R, 1.0f);
  __syncthreads();
#if W4A8 && INDEX
  row_put_e2m1(entries + row_at * KEY_BYTES, 0, row_hadamard(row, other));
#else
  row_put(entries + row_at * ROW_BYTES, row);
#endif
}
#endif

// ------------------------------------------------------------------------------------------------ tensor cores
#if defined(KERNEL_index_scores) || defined(KERNEL_attend) || defined(KERNEL_attend_block) || defined(KERNEL_attend_part)
FN u32 pack(float lo, float hi) { return __byte_perm(__float_as_uint(lo), __float_as_uint(hi), 0x7632); }  // both are bfloat16 already
// c (16,8) += a (16,16) times b (16,8), of bfloat16, by a warp. Lane 4g+i holds of a: rows g and g+8, columns 2i, 2i+1, then the
// same two rows 8 columns on; of b: column g, rows 2i, 2i+1, then 8 rows on; of c: row g, columns 2i, 2i+1, then row g+8.
FN void mma(float* c, const u32* a, u32 b0, u32 b1) {
#ifdef __CUDA_ARCH__
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  for (int half = 0; half < 2; half++) for (int i = 0; i < 4; i++) {
    u32 row[2], col[2];
    for (int e = 0; e < 2; e++) {
      row[e] = __shfl_sync(ALL, a[e + 2 * half], (LANE & ~3) + i);
      col[e] = __shfl_sync(ALL, half ? b1 : b0, (2 * (LANE & 3) + e) * 4 + i);
    }
    for (int e = 0; e < 4; e++)
      c[e] += of_bf16(row[e / 2] & 0xffffu) * of_bf16(col[e % 2] & 0xffffu) + of_bf16(row[e / 2] >> 16) * of_bf16(col[e % 2] >> 16);
  }
#endif
}
// a's 16 columns from `k` on, of rows of float32; rows from `most` on are zero
FN void mma_rows(u32* a, IN x, i64 pitch, int most, int k) {
  const int g = LANE / 4, i = k + LANE % 4 * 2;
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const int r = g + e % 2 * 8, at = i + e / 2 * 8; float2 v = make_float2(0, 0);
    if (r < most) v = *(const float2*)(x + r * pitch + at);
    a[e] = pack(bf16(v.x), bf16(v.y));
  }
}
#endif

// ------------------------------------------------------------------------------------------------ indexer
#if W4A8                                                   // scores are bfloat16
typedef unsigned short Score;
#define SCORE_OF(x) (Score)(order(x) >> 16)
#define UNORDERED(s) disorder((s) << 16 | ((s) & 0x8000u ? 0 : 0xffffu))
#else
typedef u32 Score;
#define SCORE_OF(x) order(x)
#define UNORDERED(s) disorder(s)
#endif
// how many of the first N entries a row sees of those kept here
#define VISIBLE(t, rows) kept((position(at, t, rows) + 1) / RATIO < N ? (position(at, t, rows) + 1) / RATIO : N)
#ifdef KERNEL_index_scores    // score (T,KEPT) as ordered unsigned; q (T,H,D), keys (SLOTS,C,key), weight (T,H), at (2,B). Grid: KEPT / KEYS, T
// Rows with no more visible entries than UNSCORED need no scores.
#if W4A8 && D % 32 == 0
// On tensor cores: codes times scales are exact in bfloat16. A warp has 16 heads, if that is enough for all KEYS of the block.
#define PITCH (D / 2 + 4)                                  // of a key, two channels a word
KERNEL NAME(Score* __restrict__ score, IN q, const u8* __restrict__ keys, IN weight, const int* __restrict__ at) {
  __shared__ u32 ks[32 * PITCH];
  __shared__ float sums[WARPS][32];
  const int t = blockIdx.y, g = LANE / 4, i = LANE % 4, n = VISIBLE(t, gridDim.y);
  if (n <= UNSCORED || (int)blockIdx.x * KEYS >= n) return;
  keys += slot(at, t, gridDim.y) * C * (D / 2 + D / 32);
#if H <= 16 * WARPS
  u32 a[D / 16][4];
#pragma unroll
  for (int k = 0; k < D / 16; k++) mma_rows(a[k], q + ((i64)t * H + WARP * 16) * D, D, H - (int)WARP * 16, 16 * k);
#endif
  for (int j0 = blockIdx.x * KEYS; j0 < n && j0 < (int)(blockIdx.x + 1) * KEYS; j0 += 32) {
    float part[4][2];
    __syncthreads();
    for (int w = threadIdx.x; w < 32 * (D / 2); w += THREADS) {
      const int j = j0 + w / (D / 2), c = w % (D / 2); const u8* key = keys + (i64)j * (D / 2 + D / 32); u32 v = 0;
      if (j < n) { const float s = pow2(key[D / 2 + c / 16]); v = pack(of_e2m1(key[c] & 15u) * s, of_e2m1(key[c] >> 4) * s); }
      ks[w / (D / 2) * PITCH + c] = v;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 4; k++) part[k][0] = part[k][1] = 0;
    for (int h0 = WARP * 16; h0 < H; h0 += WARPS * 16) {
      float acc[4][4], share[2];
#pragma unroll
      for (int k = 0; k < 4; k++) acc[k][0] = acc[k][1] = acc[k][2] = acc[k][3] = 0;
#pragma unroll
      for (int d = 0; d < D; d += 16) {
#if H <= 16 * WARPS
        const u32* b = a[d / 16];
#else
        u32 b[4];
        mma_rows(b, q + ((i64)t * H + h0) * D, D, H - h0, d);
#endif
#pragma unroll
        for (int k = 0; k < 4; k++) mma(acc[k], b, ks[(8 * k + g) * PITCH + d / 2 + i], ks[(8 * k + g) * PITCH + d / 2 + i + 4]);
      }
#pragma unroll
      for (int e = 0; e < 2; e++) share[e] = h0 + g + 8 * e < H ? rnd(weight[(i64)t * H + h0 + g + 8 * e] * SCALE) : 0;
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int e = 0; e < 4; e++) part[k][e % 2] += rnd(fmaxf(rnd(acc[k][e]), 0.0f) * share[e / 2]);
    }
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float s = part[k][e];
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) s += __shfl_xor_sync(ALL, s, d);
        if (g == 0) sums[WARP][8 * k + 2 * i + e] = s;
      }
    __syncthreads();
    if (threadIdx.x < 32 && j0 + (int)threadIdx.x < n) {
      float s = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) s += sums[w][threadIdx.x];
      score[(i64)t * KEPT + j0 + threadIdx.x] = SCORE_OF(rnd(s));
    }
  }
}
#else
// 64 heads times 32 keys, 64 channels at a time; each thread owns 4 heads and 4 keys.
#define HT 64
#define KT 32
#define DT 64
#define PITCH (DT + 4)                                     // rows start in different banks
KERNEL NAME(Score* __restrict__ score, IN q, const u8* __restrict__ keys, IN weight, const int* __restrict__ at) {
  __shared__ __align__(16) float qs[HT * PITCH];
  __shared__ __align__(16) float ks[KT * PITCH];
  const int t = blockIdx.y, j0 = blockIdx.x * KT, kx = threadIdx.x % 8, hx = threadIdx.x / 8;
  const int n = VISIBLE(t, gridDim.y);
  float total[4] = { 0, 0, 0, 0 };
  if (n <= UNSCORED || j0 >= n) return;
  keys += slot(at, t, gridDim.y) * C * (W4A8 ? D / 2 + D / 32 : 4 * D);
  for (int h0 = 0; h0 < H; h0 += HT) {
    float acc[4][4];
#pragma unroll
    for (int a = 0; a < 4; a++) for (int b = 0; b < 4; b++) acc[a][b] = 0;
    for (int d0 = 0; d0 < D; d0 += DT) {
      __syncthreads();
      for (int i = threadIdx.x; i < HT * DT; i += THREADS) {
        const int h = h0 + i / DT, d = d0 + i % DT;
        qs[i / DT * PITCH + i % DT] = h < H && d < D ? q[((i64)t * H + h) * D + d] : 0;
      }
      for (int i = threadIdx.x; i < KT * DT; i += THREADS) {
        const int j = j0 + i / DT, d = d0 + i % DT; float v = 0;
        if (j < n && d < D) {
#if W4A8
          const u8* key = keys + (i64)j * (D / 2 + D / 32);
          v = of_e2m1(key[d / 2] >> 4 * (d & 1) & 15u) * pow2(key[D / 2 + d / 32]);
#else
          v = ((const float*)keys)[(i64)j * D + d];
#endif
        }
        ks[i / DT * PITCH + i % DT] = v;
      }
      __syncthreads();
#pragma unroll 4
      for (int d = 0; d < DT; d += 4) {
        float4 a[4], b[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          a[i] = *(const float4*)(qs + (hx * 4 + i) * PITCH + d); b[i] = *(const float4*)(ks + (kx + 8 * i) * PITCH + d);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
          for (int k = 0; k < 4; k++) acc[i][k] += a[i].x * b[k].x + a[i].y * b[k].y + a[i].z * b[k].z + a[i].w * b[k].w;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int h = h0 + hx * 4 + i; const float share = h < H ? rnd(weight[(i64)t * H + h] * SCALE) : 0;
#pragma unroll
      for (int k = 0; k < 4; k++) total[k] += rnd(fmaxf(rnd(acc[i][k]), 0.0f) * share);
    }
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 4; k++) qs[hx * KT + kx + 8 * k] = total[k];
  __syncthreads();
  if (threadIdx.x < KT && j0 + threadIdx.x < KEPT) {
    float s = 0;
#pragma unroll
    for (int i = 0; i < HT / 4; i++) s += qs[i * KT + threadIdx.x];
    score[(i64)t * KEPT + j0 + threadIdx.x] = SCORE_OF(rnd(s));
  }
}
#endif
#endif

#if defined(KERNEL_index_topk) || defined(KERNEL_index_best)
// The score of the last one chosen, bit by bit; each thread keeps PER scores. Of equals the lower index wins.
#define HELD (KEPT <= (W4A8 ? 32768 : 16384))              // in registers, else they are read again for every bit
#define VECTORS (W4A8 && HELD && KEPT % 8 == 0)
enum { PER = ((KEPT + THREADS - 1) / THREADS + 7) / 8 * 8, UNROLLED = HELD ? PER : 4, TOP_BIT = W4A8 ? 15 : 31 };
#ifdef KERNEL_index_topk      // out (T,N) bytes; score (T,N), at (2,B): the TOPK best of the visible entries. Grid: T
KERNEL NAME(u8* __restrict__ out, const Score* __restrict__ score, const int* __restrict__ at) {
  u8* o = out + (i64)blockIdx.x * N;
#endif
#ifdef KERNEL_index_best      // out (T,2,TOPK), best first: scores, -inf where there is none, and numbers; score (T,KEPT), at (2,B). Grid: T
KERNEL NAME(OUT out, const Score* __restrict__ score, const int* __restrict__ at) {
  __shared__ u32 found[TOPK];
  __shared__ int ids[TOPK];
  float* o = out + (i64)blockIdx.x * 2 * TOPK;
#endif
  __shared__ int room[WARPS];
  const i64 t = blockIdx.x; const int first = threadIdx.x * PER, n = VISIBLE((int)t, gridDim.x); u32 least = 0;
  int left = TOPK, same = 0, more = 0;
  const Score* from = score + t * KEPT;
#ifdef KERNEL_index_topk
  if (n <= TOPK) {
    for (int j = threadIdx.x; j < N; j += THREADS) o[j] = j < n;
    return;
  }
#endif
#define READ(i) (first + (i) < n ? (u32)from[first + (i)] : 0u)  // 0 is below every score
#if VECTORS
  u32 s[PER / 2];
#pragma unroll
  for (int i = 0; i < PER / 8; i++) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (first + 8 * i < n) v = *(const uint4*)(from + first + 8 * i);
    s[4 * i] = v.x; s[4 * i + 1] = v.y; s[4 * i + 2] = v.z; s[4 * i + 3] = v.w;
  }
#pragma unroll
  for (int i = 0; i < PER / 2; i++) { const int rest = n - first - 2 * i; s[i] = rest >= 2 ? s[i] : rest == 1 ? s[i] & 0xffffu : 0; }
#define SCORE(i) (s[(i) / 2] >> 16 * ((i) % 2) & 0xffffu)
#elif HELD
  u32 s[PER];
#pragma unroll
  for (int i = 0; i < PER; i++) s[i] = READ(i);
#define SCORE(i) s[i]
#else
#define SCORE(i) READ(i)
#endif
  for (int b = TOP_BIT; b >= 0; b--) {
    const u32 want = least | 1u << b; int count = 0;
#pragma unroll UNROLLED
    for (int i = 0; i < PER; i++) count += SCORE(i) >= want;
    if (block_count(count, room) >= TOPK) least = want;
  }
#pragma unroll UNROLLED
  for (int i = 0; i < PER; i++) { same += SCORE(i) == least; more += SCORE(i) > least; }
  left -= block_count(more, room);
  left -= block_before(same, room, &more);                 // of equals, how many are left for this thread
#ifdef KERNEL_index_best
#define TAKEN(i) (SCORE(i) > least || (SCORE(i) == least && least && left-- > 0))  // with fewer than TOPK all that are not 0
  int mine = 0, keep = left;
#pragma unroll UNROLLED
  for (int i = 0; i < PER; i++) mine += TAKEN(i);
  left = keep; mine = block_before(mine, room, &more);     // they follow each other by their numbers
#pragma unroll UNROLLED
  for (int i = 0; i < PER; i++) if (TAKEN(i)) { found[mine] = SCORE(i); ids[mine++] = first + i; }
  __syncthreads();
  for (int i = threadIdx.x; i < TOPK; i += THREADS) {
    if (i >= more) { o[i] = -INF; o[TOPK + i] = 0; continue; }
    const u32 s = found[i]; int before = 0;
#pragma unroll 8
    for (int k = 0; k < more; k++) before += found[k] > s || (found[k] == s && k < i);
    o[before] = UNORDERED(s); o[TOPK + before] = (float)(ids[i] * RANKS + RANK);
  }
#elif VECTORS
#pragma unroll
  for (int i = 0; i < PER / 4; i++) {
    u32 v = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) v |= (u32)(SCORE(4 * i + e) > least || (SCORE(4 * i + e) == least && left-- > 0)) << 8 * e;
    if (first + 4 * i < KEPT) *(u32*)(o + first + 4 * i) = v;
  }
#else
#pragma unroll UNROLLED
  for (int i = 0; i < PER; i++) if (first + i < KEPT) o[first + i] = SCORE(i) > least || (SCORE(i) == least && left-- > 0);
#endif
}
#endif

#ifdef KERNEL_index_choose    // out (T,KEPT) bytes; for each rank (T,2,TOPK): the own ones of the TOPK best of all. Grid: T
KERNEL NAME(u8* __restrict__ out, EACH(INS)) {
  const float* list[RANKS] = { EACH(IN_NAME) }; u8* o = out + (i64)blockIdx.x * KEPT; const i64 row = (i64)blockIdx.x * 2 * TOPK;
  for (int j = threadIdx.x; j < KEPT; j += THREADS) o[j] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < TOPK; i += THREADS) {
    const float s = list[RANK][row + i], j = list[RANK][row + TOPK + i]; int before = i;
    if (!(s > -INF)) break;
#pragma unroll
    for (int r = 0; r < RANKS; r++) if (r != RANK) {       // in each other list the better ones come first
      int low = 0, high = TOPK;
      while (low < high) {
        const int mid = (low + high) / 2; const float x = list[r][row + mid];
        if (x > s || (x == s && list[r][row + TOPK + mid] < j)) low = mid + 1; else high = mid;
      }
      before += low;
    }
    if (before < TOPK) o[(int)j / RANKS] = 1;
  }
}
#endif

// ------------------------------------------------------------------------------------------------ attention
#if defined(KERNEL_attend) || defined(KERNEL_attend_block) || defined(KERNEL_attend_part)
// part (SPLITS,T,H,D), ends (SPLITS,T,H,2): sums of a share of the visible rows, which are keys and values, weighted relative
// to the share's largest score; that score and the sum of weights. Visible rows are numbered: those of the window, then entries
// (or the block's rows). Split s takes every SPLITS-th chunk of them from chunk s on: the shares follow from how many rows are
// visible and from nothing else. Grid: SPLITS, H / HEADS, T. attend_part has the H heads of each rank, one rank after another; those
// of other ranks see no window.
#define ROW_BYTES (W4A8 ? ((D - R) + 2 * R + ((D - R) + 63) / 64 + 3) / 4 * 4 : 4 * D)
#define REST 0x40000000                                    // of a row's number: an entry or one of the block, not a slot of the ring
#ifndef KERNEL_attend_block
#define REST_BYTES ROW_BYTES
#define PLAIN(row) (!W4A8)
#else
#define REST_BYTES (4 * D)
#define PLAIN(row) (!W4A8 || (row) & REST)
#define CHOSEN 0
#endif
#define CHUNK 64
#define TENSOR (W4A8 && D % 128 == 0 && (D - R) % 64 == 0)
#define PAIR 2                                             // rows at a time
#define OWN 4                                              // heads of a warp
#define HEADS (OWN * WARPS)
#define SLICES ((D + 32 * VN - 1) / (32 * VN))

#if CHOSEN
// entries chosen among flags[from..to)
FN int chosen_between(const u8* __restrict__ flags, int from, int to) {
  int count = 0, j = from;
#if KEPT % 16 == 0
  for (; j + 16 <= to; j += 16) {
    const uint4 v = *(const uint4*)(flags + j);
    count += __popc((v.x & 0x01010101u) | (v.y & 0x01010101u) << 1 | (v.z & 0x01010101u) << 2 | (v.w & 0x01010101u) << 3);
  }
#endif
  for (; j < to; j++) count += flags[j];
  return count;
}
#endif

// the VN channels of a row from `d` on
FN void row_quad(float* x, const u8* __restrict__ ring, const u8* __restrict__ rest, int row, int d) {
  const u8* p = row & REST ? rest + (i64)(row & ~REST) * REST_BYTES : ring + (i64)row * ROW_BYTES;
  if (PLAIN(row)) load_vec(x, (const float*)p + d);
#if W4A8 && VN == 4
  else if (d < D - R) {
    const u32 v = *(const u32*)(p + d); const float s = pow2(p[D + R + d / 64]);
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = of_e4m3(v >> 8 * e & 255u) * s;
  } else {
    const u32 v = *(const u32*)(p + 2 * d - (D - R)), w = *(const u32*)(p + 2 * d - (D - R) + 4);
    x[0] = of_bf16(v & 0xffffu); x[1] = of_bf16(v >> 16); x[2] = of_bf16(w & 0xffffu); x[3] = of_bf16(w >> 16);
  }
#elif W4A8
  else if (d < D - R) x[0] = of_e4m3(p[d]) * pow2(p[D + R + d / 64]);
  else x[0] = of_bf16(p[2 * d - (D - R)] | (u32)p[2 * d - (D - R) + 1] << 8);
#endif
}
#if TENSOR
#define TILE 32                                            // rows in shared memory
#define KV_PITCH (D + 8)                                   // keeps both uses free of bank conflicts
#else
// this lane's channels of a row
FN void row_slice(float (*x)[VN], const u8* __restrict__ ring, const u8* __restrict__ rest, int row) {
#pragma unroll
  for (int c = 0; c < SLICES; c++) {
    const int d = (c * 32 + LANE) * VN;
#pragma unroll
    for (int e = 0; e < VN; e++) x[c][e] = 0;
    if (d < D) row_quad(x[c], ring, rest, row, d);
  }
}
#endif

// list[0..m) = the visible rows from number `start` on
#if CHOSEN
#define FILL_LIST \
    __syncthreads(); \
    for (int i = threadIdx.x; i < m && start + i < near; i += THREADS) list[i] = (first + start + i) % RING; \
    if (near + before < start + m && near + before + mine > start) \
      for (int j = from, i = near + before - start; j < to && i < m; j++) if (flags[j]) { if (i >= 0) list[i] = REST | j; i++; } \
    __syncthreads();
#else
#define FILL_LIST \
    __syncthreads(); \
    for (int i = threadIdx.x; i < m; i += THREADS) list[i] = start + i < near ? (first + start + i) % RING : REST | (start + i - near); \
    __syncthreads();
#endif

#ifdef KERNEL_attend
KERNEL NAME(OUT part, OUT ends, IN q, const u8* __restrict__ ring, const u8* __restrict__ rest, const u8* __restrict__ chosen,
            const int* __restrict__ at) {
#endif
#ifdef KERNEL_attend_part
KERNEL NAME(OUT part, OUT ends, EACH(INS), const u8* __restrict__ ring, const u8* __restrict__ rest, const u8* __restrict__ chosen,
            const int* __restrict__ at) {
  const float *qs[RANKS] = { EACH(IN_NAME) }, *q = qs[0];
#endif
#ifdef KERNEL_attend_block
KERNEL NAME(OUT part, OUT ends, IN q, const u8* __restrict__ ring, const u8* __restrict__ rest, const int* __restrict__ at) {
#endif
  __shared__ int list[CHUNK];
  const int t = blockIdx.z, rows = gridDim.z, rank = RANKS == 1 ? 0 : blockIdx.y / ((H + HEADS - 1) / HEADS);
  const int b0 = (blockIdx.y - rank * ((H + HEADS - 1) / HEADS)) * HEADS, h0 = b0 + WARP * OWN, p = position(at, t, rows);
#ifdef KERNEL_attend_part
#pragma unroll
  for (int r = 1; r < RANKS; r++) if (r == rank) q = qs[r];
#endif
  ring += slot(at, t, rows) * RING * ROW_BYTES;
#ifdef KERNEL_attend_block
  const int start_of = at[sequence(t, rows)], first = start_of > WINDOW ? start_of - WINDOW : 0, near = start_of - first, far = rows / B;
  rest += (i64)sequence(t, rows) * far * REST_BYTES;
#else
  const int first = p + 1 > WINDOW ? p + 1 - WINDOW : 0, near = rank == RANK ? p + 1 - first : 0;
  int far = kept((p + 1) / RATIO < N ? (p + 1) / RATIO : N);
  rest += slot(at, t, rows) * C * ROW_BYTES;
#endif
#if CHOSEN
  __shared__ int room[WARPS];
  const u8* flags = chosen + (i64)t * KEPT;
  const int per = ((far + THREADS - 1) / THREADS + 15) / 16 * 16, from = threadIdx.x * per < far ? threadIdx.x * per : far;
  const int to = from + per < far ? from + per : far, mine = chosen_between(flags, from, to), before = block_before(mine, room, &far);
#endif
#define ROW_OF(h) ((((i64)blockIdx.x * rows + t) * RANKS + rank) * H + (h))  // of part and ends
#if TENSOR
  // Keys, and values as well, lie in shared memory as words of two rows' bfloat16: for values that is what the tensor cores take,
  // for keys two words become two operands, one for even rows and one for odd. Scores: each warp adds a share of the channels.
  __shared__ __align__(16) u32 kv[TILE / 2][KV_PITCH];
  __shared__ float scores[WARPS][HEADS][TILE], keeps[HEADS];
  __shared__ u32 weights[HEADS][TILE / 2 + 4];
  const int g = LANE / 4, l = LANE % 4, d0 = WARP * (D / WARPS);
  float o[D / WARPS / 8][4], top[OWN], sum[OWN];
  u32 x[D / WARPS / 16][4];
#pragma unroll
  for (int k = 0; k < D / WARPS / 16; k++) mma_rows(x[k], q + ((i64)t * H + b0) * D, D, H - b0, d0 + 16 * k);
#pragma unroll
  for (int c = 0; c < D / WARPS / 8; c++) o[c][0] = o[c][1] = o[c][2] = o[c][3] = 0;
#pragma unroll
  for (int h = 0; h < OWN; h++) { top[h] = -INF; sum[h] = 0; }
  for (int start = blockIdx.x * CHUNK; start < near + far; start += SPLITS * CHUNK) {
    const int m = near + far - start < CHUNK ? near + far - start : CHUNK;
    FILL_LIST
    for (int tile = 0; tile < m; tile += TILE) {
#pragma unroll 4
      for (int i = threadIdx.x; i < TILE / 2 * (D / 4); i += THREADS) {
        const int pair = i / (D / 4), d = i % (D / 4) * 4, at = tile + 2 * pair; float a[4] = { 0, 0, 0, 0 }, b[4] = { 0, 0, 0, 0 };
        if (at < m) row_quad(a, ring, rest, list[at], d);
        if (at + 1 < m) row_quad(b, ring, rest, list[at + 1], d);
        *(uint4*)&kv[pair][d] = make_uint4(pack(a[0], b[0]), pack(a[1], b[1]), pack(a[2], b[2]), pack(a[3], b[3]));
      }
      __syncthreads();
#pragma unroll
      for (int u = 0; u < TILE / 16; u++) {                // 8 pairs of rows at a time
        float even[4] = { 0, 0, 0, 0 }, odd[4] = { 0, 0, 0, 0 };
#pragma unroll
        for (int k = 0; k < D / WARPS / 16; k++) {
          const uint2 v = *(const uint2*)&kv[8 * u + g][d0 + 16 * k + 2 * l], w = *(const uint2*)&kv[8 * u + g][d0 + 16 * k + 2 * l + 8];
          mma(even, x[k], __byte_perm(v.x, v.y, 0x5410), __byte_perm(w.x, w.y, 0x5410));
          mma(odd, x[k], __byte_perm(v.x, v.y, 0x7632), __byte_perm(w.x, w.y, 0x7632));
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
          scores[WARP][g + e / 2 * 8][2 * (8 * u + 2 * l + e % 2)] = even[e];
          scores[WARP][g + e / 2 * 8][2 * (8 * u + 2 * l + e % 2) + 1] = odd[e];
        }
      }
      __syncthreads();
#pragma unroll
      for (int h = 0; h < OWN; h++) {
        const int head = WARP * OWN + h; float s = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) s += scores[w][head][LANE];
        s = tile + (int)LANE < m ? s * SCALE : -INF;
        const float best = fmaxf(top[h], warp_max(s)), keep = expf(top[h] - best), e = expf(s - best);
        sum[h] = sum[h] * keep + warp_sum(e);
        top[h] = best;
        ((unsigned short*)weights[head])[LANE] = (unsigned short)(__float_as_uint(bf16(e)) >> 16);
        if (LANE == 0) keeps[head] = keep;
      }
      __syncthreads();
      const float keep = keeps[g], keep8 = keeps[g + 8];
      u32 p[TILE / 16][4];
#pragma unroll
      for (int k = 0; k < TILE / 16; k++)
#pragma unroll
        for (int e = 0; e < 4; e++) p[k][e] = weights[g + e % 2 * 8][8 * k + l + e / 2 * 4];
#pragma unroll
      for (int c = 0; c < D / WARPS / 8; c++) {
        o[c][0] *= keep; o[c][1] *= keep; o[c][2] *= keep8; o[c][3] *= keep8;
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) mma(o[c], p[k], kv[8 * k + l][d0 + 8 * c + g], kv[8 * k + l + 4][d0 + 8 * c + g]);
      }
      __syncthreads();
    }
  }
#pragma unroll
  for (int h = 0; h < OWN; h++) if (LANE == 0 && h0 + h < H) {
    ends[2 * ROW_OF(h0 + h)] = top[h]; ends[2 * ROW_OF(h0 + h) + 1] = sum[h];
  }
  if ((int)blockIdx.x * CHUNK >= near + far) return;       // nothing was added, and the merge won't look
#pragma unroll
  for (int e = 0; e < 2; e++) if (b0 + g + 8 * e < H) {
    float* sums = part + ROW_OF(b0 + g + 8 * e) * D + d0 + 2 * l;
#pragma unroll
    for (int c = 0; c < D / WARPS / 8; c++) *(float2*)(sums + 8 * c) = make_float2(o[c][2 * e], o[c][2 * e + 1]);
  }
#else
  float x[OWN][SLICES][VN], o[OWN][SLICES][VN], top[OWN], sum[OWN];
#pragma unroll
  for (int h = 0; h < OWN; h++) {
    top[h] = -INF; sum[h] = 0;
#pragma unroll
    for (int c = 0; c < SLICES; c++) {
      const int d = (c * 32 + LANE) * VN;
#pragma unroll
      for (int e = 0; e < VN; e++) { o[h][c][e] = 0; x[h][c][e] = 0; }
      if (d < D && h0 + h < H) load_vec(x[h][c], q + ((i64)t * H + h0 + h) * D + d);
    }
  }
  for (int start = blockIdx.x * CHUNK; start < near + far; start += SPLITS * CHUNK) {
    const int m = near + far - start < CHUNK ? near + far - start : CHUNK;
    FILL_LIST
    for (int i = 0; i < m; i += PAIR) {
      float kv[PAIR][SLICES][VN], s[PAIR];
#pragma unroll
      for (int r = 0; r < PAIR; r++) row_slice(kv[r], ring, rest, list[i + r < m ? i + r : i]);
#pragma unroll
      for (int h = 0; h < OWN; h++) {
        float best = top[h];
#pragma unroll
        for (int r = 0; r < PAIR; r++) {
          s[r] = 0;
#pragma unroll
          for (int c = 0; c < SLICES; c++)
#pragma unroll
            for (int e = 0; e < VN; e++) s[r] += x[h][c][e] * kv[r][c][e];
          s[r] = i + r < m ? warp_sum(s[r]) * SCALE : -INF;
          best = fmaxf(best, s[r]);
        }
        const float keep = expf(top[h] - best);
        top[h] = best; sum[h] *= keep;
#pragma unroll
        for (int r = 0; r < PAIR; r++) { s[r] = expf(s[r] - best); sum[h] += s[r]; s[r] = rnd(s[r]); }
#pragma unroll
        for (int c = 0; c < SLICES; c++)
#pragma unroll
          for (int e = 0; e < VN; e++) {
            o[h][c][e] *= keep;
#pragma unroll
            for (int r = 0; r < PAIR; r++) o[h][c][e] += s[r] * kv[r][c][e];
          }
      }
    }
  }
#pragma unroll
  for (int h = 0; h < OWN; h++) {
    const i64 row = ROW_OF(h0 + h);
    if (h0 + h >= H) continue;
    if (LANE == 0) { ends[2 * row] = top[h]; ends[2 * row + 1] = sum[h]; }
    if ((int)blockIdx.x * CHUNK >= near + far) continue;   // nothing was added, and the merge won't look
#pragma unroll
    for (int c = 0; c < SLICES; c++) { const int d = (c * 32 + LANE) * VN; if (d < D) store_vec(part + row * D + d, o[h][c]); }
  }
#endif
}
#endif

#if defined(KERNEL_attend_end) || defined(KERNEL_attend_share)
// weight[s] and used[s] of the shares of row `at` of ends (SPLITS,rows), which gives the largest score of all; *all: the sum of weights
FN float shares(float* weight, int* used, float* all, IN ends, i64 rows, i64 at) {
  const i64 i = (LANE < SPLITS ? LANE : 0) * rows + at;    // SPLITS is at most 32: a lane for each
  const float most = ends[2 * i], sum = ends[2 * i + 1];
  const int some = LANE < SPLITS && !(most == -INF && sum == 0);
  const float top = warp_max(some ? most : -INF), w = some ? expf(most - top) : 0;
  *all = warp_sum(some ? w * sum : 0);
  if (LANE < SPLITS) { weight[LANE] = w; used[LANE] = some; }
  return top;
}
FN void add_shares(float* a, const float* weight, const int* used, IN part, i64 rows, i64 at, int d) {  // VN channels from d on
  float v[VN];
#pragma unroll
  for (int e = 0; e < VN; e++) a[e] = 0;
#pragma unroll 4
  for (int s = 0; s < SPLITS; s++) if (used[s]) {
    load_vec(v, part + (s * rows + at) * D + d);
#pragma unroll
    for (int e = 0; e < VN; e++) a[e] += weight[s] * v[e];
  }
}
#endif

#ifdef KERNEL_attend_end      // out (T,H,D); part (SPLITS,T,H,D), ends (SPLITS,T,H,2), sink (H,), rope (T,R/2,2). Grid: H, T
KERNEL NAME(OUT out, IN part, IN ends, IN sink, IN rope) {
  __shared__ float row[D], weight[SPLITS], all;
  __shared__ int used[SPLITS];
  const int h = blockIdx.x; const i64 rows = (i64)gridDim.y * H, at = (i64)blockIdx.y * H + h;
  if (WARP == 0) {
    float sum, top = shares(weight, used, &sum, ends, rows, at);
    if (LANE == 0) all = sum + expf(sink[h] - top);
  }
  __syncthreads();
  for (int d = threadIdx.x * VN; d < D; d += THREADS * VN) {
    float a[VN];
    add_shares(a, weight, used, part, rows, at, d);
#pragma unroll
    for (int e = 0; e < VN; e++) row[d + e] = rnd(a[e] / all);
  }
  __syncthreads();
  row_rotate(row, rope + (i64)blockIdx.y * R, -1.0f);
  __syncthreads();
  for (int d = threadIdx.x * VN; d < D; d += THREADS * VN) store_vec(out + at * D + d, row + d);
}
#endif

#ifdef KERNEL_attend_share    // for each rank out (T,H,D+2); part (SPLITS,T,RANKS*H,D), ends (SPLITS,T,RANKS*H,2). Grid: RANKS*H, T
KERNEL NAME(EACH(OUTS), IN part, IN ends) {
  __shared__ float weight[SPLITS], all, most;
  __shared__ int used[SPLITS];
  float *outs[RANKS] = { EACH(OUT_NAME) }, *o = outs[0];
  const int rank = blockIdx.x / H; const i64 rows = (i64)gridDim.y * RANKS * H, at = (i64)blockIdx.y * RANKS * H + blockIdx.x;
#pragma unroll
  for (int r = 1; r < RANKS; r++) if (r == rank) o = outs[r];
  o += ((i64)blockIdx.y * H + blockIdx.x % H) * (D + 2);
  if (WARP == 0) {
    float sum, top = shares(weight, used, &sum, ends, rows, at);
    if (LANE == 0) { o[D] = top; o[D + 1] = sum; }
  }
  __syncthreads();
  for (int d = threadIdx.x * VN; d < D; d += THREADS * VN) {
    float a[VN];
    add_shares(a, weight, used, part, rows, at, d);
#pragma unroll
    for (int e = 0; e < VN; e++) o[d + e] = a[e];
  }
}
#endif

#ifdef KERNEL_attend_merge    // out (T,H,D); of each rank (T,H,D+2) as attend_share leaves them; sink (H,), rope (T,R/2,2). Grid: H, T
KERNEL NAME(OUT out, EACH(INS), IN sink, IN rope) {
  __shared__ float row[D];
  const float* part[RANKS] = { EACH(IN_NAME) }; float weight[RANKS], top = -INF, all;
  const int h = blockIdx.x; const i64 at = (i64)blockIdx.y * H + h, from = at * (D + 2);
#pragma unroll
  for (int r = 0; r < RANKS; r++) top = fmaxf(top, part[r][from + D]);
  all = 0;
#pragma unroll
  for (int r = 0; r < RANKS; r++) {
    weight[r] = part[r][from + D] > -INF ? expf(part[r][from + D] - top) : 0;
    all += weight[r] * part[r][from + D + 1];
  }
  all += expf(sink[h] - top);
  for (int d = threadIdx.x; d < D; d += THREADS) {
    float a = 0;
#pragma unroll
    for (int r = 0; r < RANKS; r++) a += weight[r] * part[r][from + d];
    row[d] = rnd(a / all);
  }
  __syncthreads();
  row_rotate(row, rope + (i64)blockIdx.y * R, -1.0f);
  __syncthreads();
  for (int d = threadIdx.x * VN; d < D; d += THREADS * VN) store_vec(out + at * D + d, row + d);
}
#endif

// ------------------------------------------------------------------------------------------------ router
#ifdef KERNEL_route           // ids (T,TOPK) int, weights (T,TOPK); z (T,E), bias (E,) or tid2eid (V,TOPK), tokens (T,). Grid: T
FN float softplus(float z) {  // max(z,0) + log1p(e^-|z|), log1p as the series of 2 atanh(y / (2 + y))
  const float y = expf(-fabsf(z)), w = y / (2 + y), q = w * w; float s = 1.0f / 15;
  s = s * q + 1.0f / 13; s = s * q + 1.0f / 11; s = s * q + 1.0f / 9; s = s * q + 1.0f / 7; s = s * q + 1.0f / 5;
  s = s * q + 1.0f / 3; s = s * q + 1.0f;
  return (z > 0 ? z : 0) + 2 * w * s;
}
KERNEL NAME(int* __restrict__ ids, OUT weights, IN z, const void* __restrict__ choice, const int* __restrict__ tokens) {
  __shared__ float score[E];
  __shared__ int best[TOPK];
#if !HASH
  __shared__ float rank[E];
#endif
  const i64 t = blockIdx.x;
  for (int e = threadIdx.x; e < E; e += THREADS) {
    score[e] = sqrtf(softplus(z[t * E + e]));
#if !HASH
    const float r = score[e] + ((const float*)choice)[e];
    rank[e] = r == r ? r : -INF;                           // then ranks are a permutation, whatever the row holds
#endif
  }
#if HASH
  const i64 token = tokens[t] < 0 ? tokens[t] + V : tokens[t];
  if (threadIdx.x < TOPK) best[threadIdx.x] = ((const int*)choice)[token * TOPK + threadIdx.x];
  __syncthreads();
#else
  __syncthreads();
  for (int e = threadIdx.x; e < E; e += THREADS) {
    int before = 0; const float mine = rank[e];
#pragma unroll 16
    for (int i = 0; i < E; i++) before += rank[i] > mine || (rank[i] == mine && i < e);
    if (before < TOPK) best[before] = e;
  }
  __syncthreads();
#endif
  if (threadIdx.x < TOPK) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < TOPK; k++) sum += score[best[k]];
    ids[t * TOPK + threadIdx.x] = best[threadIdx.x];
    weights[t * TOPK + threadIdx.x] = score[best[threadIdx.x]] / sum * FACTOR;
  }
}
#endif

// ------------------------------------------------------------------------------------------------ choice of a token
#if defined(KERNEL_argmax) || defined(KERNEL_pick) || defined(KERNEL_argmax_merge)
// the larger value, of equals the lower index; index -1: nothing yet, -2: the row can't be used
FN void better(float* value, int* id, float v, int i) {
  if (*id == -2 || i == -1) return;
  if (i == -2 || *id == -1 || v > *value || (v == *value && i < *id)) { *value = v; *id = i; }
}
FN void warp_better(float* value, int* id) {
#pragma unroll
  for (int d = 16; d; d >>= 1) {
    const float v = __shfl_xor_sync(ALL, *value, d); const int i = __shfl_xor_sync(ALL, *id, d);
    better(value, id, v, i);
  }
}
#endif
#if defined(KERNEL_argmax) || defined(KERNEL_pick)
#define SHARE ((V + BLOCKS - 1) / BLOCKS + 3) / 4 * 4      // of a row for each block
// value (T,BLOCKS), id (T,BLOCKS): each block's best
FN void block_better(float v, int i, OUT value, int* __restrict__ id, float* values, int* ids) {
  warp_better(&v, &i);
  if (LANE == 0) { values[WARP] = v; ids[WARP] = i; }
  __syncthreads();
  if (WARP) return;
  v = LANE < WARPS ? values[LANE < WARPS ? LANE : 0] : -INF; i = LANE < WARPS ? ids[LANE < WARPS ? LANE : 0] : -1;
  warp_better(&v, &i);
  if (LANE == 0) { value[blockIdx.y * BLOCKS + blockIdx.x] = v; id[blockIdx.y * BLOCKS + blockIdx.x] = i; }
}
#endif

#ifdef KERNEL_argmax   // value (T,BLOCKS), id (T,BLOCKS); logits (T,V). Grid: BLOCKS, T
FN void look(float* most, int* id, float x, int i) {
  if (x != x || x == INF) *id = -2;
  else if (*id != -2 && x > -INF && (*id == -1 || x > *most)) { *most = x; *id = i; }
}
KERNEL NAME(OUT value, int* __restrict__ id, IN logits) {
  __shared__ float values[WARPS];
  __shared__ int ids[WARPS];
  const float* x = logits + (i64)blockIdx.y * V; const int first = blockIdx.x * (SHARE), end = first + (SHARE) < V ? first + (SHARE) : V;
  float most = -INF; int best = -1;
#if V % 4 == 0
#pragma unroll 4
  for (int i = first + threadIdx.x * 4; i < end; i += THREADS * 4) {
    const float4 a = *(const float4*)(x + i);
    look(&most, &best, a.x, i); look(&most, &best, a.y, i + 1); look(&most, &best, a.z, i + 2); look(&most, &best, a.w, i + 3);
  }
#else
  for (int i = first + threadIdx.x; i < end; i += THREADS) look(&most, &best, x[i], i);
#endif
  block_better(most, best, value, id, values, ids);
}
#endif

#ifdef KERNEL_argmax_merge    // ids (T,) int; value (T,BLOCKS), id (T,BLOCKS). Grid: T, one warp
KERNEL NAME(int* __restrict__ ids, IN value, const int* __restrict__ id) {
  float v = -INF; int i = -1;
  for (int b = LANE; b < BLOCKS; b += 32) better(&v, &i, value[blockIdx.x * BLOCKS + b], id[blockIdx.x * BLOCKS + b]);
  warp_better(&v, &i);
  if (LANE == 0) ids[blockIdx.x] = i < 0 ? -1 : i;
}
#endif

#ifdef KERNEL_pick     // value (T,BLOCKS), id (T,BLOCKS); weights (T,V), seed (B,2) int, at (2,B). Grid: BLOCKS, T
FN u32 mix(u32 h) { h ^= h >> 16; h *= 0x7feb352du; h ^= h >> 15; h *= 0x846ca68bu; return h ^ h >> 16; }
FN void look(float* most, int* id, float w, int i, u32 h) {
  if (w != w) *id = -2;
  if (*id == -2 || !(w > 1e-37f)) return;
  const float u = (mix(h + (u32)i * 0x9e3779b9u) >> 8) * 0x1p-24f + 0x1p-25f, g = logf(w) - logf(-logf(u));
  if (*id == -1 || g > *most) { *most = g; *id = i; }
}
KERNEL NAME(OUT value, int* __restrict__ id, IN weights, const int* __restrict__ seed, const int* __restrict__ at) {
  __shared__ float values[WARPS];
  __shared__ int ids[WARPS];
  const float* w = weights + (i64)blockIdx.y * V; const int first = blockIdx.x * (SHARE), end = first + (SHARE) < V ? first + (SHARE) : V;
  const int* dice = seed + 2 * sequence(blockIdx.y, gridDim.y); const int p = position(at, blockIdx.y, gridDim.y);
  const u32 h = mix(mix(mix(mix((u32)dice[0]) ^ (u32)dice[1]) + (u32)(p + 1 + OFFSET)) + USE);
  float most = -INF; int best = -1;
#if V % 4 == 0
  for (int i = first + threadIdx.x * 4; i < end; i += THREADS * 4) {
    const float4 a = *(const float4*)(w + i);
    look(&most, &best, a.x, i, h); look(&most, &best, a.y, i + 1, h); look(&most, &best, a.z, i + 2, h); look(&most, &best, a.w, i + 3, h);
  }
#else
  for (int i = first + threadIdx.x; i < end; i += THREADS) look(&most, &best, w[i], i, h);
#endif
  block_better(most, best, value, id, values, ids);
}
#endif

#ifdef KERNEL_probs    // out (T,V); logits (T,V), settings (B,4) = temperature, top_p, top_k, min_p. Grid: T
// Weights are added up as integers of 2^-44: exact in any order. A threshold is the largest value that, with all above it,
// weighs at least `want`: found by a histogram over the distance from the top, and then exactly among the values of one bin;
// or, where a bin holds too many, bit by bit over the whole row.
#define BINS 2048
#define FINE 64.0f                                         // bins for a distance of one
#define UNIT 0x1p44f
FN int bin_of(float top, float x) { return (int)fminf((top - x) * FINE, (float)(BINS - 1)); }
FN u64 share_of(float w) { return (u64)(w * UNIT); }
FN u64 block_total(u64 a, u64* room) {
#pragma unroll
  for (int d = 16; d; d >>= 1) a += __shfl_xor_sync(ALL, a, d);
  if (LANE == 0) room[WARP] = a;
  __syncthreads();
  a = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) a += room[i];
  __syncthreads();
  return a;
}
KERNEL NAME(float* out, IN logits, IN all_settings) {
  __shared__ u64 bins[BINS], shares[BINS], room[WARPS], above;
  __shared__ u32 keys[BINS], found;
  __shared__ float values[WARPS];
  __shared__ int held, at;
  const float* x = logits + (i64)blockIdx.x * V; float* w = out + (i64)blockIdx.x * V;
  const float* settings = all_settings + 4 * sequence(blockIdx.x, gridDim.x);
  const float temperature = settings[0], top_p = settings[1], min_p = settings[3]; const int k = (int)settings[2];
  float top = -INF; int sick = 0; u32 least = 0; u64 total = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < V; i += THREADS) { const float a = x[i]; top = fmaxf(top, a); sick |= a != a || a == INF; }
  top = warp_max(sick ? INF : top);                        // INF stands for a row that can't be used
  if (LANE == 0) values[WARP] = top;
  __syncthreads();
  for (int i = 0; i < WARPS; i++) top = fmaxf(top, values[i]);
  if (top == INF || top == -INF) {
    for (int i = threadIdx.x; i < V; i += THREADS) w[i] = NOT_A_NUMBER;
    return;
  }
  if (!(temperature > 0)) {                                // the first of the largest alone
    if (threadIdx.x == 0) found = ALL;
    __syncthreads();
    for (int i = threadIdx.x; i < V; i += THREADS) if (x[i] == top) { atomicMin(&found, (u32)i); break; }
    __syncthreads();
    for (int i = threadIdx.x; i < V; i += THREADS) w[i] = i == (int)found;
    return;
  }
  for (int step = 0; step < 2; step++) {                   // top_k, then top_p, which needs the weights
    u64 want, base = 0;
    if (step == 0) { if (k <= 0 || k >= V) continue; want = (u64)k; }
    else {
      u64 sum = 0;
#pragma unroll 4
      for (int i = threadIdx.x; i < V; i += THREADS) {
        const float a = x[i], e = order(a) >= least ? expf((a - top) / temperature) : 0;
        w[i] = e; sum += share_of(e);
      }
      total = block_total(sum, room);
      if (!(top_p < 1)) continue;
      const double part = (double)top_p * (double)total;
      want = part > 0 ? (u64)part + ((double)(u64)part < part) : ~0ull;  // the least integer that isn't below
    }
#define VALUE(i) (step ? share_of(w[i]) : 1ull)
    for (int b = threadIdx.x; b < BINS; b += THREADS) bins[b] = 0;
    if (threadIdx.x == 0) { held = 0; found = 0; at = -1; above = 0; }
    __syncthreads();
    for (int i = threadIdx.x; i < V; i += THREADS) { const u64 a = VALUE(i); if (a) atomicAdd(&bins[bin_of(top, x[i])], a); }
    __syncthreads();
    for (int b = WARP * (BINS / WARPS) + LANE; b < (WARP + 1) * (BINS / WARPS); b += 32) base += bins[b];
#pragma unroll
    for (int d = 16; d; d >>= 1) base += __shfl_xor_sync(ALL, base, d);
    if (LANE == 0) room[WARP] = base;                      // of this warp's share of the bins
    __syncthreads();
    if (threadIdx.x == 0) {
      u64 sum = 0; int g = 0, b;
      while (g < WARPS && sum + room[g] < want) sum += room[g++];
      for (b = g * (BINS / WARPS); g < WARPS && b < BINS; b++) {
        if (sum + bins[b] >= want) { at = b; above = sum; break; }
        sum += bins[b];
      }
    }
    __syncthreads();
    if (at < 0) { if (step && want == ~0ull) least = ALL; continue; }   // all together weigh less: nothing to cut
    for (int i = threadIdx.x; i < V; i += THREADS) if (bin_of(top, x[i]) == at && VALUE(i)) {
      const int slot = atomicAdd(&held, 1);
      if (slot < BINS) { keys[slot] = order(x[i]); shares[slot] = VALUE(i); }
    }
    __syncthreads();
    if (held <= BINS) {
      for (int i = threadIdx.x; i < held; i += THREADS) {
        u64 sum = above;
        for (int j = 0; j < held; j++) if (keys[j] >= keys[i]) sum += shares[j];
        if (sum >= want) atomicMax(&found, keys[i]);
      }
      __syncthreads();
      least = found > least ? found : least;
    } else {
      u32 key = 0;
      for (int b = 31; b >= 0; b--) {
        u64 sum = 0;
        for (int i = threadIdx.x; i < V; i += THREADS) if (order(x[i]) >= (key | 1u << b)) sum += VALUE(i);
        if (block_total(sum, room) >= want) key |= 1u << b;
      }
      least = key > least ? key : least;
    }
    __syncthreads();
  }
  if (top_p < 1 || min_p > 0) {                            // the mass of what stays
    u64 sum = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < V; i += THREADS) if (order(x[i]) >= least && w[i] >= min_p) sum += share_of(w[i]);
    total = block_total(sum, room);
  }
  const float all = (float)((double)total / (double)UNIT);
#pragma unroll 4
  for (int i = threadIdx.x; i < V; i += THREADS) { const float a = w[i]; w[i] = order(x[i]) >= least && a >= min_p ? a / all : 0 / all; }
}
#endif
