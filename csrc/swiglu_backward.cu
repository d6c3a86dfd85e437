// Gradient of silu(gate) * up: as BF16, or as codes in both orientations without BF16 in memory. One device function
// computes the numbers of both, so that the fused kernel gives the bytes of its parts.
#include "tile.cuh"

namespace jetrl {
namespace {

struct Gradients {
    float gate, up;
};

// Each operation is named, so that no compiler contracts them differently in the two kernels. `silu` is rounded to
// BF16, as the forward kernel does. The exact reciprocal is not there for its last bit: with an approximate one the
// compiler interleaves more elements than it has registers for.
__device__ inline Gradients swiglu_gradients(float dh, float gate, float up) {
    const float sigmoid = __frcp_rn(__fadd_rn(1.f, exp_of_negative(gate)));
    const float silu = __bfloat162float(__float2bfloat16_rn(__fmul_rn(gate, sigmoid)));
    const float slope = __fmul_rn(sigmoid, __fadd_rn(1.f, __fmul_rn(gate, __fadd_rn(1.f, -sigmoid))));
    return {__fmul_rn(__fmul_rn(dh, up), slope), __fmul_rn(dh, silu)};
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
    const int row = blockIdx.y * kBlock, column = blockIdx.x * kBlock;
    const int64_t first = int64_t(row) * f + column, first_of_y = int64_t(row) * 2 * f + column;
    Part gate, up, gradient;
    load_part<kVector>(gradient, dh + first, f, m - row, f - column, place);
    load_part<kVector>(gate, y + first_of_y, 2 * int64_t(f), m - row, f - column, place);
    load_part<kVector>(up, y + first_of_y + f, 2 * int64_t(f), m - row, f - column, place);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            const uint32_t g = gate.word[i][w], u = up.word[i][w], d = gradient.word[i][w];
            const Gradients low = swiglu_gradients(low_bf16(d), low_bf16(g), low_bf16(u));
            const Gradients high = swiglu_gradients(high_bf16(d), high_bf16(g), high_bf16(u));
            gate.word[i][w] = bf16_pair(low.gate, high.gate);
            up.word[i][w] = bf16_pair(low.up, high.up);
        }
    }
    if constexpr (kQuantize) {
        const int64_t padded_rows = int64_t(gridDim.y) * kBlock;
        // f is a multiple of the block, so no group holds elements of both halves.
        const TileTarget of_gate{row, column, m, 2 * f, padded_rows}, of_up{row, f + column, m, 2 * f, padded_rows};
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
    const dim3 grid(tiles(f), tiles(m));
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
