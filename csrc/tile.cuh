// A 128 x 128 tile of BF16 in the registers of 256 threads, and what quantisers do with it.
//
// Thread layout: 8 warps as 2 (rows) x 4 (columns), the 32 lanes of a warp as 8 (rows) x 4 (columns); a thread owns 8
// neighbouring rows by 8 neighbouring columns. So a row of 8 elements is one 16-byte load, and the 8 codes of one
// column are 8 bytes that lie next to each other in the transposed result: transposing needs no shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "operators.h"

namespace jetrl {

constexpr int kThreads = 256;
constexpr int kOwned = 8;  // rows, and columns, of a thread's part
constexpr int kWords = kOwned / 2;
constexpr uint32_t kAbs = 0x7fff7fffu;

struct Place {
    int row;     // first owned row within the tile
    int column;  // first owned column within the tile
    int warp_row, warp_column, lane_row, lane_column;

    __device__ Place() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        warp_row = warp / 4, warp_column = warp % 4, lane_row = lane / 4, lane_column = lane % 4;
        row = warp_row * 64 + lane_row * kOwned;
        column = warp_column * 32 + lane_column * kOwned;
    }
};

// The owned 8 x 8 BF16, two columns a word.
struct Part {
    uint32_t word[kOwned][kWords];
};

// Amaxes of 8 columns or rows, two a word, as the bits of |BF16|. Compared as integers, so NaN is larger than anything.
struct Amax8 {
    uint32_t pair[kWords];

    __device__ void merge_lanes(int distance) {
#pragma unroll
        for (int i = 0; i < kWords; ++i)
            pair[i] = __vmaxu2(pair[i], __shfl_xor_sync(0xffffffffu, pair[i], distance));
    }
};

__device__ inline float low_bf16(uint32_t word) {
    return __uint_as_float(word << 16);
}
__device__ inline float high_bf16(uint32_t word) {
    return __uint_as_float(word & 0xffff0000u);
}

// Two BF16 in a word, the first in the low half, from one instruction.
__device__ inline uint32_t bf16_pair(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// e^-x and 1 / x from one instruction each.
__device__ inline float exp_of_negative(float x) {
    constexpr float kLog2E = 1.4426950408889634f;
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(x, -kLog2E)));
    return power;
}

__device__ inline float reciprocal(float x) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
}

__device__ inline float sigmoid_of(float x) {
    return reciprocal(__fadd_rn(1.f, exp_of_negative(x)));
}

// Two codes, the first in the low byte. NaN stays NaN, larger values saturate.
__device__ inline uint32_t encode2(float first, float second) {
    return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
}

__device__ inline float scale_of(float amax, const ScaleRule& rule, bool power_of_two) {
    // fmaxf would lose NaN.
    float scale = __fdiv_rn(amax < rule.amax_floor ? rule.amax_floor : amax, rule.divisor);
    if (!power_of_two)
        return scale;
    scale = scale < rule.scale_floor ? rule.scale_floor : scale;
    const uint32_t bits = __float_as_uint(scale);
    return bits < 0x7f800000u ? __uint_as_float((bits + 0x007fffffu) & 0xff800000u) : scale;
}

// The same number, for kernels in which every lane computes one: a power of two needs no division. Of two floats the
// quotient of the mantissas, rounded to nearest, is more than one if and only if the first mantissa is the larger one.
// (Where one thread of many computes it, this form costs more registers than it saves time.)
template <bool kPowerOfTwo>
__device__ inline float scale_of_lane(float amax, const ScaleRule& rule) {
    constexpr int kMantissa = 0x007fffff, kExponent = 0x7f800000;
    if constexpr (!kPowerOfTwo)
        return scale_of(amax, rule, false);
    // fmaxf would lose NaN.
    amax = amax < rule.amax_floor ? rule.amax_floor : amax;
    const uint32_t bits = __float_as_uint(amax), divisor = __float_as_uint(rule.divisor);
    const int exponent = ((bits + (kMantissa - (divisor & kMantissa))) & kExponent) - (divisor & kExponent);
    const int least = (__float_as_int(rule.scale_floor) + kMantissa) & kExponent;
    const float scale = __int_as_float(max(exponent + __float_as_int(1.f), least));
    return bits < kExponent ? scale : __fadd_rn(amax, amax);  // infinity stays, and NaN is what a division gives
}

// What `apply` multiplies with (a power of two: exact) or divides by.
__device__ inline float factor_of(float scale, bool power_of_two) {
    if (!power_of_two)
        return scale;
    const int bits = __float_as_int(scale);
    return bits > 0x7f800000 ? scale : __int_as_float(max(0x7f000000 - bits, 0));
}

