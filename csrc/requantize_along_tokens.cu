// FP8 codes in groups along features become FP8 codes in groups along tokens, transposed: the saved input for wgrad.
#include <cuda_fp16.h>

#include "tile.cuh"

namespace jetrl {
namespace {

constexpr int kWide = 16;          // columns of a thread's part: one 16-byte load
constexpr int kTileColumns = 256;  // 2 x 4 warps of 64 rows x 64 columns

// Four codes as float32.
__device__ inline void decode4(float (&x)[4], uint32_t codes) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2((codes >> 16 * h) & 0xffff, __NV_E4M3);
        const float2 pair = __half22float2(__half2(raw));
        x[2 * h] = pair.x, x[2 * h + 1] = pair.y;
    }
}

template <bool kVector>
__device__ inline uint4 load16(const uint8_t* source, int left) {
    if (kVector)
        return left > 0 ? __ldg(reinterpret_cast<const uint4*>(source)) : make_uint4(0, 0, 0, 0);
    uint32_t word[4] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i)
        if (i < left)
            word[i / 4] |= uint32_t(source[i]) << 8 * (i % 4);
    return make_uint4(word[0], word[1], word[2], word[3]);
}

template <bool kPowerOfTwo, bool kVector>
__global__ __launch_bounds__(kThreads, 3) void requantize_kernel(const uint8_t* codes, const float* scale,
                                                                 int64_t scale_stride_m, int64_t scale_stride_c, int m,
                                                                 int c, Codes columns, ScaleRule rule) {
    // float32 bits of |x|: compared as integers, so NaN is larger than anything.
    __shared__ uint32_t column_amax[2][kTileColumns];
    __shared__ __align__(16) float column_factor[kTileColumns];
    const Place place;
    const int first_row = blockIdx.y * kBlock + place.row;
    const int tile_column = place.warp_column * 64 + place.lane_column * kWide;
    const int first_column = blockIdx.x * kTileColumns + tile_column;
    uint32_t word[kOwned][4];
    float row_scale[kOwned];
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
        const int row = first_row + i;
        const bool in = row < m && first_column < c;
        const uint4 loaded = load16<kVector>(codes + int64_t(row) * c + first_column, in ? c - first_column : 0);
        word[i][0] = loaded.x, word[i][1] = loaded.y, word[i][2] = loaded.z, word[i][3] = loaded.w;
        row_scale[i] = in ? scale[row * scale_stride_m + first_column / kBlock * scale_stride_c] : 0.f;
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        uint32_t amax[4] = {};
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
            float x[4];
            decode4(x, word[i][w]);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                amax[j] = max(amax[j], __float_as_uint(__fmul_rn(x[j], row_scale[i])) & 0x7fffffffu);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2)
                amax[j] = max(amax[j], __shfl_xor_sync(0xffffffffu, amax[j], distance));
        if (place.lane_row == 0)
            *reinterpret_cast<uint4*>(&column_amax[place.warp_row][tile_column + 4 * w]) =
                make_uint4(amax[0], amax[1], amax[2], amax[3]);
    }
    __syncthreads();
    {
        const int t = threadIdx.x, column = blockIdx.x * kTileColumns + t;
        const float s = scale_of(__uint_as_float(max(column_amax[0][t], column_amax[1][t])), rule, kPowerOfTwo);
        column_factor[t] = factor_of(s, kPowerOfTwo);
        if (column < c)
            columns.scale[blockIdx.y * columns.scale_stride + column] = s;
    }
    __syncthreads();
    const int64_t padded_rows = int64_t(gridDim.y) * kBlock;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const float4 loaded = *reinterpret_cast<const float4*>(&column_factor[tile_column + 4 * w]);
        const float factor[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
        uint32_t transposed[4][2] = {};
#pragma unroll
        for (int i = 0; i < kOwned; i += 2) {
            float upper[4], lower[4];
            decode4(upper, word[i][w]), decode4(lower, word[i + 1][w]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float first = __fmul_rn(upper[j], row_scale[i]), second = __fmul_rn(lower[j], row_scale[i + 1]);
                transposed[j][i / 4] |=
                    encode2(apply<kPowerOfTwo>(first, factor[j]), apply<kPowerOfTwo>(second, factor[j])) << (i % 4) * 8;
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (first_column + 4 * w + j < c)
                store8<true>(columns.data + (first_column + 4 * w + j) * padded_rows + first_row, transposed[j][0],
                             transposed[j][1], 8);
    }
}

}  // namespace

void requantize_along_tokens(const uint8_t* codes, const float* scale, int64_t scale_stride_m, int64_t scale_stride_c,
                             int m, int c, Codes columns, ScaleRule rule, bool vectorized, cudaStream_t stream) {
    const dim3 grid((c + kTileColumns - 1) / kTileColumns, tiles(m));
    dispatch(rule.power_of_two, vectorized, [&](auto power_of_two, auto vector) {
        requantize_kernel<decltype(power_of_two)::value, decltype(vector)::value>
            <<<grid, kThreads, 0, stream>>>(codes, scale, scale_stride_m, scale_stride_c, m, c, columns, rule);
    });
}

}  // namespace jetrl
