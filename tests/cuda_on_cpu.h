// Runs CUDA kernels on a CPU, for tests on machines without a GPU: compile the kernels as C with clang, load the library, call
// cuda_on_cpu_launch. Slow, deterministic, and spiteful where a GPU would be kind:
//   - Threads of a block are fibers that are resumed in scrambled order, and warps now and then run far ahead of others; nobody
//     runs past a barrier before all have reached it. A missing __syncthreads or __syncwarp shows as a wrong result, if not with
//     every seed. Blocks run one after another, also scrambled.
//   - Shared memory is 0xff (NaN) at the start of every block: what is read before it was written shows.
//   - A barrier met in two different lines, or by a part of a warp or block that the rest never joins, is an error (below).
//   - With -fsanitize=alignment,bounds -fsanitize-trap=all a misaligned vector load or an index outside a local or shared array is
//     an error too, and so is a wild pointer: the launch returns instead of ending the process.
//
// How to use it. The source must stay inside C: no templates, references, overloads, default arguments or `extern "C"` (write
//   #ifdef __cplusplus
//   #define KERNEL extern "C" __global__
//   #else
//   #define KERNEL __global__
//   #endif
// ), inline PTX only under #ifdef __CUDA_ARCH__ with plain C in the #else, and every kernel parameter is a pointer. Then
//   clang -x c -std=gnu11 -O1 -w -fPIC -shared -include tests/cuda_on_cpu.h kernels.cu -o kernels.so -lm
// (several files in one command are one library) and from Python
//   lib = ctypes.CDLL("kernels.so")
//   grid, block, args = (ctypes.c_uint * 3)(8, 1, 1), (ctypes.c_uint * 3)(128, 1, 1), (ctypes.c_void_p * 3)(out, x, None)
//   error = lib.cuda_on_cpu_launch(ctypes.cast(lib.my_kernel, ctypes.c_void_p), grid, block, args, seed)
// with at most 31 arguments, the list ended by None. `seed` scrambles the order (0: plain order). The result is 0, or
//   1  a barrier or shuffle that not all of its threads reach     2  threads at one barrier in different lines
//   3  a trap: bad address, misaligned vector, array bounds       4  a block of more than 1024 threads
// static memory of all kernels in the library: cuda_on_cpu_shared() bytes (one library per kernel to see it apart).
#ifndef CUDA_ON_CPU_H
#define CUDA_ON_CPU_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE                                        // sincosf
#endif
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#define __global__ __attribute__((visibility("default")))
#define __device__ static __attribute__((unused))
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict __restrict__
// `used`: the optimiser then must believe that other threads see it
#define __shared__ static __attribute__((section("cuda_shared"), used, aligned(16)))
#define __grid_constant__

// ------------------------------------------------------------------------------------------------ vector types
// vectors of the compiler, since it doesn't check how structs are aligned; nvcc refuses what these can do beyond CUDA's
#define CUDA_VECTORS(T, name) \
  typedef struct { T x; } name##1; \
  typedef T name##2 __attribute__((ext_vector_type(2))); \
  typedef struct { T x, y, z; } name##3; \
  typedef T name##4 __attribute__((ext_vector_type(4))); \
  static inline name##2 make_##name##2(T x, T y) { name##2 v = { x, y }; return v; } \
  static inline name##4 make_##name##4(T x, T y, T z, T w) { name##4 v = { x, y, z, w }; return v; }
typedef unsigned char cuda_uchar; typedef unsigned short cuda_ushort; typedef unsigned int cuda_uint;
CUDA_VECTORS(signed char, char) CUDA_VECTORS(cuda_uchar, uchar) CUDA_VECTORS(short, short) CUDA_VECTORS(cuda_ushort, ushort)
CUDA_VECTORS(int, int) CUDA_VECTORS(cuda_uint, uint) CUDA_VECTORS(float, float) CUDA_VECTORS(double, double)
CUDA_VECTORS(long long, longlong) CUDA_VECTORS(unsigned long long, ulonglong)
typedef uint3 dim3;

