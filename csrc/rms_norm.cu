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
constexpr int kResidentThreads = 2048;  // of a multiprocessor, with the registers that these kernels take
constexpr int kMostWarps = kMostThreads / 32;

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

    __device__ static int column(int v) { return (v * blockDim.x + threadIdx.x) * kVector; }

    __device__ void load(const uint16_t* row, int k) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
            raw[v] = column(v) < k ? __ldg(reinterpret_cast<const uint4*>(row + column(v))) : make_uint4(0, 0, 0, 0);
    }
    __device__ void store(uint16_t* row, int k) const {
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
            if (column(v) < k)
                *reinterpret_cast<uint4*>(row + column(v)) = raw[v];
    }
};

// The sum over the block, the same in every thread: lanes first, then warps, each as a tree. `of_warps` must not be
// read any more by an earlier call: callers alternate between two.
__device__ inline float block_sum(float value, float* of_warps) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        value = __fadd_rn(value, __shfl_xor_sync(0xffffffffu, value, distance));
    if (lane == 0)
        of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = lane % kMostWarps < blockDim.x / 32 ? of_warps[lane % kMostWarps] : 0.f;
#pragma unroll
    for (int distance = kMostWarps / 2; distance > 0; distance /= 2)
        value = __fadd_rn(value, __shfl_xor_sync(0xffffffffu, value, distance));
    return value;
}

// Codes of one normed row. All threads call it.
template <bool kPowerOfTwo, int kVectors>
__device__ inline void store_codes(const Row<kVectors>& normed, int64_t row, int k, const Codes& codes,
                                   const ScaleRule& rule) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int column = Row<kVectors>::column(v);
        const uint4 raw = normed.raw[v];
        uint32_t amax = __vmaxu2(__vmaxu2(raw.x & kAbs, raw.y & kAbs), __vmaxu2(raw.z & kAbs, raw.w & kAbs));
        amax = max(amax & 0xffffu, amax >> 16);
#pragma unroll
        for (int distance = 1; distance < kGroupLanes; distance *= 2)
            amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
        if (column >= k)
            continue;
        const float scale = scale_of_lane<kPowerOfTwo>(bf16_bits(amax), rule), factor = factor_of(scale, kPowerOfTwo);
        if (threadIdx.x % kGroupLanes == 0)
            codes.scale[column / kBlock * codes.scale_stride + row] = scale;
        const Vector final = Vector::of(raw);
        uint32_t pair[kWords];
#pragma unroll
        for (int w = 0; w < kWords; ++w)
            pair[w] =
                encode2(apply<kPowerOfTwo>(final.x[2 * w], factor), apply<kPowerOfTwo>(final.x[2 * w + 1], factor));
        store8<true>(codes.data + row * k + column, pair[0] | pair[1] << 16, pair[2] | pair[3] << 16, kVector);
    }
}

// A block takes every gridDim.x-th row, and loads the next ones while it reduces: one row alone is too little to keep
// the memory busy.
template <bool kQuantize, bool kResidual, bool kPowerOfTwo, int kVectors>
__global__ __launch_bounds__(kMostThreads) void forward_kernel(const uint16_t* x, const uint16_t* residual,
                                                               const uint16_t* weight, int m, int k, float eps,
                                                               uint16_t* y, Codes codes, float* rstd, uint16_t* sums,
                                                               ScaleRule rule) {
    __shared__ float of_warps[2][kMostWarps];
    constexpr int kAhead = kResidual ? 1 : 2;
    Row<kVectors> ahead[kAhead], ahead_added[kAhead], gain;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
        const int64_t row = blockIdx.x + int64_t(i) * gridDim.x;
        if (row < m)
            ahead[i].load(x + row * k, k);
        if (kResidual && row < m)
            ahead_added[i].load(residual + row * k, k);
    }
    gain.load(weight, k);
    int buffer = 0;
    for (int64_t row = blockIdx.x; row < m; row += gridDim.x, buffer ^= 1) {
        Row<kVectors> current = ahead[0];
        const Row<kVectors> added = ahead_added[0];
#pragma unroll
        for (int i = 0; i + 1 < kAhead; ++i)
            ahead[i] = ahead[i + 1], ahead_added[i] = ahead_added[i + 1];
        const int64_t later = row + int64_t(kAhead) * gridDim.x;
        if (later < m)
            ahead[kAhead - 1].load(x + later * k, k);
        if (kResidual && later < m)
            ahead_added[kAhead - 1].load(residual + later * k, k);
        Vector value[kVectors];
        float squares = 0.f;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            value[v] = Vector::of(current.raw[v]);
            if constexpr (kResidual) {
                const Vector other = Vector::of(added.raw[v]);
#pragma unroll
                for (int i = 0; i < kVector; ++i)
                    value[v].x[i] = __fadd_rn(value[v].x[i], other.x[i]);
                current.raw[v] = value[v].rounded();
                value[v] = Vector::of(current.raw[v]);
            }
#pragma unroll
            for (int i = 0; i < kVector; ++i)
                squares = __fmaf_rn(value[v].x[i], value[v].x[i], squares);
        }
        if constexpr (kResidual)
            current.store(sums + row * k, k);
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
            current.raw[v] = value[v].rounded();
        }
        if constexpr (kQuantize)
            store_codes<kPowerOfTwo>(current, row, k, codes, rule);
        else
            current.store(y + row * k, k);
    }
}

// A program takes `rows` neighbouring rows, and keeps its part of the weight's gradient in registers.
template <int kVectors>
__global__ __launch_bounds__(kMostThreads) void backward_kernel(const uint16_t* dy, const uint16_t* x,
                                                                const uint16_t* weight, const float* rstd, int m, int k,
                                                                int rows, uint16_t* dx, float* partial) {
    __shared__ float of_warps[2][kMostWarps];
    const int64_t first = int64_t(blockIdx.x) * rows, last = min(first + rows, int64_t(m));
    Row<kVectors> gain, next, next_gradient;
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

// Threads that own `most` vectors of a row each, or one where the row is short.
Shape shape_of(int k, int most) {
    const int vectors = k / kVector, each = vectors <= 256 ? 1 : most;
    const int threads = (vectors + each - 1) / each;
    return {(threads + 31) / 32 * 32, each};
}

}  // namespace

void rms_norm(const void* x, const void* residual, const void* weight, int m, int k, float eps, void* y, Codes codes,
              float* rstd, void* sums, ScaleRule rule, int multiprocessors, cudaStream_t stream) {
    const Shape shape = shape_of(k, kForwardVectors);
    // As many blocks as run at once. The number changes no result.
    const int blocks = min(m, multiprocessors * (kResidentThreads / (shape.threads * shape.vectors)));
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
    const int rows = (m + programs - 1) / programs;
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
