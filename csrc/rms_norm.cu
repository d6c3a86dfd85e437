// RMSNorm, with residual add and quantisation in the same kernel, and its gradient. A block owns a row, a thread a few
// 16-byte vectors of it, whatever the width: Triton's tiles are powers of two, which wastes 3 of 8 lanes at 5120.
// How a row is summed depends on the number of features alone.
#include "tile.cuh"

namespace jetrl {
namespace {

constexpr int kVector = 8;                     // BF16 elements in 16 bytes
constexpr int kGroupLanes = kBlock / kVector;  // neighbouring lanes that hold a group
constexpr int kMostThreads = kMostFeatures / kVector / 2;
constexpr int kForwardVectors = 4;  // of a thread: what every warp does once a row is shared by more elements
constexpr int kBackwardVectors = 2;
constexpr int kMostWarps = kMostThreads / 32;
constexpr int kForwardThreads = kMostFeatures / kVector / kForwardVectors;  // at most
constexpr int kForwardWarps = kForwardThreads / 32;
constexpr int kFewVectors = kForwardThreads;  // of a row: a thread has one of them

// Forward blocks of the most threads that a multiprocessor has registers for; of fewer threads, at most 32.
constexpr int resident_blocks(int vectors) {
    return vectors == 1 ? 5 : 2;
}
constexpr int kMostResidentBlocks = 32;

struct Vector {
    float x[kVector];

    __device__ static Vector of(const uint4& raw) {
        Vector v;
        const uint32_t word[kWords] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int w = 0; w < kWords; ++w)
            v.x[2 * w] = low_bf16(word[w]), v.x[2 * w + 1] = high_bf16(word[w]);
        return v;
    }
    // Rounded to BF16, as the bits that are stored.
    __device__ uint4 rounded() const {
        return make_uint4(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]), bf16_pair(x[6], x[7]));
    }
};

// A thread's part of a row, as it lies in memory.
template <int kVectors>
struct Row {
    uint4 raw[kVectors];

    // Which of the row's vectors. Unsigned, so that an address takes one instruction.
    __device__ static unsigned index(unsigned v) { return v * blockDim.x + threadIdx.x; }
    __device__ static int column(int v) { return index(v) * kVector; }

    // What lies beyond the row stays what it is: zero.
    __device__ void load(const uint16_t* row, int k) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
            if (column(v) < k)
                raw[v] = __ldg(reinterpret_cast<const uint4*>(row) + index(v));
    }
    __device__ void store(uint16_t* row, int k) const {
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
            if (column(v) < k)
                reinterpret_cast<uint4*>(row)[index(v)] = raw[v];
    }
};

// The sum over the block, the same in every thread: lanes first, then warps, each as a tree. `of_warps` must not be
// read any more by an earlier call: callers alternate between two. `clear_warps` comes before the first call.
template <int kWarps>
__device__ inline float block_sum(float value, float (&of_warps)[kWarps]) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        value = __fadd_rn(value, __shfl_xor_sync(0xffffffffu, value, distance));
    if (threadIdx.x % 32 == 0)
        of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    float sum[kWarps];
#pragma unroll
    for (int warp = 0; warp < kWarps; warp += 4) {
        const float4 four = *reinterpret_cast<const float4*>(of_warps + warp);
        sum[warp] = four.x, sum[warp + 1] = four.y, sum[warp + 2] = four.z, sum[warp + 3] = four.w;
    }
#pragma unroll
    for (int distance = kWarps / 2; distance > 0; distance /= 2)
#pragma unroll
        for (int warp = 0; warp < distance; ++warp)
            sum[warp] = __fadd_rn(sum[warp], sum[warp + distance]);
    return sum[0];
}

// What warps that the block lacks add.
template <int kWarps>
__device__ inline void clear_warps(float (&of_warps)[2][kWarps]) {
    for (int warp = blockDim.x / 32 + threadIdx.x; warp < kWarps; warp += blockDim.x)
        of_warps[0][warp] = of_warps[1][warp] = 0.f;
}

