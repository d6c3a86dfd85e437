// Both orientations of an activation or gradient from one read: codes along features and codes along tokens.
// Triton transposes through shared memory, byte by byte; here registers do it.
#include "tile.cuh"

namespace jetrl {
namespace {

template <bool kRows, bool kColumns, bool kPowerOfTwo, bool kVector>
__global__ __launch_bounds__(kThreads, 3) void quantize_both_kernel(const uint16_t* x, int64_t stride, int m, int c,
                                                                    Codes rows, Codes columns, ScaleRule rule) {
    __shared__ TileScratch scratch;
    const Place place;
    const int row = blockIdx.y * kBlock, column = blockIdx.x * kBlock;
    Part part;
    load_part<kVector>(part, x + int64_t(row) * stride + column, stride, m - row, c - column, place);
    const TileTarget at{row, column, m, c, int64_t(gridDim.y) * kBlock};
    quantize_tile<kRows, kColumns, kPowerOfTwo, kVector>(part, place, at, rows, columns, rule, scratch);
}

}  // namespace

void quantize_both(const void* x, int64_t stride, int m, int c, Codes rows, Codes columns, ScaleRule rule,
                   bool vectorized, cudaStream_t stream) {
    const dim3 grid(tiles(c), tiles(m));
    const auto* source = static_cast<const uint16_t*>(x);
    dispatch(rule.power_of_two, vectorized, [&](auto power_of_two, auto vector) {
        constexpr bool kPowerOfTwo = decltype(power_of_two)::value, kVector = decltype(vector)::value;
        if (rows.data && columns.data)
            quantize_both_kernel<true, true, kPowerOfTwo, kVector>
                <<<grid, kThreads, 0, stream>>>(source, stride, m, c, rows, columns, rule);
        else if (rows.data)
            quantize_both_kernel<true, false, kPowerOfTwo, kVector>
                <<<grid, kThreads, 0, stream>>>(source, stride, m, c, rows, columns, rule);
        else
            quantize_both_kernel<false, true, kPowerOfTwo, kVector>
                <<<grid, kThreads, 0, stream>>>(source, stride, m, c, rows, columns, rule);
    });
}

}  // namespace jetrl
