// The matrix products of specgrad/quant/cuda_products.py, one kernel per section. Sizes arrive as macros. All of it is C with
// CUDA's words, so that tests can run it on a CPU; PTX has an equivalent in C beside it.
//
// Every product is one on tensor cores, for one row of x as for a hundred: mma m16n8k16 takes 16 rows of the weights and 8 rows
// of x. The weights are what costs, they are read once and in the bytes of the checkpoint, 16 bytes a lane and many loads in
// flight; that 7 of 8 columns idle for a single row costs nothing. So a row's bits can't depend on how many rows there are:
// each column of an mma is its own sum, and which warp adds which part of k depends on the weight's shape alone.
//
// e4m3 and e2m1 times a power of two are exact in bfloat16. A float32 is the sum of three bfloat16 numbers, exactly, so other
// values of x cost three mma and float32 weights six. An mma adds at most 128 products (512 of bfloat16); sums of those are
// ordinary float32 additions in a fixed order.
//
// With MX, for processors that have it (sm_120a) and many rows: experts of FP4 by an mma that takes e2m1, e4m3 and a scale for
// each 32 of k as they are stored. Its sums are added in other places, so its bits are not those of the plain kernels.
//
// Which k a lane's registers hold is free as long as both sides agree. Lane 4g+t reads 16 consecutive bytes of rows g and g+8,
// four lanes 64 bytes: SPAN weights from k = 4 SPAN unit + SPAN t on. Each four of them are the lane's share of one mma (a
// "step"). `put` lays x out for that: 16 bytes hold a lane's x for two steps.
#ifdef __cplusplus
#define ENTRY extern "C" __global__
#else
#define ENTRY __global__
#endif
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
#define INLINE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define CEIL(a, b) (((a) + (b) - 1) / (b))
#define ALL 0xffffffffu
enum { F32, BF16, FP8, FP4 };              // how a weight is stored: its scales are e8m0, one for 128 (FP8) or 32 (FP4) of K

#define SPAN(kind) ((kind) == FP4 ? 32 : (kind) == FP8 ? 16 : 8)   // weights of a lane's load: 16 bytes, of F32 twice that
#define UNIT(kind) (4 * SPAN(kind))                        // k of four lanes
#define LONG(kind, k) (CEIL(k, UNIT(kind)) * UNIT(kind))   // k with the zeros that fill the last unit
#define BYTES(kind, k) ((kind) == FP4 ? (k) / 2 : (kind) == FP8 ? (k) : (kind) == BF16 ? 2 * (k) : 4 * (k))
#define SCALES(kind, k) ((kind) == FP4 ? (k) / 32 : (kind) == FP8 ? CEIL(k, 128) : 0)
#define TERMS(kind, quantised) ((quantised) && ((kind) == FP8 || (kind) == FP4) ? 1 : 3)   // bfloat16 numbers for a value of x
#ifndef MX
#define MX 0
#endif
enum { PIECE = 4 };                                        // units that a warp adds before it skips to its next piece

// ------------------------------------------------------------------------------------------------ numbers
INLINE u32 bits_of(float x) { return __float_as_uint(x); }
INLINE float of_bits(u32 u) { return __uint_as_float(u); }
INLINE float bf16(float x) {                               // to bfloat16, ties to even
  u32 u = bits_of(x);
  return x != x ? x : of_bits((u + 0x7fffu + (u >> 16 & 1)) & 0xffff0000u);
}
INLINE float pow2(int code) { return of_bits(code ? (u32)code << 23 : 1u << 22); }   // of an e8m0 code
INLINE float sigmoid(float x) {                            // Cody-Waite reduction and a degree-6 polynomial, as on the CPU
  float c = -x < -87.3f ? -87.3f : -x > 88.7f ? 88.7f : -x, n = rintf(c * 1.44269504f);
  float r = (c - n * 0.693359375f) + n * 2.12194440e-4f, p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f; p = p * r + 8.3334519073e-3f; p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f; p = p * r + 5.0000001201e-1f; p = p * r * r + r + 1.0f;
  return 1.0f / (1.0f + p * of_bits((u32)((int)n + 126) << 23) * 2.0f);
}
INLINE u32 times(u32 pair, u32 factor) {                   // two bfloat16 products, exact where the factors are powers of two
  u32 r;
#ifdef __CUDA_ARCH__
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(pair), "r"(factor), "r"(0x80008000u));
#else
  r = bits_of(of_bits(pair << 16) * of_bits(factor << 16)) >> 16;
  r |= bits_of(of_bits(pair & 0xffff0000u) * of_bits(factor & 0xffff0000u)) & 0xffff0000u;
#endif
  return r;
}
INLINE uint4 read_once(const u8* p) {      // past the L1 cache, which is for x; volatile: all loads of a piece before its first mma
  uint4 v;
#ifdef __CUDA_ARCH__
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
#else
  v = *(const uint4*)p;
#endif
  return v;
}