__device__ inline __nv_bfloat162 as_bf16(uint32_t word) {
    return *reinterpret_cast<const __nv_bfloat162*>(&word);
}
__device__ inline uint32_t bits_of(__nv_bfloat162 pair) {
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// The larger magnitude of each half, under some sign; NaN where either is NaN.
__device__ inline uint32_t larger_magnitude(uint32_t a, uint32_t b) {
    uint32_t larger;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

// Amaxes of the even and of the odd elements, two in a word, under some sign.
__device__ inline uint32_t amax_of(const uint4& raw) {
    return larger_magnitude(larger_magnitude(raw.x, raw.y), larger_magnitude(raw.z, raw.w));
}

// The group whose scale a lane computes. 16 lanes hold as many groups as each of them holds vectors; of four, lanes 0,
// 1, 8 and 9 compute one each, and the others what one of these does.
template <int kVectors>
struct GroupOfLane {
    static_assert(kVectors == 1 || kVectors == 4);
    static constexpr int kCopies = kVectors == 1 ? kGroupLanes - 1 : 6;  // bits that are set in copies only

    __device__ static int lane_of(int vector) { return (vector & 2) * 4 + (vector & 1); }
    __device__ static int vector() { return kVectors == 1 ? 0 : (threadIdx.x & 8) / 4 + (threadIdx.x & 1); }
    // Bits of its amax, as a float's. Half of the vectors leave with the first exchange, so four cost what one does.
    __device__ static float amax(const Row<kVectors>& normed) {
        const auto exchange = [](uint32_t mine, uint32_t sent, int distance) {
            return __vmaxu2(mine, __shfl_xor_sync(0xffffffffu, sent, distance));
        };
        uint32_t pair;
        if constexpr (kVectors == 1) {
            pair = amax_of(normed.raw[0]) & kAbs;
            pair = exchange(pair, pair, 8);
        } else {
            uint32_t half[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint32_t first = amax_of(normed.raw[2 * h]), second = amax_of(normed.raw[2 * h + 1]);
                half[h] =
                    larger_magnitude(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632)) & kAbs;
            }
            const bool upper = threadIdx.x & 8;
            pair = exchange(upper ? half[1] : half[0], upper ? half[0] : half[1], 8);
        }
#pragma unroll
        for (int distance = 4; distance > 0; distance /= 2)
            pair = exchange(pair, pair, distance);
        if constexpr (kVectors == 1)
            return bf16_bits(max(pair & 0xffffu, pair >> 16));
        return threadIdx.x & 1 ? high_bf16(pair) : low_bf16(pair);
    }
};

// Codes of a vector. A power of two times BF16 is exact in BF16 down to what is zero as a code.
template <bool kPowerOfTwo>
__device__ inline uint2 codes_of(const uint4& raw, float factor) {
    const uint32_t word[kWords] = {raw.x, raw.y, raw.z, raw.w};
    uint32_t pair[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        if constexpr (kPowerOfTwo) {
            const uint32_t scaled = bits_of(__hmul2(as_bf16(word[w]), as_bf16(__float_as_uint(factor))));
            pair[w] = encode2(low_bf16(scaled), high_bf16(scaled));
        } else {
            pair[w] = encode2(__fdiv_rn(low_bf16(word[w]), factor), __fdiv_rn(high_bf16(word[w]), factor));
        }
    }
    return make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
}

// Codes of one normed row. All threads call it.
template <bool kPowerOfTwo, int kVectors>
__device__ inline void store_codes(const Row<kVectors>& normed, int64_t row, int k, const Codes& codes,
                                   const ScaleRule& rule) {
    using Group = GroupOfLane<kVectors>;
    const float scale = scale_of_lane<kPowerOfTwo>(Group::amax(normed), rule);
    float factor = factor_of(scale, kPowerOfTwo);
    if (kPowerOfTwo)  // as BF16, twice
        factor = __uint_as_float(__byte_perm(__float_as_uint(factor), 0, 0x3232));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const float of_vector = __shfl_sync(0xffffffffu, factor, Group::lane_of(v), kGroupLanes);
        const uint2 code = codes_of<kPowerOfTwo>(normed.raw[v], of_vector);
        if (normed.column(v) < k)
            reinterpret_cast<uint2*>(codes.data + row * k)[normed.index(v)] = code;
    }
    const int group = normed.index(Group::vector()) / kGroupLanes;
    if ((threadIdx.x & Group::kCopies) == 0 && group * kBlock < k)
        codes.scale[group * codes.scale_stride + row] = scale;
}