template <bool kPowerOfTwo>
__device__ inline float apply(float x, float factor) {
    return kPowerOfTwo ? __fmul_rn(x, factor) : __fdiv_rn(x, factor);
}

// Loads the owned part of a tile whose first element is x; rows and columns beyond the matrix are zero.
template <bool kVector>
__device__ inline void load_part(Part& part, const uint16_t* x, int64_t stride, int rows_left, int columns_left,
                                 const Place& place) {
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
        const bool row_in = place.row + i < rows_left;
        const uint16_t* source = x + (place.row + i) * stride + place.column;
        if constexpr (kVector) {
            uint4 loaded = make_uint4(0, 0, 0, 0);
            if (row_in && place.column < columns_left)
                loaded = __ldg(reinterpret_cast<const uint4*>(source));
            part.word[i][0] = loaded.x, part.word[i][1] = loaded.y;
            part.word[i][2] = loaded.z, part.word[i][3] = loaded.w;
        } else {
#pragma unroll
            for (int w = 0; w < kWords; ++w) {
                const int left = columns_left - place.column - 2 * w;
                const uint32_t low = row_in && left > 0 ? source[2 * w] : 0;
                const uint32_t high = row_in && left > 1 ? source[2 * w + 1] : 0;
                part.word[i][w] = low | high << 16;
            }
        }
    }
}

// Stores 8 bytes at destination, of which `left` lie within the matrix.
template <bool kVector>
__device__ inline void store8(uint8_t* destination, uint32_t low, uint32_t high, int left) {
    if constexpr (kVector) {
        if (left > 0)
            *reinterpret_cast<uint2*>(destination) = make_uint2(low, high);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < left)
                destination[i] = (i < 4 ? low >> 8 * i : high >> 8 * (i - 4)) & 0xff;
    }
}

__device__ inline Amax8 row_amax(const Part& part) {
    Amax8 amax;
#pragma unroll
    for (int p = 0; p < kWords; ++p) {
        uint32_t both[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint32_t* word = part.word[2 * p + r];
            both[r] = __vmaxu2(__vmaxu2(word[0] & kAbs, word[1] & kAbs), __vmaxu2(word[2] & kAbs, word[3] & kAbs));
        }
        // Even columns of both rows against odd columns of both rows.
        amax.pair[p] = __vmaxu2(__byte_perm(both[0], both[1], 0x5410), __byte_perm(both[0], both[1], 0x7632));
    }
    return amax;
}

__device__ inline Amax8 column_amax(const Part& part) {
    Amax8 amax;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        amax.pair[w] = part.word[0][w] & kAbs;
#pragma unroll
        for (int i = 1; i < kOwned; ++i)
            amax.pair[w] = __vmaxu2(amax.pair[w], part.word[i][w] & kAbs);
    }
    return amax;
}

// Shared memory of one tile. 16-byte aligned, because 8 amaxes or 4 factors are moved at once.
struct alignas(16) TileScratch {
    uint16_t row_amax[4][kBlock];
    uint16_t column_amax[2][kBlock];
    float row_factor[kBlock];
    float column_factor[kBlock];
};

__device__ inline void put_amax(uint16_t* destination, const Amax8& amax) {
    *reinterpret_cast<uint4*>(destination) = make_uint4(amax.pair[0], amax.pair[1], amax.pair[2], amax.pair[3]);
}

__device__ inline float bf16_bits(uint32_t bits) {
    return __uint_as_float(bits << 16);
}

__device__ inline void load8(float (&values)[8], const float* source) {
    const float4 first = reinterpret_cast<const float4*>(source)[0],
                 second = reinterpret_cast<const float4*>(source)[1];
    values[0] = first.x, values[1] = first.y, values[2] = first.z, values[3] = first.w;
    values[4] = second.x, values[5] = second.y, values[6] = second.z, values[7] = second.w;
}

// Where the tile lies in the matrix that its codes belong to.
struct TileTarget {
    int row, column;      // first row and column of the tile
    int rows, columns;    // of the matrix
    int64_t padded_rows;  // rows rounded up to the block: length of a row of the transposed codes
};

