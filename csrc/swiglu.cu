// silu(gate) * up, as BF16 or as codes in groups along features. Sixteen neighbouring threads own a group.
#include "tile.cuh"

namespace jetrl {
namespace {

constexpr int kVector = 8;  // BF16 elements in 16 bytes
constexpr int kGroupLanes = kBlock / kVector;

template <bool kQuantize, bool kPowerOfTwo>
__global__ __launch_bounds__(kThreads) void swiglu_kernel(const uint16_t* y, int m, int f, uint16_t* h, Codes codes,
                                                          ScaleRule rule) {
    const int vectors = f / kVector;
    // Groups of lanes take part in shuffles even where they lie beyond the matrix.
    const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t row = index / vectors;
    const int column = int(index - row * vectors) * kVector;
    const bool inside = row < m;
    uint4 gate{}, up{};
    if (inside) {
        const uint16_t* source = y + row * 2 * f + column;
        gate = __ldg(reinterpret_cast<const uint4*>(source)), up = __ldg(reinterpret_cast<const uint4*>(source + f));
    }
    const uint32_t g[kWords] = {gate.x, gate.y, gate.z, gate.w}, u[kWords] = {up.x, up.y, up.z, up.w};
    uint32_t word[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        const float low = low_bf16(g[w]), high = high_bf16(g[w]);
        const uint32_t silu = bf16_pair(__fmul_rn(low, sigmoid_of(low)), __fmul_rn(high, sigmoid_of(high)));
        word[w] = bf16_pair(__fmul_rn(low_bf16(silu), low_bf16(u[w])), __fmul_rn(high_bf16(silu), high_bf16(u[w])));
    }
    if constexpr (!kQuantize) {
        if (inside)
            *reinterpret_cast<uint4*>(h + row * f + column) = make_uint4(word[0], word[1], word[2], word[3]);
    } else {
        uint32_t amax = __vmaxu2(__vmaxu2(word[0] & kAbs, word[1] & kAbs), __vmaxu2(word[2] & kAbs, word[3] & kAbs));
        amax = max(amax & 0xffffu, amax >> 16);
#pragma unroll
        for (int distance = 1; distance < kGroupLanes; distance *= 2)
            amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
        if (!inside)
            return;
        const float scale = scale_of_lane<kPowerOfTwo>(bf16_bits(amax), rule), factor = factor_of(scale, kPowerOfTwo);
        if (threadIdx.x % kGroupLanes == 0)
            codes.scale[column / kBlock * codes.scale_stride + row] = scale;
        uint32_t pair[kWords];
#pragma unroll
        for (int w = 0; w < kWords; ++w)
            pair[w] =
                encode2(apply<kPowerOfTwo>(low_bf16(word[w]), factor), apply<kPowerOfTwo>(high_bf16(word[w]), factor));
        store8<true>(codes.data + row * f + column, pair[0] | pair[1] << 16, pair[2] | pair[3] << 16, kVector);
    }
}

}  // namespace

void swiglu(const void* y, int m, int f, void* h, Codes codes, ScaleRule rule, cudaStream_t stream) {
    const int64_t vectors = int64_t(m) * (f / kVector);
    const int blocks = int((vectors + kThreads - 1) / kThreads);
    const auto* source = static_cast<const uint16_t*>(y);
    auto* target = static_cast<uint16_t*>(h);
    if (!codes.data)
        swiglu_kernel<false, true><<<blocks, kThreads, 0, stream>>>(source, m, f, target, codes, rule);
    else if (rule.power_of_two)
        swiglu_kernel<true, true><<<blocks, kThreads, 0, stream>>>(source, m, f, target, codes, rule);
    else
        swiglu_kernel<true, false><<<blocks, kThreads, 0, stream>>>(source, m, f, target, codes, rule);
}

}  // namespace jetrl