// d (16,8) += a (16,16) b (16,8). With lane = 4g+t, d: rows g and g+8, columns 2t and 2t+1; a: row g, g+8, g, g+8 at k of 2t and
// 2t+1, the last two 8 further; b: column g, the same k
INLINE void mma(float* d, const u32* a, u32 b0, u32 b1) {
#ifdef __CUDA_ARCH__
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  int lane = threadIdx.x & 31, s, h;
  uint4 mine = make_uint4(a[0], a[1], a[2], a[3]); uint2 col = make_uint2(b0, b1);
  for (s = 0; s < 4; s++) {
    uint4 v = __shfl_sync(ALL, mine, (lane & ~3) + s);
    uint2 l = __shfl_sync(ALL, col, (lane & 3) * 8 + s), r = __shfl_sync(ALL, col, (lane & 3) * 8 + 4 + s);
    for (h = 0; h < 2; h++) {
      u32 top = h ? v.z : v.x, low = h ? v.w : v.y, lb = h ? l.y : l.x, rb = h ? r.y : r.x;
      d[0] += of_bits(top << 16) * of_bits(lb << 16); d[0] += of_bits(top & 0xffff0000u) * of_bits(lb & 0xffff0000u);
      d[1] += of_bits(top << 16) * of_bits(rb << 16); d[1] += of_bits(top & 0xffff0000u) * of_bits(rb & 0xffff0000u);
      d[2] += of_bits(low << 16) * of_bits(lb << 16); d[2] += of_bits(low & 0xffff0000u) * of_bits(lb & 0xffff0000u);
      d[3] += of_bits(low << 16) * of_bits(rb << 16); d[3] += of_bits(low & 0xffff0000u) * of_bits(rb & 0xffff0000u);
    }
  }
#endif
}

// ------------------------------------------------------------------------------------------------ x
INLINE void split(u32* term, float v) {                    // v as three bfloat16 numbers of 8 bits each; infinity and NaN have one
  term[0] = bits_of(v) >> 16; v = v - of_bits(term[0] << 16);
  if ((term[0] & 0x7f80) == 0x7f80) { term[0] |= v != v && (term[0] & 0x7f) ? 0x40 : 0; v = 0; }
  term[1] = bits_of(v) >> 16; v -= of_bits(term[1] << 16);
  term[2] = bits_of(v) >> 16;
}
// a warp lays out group `group` of 128 of a row: of x (k), in the order that weights of `kind` want, with zeros up to LONG.
// quantised: rounded to e4m3 with a scale of its own, as formats.roundtrip_e4m3 does. Terms lie `apart` apart
INLINE void put(u16* y, i64 apart, const float* x, int k, int group, int kind, int quantised) {
  const int lane = threadIdx.x & 31, at = 128 * group + 4 * lane, terms = TERMS(kind, quantised);
  float v[4]; u32 term[4][3]; int i, j;
  UNROLL for (i = 0; i < 4; i++) v[i] = at + i < k ? x[at + i] : 0.0f;
  if (quantised) {
    u32 most = 0x38d1b717u;                                // 1e-4: NaN is the largest of the bits without sign
    UNROLL for (i = 0; i < 4; i++) { u32 a = bits_of(v[i]) & 0x7fffffffu; most = a > most ? a : most; }
    UNROLL for (i = 16; i; i >>= 1) { u32 a = __shfl_xor_sync(ALL, most, i); most = a > most ? a : most; }
    int code = most >= 0x7f800000u ? 255 : (int)(most >> 23) - 8 + ((most & 0x7fffffu) > 0x600000u);     // 448 is 1.75 x 2^8
    float scale = pow2(code), inverse = pow2(254 - code);
    UNROLL for (i = 0; i < 4; i++) {
      float a = v[i] * inverse; u32 u = bits_of(a), sign = u & 0x80000000u; u &= 0x7fffffffu;
      float r = u < 0x3c800000u ? (of_bits(u) + 16384.0f) - 16384.0f : of_bits((u + 0x7ffffu + (u >> 20 & 1)) & 0xfff00000u);
      v[i] = code == 255 ? of_bits(0x7fc00000u) : of_bits(bits_of(r) | sign) * scale;
    }
  }
  if (at >= LONG(kind, k)) return;
  UNROLL for (i = 0; i < 4; i++) if (terms == 3) split(term[i], v[i]); else term[i][0] = bits_of(v[i]) >> 16;
  const int unit = at / UNIT(kind), t = at % UNIT(kind) / SPAN(kind), step = unit * (SPAN(kind) / 4) + at % SPAN(kind) / 4;
  uint2* to = (uint2*)(y + (step / 2 * 4 + t) * 8 + step % 2 * 4);
  UNROLL for (j = 0; j < terms; j++)
    *(uint2*)((u16*)to + j * apart) = make_uint2(term[0][j] | term[1][j] << 16, term[2][j] | term[3][j] << 16);
}

