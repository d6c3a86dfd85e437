// FP8 codes in groups along features become FP8 codes in groups along tokens, transposed: the saved input for wgrad.
//
// Two bytes move per element, so instructions count. With power-of-two scales a code times a ratio of scales has four
// significant bits, and half precision holds it exactly as long as the scales that meet in a tile differ by less than
// 2^15. The kernel checks that, and computes in float32 otherwise.
#include <cuda_fp16.h>

#include "tile.cuh"

namespace jetrl {
namespace {

constexpr int kCodeWords = kOwned / 4;  // words that hold the codes of a row of a thread's part
constexpr int kHalfRange = 15;          // a code is a multiple of 2^-9, half precision goes down to 2^-24
constexpr int kCodeShift = 8;           // exponent bias of half precision minus that of a code
constexpr int kNotFinite = 255;         // exponent bits of infinity and NaN

struct Scratch {
    uint32_t column_amax[2][kBlock];  // float32 bits, or half bits in the fast path
    alignas(16) float column_factor[kBlock];
    alignas(16) __half column_ratio[kBlock];
    int exponent[2];  // by warp row
};

struct CodePart {
    uint32_t word[kOwned][kCodeWords];
    float row_scale[kOwned];
};

struct CodePlace : Place {
    int first_row, first_column;

    __device__ CodePlace() : first_row(blockIdx.y * kBlock + row), first_column(blockIdx.x * kBlock + column) {}
};

template <bool kVector>
__device__ inline uint2 load8_codes(const uint8_t* source, int left) {
    if constexpr (kVector) {
        return left > 0 ? __ldg(reinterpret_cast<const uint2*>(source)) : make_uint2(0, 0);
    } else {
        uint32_t word[kCodeWords] = {};
#pragma unroll
        for (int i = 0; i < kOwned; ++i)
            if (i < left)
                word[i / 4] |= uint32_t(source[i]) << 8 * (i % 4);
        return make_uint2(word[0], word[1]);
    }
}

__device__ inline __half2 decode2(uint32_t codes) {
    return __half2(__nv_cvt_fp8x2_to_halfraw2(codes & 0xffff, __NV_E4M3));
}

// Four codes as float32.
__device__ inline void decode4(float (&x)[4], uint32_t codes) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float2 pair = __half22float2(decode2(codes >> 16 * h));
        x[2 * h] = pair.x, x[2 * h + 1] = pair.y;
    }
}

// The larger of two numbers that are not negative; NaN if either is.
__device__ inline float max_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

// The codes' bits as half precision, which is 2^-8 of what they stand for: bytes 1 and 3 of a word, signs left out.
// Conversions are slower than memory here. NaN becomes 480.
__device__ inline __half2 odd_magnitudes(uint32_t codes) {
    const uint32_t bits = codes >> 1 & 0x3f803f80u;
    return *reinterpret_cast<const __half2*>(&bits);
}

// The same of bytes 1 and 3 with their signs.
__device__ inline __half2 odd_values(uint32_t codes) {
    const uint32_t bits = (codes >> 1 & 0x3f803f80u) | (codes & 0x80008000u);
    return *reinterpret_cast<const __half2*>(&bits);
}

// A power of two that half precision holds as a normal number, twice in a word.
__device__ inline __half2 power_of_two(int exponent) {
    const uint32_t bits = uint32_t(exponent + 15) * 0x04000400u;
    return *reinterpret_cast<const __half2*>(&bits);
}

__device__ inline void store_columns(const CodePlace& place, int word, const uint32_t (&transposed)[4][2], int c,
                                     const Codes& columns) {
    const int64_t padded_rows = int64_t(gridDim.y) * kBlock;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int column = place.first_column + 4 * word + j;
        if (column < c)
            store8<true>(columns.data + column * padded_rows + place.first_row, transposed[j][0], transposed[j][1], 8);
    }
}