// A block takes every gridDim.x-th row, and loads the next ones while it reduces: one row alone is too little to keep
// the memory busy.
template <bool kQuantize, bool kResidual, bool kPowerOfTwo, int kVectors>
__global__ __launch_bounds__(kForwardThreads, resident_blocks(kVectors)) void forward_kernel(
    const uint16_t* x, const uint16_t* residual, const uint16_t* weight, int m, int k, float eps, uint16_t* y,
    Codes codes, float* rstd, uint16_t* sums, ScaleRule rule) {
    alignas(16) __shared__ float of_warps[2][kForwardWarps];
    clear_warps(of_warps);
    constexpr int kAhead = kResidual ? 1 : 2;
    Row<kVectors> ahead[kAhead] = {}, ahead_added[kAhead] = {}, gain = {};
    const auto load = [&](int slot, int64_t row) {
        if (row >= m)
            return;
        ahead[slot].load(x + row * k, k);
        if constexpr (kResidual)
            ahead_added[slot].load(residual + row * k, k);
    };
#pragma unroll
    for (int slot = 0; slot < kAhead; ++slot)
        load(slot, blockIdx.x + int64_t(slot) * gridDim.x);
    gain.load(weight, k);
    const auto norm = [&](int64_t row, int slot, int buffer) {
        Row<kVectors> result;
        Vector value[kVectors];
        float squares = 0.f;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            value[v] = Vector::of(ahead[slot].raw[v]);
            if constexpr (kResidual) {
                const Vector other = Vector::of(ahead_added[slot].raw[v]);
#pragma unroll
                for (int i = 0; i < kVector; ++i)
                    value[v].x[i] = __fadd_rn(value[v].x[i], other.x[i]);
                result.raw[v] = value[v].rounded();
                value[v] = Vector::of(result.raw[v]);
            }
#pragma unroll
            for (int i = 0; i < kVector; ++i)
                squares = __fmaf_rn(value[v].x[i], value[v].x[i], squares);
            // Kept over the barrier: the compiler would keep the raw words and unpack them again.
#pragma unroll
            for (int i = 0; i < kVector; ++i)
                asm volatile("" : "+f"(value[v].x[i]));
        }
        load(slot, row + int64_t(kAhead) * gridDim.x);
        if constexpr (kResidual)
            result.store(sums + row * k, k);
        const float mean = __fdiv_rn(block_sum(squares, of_warps[buffer]), float(k));
        const float inverse = rsqrtf(__fadd_rn(mean, eps));
        if (threadIdx.x == 0)
            rstd[row] = inverse;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const Vector of_column = Vector::of(gain.raw[v]);
#pragma unroll
            for (int i = 0; i < kVector; ++i)
                value[v].x[i] = __fmul_rn(__fmul_rn(value[v].x[i], inverse), of_column.x[i]);
            result.raw[v] = value[v].rounded();
        }
        if constexpr (kQuantize)
            store_codes<kPowerOfTwo>(result, row, k, codes, rule);
        else
            result.store(y + row * k, k);
    };
    // Two turns at once: which registers and which shared memory a row takes is known when compiling.
    for (int64_t row = blockIdx.x; row < m; row += 2 * int64_t(gridDim.x)) {
        norm(row, 0, 0);
        if (row + gridDim.x < m)
            norm(row + gridDim.x, kAhead - 1, 1);
    }
}

