// Host stand-ins for what the device code of csrc/ uses: a fiber for each thread, blocks one after the other. A thread
// runs until it reaches a barrier or exchanges values with its warp; then the next one runs.
#pragma once
#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __shared__
#define __shared__ static
#undef __global__
#define __global__
#undef __device__
#define __device__

using std::max;
using std::min;

struct Index {
    unsigned x, y, z;
};
inline Index threadIdx, blockIdx;
inline dim3 gridDim, blockDim;

struct Fibers {
    static constexpr int kMost = 1024, kStack = 64 * 1024;
    ucontext_t scheduler, context[kMost];
    std::vector<char> stacks = std::vector<char>(size_t(kMost) * kStack);
    bool done[kMost];
    int count = 0, current = 0;
    std::function<void()> body;
    uint64_t slot[kMost];  // what a thread shows the others
};
inline Fibers fibers;

inline void yield_to_others() { swapcontext(&fibers.context[fibers.current], &fibers.scheduler); }

inline void enter() {
    fibers.body();
    fibers.done[fibers.current] = true;
    swapcontext(&fibers.context[fibers.current], &fibers.scheduler);
}

inline void run_block() {
    for (int t = 0; t < fibers.count; ++t) {
        auto& context = fibers.context[t];
        fibers.done[t] = false;
        getcontext(&context);
        context.uc_stack.ss_sp = &fibers.stacks[size_t(t) * Fibers::kStack];
        context.uc_stack.ss_size = Fibers::kStack;
        context.uc_link = &fibers.scheduler;
        makecontext(&context, enter, 0);
    }
    for (bool live = true; live;) {
        live = false;
        for (int t = 0; t < fibers.count; ++t) {
            if (fibers.done[t]) continue;
            fibers.current = t;
            threadIdx = {unsigned(t), 0, 0};
            swapcontext(&fibers.scheduler, &fibers.context[t]);
            live |= !fibers.done[t];
        }
    }
}

// What <<<grid, threads, shared, stream>>> becomes.
inline void run_grid(dim3 grid, int threads, int, cudaStream_t, std::function<void()> body) {
    gridDim = grid, blockDim = dim3(threads);
    fibers.count = threads, fibers.body = std::move(body);
    for (unsigned y = 0; y < grid.y; ++y)
        for (unsigned x = 0; x < grid.x; ++x) {
            blockIdx = {x, y, 0};
            run_block();
        }
}

template <typename T>
T shown_by(int thread) {
    T value;
    memcpy(&value, &fibers.slot[thread], sizeof value);
    return value;
}

template <typename T>
void show(T value) {
    memcpy(&fibers.slot[fibers.current], &value, sizeof value);
    yield_to_others();
}

inline void __syncthreads() { yield_to_others(); }

inline int __syncthreads_and(int predicate) {
    show(int(predicate != 0));
    int all = 1;
    for (int t = 0; t < fibers.count; ++t) all &= shown_by<int>(t);
    yield_to_others();
    return all;
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int distance) {
    const int self = fibers.current;
    show(value);
    const T other = shown_by<T>((self & ~31) | ((self & 31) ^ distance));
    yield_to_others();
    return other;
}

template <typename T>
T __shfl_sync(unsigned, T value, int lane, int width = 32) {
    const int self = fibers.current;
    show(value);
    const T other = shown_by<T>(self / width * width + lane);
    yield_to_others();
    return other;
}

template <typename T>
T __reduce_max_sync(unsigned, T value) {
    const int warp = fibers.current & ~31;
    show(value);
    T largest = shown_by<T>(warp);
    for (int lane = 1; lane < 32; ++lane) largest = std::max(largest, shown_by<T>(warp + lane));
    yield_to_others();
    return largest;
}

template <typename T>
T __ldg(const T* pointer) {
    if (reinterpret_cast<size_t>(pointer) % sizeof(T) != 0) {
        fprintf(stderr, "misaligned load of %zu bytes\n", sizeof(T));
        abort();
    }
    return *pointer;
}

template <typename To, typename From>
To bits_of(From value) {
    To bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float __int_as_float(int bits) { return bits_of<float>(bits); }
inline float __uint_as_float(unsigned bits) { return bits_of<float>(bits); }
inline int __float_as_int(float value) { return bits_of<int>(value); }
// A GPU's arithmetic makes no other NaN than this one.
inline unsigned __float_as_uint(float value) { return value != value ? 0x7fffffffu : bits_of<unsigned>(value); }

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float a) { return 1.f / a; }
inline float rsqrtf(float a) { return 1.f / sqrtf(a); }
inline float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.f, x) : x; }

inline unsigned __vmaxu2(unsigned a, unsigned b) {
    return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16;
}

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = a | uint64_t(b) << 32;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}

// Of the lower halves, as BF16.
inline unsigned max_nan_xorsign_abs(unsigned a, unsigned b) {
    const unsigned larger = std::max(a & 0x7fff, b & 0x7fff);
    return larger > 0x7f80 ? 0x7fff : larger | ((a ^ b) & 0x8000);
}