// Whether half precision holds every product exactly; if not, no code has been written.
__device__ inline bool requantize_in_half(const CodePart& part, const CodePlace& place, int c, const Codes& columns,
                                          const ScaleRule& rule, Scratch& scratch) {
    int exponent[kOwned], top = 0, bottom = kNotFinite;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
        exponent[i] = __float_as_int(part.row_scale[i]) >> 23 & kNotFinite;
        top = max(top, exponent[i]), bottom = min(bottom, exponent[i]);
    }
    top = __reduce_max_sync(0xffffffffu, top);
    // All warps of a row see the same rows.
    if (threadIdx.x % 32 == 0 && place.warp_column == 0)
        scratch.exponent[place.warp_row] = top;
    __syncthreads();
    top = max(scratch.exponent[0], scratch.exponent[1]);
    // Codes are NaN only where the scale is not finite.
    bool exact = top != kNotFinite;
    if (top - bottom > kHalfRange) {
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
            const bool zero = ((part.word[i][0] | part.word[i][1]) & 0x7f7f7f7fu) == 0;
            exact = exact && (zero || top - exponent[i] <= kHalfRange);
        }
    }
    __half2 row_ratio[kOwned];
#pragma unroll
    for (int i = 0; i < kOwned; ++i)
        row_ratio[i] = power_of_two(max(exponent[i] - top, -kHalfRange) + kCodeShift);
#pragma unroll
    for (int w = 0; w < kCodeWords; ++w) {
        // Columns 0 and 2 of the word, then 1 and 3.
        __half2 largest[2] = {__half2half2(__ushort_as_half(0)), __half2half2(__ushort_as_half(0))};
#pragma unroll
        for (int i = 0; i < kOwned; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint32_t codes = h == 0 ? part.word[i][w] << 8 : part.word[i][w];
                largest[h] = __hmax2(largest[h], __hmul2(odd_magnitudes(codes), row_ratio[i]));
            }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint32_t amax = *reinterpret_cast<const uint32_t*>(&largest[h]);
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2)
                amax = __vmaxu2(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
            if (place.lane_row == 0) {
                scratch.column_amax[place.warp_row][place.column + 4 * w + h] = amax & 0xffff;
                scratch.column_amax[place.warp_row][place.column + 4 * w + h + 2] = amax >> 16;
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < kBlock) {
        const int t = threadIdx.x, column = blockIdx.x * kBlock + t;
        const uint32_t bits = max(scratch.column_amax[0][t], scratch.column_amax[1][t]);
        // top may be the exponent of a subnormal scale, 0, where every code is 0.
        const float unit = __int_as_float(top << 23);
        const float scale = scale_of(__fmul_rn(__half2float(__ushort_as_half(bits)), unit), rule, true);
        const int distance = top - (__float_as_int(scale) >> 23 & kNotFinite);
        exact = exact && (bits == 0 || (distance >= 0 && distance <= kHalfRange));
        // In the order of the words' halves: columns 0, 2, 1, 3.
        const int slot = (t & ~3) | (t & 1) << 1 | (t & 2) >> 1;
        scratch.column_ratio[slot] = __low2half(power_of_two(bits == 0 ? 0 : min(max(distance, 0), kHalfRange)));
        // Written again if this way turns out not to be exact.
        if (column < c)
            columns.scale[blockIdx.y * columns.scale_stride + column] = scale;
    }
    if (!__syncthreads_and(exact))
        return false;
#pragma unroll
    for (int w = 0; w < kCodeWords; ++w) {
        const auto* ratio = reinterpret_cast<const __half2*>(&scratch.column_ratio[place.column + 4 * w]);
        uint32_t code[kOwned], transposed[4][2];
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
            uint32_t pair[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint32_t codes = h == 0 ? part.word[i][w] << 8 : part.word[i][w];
                const __half2 value = __hmul2(__hmul2(odd_values(codes), row_ratio[i]), ratio[h]);
                pair[h] = __nv_cvt_halfraw2_to_fp8x2(__half2_raw(value), __NV_SATFINITE, __NV_E4M3);
            }
            code[i] = pair[0] | pair[1] << 16;
        }
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const uint32_t* row = code + 4 * q;
            // Bytes of a row: columns 0, 2, 1, 3.
            const uint32_t even[2] = {__byte_perm(row[0], row[1], 0x5140), __byte_perm(row[2], row[3], 0x5140)};
            const uint32_t odd[2] = {__byte_perm(row[0], row[1], 0x7362), __byte_perm(row[2], row[3], 0x7362)};
            transposed[0][q] = __byte_perm(even[0], even[1], 0x5410),
            transposed[2][q] = __byte_perm(even[0], even[1], 0x7632);
            transposed[1][q] = __byte_perm(odd[0], odd[1], 0x5410),
            transposed[3][q] = __byte_perm(odd[0], odd[1], 0x7632);
        }
        store_columns(place, w, transposed, c, columns);
    }
    return true;
}