// ------------------------------------------------------------------------------------------------ weights
// a lane's load from column k on, which is a multiple of SPAN; zeros beyond the row's end
INLINE void load(u32* word, const u8* row, int k, int most, int kind) {
  const u8* p = row + BYTES(kind, k); const int words = kind == F32 ? 8 : 4; int i;
  if (most % SPAN(kind) == 0) {
    if (most % UNIT(kind) == 0 || k < most) {
      uint4 v = read_once(p); word[0] = v.x; word[1] = v.y; word[2] = v.z; word[3] = v.w;
      if (kind == F32) { v = read_once(p + 16); word[4] = v.x; word[5] = v.y; word[6] = v.z; word[7] = v.w; }
    } else { UNROLL for (i = 0; i < words; i++) word[i] = 0; }
  } else {                                                 // rows begin anywhere
    const int left = BYTES(kind, most) - BYTES(kind, k);
    for (i = 0; i < words; i++) word[i] = 0;
    UNROLL for (i = 0; i < 4 * words; i++) if (i < left) word[i / 4] |= (u32)p[i] << i % 4 * 8;
  }
}
// the four weights of a step as two registers for each bfloat16 term: out[2 * term], out[2 * term + 1]. `table`: see e2m1_table
INLINE void decode(u32* out, const u32* word, int step, const u32* table, int kind) {
  if (kind == BF16) { out[0] = word[2 * step]; out[1] = word[2 * step + 1]; }
  if (kind == FP8) {                                       // the bits of e4m3 are those of a number 2^120 times smaller
    u32 w = word[step], a = __byte_perm(w, 0, 0x1404), b = __byte_perm(w, 0, 0x3424);
    out[0] = times((a & 0x80008000u) | (a >> 4 & 0x07f007f0u), 0x7b807b80u);
    out[1] = times((b & 0x80008000u) | (b >> 4 & 0x07f007f0u), 0x7b807b80u);
  }
  if (kind == FP4) {                                       // magnitudes byte by byte from the table, signs from the nibbles' top bits
    u32 w = word[step / 2], pick = (w & 0x77777777u) >> step % 2 * 16;
    u32 low = __byte_perm(table[0], table[1], pick), high = __byte_perm(table[2], table[3], pick);
    high |= __byte_perm(w << 4, w, step % 2 ? 0xfbea : 0xd9c8) & 0x80808080u;
    out[0] = __byte_perm(low, high, 0x5140); out[1] = __byte_perm(low, high, 0x7362);
  }
  if (kind == F32) {
    u32 a[3], b[3]; int h, j;
    UNROLL for (h = 0; h < 2; h++) {
      split(a, of_bits(word[4 * step + 2 * h])); split(b, of_bits(word[4 * step + 2 * h + 1]));
      UNROLL for (j = 0; j < 3; j++) out[2 * j + h] = a[j] | b[j] << 16;
    }
  }
}
// the eight magnitudes of e2m1 times a scale, in bfloat16: low bytes of 0 .. 1.5 and of 2 .. 6, then the high ones
INLINE void e2m1_table(u32* table, int code) {
  u32 s = code ? (u32)code << 7 : 0x40u; s |= s << 16;
  u32 a = times(0x3f000000u, s), b = times(0x3fc03f80u, s), c = times(0x40404000u, s), d = times(0x40c04080u, s);
  table[0] = __byte_perm(a, b, 0x6420); table[1] = __byte_perm(c, d, 0x6420);
  table[2] = __byte_perm(a, b, 0x7531); table[3] = __byte_perm(c, d, 0x7531);
}

// A warp's part of the sums of wide tiles of 16 rows of w, tile r from row[r] on and none from most[r] on, with deep tiles of 8 columns:
// acc[r][n] is the accumulator of an mma. column[n]: this lane's row of x (terms `apart` apart), or -1. It takes pieces warp,
// warp + warps, ...
#define PRODUCT_ARGS const u8* w, const u8* scale, const int* row, const int* most, const u16* x, i64 apart, const int* column, \
  const int warp, const int warps