// ------------------------------------------------------------------------------------------------ threads
enum { CUDA_READY, CUDA_AT_BLOCK, CUDA_AT_WARP, CUDA_DONE };
enum { CUDA_MOST = 1024, CUDA_STACK = 1 << 18 };
typedef struct {
  jmp_buf here; ucontext_t start; uint3 tid;
  int state, line, started, from; unsigned index, mask, ballot; unsigned char value[16], received[16];
} cuda_thread;
typedef struct {
  cuda_thread thread[CUDA_MOST], *volatile now; uint3 block, block_dim, grid_dim;
  void* kernel; void* args[32]; jmp_buf scheduler; sigjmp_buf trap; unsigned n, random; char* stacks;
} cuda_machine;
__attribute__((weak)) cuda_machine cuda_on_cpu;            // weak: one for all files of a library
extern char __start_cuda_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_cuda_shared[] __attribute__((weak, visibility("hidden")));

#define threadIdx (cuda_on_cpu.now->tid)
#define blockIdx (cuda_on_cpu.block)
#define blockDim (cuda_on_cpu.block_dim)
#define gridDim (cuda_on_cpu.grid_dim)
#define warpSize 32

// gives the processor away until the barrier has opened
__attribute__((weak, noinline)) void cuda_wait(int state, unsigned mask, int line) {
  cuda_thread* t = cuda_on_cpu.now; t->state = state; t->mask = mask; t->line = line;
  __asm__ volatile("" ::: "memory");
  if (!_setjmp(t->here)) _longjmp(cuda_on_cpu.scheduler, 1);
  __asm__ volatile("" ::: "memory");
}
static inline int cuda_lane(void) { return cuda_on_cpu.now->index & 31; }
// *value of lane `from` of this warp, which must be at the same place; all values change hands when the barrier opens
__attribute__((weak, noinline)) void cuda_exchange(unsigned mask, void* value, int size, int from, int line) {
  cuda_thread* t = cuda_on_cpu.now; t->from = from & 31;
  memcpy(t->value, value, size);
  cuda_wait(CUDA_AT_WARP, mask, line);
  memcpy(value, t->received, size);
}
__attribute__((weak, noinline)) unsigned cuda_ballot(unsigned mask, int yes, int line) {
  cuda_on_cpu.now->value[0] = (unsigned char)yes;
  cuda_wait(CUDA_AT_WARP, mask, line);
  return cuda_on_cpu.now->ballot;
}

#define __syncthreads() cuda_wait(CUDA_AT_BLOCK, 0, __LINE__)
#define __syncwarp(...) cuda_wait(CUDA_AT_WARP, CUDA_LAST(0xffffffffu, ##__VA_ARGS__), __LINE__)
#define __threadfence() __asm__ volatile("" ::: "memory")
#define __threadfence_block() __threadfence()
#define CUDA_LAST(...) ((unsigned[]){ __VA_ARGS__ })[sizeof((unsigned[]){ __VA_ARGS__ }) / sizeof(unsigned) - 1]
#define CUDA_SHUFFLE(mask, v, from) ({ int cuda_l = cuda_lane(); __typeof__((v) + 0) cuda_v = (v); (void)cuda_l; \
  cuda_exchange((mask), &cuda_v, sizeof cuda_v, (from), __LINE__); cuda_v; })
#define CUDA_WIDTH(...) (int)CUDA_LAST(32, ##__VA_ARGS__)  // last argument of a shuffle, if it is given
#define __shfl_sync(mask, v, lane, ...) \
  CUDA_SHUFFLE(mask, v, (cuda_l & ~(CUDA_WIDTH(__VA_ARGS__) - 1)) | ((int)(lane) & (CUDA_WIDTH(__VA_ARGS__) - 1)))
#define __shfl_xor_sync(mask, v, lane, ...) \
  CUDA_SHUFFLE(mask, v, ((cuda_l ^ (int)(lane)) & ~(CUDA_WIDTH(__VA_ARGS__) - 1)) == (cuda_l & ~(CUDA_WIDTH(__VA_ARGS__) - 1)) \
               ? cuda_l ^ (int)(lane) : cuda_l)
#define __shfl_down_sync(mask, v, by, ...) \
  CUDA_SHUFFLE(mask, v, (cuda_l & (CUDA_WIDTH(__VA_ARGS__) - 1)) + (int)(by) < CUDA_WIDTH(__VA_ARGS__) ? cuda_l + (int)(by) : cuda_l)
#define __shfl_up_sync(mask, v, by, ...) \
  CUDA_SHUFFLE(mask, v, (cuda_l & (CUDA_WIDTH(__VA_ARGS__) - 1)) >= (int)(by) ? cuda_l - (int)(by) : cuda_l)