// Quantises the tile in both orientations, or in one. All 256 threads call it.
template <bool kRows, bool kColumns, bool kPowerOfTwo, bool kVector>
__device__ inline void quantize_tile(const Part& part, const Place& place, const TileTarget& at, const Codes& rows,
                                     const Codes& columns, const ScaleRule& rule, TileScratch& scratch) {
    if (kRows) {
        Amax8 amax = row_amax(part);
        amax.merge_lanes(1), amax.merge_lanes(2);
        if (place.lane_column == 0)
            put_amax(&scratch.row_amax[place.warp_column][place.row], amax);
    }
    if (kColumns) {
        Amax8 amax = column_amax(part);
        amax.merge_lanes(4), amax.merge_lanes(8), amax.merge_lanes(16);
        if (place.lane_row == 0)
            put_amax(&scratch.column_amax[place.warp_row][place.column], amax);
    }
    __syncthreads();
    const int t = threadIdx.x % kBlock;
    if (kRows && threadIdx.x < kBlock) {
        const uint32_t bits = max(max(scratch.row_amax[0][t], scratch.row_amax[1][t]),
                                  max(scratch.row_amax[2][t], scratch.row_amax[3][t]));
        const float scale = scale_of(bf16_bits(bits), rule, kPowerOfTwo);
        scratch.row_factor[t] = factor_of(scale, kPowerOfTwo);
        if (at.row + t < at.rows)
            rows.scale[(at.column / kBlock) * rows.scale_stride + at.row + t] = scale;
    }
    if (kColumns && threadIdx.x >= kBlock) {
        const uint32_t bits = max(scratch.column_amax[0][t], scratch.column_amax[1][t]);
        const float scale = scale_of(bf16_bits(bits), rule, kPowerOfTwo);
        scratch.column_factor[t] = factor_of(scale, kPowerOfTwo);
        if (at.column + t < at.columns)
            columns.scale[(at.row / kBlock) * columns.scale_stride + at.column + t] = scale;
    }
    __syncthreads();
    float row_factor[kOwned], column_factor[kOwned];
    if (kRows)
        load8(row_factor, &scratch.row_factor[place.row]);
    if (kColumns)
        load8(column_factor, &scratch.column_factor[place.column]);
    uint32_t transposed[kOwned][2] = {};
    const int first_column = at.column + place.column;
#pragma unroll
    for (int i = 0; i < kOwned; i += 2) {
        float upper[kOwned], lower[kOwned];
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            upper[2 * w] = low_bf16(part.word[i][w]), upper[2 * w + 1] = high_bf16(part.word[i][w]);
            lower[2 * w] = low_bf16(part.word[i + 1][w]), lower[2 * w + 1] = high_bf16(part.word[i + 1][w]);
        }
        if (kRows) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float* x = r == 0 ? upper : lower;
                const float factor = row_factor[i + r];
                uint32_t code[2];
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    code[h] =
                        encode2(apply<kPowerOfTwo>(x[4 * h], factor), apply<kPowerOfTwo>(x[4 * h + 1], factor)) |
                        encode2(apply<kPowerOfTwo>(x[4 * h + 2], factor), apply<kPowerOfTwo>(x[4 * h + 3], factor))
                            << 16;
                const int row = at.row + place.row + i + r;
                if (row < at.rows)
                    store8<kVector>(rows.data + int64_t(row) * at.columns + first_column, code[0], code[1],
                                    at.columns - first_column);
            }
        }
        if (kColumns) {
#pragma unroll
            for (int j = 0; j < kOwned; ++j) {
                const float factor = column_factor[j];
                const uint32_t pair =
                    encode2(apply<kPowerOfTwo>(upper[j], factor), apply<kPowerOfTwo>(lower[j], factor));
                transposed[j][i / 4] |= pair << (i % 4) * 8;
            }
        }
    }
    if (kColumns) {
        uint8_t* destination = columns.data + int64_t(first_column) * at.padded_rows + at.row + place.row;
#pragma unroll
        for (int j = 0; j < kOwned; ++j)
            if (first_column + j < at.columns)
                store8<true>(destination + j * at.padded_rows, transposed[j][0], transposed[j][1], 8);
    }
}

// Calls launch with the template arguments that the run-time choices stand for.
template <typename Launch>
void dispatch(bool power_of_two, bool vectorized, Launch launch) {
    if (power_of_two && vectorized)
        launch(std::true_type{}, std::true_type{});
    if (power_of_two && !vectorized)
        launch(std::true_type{}, std::false_type{});
    if (!power_of_two && vectorized)
        launch(std::false_type{}, std::true_type{});
    if (!power_of_two && !vectorized)
        launch(std::false_type{}, std::false_type{});
}

inline int tiles(int size) {
    return (size + kBlock - 1) / kBlock;
}

}  // namespace jetrl
