// RMSNorm, with residual add and quantisation in the same kernel, and its gradient. A block owns a row, a thread one or
// two 16-byte vectors of it, whatever the width: Triton's tiles are powers of two, which wastes 3 of 8 lanes at 5120.
// How a row is summed depends on the number of features alone.
#include "tile.cuh"

namespace jetrl {
namespace {

constexpr int kVector = 8;                     // BF16 elements in 16 bytes
constexpr int kGroupLanes = kBlock / kVector;  // neighbouring lanes that hold a group
constexpr int kMostThreads = kMostFeatures / kVector / 2;
constexpr int kMostWarps = kMostThreads / 32;

struct Vector {
    float x[kVector];

    __device__ static Vector load(const uint16_t* source) {
        const uint4 raw = __ldg(reinterpret_cast<const uint4*>(source));
        return of(raw);
    }
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

// The sum over the block, the same in every thread: lanes first, then warps in order.
__device__ inline float block_sum(float value, float* of_warps) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        value = __fadd_rn(value, __shfl_xor_sync(0xffffffffu, value, distance));
    __syncthreads();  // of_warps may still be read from the last call
    if (threadIdx.x % 32 == 0)
        of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = of_warps[0];
    for (int warp = 1; warp < blockDim.x / 32; ++warp)
        sum = __fadd_rn(sum, of_warps[warp]);
    return sum;
}

template <bool kQuantize, bool kResidual, bool kPowerOfTwo, int kVectors>
__global__ __launch_bounds__(kMostThreads) void forward_kernel(const uint16_t* x, const uint16_t* residual,
                                                               const uint16_t* weight, int k, float eps, uint16_t* y,
                                                               Codes codes, float* rstd, uint16_t* sums,
                                                               ScaleRule rule) {
    __shared__ float of_warps[kMostWarps];
    const int64_t row = blockIdx.x, base = row * k;
    Vector value[kVectors];
    float squares = 0.f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int column = (v * blockDim.x + threadIdx.x) * kVector;
        if (column >= k) {
            value[v] = {};
            continue;
        }
        value[v] = Vector::load(x + base + column);
        if constexpr (kResidual) {
            const Vector added = Vector::load(residual + base + column);
#pragma unroll
            for (int i = 0; i < kVector; ++i)
                value[v].x[i] = __fadd_rn(value[v].x[i], added.x[i]);
            const uint4 rounded = value[v].rounded();
            *reinterpret_cast<uint4*>(sums + base + column) = rounded;
            value[v] = Vector::of(rounded);
        }
#pragma unroll
        for (int i = 0; i < kVector; ++i)
            squares = __fadd_rn(squares, __fmul_rn(value[v].x[i], value[v].x[i]));
    }
    const float mean = __fdiv_rn(block_sum(squares, of_warps), float(k));
    const float inverse = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, eps)));
    if (threadIdx.x == 0)
        rstd[row] = inverse;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int column = (v * blockDim.x + threadIdx.x) * kVector;
        const bool inside = column < k;
        Vector normed{};
        if (inside) {
            const Vector gain = Vector::load(weight + column);
#pragma unroll
            for (int i = 0; i < kVector; ++i)
                normed.x[i] = __fmul_rn(__fmul_rn(value[v].x[i], inverse), gain.x[i]);
        }
        const uint4 rounded = normed.rounded();
        if constexpr (!kQuantize) {
            if (inside)
                *reinterpret_cast<uint4*>(y + base + column) = rounded;
            continue;
        }
        uint32_t amax =
            __vmaxu2(__vmaxu2(rounded.x & kAbs, rounded.y & kAbs), __vmaxu2(rounded.z & kAbs, rounded.w & kAbs));
        amax = max(amax & 0xffffu, amax >> 16);
#pragma unroll
        for (int distance = 1; distance < kGroupLanes; distance *= 2)
            amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
        const float scale = scale_of(bf16_bits(amax), rule, kPowerOfTwo), factor = factor_of(scale, kPowerOfTwo);
        if (!inside)
            continue;
        if (threadIdx.x % kGroupLanes == 0)
            codes.scale[column / kBlock * codes.scale_stride + row] = scale;
        const Vector final = Vector::of(rounded);
        uint32_t code[2];