#define __ballot_sync(mask, p) cuda_ballot((mask), !!(p), __LINE__)
#define __any_sync(mask, p) (__ballot_sync(mask, p) != 0)
#define __all_sync(mask, p) (__ballot_sync(mask, !(p)) == 0)

// ------------------------------------------------------------------------------------------------ memory and arithmetic
#define __ldg(p) (*(p))
#define __ldcg(p) (*(p))
#define __ldcs(p) (*(p))
#define __ldca(p) (*(p))
#define __stcg(p, v) (void)(*(p) = (v))
#define __stcs(p, v) (void)(*(p) = (v))
#define CUDA_ATOMIC(p, expression) \
  ({ __typeof__(p) cuda_p = (p); __typeof__(*cuda_p) cuda_old = *cuda_p; *cuda_p = (expression); cuda_old; })
#define atomicAdd(p, v) CUDA_ATOMIC(p, cuda_old + (v))     // one thread at a time runs, and none is interrupted
#define atomicSub(p, v) CUDA_ATOMIC(p, cuda_old - (v))
#define atomicMax(p, v) CUDA_ATOMIC(p, cuda_old > (v) ? cuda_old : (v))
#define atomicMin(p, v) CUDA_ATOMIC(p, cuda_old < (v) ? cuda_old : (v))
#define atomicOr(p, v) CUDA_ATOMIC(p, cuda_old | (v))
#define atomicAnd(p, v) CUDA_ATOMIC(p, cuda_old & (v))
#define atomicXor(p, v) CUDA_ATOMIC(p, cuda_old ^ (v))
#define atomicExch(p, v) CUDA_ATOMIC(p, (v))
#define atomicCAS(p, was, v) CUDA_ATOMIC(p, cuda_old == (was) ? (v) : cuda_old)
#define min(a, b) ({ __auto_type cuda_a = (a); __auto_type cuda_b = (b); cuda_a < cuda_b ? cuda_a : cuda_b; })
#define max(a, b) ({ __auto_type cuda_a = (a); __auto_type cuda_b = (b); cuda_a > cuda_b ? cuda_a : cuda_b; })

static inline unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
static inline int __float_as_int(float x) { int u; memcpy(&u, &x, 4); return u; }
static inline float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
static inline float __int_as_float(int u) { float x; memcpy(&x, &u, 4); return x; }
static inline long long __double_as_longlong(double x) { long long u; memcpy(&u, &x, 8); return u; }
static inline double __longlong_as_double(long long u) { double x; memcpy(&x, &u, 8); return x; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
#define __expf expf                                        // libm has functions of these names
#define __logf logf
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __saturatef(float a) { return a > 0 ? a < 1 ? a : 1 : 0; }
static inline int __float2int_rn(float a) { return (int)rintf(a); }
static inline int __float2int_rz(float a) { return (int)a; }
static inline int __float2int_rd(float a) { return (int)floorf(a); }
static inline unsigned __float2uint_rn(float a) { return (unsigned)rintf(a); }
static inline float __int2float_rn(int a) { return (float)a; }
static inline float __uint2float_rn(unsigned a) { return (float)a; }
static inline int __popc(unsigned a) { return __builtin_popcount(a); }
static inline int __clz(int a) { return a ? __builtin_clz((unsigned)a) : 32; }
static inline int __ffs(int a) { return __builtin_ffs(a); }
static inline unsigned __brev(unsigned a) { return __builtin_bitreverse32(a); }
static inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
static inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) {
  return (unsigned)((((unsigned long long)hi << 32 | lo) << (n & 31)) >> 32);
}
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) {
  return (unsigned)(((unsigned long long)hi << 32 | lo) >> (n & 31));
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  unsigned long long v = (unsigned long long)b << 32 | a; unsigned r = 0; int i;
  for (i = 0; i < 4; i++) {
    unsigned sel = s >> (4 * i), byte = (unsigned)(v >> (8 * (sel & 7))) & 255;
    r |= (sel & 8 ? byte & 128 ? 255u : 0u : byte) << (8 * i);
  }
  return r;
}
static inline int __dp4a(int a, int b, int c) {
  int i; for (i = 0; i < 32; i += 8) c += (signed char)(a >> i) * (signed char)(b >> i);
  return c;
}
static inline unsigned __vsub4(unsigned a, unsigned b) {
  unsigned r = 0; int i; for (i = 0; i < 32; i += 8) r |= (((a >> i) - (b >> i)) & 255u) << i;
  return r;
}