// A program takes `rows` neighbouring rows, and keeps its part of the weight's gradient in registers.
template <int kVectors>
__global__ __launch_bounds__(kMostThreads) void backward_kernel(const uint16_t* dy, const uint16_t* x,
                                                                const uint16_t* weight, const float* rstd, int m, int k,
                                                                int rows, uint16_t* dx, float* partial) {
    alignas(16) __shared__ float of_warps[2][kMostWarps];
    clear_warps(of_warps);
    const int64_t first = int64_t(blockIdx.x) * rows, last = min(first + rows, int64_t(m));
    Row<kVectors> gain = {}, next = {}, next_gradient = {};
    Vector of_weight[kVectors] = {};
    gain.load(weight, k);
    if (first < last)
        next.load(x + first * k, k), next_gradient.load(dy + first * k, k);
    int buffer = 0;
    for (int64_t row = first; row < last; ++row, buffer ^= 1) {
        const Row<kVectors> current = next, gradient = next_gradient;
        if (row + 1 < last)
            next.load(x + (row + 1) * k, k), next_gradient.load(dy + (row + 1) * k, k);
        const float inverse = rstd[row];
        Vector normed[kVectors], weighted[kVectors];
        float product = 0.f;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            normed[v] = Vector::of(current.raw[v]), weighted[v] = Vector::of(gradient.raw[v]);
            const Vector of_column = Vector::of(gain.raw[v]);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                normed[v].x[i] *= inverse;
                of_weight[v].x[i] += weighted[v].x[i] * normed[v].x[i];
                weighted[v].x[i] *= of_column.x[i];
                product += weighted[v].x[i] * normed[v].x[i];
            }
        }
        const float mean = block_sum(product, of_warps[buffer]) / float(k);
        Row<kVectors> result;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
            for (int i = 0; i < kVector; ++i)
                weighted[v].x[i] = (weighted[v].x[i] - normed[v].x[i] * mean) * inverse;
            result.raw[v] = weighted[v].rounded();
        }
        result.store(dx + row * k, k);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int column = Row<kVectors>::column(v);
        if (column >= k)
            continue;
        auto* target = reinterpret_cast<float4*>(partial + int64_t(blockIdx.x) * k + column);
        const float* sum = of_weight[v].x;
        target[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        target[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
}

struct Shape {
    int threads, vectors;
};

int ceil_div(int value, int divisor) {
    return (value + divisor - 1) / divisor;
}

// Threads that own `most` vectors of a row each, or one where the row is short.
Shape shape_of(int k, int most) {
    const int vectors = k / kVector, each = vectors <= kFewVectors ? 1 : most;
    const int threads = ceil_div(vectors, each);
    return {(threads + 31) / 32 * 32, each};
}

}  // namespace

void rms_norm(const void* x, const void* residual, const void* weight, int m, int k, float eps, void* y, Codes codes,
              float* rstd, void* sums, ScaleRule rule, int multiprocessors, cudaStream_t stream) {
    const Shape shape = shape_of(k, kForwardVectors);
    // As many blocks as run at once, less those that would leave others to a last row. The number changes no result.
    const int resident = min(kMostResidentBlocks, resident_blocks(shape.vectors) * kForwardThreads / shape.threads);
    const int rows = ceil_div(m, multiprocessors * resident), blocks = ceil_div(m, rows);
    const auto launch = [&](auto quantize, auto with_residual, auto power_of_two, auto vectors) {
        forward_kernel<decltype(quantize)::value, decltype(with_residual)::value, decltype(power_of_two)::value,
                       decltype(vectors)::value><<<blocks, shape.threads, 0, stream>>>(
            static_cast<const uint16_t*>(x), static_cast<const uint16_t*>(residual),
            static_cast<const uint16_t*>(weight), m, k, eps, static_cast<uint16_t*>(y), codes, rstd,
            static_cast<uint16_t*>(sums), rule);
    };
    const auto by_vectors = [&](auto quantize, auto with_residual, auto power_of_two) {
        if (shape.vectors == 1)
            launch(quantize, with_residual, power_of_two, std::integral_constant<int, 1>{});
        if (shape.vectors == kForwardVectors)
            launch(quantize, with_residual, power_of_two, std::integral_constant<int, kForwardVectors>{});
    };
    const auto by_residual = [&](auto quantize, auto power_of_two) {
        residual ? by_vectors(quantize, std::true_type{}, power_of_two)
                 : by_vectors(quantize, std::false_type{}, power_of_two);
    };
    if (!codes.data)
        by_residual(std::false_type{}, std::true_type{});
    else if (rule.power_of_two)
        by_residual(std::true_type{}, std::true_type{});
    else
        by_residual(std::true_type{}, std::false_type{});
}

void rms_norm_backward(const void* dy, const void* x, const void* weight, const float* rstd, int m, int k, int programs,
                       void* dx, float* partial, cudaStream_t stream) {
    const Shape shape = shape_of(k, kBackwardVectors);
    const int rows = ceil_div(m, programs);
    const auto launch = [&](auto vectors) {
        backward_kernel<decltype(vectors)::value><<<programs, shape.threads, 0, stream>>>(
            static_cast<const uint16_t*>(dy), static_cast<const uint16_t*>(x), static_cast<const uint16_t*>(weight),
            rstd, m, k, rows, static_cast<uint16_t*>(dx), partial);
    };
    if (shape.vectors == 1)
        launch(std::integral_constant<int, 1>{});
    if (shape.vectors == kBackwardVectors)
        launch(std::integral_constant<int, kBackwardVectors>{});
}

}  // namespace jetrl