INLINE void product(float* acc, int wide, int deep, int kind, int terms, const int k, PRODUCT_ARGS) {
  enum { MOST_R = 2, MOST_N = 4 };
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, units = CEIL(k, UNIT(kind)), steps = SPAN(kind) / 4;
  const int group = kind == FP4 ? 1 : kind == FP8 ? 2 : PIECE;      // units of one chain of mma
  const u8 *wr[MOST_R][2], *sr[MOST_R][2]; int r, h, n, u, j, a, b;
  UNROLL for (r = 0; r < wide; r++) UNROLL for (h = 0; h < 2; h++) {
    int at = row[r] + g + 8 * h; at = at < most[r] ? at : most[r] - 1;       // rows there are none of repeat the last one
    wr[r][h] = w + (i64)at * BYTES(kind, k); sr[r][h] = scale + (i64)at * SCALES(kind, k);
  }
  for (int piece = warp; piece < CEIL(units, PIECE); piece += warps) {
    u32 word[PIECE][MOST_R][2][8], code[PIECE][MOST_R][2]; float sum[MOST_R][MOST_N][4];
    UNROLL for (u = 0; u < PIECE; u++) {
      const int unit = piece * PIECE + u;
      if (units % PIECE == 0 || unit < units) UNROLL for (r = 0; r < wide; r++) UNROLL for (h = 0; h < 2; h++)
        load(word[u][r][h], wr[r][h], unit * UNIT(kind) + t * SPAN(kind), k, kind);
    }
    UNROLL for (r = 0; r < wide; r++) UNROLL for (h = 0; h < 2; h++) {
      if (kind == FP4 && k % (16 * 32) == 0) {             // the 16 scales of a piece are one load
        uint4 v = read_once(sr[r][h] + piece * 16);
        code[0][r][h] = v.x >> 8 * t & 255; code[1][r][h] = v.y >> 8 * t & 255;
        code[2][r][h] = v.z >> 8 * t & 255; code[3][r][h] = v.w >> 8 * t & 255;
      } else UNROLL for (u = 0; u < PIECE; u++) {
        const int unit = piece * PIECE + u, at = kind == FP4 ? unit * 4 + t : unit / 2;
        if (kind == FP4) code[u][r][h] = at < k / 32 ? sr[r][h][at] : 127;
        if (kind == FP8) code[u][r][h] = u % 2 == 0 && at < CEIL(k, 128) ? sr[r][h][at] : 127;
      }
    }
    UNROLL for (u = 0; u < PIECE; u++) {
      const int unit = piece * PIECE + u;
      if (u % group == 0) UNROLL for (r = 0; r < wide; r++) UNROLL for (n = 0; n < deep; n++) UNROLL for (j = 0; j < 4; j++)
        sum[r][n][j] = 0;
      if (units % PIECE == 0 || unit < units) {
        u32 table[MOST_R][2][4];
        if (kind == FP4) UNROLL for (r = 0; r < wide; r++) UNROLL for (h = 0; h < 2; h++) e2m1_table(table[r][h], code[u][r][h]);
        UNROLL for (j = 0; j < steps; j += 2) {
          uint4 v[MOST_N][3];
          UNROLL for (n = 0; n < deep; n++) UNROLL for (b = 0; b < terms; b++) v[n][b] = column[n] < 0 ? make_uint4(0, 0, 0, 0)
            : *(const uint4*)(x + b * apart + (i64)column[n] * LONG(kind, k) + ((unit * steps + j) / 2 * 4 + t) * 8);
          UNROLL for (h = 0; h < 2; h++) UNROLL for (r = 0; r < wide; r++) {
            u32 top[6], low[6];
            decode(top, word[u][r][0], j + h, table[r][0], kind); decode(low, word[u][r][1], j + h, table[r][1], kind);
            UNROLL for (a = 0; a < (kind == F32 ? 3 : 1); a++) {
              u32 regs[4]; regs[0] = top[2 * a]; regs[1] = low[2 * a]; regs[2] = top[2 * a + 1]; regs[3] = low[2 * a + 1];
              UNROLL for (n = 0; n < deep; n++) UNROLL for (b = 0; b < terms; b++)
                if (a + b < 3) mma(sum[r][n], regs, h ? v[n][b].z : v[n][b].x, h ? v[n][b].w : v[n][b].y);
            }
          }
        }
      }
      if (u % group == group - 1) UNROLL for (r = 0; r < wide; r++) UNROLL for (n = 0; n < deep; n++) UNROLL for (j = 0; j < 4; j++) {
        float* to = acc + (r * deep + n) * 4 + j;
        *to = kind == FP8 ? *to + sum[r][n][j] * pow2(code[u - 1][r][j / 2]) : *to + sum[r][n][j];
      }
    }
  }
}
// total[column][row] of 16 wide rows and 8 deep columns: the warps' sums, added in their order. Ends on a barrier
INLINE void add_warps(float* total, const float* acc, int wide, int deep, const int warp, const int warps) {
  const int lane = threadIdx.x & 31; int turn, r, n, j;
  for (turn = 0; turn < warps; turn++) {
    if (warp == turn) UNROLL for (r = 0; r < wide; r++) UNROLL for (n = 0; n < deep; n++) UNROLL for (j = 0; j < 4; j++) {
      float* to = total + (n * 8 + lane % 4 * 2 + j % 2) * 16 * wide + r * 16 + (lane >> 2) + j / 2 * 8;
      *to = turn ? *to + acc[(r * deep + n) * 4 + j] : acc[(r * deep + n) * 4 + j];
    }
    __syncthreads();
  }
}