#pragma unroll
        for (int h = 0; h < 2; ++h)
            code[h] =
                encode2(apply<kPowerOfTwo>(final.x[4 * h], factor), apply<kPowerOfTwo>(final.x[4 * h + 1], factor)) |
                encode2(apply<kPowerOfTwo>(final.x[4 * h + 2], factor), apply<kPowerOfTwo>(final.x[4 * h + 3], factor))
                    << 16;
        store8<true>(codes.data + base + column, code[0], code[1], kVector);
    }
}

template <int kVectors>
__global__ __launch_bounds__(kMostThreads) void backward_kernel(const uint16_t* dy, const uint16_t* x,
                                                                const uint16_t* weight, const float* rstd, int m, int k,
                                                                int rows, uint16_t* dx, float* partial) {
    __shared__ float of_warps[kMostWarps];
    Vector gain[kVectors], of_weight[kVectors] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int column = (v * blockDim.x + threadIdx.x) * kVector;
        gain[v] = column < k ? Vector::load(weight + column) : Vector{};
    }
    const int last = min((int(blockIdx.x) + 1) * rows, m);
    for (int row = blockIdx.x * rows; row < last; ++row) {
        const int64_t base = int64_t(row) * k;
        const float inverse = rstd[row];
        Vector normed[kVectors], weighted[kVectors];
        float product = 0.f;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const int column = (v * blockDim.x + threadIdx.x) * kVector;
            const bool inside = column < k;
            normed[v] = inside ? Vector::load(x + base + column) : Vector{};
            weighted[v] = inside ? Vector::load(dy + base + column) : Vector{};
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                normed[v].x[i] *= inverse;
                of_weight[v].x[i] += weighted[v].x[i] * normed[v].x[i];
                weighted[v].x[i] *= gain[v].x[i];
                product += weighted[v].x[i] * normed[v].x[i];
            }
        }
        const float mean = block_sum(product, of_warps) / float(k);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const int column = (v * blockDim.x + threadIdx.x) * kVector;
            if (column >= k)
                continue;
#pragma unroll
            for (int i = 0; i < kVector; ++i)
                weighted[v].x[i] = (weighted[v].x[i] - normed[v].x[i] * mean) * inverse;
            *reinterpret_cast<uint4*>(dx + base + column) = weighted[v].rounded();
        }
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const int column = (v * blockDim.x + threadIdx.x) * kVector;
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

Shape shape_of(int k) {
    const int vectors = k / kVector;
    const int each = vectors <= 256 ? 1 : 2;
    const int threads = (vectors + each - 1) / each;
    return {(threads + 31) / 32 * 32, each};
}

}  // namespace

void rms_norm(const void* x, const void* residual, const void* weight, int m, int k, float eps, void* y, Codes codes,
              float* rstd, void* sums, ScaleRule rule, cudaStream_t stream) {
    const Shape shape = shape_of(k);
    const auto launch = [&](auto quantize, auto with_residual, auto power_of_two, auto vectors) {
        forward_kernel<decltype(quantize)::value, decltype(with_residual)::value, decltype(power_of_two)::value,
                       decltype(vectors)::value>
            <<<m, shape.threads, 0, stream>>>(static_cast<const uint16_t*>(x), static_cast<const uint16_t*>(residual),
                                              static_cast<const uint16_t*>(weight), k, eps, static_cast<uint16_t*>(y),
                                              codes, rstd, static_cast<uint16_t*>(sums), rule);
    };
    const auto by_vectors = [&](auto quantize, auto with_residual, auto power_of_two) {
        if (shape.vectors == 1)
            launch(quantize, with_residual, power_of_two, std::integral_constant<int, 1>{});
        if (shape.vectors == 2)
            launch(quantize, with_residual, power_of_two, std::integral_constant<int, 2>{});
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
    const Shape shape = shape_of(k);
    const int rows = (m + programs - 1) / programs;
    const auto launch = [&](auto vectors) {
        backward_kernel<decltype(vectors)::value><<<programs, shape.threads, 0, stream>>>(
            static_cast<const uint16_t*>(dy), static_cast<const uint16_t*>(x), static_cast<const uint16_t*>(weight),
            rstd, m, k, rows, static_cast<uint16_t*>(dx), partial);
    };
    if (shape.vectors == 1)
        launch(std::integral_constant<int, 1>{});
    if (shape.vectors == 2)
        launch(std::integral_constant<int, 2>{});
}

}  // namespace jetrl