// ------------------------------------------------------------------------------------------------ the launch
__attribute__((weak)) unsigned cuda_random(void) {
  cuda_on_cpu.random = cuda_on_cpu.random * 1664525u + 1013904223u;
  return cuda_on_cpu.random >> 8;
}
__attribute__((weak, noinline)) void cuda_fiber(void) {    // never returns: one life for all blocks of a launch
  void** a = cuda_on_cpu.args;
  for (;;) {
    // the kernel takes fewer; what is passed beyond is ignored by every calling convention that matters here
    ((void (*)(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*,
               void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*))
     cuda_on_cpu.kernel)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16],
                         a[17], a[18], a[19], a[20], a[21], a[22], a[23], a[24], a[25], a[26], a[27], a[28], a[29], a[30], a[31]);
    cuda_wait(CUDA_DONE, 0, 0);
  }
}
__attribute__((weak, noinline)) void cuda_resume(cuda_thread* t) {
  cuda_on_cpu.now = t;
  if (_setjmp(cuda_on_cpu.scheduler)) return;
  if (t->started++) _longjmp(t->here, 1);
  setcontext(&t->start);
}
__attribute__((weak)) void cuda_trapped(int signal) { (void)signal; siglongjmp(cuda_on_cpu.trap, 1); }

// opens the barriers of a warp that all have reached: 1 if there was one, -2 if it was met in two places
__attribute__((weak)) int cuda_open_warp(unsigned first) {
  cuda_thread* t = cuda_on_cpu.thread + first; int opened = 0;
  unsigned n = cuda_on_cpu.n - first < 32 ? cuda_on_cpu.n - first : 32, i, j, ballot;
  for (i = 0; i < n; i++) {
    unsigned mask = t[i].mask, there = 1; int at = t[i].line; char here[32] = { 0 };
    if (t[i].state != CUDA_AT_WARP || !(mask >> i & 1)) continue;
    for (j = 0; j < n; j++)
      if (mask >> j & 1 && t[j].state != CUDA_DONE && (t[j].state != CUDA_AT_WARP || t[j].mask != mask)) there = 0;
    if (!there) continue;
    for (ballot = 0, j = 0; j < n; j++)
      if ((here[j] = mask >> j & 1 && t[j].state == CUDA_AT_WARP)) ballot |= (unsigned)(t[j].value[0] & 1) << j;
    for (j = 0; j < n; j++) if (here[j]) {
      if (t[j].line != at) return -2;
      if (here[t[j].from]) memcpy(t[j].received, t[t[j].from].value, sizeof t->value);
      else memset(t[j].received, 0xff, sizeof t->value);
      t[j].ballot = ballot; t[j].state = CUDA_READY; opened = 1;
    }
  }
  return opened;
}
// opens the barrier of the block: 1, or 0 if all threads have ended; -1 if it isn't reached by all, -2 if in two places
__attribute__((weak)) int cuda_open_block(void) {
  cuda_thread* t = cuda_on_cpu.thread; unsigned i, alive = 0, waiting = 0; int line = 0;
  for (i = 0; i < cuda_on_cpu.n; i++) {
    alive += t[i].state != CUDA_DONE; waiting += t[i].state == CUDA_AT_BLOCK;
    if (t[i].state == CUDA_AT_BLOCK) { if (line && t[i].line != line) return -2; line = t[i].line; }
  }
  if (!alive) return 0;
  if (waiting < alive) return -1;
  for (i = 0; i < cuda_on_cpu.n; i++) if (t[i].state == CUDA_AT_BLOCK) t[i].state = CUDA_READY;
  return 1;
}
__attribute__((weak)) void cuda_scramble(unsigned* a, unsigned n) {
  unsigned i, k, swap;
  for (i = n; cuda_on_cpu.random && i > 1; i--) { k = cuda_random() % i; swap = a[k]; a[k] = a[i - 1]; a[i - 1] = swap; }
}
// Between two barriers of the block warps either take turns from one of their own barriers to the next, or (every other time)
// each runs as far as it can before the next one starts: what isn't protected then is overwritten early, or read late.
__attribute__((weak)) int cuda_run_block(void) {
  unsigned order[32], lanes[32], n, w, i, warps = (cuda_on_cpu.n + 31) / 32; int more = 1, opened, any;
  for (i = 0; i < cuda_on_cpu.n; i++) cuda_on_cpu.thread[i].state = CUDA_READY;
  if (__start_cuda_shared) memset(__start_cuda_shared, 0xff, __stop_cuda_shared - __start_cuda_shared);
  for (w = 0; w < warps; w++) order[w] = w;
  while (more > 0) {
    int ahead = cuda_on_cpu.random && cuda_random() & 1;
    do {
      any = 0;
      cuda_scramble(order, warps);
      for (w = 0; w < warps; w++) do {
        for (n = 0, i = order[w] * 32; i < cuda_on_cpu.n && i < order[w] * 32 + 32; i++)
          if (cuda_on_cpu.thread[i].state == CUDA_READY) lanes[n++] = i;
        cuda_scramble(lanes, n);
        for (i = 0; i < n; i++) cuda_resume(&cuda_on_cpu.thread[lanes[i]]);
        opened = cuda_open_warp(order[w] * 32);
        if (opened < 0) return 2;
        any |= opened;
      } while (ahead && opened);
    } while (any);
    more = cuda_open_block();
  }
  return -more;
}
__attribute__((weak, visibility("default"))) long cuda_on_cpu_shared(void) {
  return __start_cuda_shared ? (long)(__stop_cuda_shared - __start_cuda_shared) : 0;
}
__attribute__((weak, visibility("default")))
int cuda_on_cpu_launch(void* kernel, const unsigned* grid, const unsigned* block, void** args, unsigned seed) {
  static const int caught[] = { SIGILL, SIGTRAP, SIGSEGV, SIGBUS, SIGFPE };
  struct sigaction was[5], ours; unsigned i, blocks = grid[0] * grid[1] * grid[2], step = 1; volatile int error = 0;
  cuda_on_cpu.n = block[0] * block[1] * block[2];
  if (cuda_on_cpu.n > CUDA_MOST || !cuda_on_cpu.n) return 4;
  if (!cuda_on_cpu.stacks) {
    cuda_on_cpu.stacks = (char*)mmap(0, (size_t)CUDA_MOST * CUDA_STACK, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (cuda_on_cpu.stacks == MAP_FAILED) { cuda_on_cpu.stacks = 0; return 4; }
  }
  cuda_on_cpu.kernel = kernel; cuda_on_cpu.random = seed;
  for (i = 0; i < 32; i++) cuda_on_cpu.args[i] = 0;
  cuda_on_cpu.block_dim.x = block[0]; cuda_on_cpu.block_dim.y = block[1]; cuda_on_cpu.block_dim.z = block[2];
  cuda_on_cpu.grid_dim.x = grid[0]; cuda_on_cpu.grid_dim.y = grid[1]; cuda_on_cpu.grid_dim.z = grid[2];
  for (i = 0; i < 31 && args[i]; i++) cuda_on_cpu.args[i] = args[i];  // the list ends with a null pointer
  for (i = 0; i < cuda_on_cpu.n; i++) {
    cuda_thread* t = &cuda_on_cpu.thread[i];
    t->index = i; t->started = 0;
    t->tid.x = i % block[0]; t->tid.y = i / block[0] % block[1]; t->tid.z = i / block[0] / block[1];
    getcontext(&t->start);
    t->start.uc_stack.ss_sp = cuda_on_cpu.stacks + (size_t)i * CUDA_STACK; t->start.uc_stack.ss_size = CUDA_STACK; t->start.uc_link = 0;
    makecontext(&t->start, cuda_fiber, 0);
  }
  memset(&ours, 0, sizeof ours); ours.sa_handler = cuda_trapped; ours.sa_flags = SA_NODEFER;
  for (i = 0; i < 5; i++) sigaction(caught[i], &ours, &was[i]);
  if (seed && blocks > 2) for (step = blocks / 2 + seed % blocks % (blocks - blocks / 2); ; step++) {  // a step that visits every block
    unsigned a = step, b = blocks; while (b) { unsigned r = a % b; a = b; b = r; }
    if (a == 1) break;
  }
  if (sigsetjmp(cuda_on_cpu.trap, 1)) error = 3;
  else for (i = 0; i < blocks && !error; i++) {
    unsigned b = (unsigned)((unsigned long long)i * step % blocks);
    cuda_on_cpu.block.x = b % grid[0]; cuda_on_cpu.block.y = b / grid[0] % grid[1]; cuda_on_cpu.block.z = b / grid[0] / grid[1];
    error = cuda_run_block();
  }
  for (i = 0; i < 5; i++) sigaction(caught[i], &was[i], 0);
  return error;
}
#endif
