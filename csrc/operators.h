// What bindings.cpp launches. Raw pointers, so that the kernels compile without torch's headers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jetrl {

// How an amax becomes a scale; every number comes from the recipe.
struct ScaleRule {
    float amax_floor;
    float divisor;
    float scale_floor;
    bool power_of_two;
};

// One orientation of a quantised matrix. Scales are stored group by group: scale[group * scale_stride + row].
struct Codes {
    uint8_t* data;
    float* scale;
    int64_t scale_stride;
};

// x: BF16 [m, c], rows `stride` elements apart. rows: [m, c]. columns: [c, mp], mp = m rounded up to the block.
// Either orientation may be absent (data == nullptr). `vectorized`: c and stride are multiples of 8, pointers of 16.
void quantize_both(const void* x, int64_t stride, int m, int c, Codes rows, Codes columns, ScaleRule rule,
                   bool vectorized, cudaStream_t stream);

// codes: FP8 [m, c], contiguous, with scale[row * scale_stride_m + group * scale_stride_c]. columns as above.
// `vectorized`: c is a multiple of 16, pointers of 16 bytes.
void requantize_along_tokens(const uint8_t* codes, const float* scale, int64_t scale_stride_m, int64_t scale_stride_c,
                             int m, int c, Codes columns, ScaleRule rule, bool vectorized, cudaStream_t stream);

// y: BF16 [m, 2 f], gate then up. Writes BF16 h [m, f], or its codes where codes.data is given. f is a multiple of the
// block.
void swiglu(const void* y, int m, int f, void* h, Codes codes, ScaleRule rule, cudaStream_t stream);

// dh: BF16 [m, f]; y: BF16 [m, 2 f], gate then up. Writes BF16 dy [m, 2 f], or, where rows.data is given, its codes in
// both orientations; then f is a multiple of the block.
void swiglu_backward(const void* dh, const void* y, int m, int f, void* dy, Codes rows, Codes columns, ScaleRule rule,
                     bool vectorized, cudaStream_t stream);

// x, residual, y, sums: BF16 [m, k]; weight: BF16 [k]. Norms x, or the BF16 sum of x and residual, which it also
// writes. Writes y, or its codes where codes.data is given. k is a multiple of 8 and at most kMostFeatures.
constexpr int kMostFeatures = 8192;
void rms_norm(const void* x, const void* residual, const void* weight, int m, int k, float eps, void* y, Codes codes,
              float* rstd, void* sums, ScaleRule rule, int multiprocessors, cudaStream_t stream);

// partial: float32 [programs, k], each program's sum over its rows; their sum is the weight's gradient.
void rms_norm_backward(const void* dy, const void* x, const void* weight, const float* rstd, int m, int k, int programs,
                       void* dx, float* partial, cudaStream_t stream);

struct Weight {
    const void* w;  // BF16 [n, k], rows `stride` elements apart
    int64_t stride;
    const float* amax;    // [ceil(n / block), ceil(k / block)] instead of the tiles' own, or nullptr
    uint8_t* codes;       // [n, k]
    uint8_t* transposed;  // [k, n]
    float* scale;         // [ceil(n / block), ceil(k / block)]
    int n;
    int k;
    int first_tile;
};

constexpr int kWeightsPerLaunch = 40;

struct WeightTable {
    Weight weights[kWeightsPerLaunch];
    int count;
    int tiles;
};

void quantize_weights(const WeightTable& table, ScaleRule rule, bool vectorized, cudaStream_t stream);

constexpr int kBlock = 128;  // what the kernels are written for; the bindings compare it with the recipe's

}  // namespace jetrl
