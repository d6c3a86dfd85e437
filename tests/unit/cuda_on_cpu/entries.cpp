// What tests call: the launchers of operators.h with flat arguments.
#include "operators.h"

using jetrl::Codes;
using jetrl::ScaleRule;

extern "C" {

void quantize_both(const void* x, int64_t stride, int m, int c, Codes rows, Codes columns, ScaleRule rule, int vectorized) {
    jetrl::quantize_both(x, stride, m, c, rows, columns, rule, vectorized, nullptr);
}

void requantize_along_tokens(const uint8_t* codes, const float* scale, int64_t stride_m, int64_t stride_c, int m, int c,
                             Codes columns, ScaleRule rule, int vectorized) {
    jetrl::requantize_along_tokens(codes, scale, stride_m, stride_c, m, c, columns, rule, vectorized, nullptr);
}

void swiglu(const void* y, int m, int f, void* h, Codes codes, ScaleRule rule) {
    jetrl::swiglu(y, m, f, h, codes, rule, nullptr);
}

void swiglu_backward(const void* dh, const void* y, int m, int f, void* dy, Codes rows, Codes columns, ScaleRule rule,
                     int vectorized) {
    jetrl::swiglu_backward(dh, y, m, f, dy, rows, columns, rule, vectorized, nullptr);
}

void rms_norm(const void* x, const void* residual, const void* weight, int m, int k, float eps, void* y, Codes codes,
              float* rstd, void* sums, ScaleRule rule, int multiprocessors) {
    jetrl::rms_norm(x, residual, weight, m, k, eps, y, codes, rstd, sums, rule, multiprocessors, nullptr);
}

void rms_norm_backward(const void* dy, const void* x, const void* weight, const float* rstd, int m, int k, int programs,
                       void* dx, float* partial) {
    jetrl::rms_norm_backward(dy, x, weight, rstd, m, k, programs, dx, partial, nullptr);
}

void quantize_weight(const void* w, int64_t stride, const float* amax, uint8_t* codes, uint8_t* transposed, float* scale,
                     int n, int k, ScaleRule rule, int vectorized) {
    jetrl::WeightTable table{};
    const int block = jetrl::kBlock, tiles = (n + block - 1) / block * ((k + block - 1) / block);
    table.weights[0] = {w, stride, amax, codes, transposed, scale, n, k, 0};
    table.count = 1, table.tiles = tiles;
    jetrl::quantize_weights(table, rule, vectorized, nullptr);
}
}
