// Gradient of silu(gate) * up: as BF16, or as codes in both orientations without BF16 in memory. One device function
// computes the numbers of both, so that the fused kernel gives the bytes of its parts.
#include "tile.cuh"

namespace jetrl {
namespace {

// A pair of elements of gate and up becomes their gradients, BF16 in words of two. Each operation is named, so that no
// compiler contracts them differently in the two kernels.
__device__ inline void swiglu_gradients(uint32_t dh, uint32_t& gate, uint32_t& up) {
    float of_gate[2], silu[2];
    const float g[2] = {low_bf16(gate), high_bf16(gate)}, u[2] = {low_bf16(up), high_bf16(up)};
    const float d[2] = {low_bf16(dh), high_bf16(dh)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float sigmoid = __fdividef(1.f, __fadd_rn(1.f, __expf(-g[i])));
        silu[i] = __fmul_rn(g[i], sigmoid);
        // The derivative of silu: sigmoid + silu (1 - sigmoid).
        const float slope = __fmaf_rn(silu[i], __fadd_rn(1.f, -sigmoid), sigmoid);
        of_gate[i] = __fmul_rn(__fmul_rn(d[i], u[i]), slope);
    }
    const uint32_t rounded = bf16_pair(silu[0], silu[1]);
    gate = bf16_pair(of_gate[0], of_gate[1]);
    up = bf16_pair(__fmul_rn(d[0], low_bf16(rounded)), __fmul_rn(d[1], high_bf16(rounded)));
}

// Stores one half of the tile of dy, whose rows are 2 f long.
template <bool kVector>
__device__ inline void store_half(const Part& part, uint16_t* target, int f, int rows_left, int columns_left,
                                  const Place& place) {
    const int left = columns_left - place.column;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
        if (place.row + i >= rows_left)
            continue;
        uint16_t* row = target + int64_t(place.row + i) * 2 * f + place.column;
        if constexpr (kVector) {
            const uint32_t* word = part.word[i];
            if (left > 0)
                *reinterpret_cast<uint4*>(row) = make_uint4(word[0], word[1], word[2], word[3]);
        } else {
#pragma unroll
            for (int j = 0; j < kOwned; ++j)
                if (j < left)
                    row[j] = part.word[i][j / 2] >> 16 * (j % 2);
        }
    }
}

template <bool kQuantize, bool kPowerOfTwo, bool kVector>
__global__ __launch_bounds__(kThreads, 2) void swiglu_backward_kernel(const uint16_t* dh, const uint16_t* y, int m,
                                                                      int f, uint16_t* dy, Codes rows, Codes columns,
                                                                      ScaleRule rule) {
    __shared__ TileScratch scratch[2];
    const Place place;
    const Tile tile((m + kBlock - 1) / kBlock, (f + kBlock - 1) / kBlock);
    const int row = tile.row * kBlock, column = tile.column * kBlock;
    const int64_t first = int64_t(row) * f + column, first_of_y = int64_t(row) * 2 * f + column;
    Part gate, up, gradient;
    load_part<kVector>(gradient, dh + first, f, m - row, f - column, place);
    load_part<kVector>(gate, y + first_of_y, 2 * int64_t(f), m - row, f - column, place);
    load_part<kVector>(up, y + first_of_y + f, 2 * int64_t(f), m - row, f - column, place);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            swiglu_gradients(gradient.word[i][w], gate.word[i][w], up.word[i][w]);
        }
    }
    if constexpr (kQuantize) {
        // f is a multiple of the block, so no group holds elements of both halves.
        const TileTarget of_gate{row, column, m, 2 * f, tile.padded_rows},
            of_up{row, f + column, m, 2 * f, tile.padded_rows};
        quantize_tile<true, true, kPowerOfTwo, kVector>(gate, place, of_gate, rows, columns, rule, scratch[0]);
        quantize_tile<true, true, kPowerOfTwo, kVector>(up, place, of_up, rows, columns, rule, scratch[1]);
    } else {
        store_half<kVector>(gate, dy + first_of_y, f, m - row, f - column, place);
        store_half<kVector>(up, dy + first_of_y + f, f, m - row, f - column, place);
    }
}

}  // namespace

void swiglu_backward(const void* dh, const void* y, int m, int f, void* dy, Codes rows, Codes columns, ScaleRule rule,
                     bool vectorized, cudaStream_t stream) {
    const int grid = tiles(f) * tiles(m);
    const auto *of_h = static_cast<const uint16_t*>(dh), *of_y = static_cast<const uint16_t*>(y);
    auto* target = static_cast<uint16_t*>(dy);
    dispatch(rule.power_of_two, vectorized, [&](auto power_of_two, auto vector) {
        constexpr bool kPowerOfTwo = decltype(power_of_two)::value, kVector = decltype(vector)::value;
        if (rows.data)
            swiglu_backward_kernel<true, kPowerOfTwo, kVector>
                <<<grid, kThreads, 0, stream>>>(of_h, of_y, m, f, target, rows, columns, rule);
        else
            swiglu_backward_kernel<false, kPowerOfTwo, kVector>
                <<<grid, kThreads, 0, stream>>>(of_h, of_y, m, f, target, rows, columns, rule);
    });
}

}  // namespace jetrl
