// Weights in 128 x 128 tiles, W and its transpose from one read, many weights in one launch.
#include "tile.cuh"

namespace jetrl {
namespace {

template <bool kPowerOfTwo, bool kVector>
__global__ __launch_bounds__(kThreads, 3) void quantize_weights_kernel(const __grid_constant__ WeightTable table,
                                                                       ScaleRule rule) {
    __shared__ uint16_t warp_amax[kThreads / 32];
    int first = 0, last = table.count - 1;
    while (first < last) {
        const int middle = (first + last + 1) / 2;
        if (table.weights[middle].first_tile <= int(blockIdx.x)) {
            first = middle;
        } else {
            last = middle - 1;
        }
    }
    const Weight& weight = table.weights[first];
    const int tile = blockIdx.x - weight.first_tile, tile_columns = (weight.k + kBlock - 1) / kBlock;
    const int row = tile / tile_columns * kBlock, column = tile % tile_columns * kBlock;
    const Place place;
    Part part;
    load_part<kVector>(part, static_cast<const uint16_t*>(weight.w) + row * weight.stride + column, weight.stride,
                       weight.n - row, weight.k - column, place);
    Amax8 amax = row_amax(part);
    uint32_t largest = __vmaxu2(__vmaxu2(amax.pair[0], amax.pair[1]), __vmaxu2(amax.pair[2], amax.pair[3]));
    largest = max(largest & 0xffffu, largest >> 16);
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (threadIdx.x % 32 == 0)
        warp_amax[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w)
        largest = max(largest, uint32_t(warp_amax[w]));
    const float tile_amax = weight.amax ? weight.amax[tile] : bf16_bits(largest);
    const float scale = scale_of(tile_amax, rule, kPowerOfTwo), factor = factor_of(scale, kPowerOfTwo);
    if (threadIdx.x == 0)
        weight.scale[tile] = scale;

    const int first_row = row + place.row, first_column = column + place.column;
    uint32_t transposed[kOwned][2] = {};
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
        uint32_t code[2] = {};
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            const uint32_t pair = encode2(apply<kPowerOfTwo>(low_bf16(part.word[i][w]), factor),
                                          apply<kPowerOfTwo>(high_bf16(part.word[i][w]), factor));
            code[w / 2] |= pair << 16 * (w % 2);
            transposed[2 * w][i / 4] |= (pair & 0xff) << 8 * (i % 4);
            transposed[2 * w + 1][i / 4] |= (pair >> 8) << 8 * (i % 4);
        }
        if (first_row + i < weight.n)
            store8<kVector>(weight.codes + int64_t(first_row + i) * weight.k + first_column, code[0], code[1],
                            weight.k - first_column);
    }
    if (first_row >= weight.n)
        return;
#pragma unroll
    for (int j = 0; j < kOwned; ++j)
        if (first_column + j < weight.k)
            store8<kVector>(weight.transposed + int64_t(first_column + j) * weight.n + first_row, transposed[j][0],
                            transposed[j][1], weight.n - first_row);
}

}  // namespace

void quantize_weights(const WeightTable& table, ScaleRule rule, bool vectorized, cudaStream_t stream) {
    dispatch(rule.power_of_two, vectorized, [&](auto power_of_two, auto vector) {
        quantize_weights_kernel<decltype(power_of_two)::value, decltype(vector)::value>
            <<<table.tiles, kThreads, 0, stream>>>(table, rule);
    });
}

}  // namespace jetrl