template <bool kPowerOfTwo>
__device__ inline void requantize_in_float(const CodePart& part, const CodePlace& place, int c, const Codes& columns,
                                           const ScaleRule& rule, Scratch& scratch) {
#pragma unroll
    for (int w = 0; w < kCodeWords; ++w) {
        float largest[4] = {};
#pragma unroll
        for (int i = 0; i < kOwned; ++i) {
            float x[4];
            decode4(x, part.word[i][w]);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                largest[j] = max_or_nan(largest[j], fabsf(__fmul_rn(x[j], part.row_scale[i])));
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            // Bits of numbers that are not negative: compared as integers, so NaN is larger than anything.
            uint32_t amax = __float_as_uint(largest[j]) & 0x7fffffffu;
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2)
                amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
            if (place.lane_row == 0)
                scratch.column_amax[place.warp_row][place.column + 4 * w + j] = amax;
        }
    }
    __syncthreads();
    if (threadIdx.x < kBlock) {
        const int t = threadIdx.x, column = blockIdx.x * kBlock + t;
        const uint32_t bits = max(scratch.column_amax[0][t], scratch.column_amax[1][t]);
        const float scale = scale_of(__uint_as_float(bits), rule, kPowerOfTwo);
        scratch.column_factor[t] = factor_of(scale, kPowerOfTwo);
        if (column < c)
            columns.scale[blockIdx.y * columns.scale_stride + column] = scale;
    }
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kCodeWords; ++w) {
        const float* factor = &scratch.column_factor[place.column + 4 * w];
        uint32_t transposed[4][2] = {};
#pragma unroll
        for (int i = 0; i < kOwned; i += 2) {
            float upper[4], lower[4];
            decode4(upper, part.word[i][w]), decode4(lower, part.word[i + 1][w]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float first = apply<kPowerOfTwo>(__fmul_rn(upper[j], part.row_scale[i]), factor[j]);
                const float second = apply<kPowerOfTwo>(__fmul_rn(lower[j], part.row_scale[i + 1]), factor[j]);
                transposed[j][i / 4] |= encode2(first, second) << (i % 4) * 8;
            }
        }
        store_columns(place, w, transposed, c, columns);
    }
}

template <bool kPowerOfTwo, bool kVector>
__global__ __launch_bounds__(kThreads, 4) void requantize_kernel(const uint8_t* codes, const float* scale,
                                                                 int64_t scale_stride_m, int64_t scale_stride_c, int m,
                                                                 int c, Codes columns, ScaleRule rule) {
    __shared__ Scratch scratch;
    const CodePlace place;
    CodePart part;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
        const int row = place.first_row + i;
        const bool in = row < m && place.first_column < c;
        const uint2 loaded =
            load8_codes<kVector>(codes + int64_t(row) * c + place.first_column, in ? c - place.first_column : 0);
        part.word[i][0] = loaded.x, part.word[i][1] = loaded.y;
        part.row_scale[i] = in ? scale[row * scale_stride_m + place.first_column / kBlock * scale_stride_c] : 0.f;
    }
    if constexpr (kPowerOfTwo)
        if (requantize_in_half(part, place, c, columns, rule, scratch))
            return;
    requantize_in_float<kPowerOfTwo>(part, place, c, columns, rule, scratch);
}

}  // namespace

void requantize_along_tokens(const uint8_t* codes, const float* scale, int64_t scale_stride_m, int64_t scale_stride_c,
                             int m, int c, Codes columns, ScaleRule rule, bool vectorized, cudaStream_t stream) {
    const dim3 grid(tiles(c), tiles(m));
    dispatch(rule.power_of_two, vectorized, [&](auto power_of_two, auto vector) {
        requantize_kernel<decltype(power_of_two)::value, decltype(vector)::value>
            <<<grid, kThreads, 0, stream>>>(codes, scale, scale_stride_m, scale_stride_c, m, c, columns, rule);
    });
}

}  // namespace jetrl