// ------------------------------------------------------------------------------------------------ block-scaled products
#if MX
// d (16,8) += a (16,32) sa (16) b (32,8) sb (8). With lane = 4g+t, a: rows g, g+8, g, g+8, bytes of k 4t.. and 16 further, e2m1
// codes times 4; sa: of row g in even lanes, of row g+8 in odd ones; b: column g, e4m3 codes, the same k; sb: of column g
INLINE void mma_mx(float* d, const u32* a, u32 sa, u32 b0, u32 b1, u32 sb) {
#ifdef __CUDA_ARCH__
  asm volatile("mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e2m1.e4m3.f32.ue8m0 {%0, %1, %2, %3}, "
               "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, 0}, {%11}, {0, 0};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(sa), "r"(sb));
#else
  int lane = threadIdx.x & 31, s, i, c; float sum[4] = { 0, 0, 0, 0 };
  uint4 mine = make_uint4(a[0], a[1], a[2], a[3]); uint2 col = make_uint2(b0, b1);
  u32 top = __shfl_sync(ALL, sa, lane & ~3), low = __shfl_sync(ALL, sa, lane & ~3 | 1);
  u32 left = __shfl_sync(ALL, sb, (lane & 3) * 8), right = __shfl_sync(ALL, sb, (lane & 3) * 8 + 4);
  for (s = 0; s < 4; s++) {
    uint4 v = __shfl_sync(ALL, mine, (lane & ~3) + s);
    uint2 l = __shfl_sync(ALL, col, (lane & 3) * 8 + s), r = __shfl_sync(ALL, col, (lane & 3) * 8 + 4 + s);
    for (i = 0; i < 8; i++) {
      float w[2], x[2];
      for (c = 0; c < 2; c++) {
        u32 e2m1 = (i < 4 ? c ? v.y : v.x : c ? v.w : v.z) >> i % 4 * 8 & 255;
        u32 e4m3 = (i < 4 ? c ? r.x : l.x : c ? r.y : l.y) >> i % 4 * 8 & 255;
        w[c] = of_bits((e2m1 >> 2 & 8) << 28 | (e2m1 >> 2 & 7) << 22) * 0x1p126f;
        x[c] = (e4m3 & 0x7f) == 0x7f ? of_bits(0x7fc00000u) : of_bits((e4m3 & 0x80) << 24 | (e4m3 & 0x7f) << 20) * 0x1p120f;
      }
      sum[0] += w[0] * x[0]; sum[1] += w[0] * x[1]; sum[2] += w[1] * x[0]; sum[3] += w[1] * x[1];
    }
  }
  d[0] += sum[0] * pow2(top & 255) * pow2(left & 255); d[1] += sum[1] * pow2(top & 255) * pow2(right & 255);
  d[2] += sum[2] * pow2(low & 255) * pow2(left & 255); d[3] += sum[3] * pow2(low & 255) * pow2(right & 255);
#endif
}
// bytes of a row of x: its codes, then a scale for each 128, up to a multiple of 16
#define MX_ROW(k) (((k) + CEIL(k, 128) + 15) / 16 * 16)
// As `put`, k a multiple of 128: e4m3 codes and their scale. Eight codes of a lane: the even ones, then the odd ones, as e2m1 comes apart
INLINE void put_mx(u8* y, const float* x, int k, int group) {
  const int lane = threadIdx.x & 31, at = 128 * group + 4 * lane; float v[4]; u32 code[4], most = 0x38d1b717u; int i;
  UNROLL for (i = 0; i < 4; i++) { v[i] = x[at + i]; u32 a = bits_of(v[i]) & 0x7fffffffu; most = a > most ? a : most; }
  UNROLL for (i = 16; i; i >>= 1) { u32 a = __shfl_xor_sync(ALL, most, i); most = a > most ? a : most; }
  int scale = most >= 0x7f800000u ? 255 : (int)(most >> 23) - 8 + ((most & 0x7fffffu) > 0x600000u); float inverse = pow2(254 - scale);
  UNROLL for (i = 0; i < 4; i++) {
    u32 u = bits_of(v[i] * inverse), sign = u >> 24 & 0x80; u &= 0x7fffffffu;
    code[i] = u < 0x3c800000u ? bits_of(of_bits(u) + 16384.0f) & 15 : ((u + 0x7ffffu + (u >> 20 & 1)) >> 20) - 960;
    code[i] = scale == 255 ? 0x7f : sign | code[i];
  }
  u16* to = (u16*)(y + at / 8 * 8 + at % 8 / 2);
  to[0] = (u16)(code[0] | code[2] << 8); to[2] = (u16)(code[1] | code[3] << 8);
  if (lane == 0) y[k + group] = (u8)scale;
}
// As `product`, one tile of columns, FP4 and k a multiple of 128: a warp takes every `warps`th 128 of k
INLINE void product_mx(float* acc, int wide, const int k, const u8* w, const u8* scale, const int* row, const int* most, const u8* x,
                       const int column, const int warp, const int warps) {
  enum { MOST_R = 2 };
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3; const u8 *wr[MOST_R][2], *sr[MOST_R]; int r, h, q, j;
  UNROLL for (r = 0; r < wide; r++) UNROLL for (h = 0; h < 2; h++) {
    int at = row[r] + g + 8 * h; at = at < most[r] ? at : most[r] - 1;
    wr[r][h] = w + (i64)at * (k / 2) + 4 * t;
    if (h == t % 2) sr[r] = scale + (i64)at * (k / 32);
  }
  const u8* xr = x + (i64)(column < 0 ? 0 : column) * MX_ROW(k);
  for (int at = warp * 128; at < k; at += warps * 128) {
    u32 word[4][MOST_R][2], sw[MOST_R], sx = column < 0 ? 0x7f : xr[k + at / 128]; uint2 v[4]; float sum[MOST_R][4];
    UNROLL for (r = 0; r < wide; r++) {
      sw[r] = *(const u32*)(sr[r] + at / 32);
      UNROLL for (q = 0; q < 4; q++) UNROLL for (h = 0; h < 2; h++) word[q][r][h] = *(const u32*)(wr[r][h] + at / 2 + 16 * q);
      UNROLL for (j = 0; j < 4; j++) sum[r][j] = 0;
    }
    UNROLL for (q = 0; q < 4; q++) v[q] = column < 0 ? make_uint2(0, 0) : *(const uint2*)(xr + at + 32 * q + 8 * t);
    UNROLL for (q = 0; q < 4; q++) UNROLL for (r = 0; r < wide; r++) {
      u32 a[4]; const u32 top = word[q][r][0], low = word[q][r][1];
      a[0] = top << 2 & 0x3c3c3c3cu; a[1] = low << 2 & 0x3c3c3c3cu; a[2] = top >> 2 & 0x3c3c3c3cu; a[3] = low >> 2 & 0x3c3c3c3cu;
      mma_mx(sum[r], a, sw[r] >> 8 * q & 255, v[q].x, v[q].y, sx);
    }
    UNROLL for (r = 0; r < wide; r++) UNROLL for (j = 0; j < 4; j++) acc[4 * r + j] += sum[r][j];
  }
}
#endif

#ifdef KERNEL_prepare  // y (terms,T,LONG); x (T,K): see put. T*ceil(K/128) warps, eight a block
ENTRY void __launch_bounds__(256) NAME(u16* __restrict__ y, const float* __restrict__ x) {
  const int job = blockIdx.x * 8 + (threadIdx.x >> 5), row = job / CEIL(K, 128);
  if (row < T) put(y + (i64)row * LONG(KIND, K), (i64)T * LONG(KIND, K), x + (i64)row * K, K, job % CEIL(K, 128), KIND, QUANTISE);
}
#endif

#ifdef KERNEL_linear   // out (T,G*N); x from prepare (terms,T*G,LONG), w (G*N,K) and its scales. Blocks (G*ceil(N/16R), ceil(T/8NT))
ENTRY void __launch_bounds__(WARPS * 32) NAME(float* __restrict__ out, const u16* __restrict__ x, const u8* __restrict__ w,
                                             const u8* __restrict__ scale) {
  __shared__ float total[8 * NT * 16 * R];
  const int group = blockIdx.x / CEIL(N, 16 * R), first = blockIdx.x % CEIL(N, 16 * R) * 16 * R, from = blockIdx.y * 8 * NT;
  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2;
  float acc[R * NT * 4]; int row[R], most[R], column[NT], i;
  UNROLL for (i = 0; i < R * NT * 4; i++) acc[i] = 0;
  UNROLL for (i = 0; i < R; i++) { row[i] = first + 16 * i; most[i] = N; }
  UNROLL for (i = 0; i < NT; i++) column[i] = from + 8 * i + g < T ? (from + 8 * i + g) * G + group : -1;
  product(acc, R, NT, KIND, TERMS(KIND, QUANTISE), K, w + (i64)group * N * BYTES(KIND, K), scale + (i64)group * N * SCALES(KIND, K), row,
          most, x, (i64)T * G * LONG(KIND, K), column, warp, WARPS);
  add_warps(total, acc, R, NT, warp, WARPS);
  for (i = threadIdx.x; i < 8 * NT * 16 * R; i += WARPS * 32) {
    const int t = from + i / (16 * R), n = first + i % (16 * R);
    if (t < T && n < N) out[((i64)t * G + group) * N + n] = ROUND ? bf16(total[i]) : total[i];
  }
}
#endif

// ------------------------------------------------------------------------------------------------ experts
// A tile is up to eight (token, slot) pairs of one expert. PAIRS = T*TOPK; plan: the number of tiles, then for each tile its
// expert, its number of pairs and the pairs, and last the pairs of every token by expert, -1 in place of one whose expert is not
// here: experts FIRST .. FIRST+E-1 are. Tiles of the shared expert come after MOST_TILES, eight tokens each: "pair" PAIRS + t is
// token t. ROUND 0: a share of a sum over devices, without the roundings that follow the shared product.
#if defined(KERNEL_experts_plan) || defined(KERNEL_experts_up) || defined(KERNEL_experts_middle) || defined(KERNEL_experts_down) || \
    defined(KERNEL_experts_sum)
#define PAIRS (T * TOPK)
#define TILE 10
#define ORDER (1 + MOST_TILES * TILE)
INLINE float rnd(float x) { return W4A8 ? bf16(x) : x; }
INLINE int tile_of(const int* plan, int tile, int* pair) {        // its expert, or E for the shared one; -1: there is no such tile
  const int g = (threadIdx.x & 31) >> 2;
  if (tile >= MOST_TILES) {
    const int t = (tile - MOST_TILES) * 8 + g;
    *pair = t < T ? PAIRS + t : -1;
    return E;
  }
  if (tile >= plan[0]) return -1;
  const int* p = plan + 1 + tile * TILE;
  *pair = g < p[1] ? p[2 + g] : -1;
  return p[0];
}
#endif

#ifdef KERNEL_experts_plan // plan, xr, xs: x (T,D) for the routed and for the shared weights; x, ids (T,TOPK). The last block sorts
ENTRY void __launch_bounds__(256) NAME(int* __restrict__ plan, u16* __restrict__ xr, u16* __restrict__ xs, const float* __restrict__ x,
                                      const int* __restrict__ ids) {
  __shared__ int id[PAIRS], tiles[E];
  const int job = blockIdx.x * 8 + (threadIdx.x >> 5), t = job / CEIL(D, 128), group = job % CEIL(D, 128);
  int e, i, n;
  if (blockIdx.x < CEIL(T * CEIL(D, 128), 8)) {
    if (t >= T) return;
#if MX
    put_mx((u8*)xr + (i64)t * MX_ROW(D), x + (i64)t * D, D, group);
#else
    put(xr + (i64)t * LONG(KIND, D), (i64)T * LONG(KIND, D), x + (i64)t * D, D, group, KIND, W4A8 && KIND >= FP8);
#endif
    put(xs + (i64)t * LONG(SHARED, D), (i64)T * LONG(SHARED, D), x + (i64)t * D, D, group, SHARED, W4A8 && SHARED >= FP8);
    return;
  }
  for (i = threadIdx.x; i < PAIRS; i += 256) id[i] = ids[i] - FIRST;
  __syncthreads();
  for (e = threadIdx.x; e < E; e += 256) {
    for (i = 0, n = 0; i < PAIRS; i++) n += id[i] == e;
    tiles[e] = CEIL(n, 8);
  }
  __syncthreads();
  for (e = threadIdx.x; e < E; e += 256) {
    int before = 0, left = tiles[e];
    if (left || e == E - 1) for (i = 0; i < e; i++) before += tiles[i];
    if (e == E - 1) plan[0] = before + left;
    int* p = plan + 1 + before * TILE;
    for (i = 0, n = 0; left && i < PAIRS; i++) if (id[i] == e) {
      p[n / 8 * TILE] = e; p[n / 8 * TILE + 2 + n % 8] = i; p[n / 8 * TILE + 1] = n % 8 + 1;
      n++;
    }
  }
  for (i = threadIdx.x; i < PAIRS; i += 256) {
    const int from = i / TOPK * TOPK; int rank = 0, j;
    for (j = from; j < from + TOPK; j++) rank += id[j] < id[i] || (id[j] == id[i] && j < i);
    plan[ORDER + from + rank] = id[i] >= 0 && id[i] < E ? i : -1;
  }
}
#endif

#ifdef KERNEL_experts_up  // t (PAIRS,I), ts (T,J); plan, xr, xs, w13 (E,2I,D), s13 (2J,D), weights (T,TOPK). Blocks (rows/16, tiles)
ENTRY void __launch_bounds__(WARPS * 32) NAME(float* __restrict__ t, float* __restrict__ ts, const int* __restrict__ plan,
                                             const u16* __restrict__ xr, const u16* __restrict__ xs, const u8* __restrict__ w13,
                                             const u8* __restrict__ w13s, const u8* __restrict__ s13, const u8* __restrict__ s13s,
                                             const float* __restrict__ weights) {
  __shared__ float total[8 * 32]; __shared__ int pairs[8];
  const int warp = threadIdx.x >> 5; int pair = -1, i;
  const int e = tile_of(plan, blockIdx.y, &pair), inner = e == E ? J : I, first = blockIdx.x * 16;
  if (e < 0 || first >= inner) return;
  float acc[8]; int row[2], most[2], column[1];
  UNROLL for (i = 0; i < 8; i++) acc[i] = 0;
  row[0] = first; row[1] = inner + first; most[0] = inner; most[1] = 2 * inner;
  if (threadIdx.x < 32 && threadIdx.x % 4 == 0) pairs[threadIdx.x / 4] = pair;
  if (e < E) {
    column[0] = pair < 0 ? -1 : pair / TOPK;
#if MX
    product_mx(acc, 2, D, w13 + (i64)e * I * D, w13s + (i64)e * 2 * I * (D / 32), row, most, (const u8*)xr, column[0], warp, WARPS);
#else
    product(acc, 2, 1, KIND, TERMS(KIND, W4A8), D, w13 + (i64)e * 2 * I * BYTES(KIND, D), w13s + (i64)e * 2 * I * SCALES(KIND, D), row,
            most, xr, (i64)T * LONG(KIND, D), column, warp, WARPS);
#endif
  } else {
    column[0] = pair < 0 ? -1 : pair - PAIRS;
    product(acc, 2, 1, SHARED, TERMS(SHARED, W4A8), D, s13, s13s, row, most, xs, (i64)T * LONG(SHARED, D), column, warp, WARPS);
  }
  add_warps(total, acc, 2, 1, warp, WARPS);
  for (i = threadIdx.x; i < 8 * 16; i += WARPS * 32) {
    const int p = pairs[i / 16], at = first + i % 16;
    if (p < 0 || at >= inner) continue;
    float a = rnd(total[i / 16 * 32 + i % 16]), b = rnd(total[i / 16 * 32 + 16 + i % 16]);
    a = a > LIMIT ? LIMIT : a; b = b > LIMIT ? LIMIT : b < -LIMIT ? -LIMIT : b;
    const float v = rnd(a * sigmoid(a) * b * (e < E ? weights[p] : 1.0f));
    if (e < E) t[(i64)p * I + at] = v; else ts[(i64)(p - PAIRS) * J + at] = v;
  }
}
#endif

#ifdef KERNEL_experts_middle // y (terms,PAIRS,LONG of I), ys (terms,T,LONG of J); t (PAIRS,I), ts (T,J): laid out for w2
ENTRY void __launch_bounds__(256) NAME(u16* __restrict__ y, u16* __restrict__ ys, const float* __restrict__ t,
                                      const float* __restrict__ ts) {
  int job = blockIdx.x * 8 + (threadIdx.x >> 5); const int routed = PAIRS * CEIL(I, 128);
  if (job < routed) {
    const int p = job / CEIL(I, 128);
#if MX
    put_mx((u8*)y + (i64)p * MX_ROW(I), t + (i64)p * I, I, job % CEIL(I, 128));
#else
    put(y + (i64)p * LONG(KIND, I), (i64)PAIRS * LONG(KIND, I), t + (i64)p * I, I, job % CEIL(I, 128), KIND, W4A8 && KIND >= FP8);
#endif
  } else if ((job -= routed) < T * CEIL(J, 128)) {
    const int p = job / CEIL(J, 128);
    put(ys + (i64)p * LONG(SHARED, J), (i64)T * LONG(SHARED, J), ts + (i64)p * J, J, job % CEIL(J, 128), SHARED, W4A8 && SHARED >= FP8);
  }
}
#endif

#ifdef KERNEL_experts_down // v (PAIRS+T,D); plan, y, ys, w2 (E,D,I), s2 (D,J). Blocks (D/16, tiles)
ENTRY void __launch_bounds__(WARPS * 32) NAME(float* __restrict__ v, const int* __restrict__ plan, const u16* __restrict__ y,
                                             const u16* __restrict__ ys, const u8* __restrict__ w2, const u8* __restrict__ w2s,
                                             const u8* __restrict__ s2, const u8* __restrict__ s2s) {
  __shared__ float total[8 * 16]; __shared__ int pairs[8];
  const int warp = threadIdx.x >> 5, first = blockIdx.x * 16; int pair = -1, i;
  const int e = tile_of(plan, blockIdx.y, &pair);
  if (e < 0) return;
  float acc[4]; int row[1], most[1], column[1];
  UNROLL for (i = 0; i < 4; i++) acc[i] = 0;
  row[0] = first; most[0] = D;
  if (threadIdx.x < 32 && threadIdx.x % 4 == 0) pairs[threadIdx.x / 4] = pair;
  if (e < E) {
    column[0] = pair;
#if MX
    product_mx(acc, 1, I, w2 + (i64)e * D * (I / 2), w2s + (i64)e * D * (I / 32), row, most, (const u8*)y, column[0], warp, WARPS);
#else
    product(acc, 1, 1, KIND, TERMS(KIND, W4A8), I, w2 + (i64)e * D * BYTES(KIND, I), w2s + (i64)e * D * SCALES(KIND, I), row, most,
            y, (i64)PAIRS * LONG(KIND, I), column, warp, WARPS);
#endif
  } else {
    column[0] = pair < 0 ? -1 : pair - PAIRS;
    product(acc, 1, 1, SHARED, TERMS(SHARED, W4A8), J, s2, s2s, row, most, ys, (i64)T * LONG(SHARED, J), column, warp, WARPS);
  }
  add_warps(total, acc, 1, 1, warp, WARPS);
  for (i = threadIdx.x; i < 8 * 16; i += WARPS * 32)
    if (pairs[i / 16] >= 0 && first + i % 16 < D)
      v[(i64)pairs[i / 16] * D + first + i % 16] = ROUND || e < E ? rnd(total[i]) : total[i];
}
#endif

#ifdef KERNEL_experts_sum // out (T,D); v (PAIRS+T,D), plan: a token's experts by number, then the shared one
ENTRY void __launch_bounds__(256) NAME(float* __restrict__ out, const float* __restrict__ v, const int* __restrict__ plan) {
  const int i = blockIdx.x * 256 + threadIdx.x, t = i / D; int k;
  if (t >= T) return;
  float a = 0;
  for (k = 0; k < TOPK; k++) {
    const int p = plan[ORDER + t * TOPK + k];
    if (p >= 0) a += v[(i64)p * D + i % D];
  }
  a += v[(i64)(PAIRS + t) * D + i % D];
  out[i] = ROUND ? bf16(a) : a;
}
#endif

#ifdef KERNEL_markov   // out (B,V); base (B*ROWS,V), w1 (V,RANK), w2 (V,RANK), token (B,): row ROW of each base plus w2 . w1[token]
// Four lanes a row of w2, each lane every fourth part of its 16 byte parts. A block makes 64 rows. Grid: V / 64, B
ENTRY void __launch_bounds__(256) NAME(float* __restrict__ out, const float* __restrict__ base, const u8* __restrict__ w1,
                                      const u8* __restrict__ w2, const int* __restrict__ token) {
  __shared__ float e[RANK];
  const int row = blockIdx.x * 64 + (threadIdx.x >> 2), t = threadIdx.x & 3, b = blockIdx.y, from = token[b] < 0 ? 0 : token[b]; int i, j;
  for (i = threadIdx.x; i < RANK; i += 256)
    e[i] = HALF ? of_bits((u32)((const u16*)w1)[(i64)from * RANK + i] << 16) : ((const float*)w1)[(i64)from * RANK + i];
  __syncthreads();
  const u8* w = w2 + (i64)(row < V ? row : V - 1) * RANK * (HALF ? 2 : 4); float a = 0;
  if (RANK % (HALF ? 32 : 16) == 0) {
    UNROLL for (i = t; i < RANK / (HALF ? 8 : 4); i += 4) {
      uint4 v = read_once(w + 16 * i); u32 word[4]; word[0] = v.x; word[1] = v.y; word[2] = v.z; word[3] = v.w;
      UNROLL for (j = 0; j < 4; j++)
        if (HALF) { a += of_bits(word[j] << 16) * e[8 * i + 2 * j]; a += of_bits(word[j] & 0xffff0000u) * e[8 * i + 2 * j + 1]; }
        else a += of_bits(word[j]) * e[4 * i + j];
    }
  } else for (i = t; i < RANK; i += 4) a += (HALF ? of_bits((u32)((const u16*)w)[i] << 16) : ((const float*)w)[i]) * e[i];
  a += __shfl_xor_sync(ALL, a, 1); a += __shfl_xor_sync(ALL, a, 2);
  if (t == 0 && row < V) out[(i64)b * V + row] = base[((i64)b * ROWS + ROW) * V + row] + a;
}
#endif
