// jetrl_megatron._C: checks of arguments, and launches on the current stream.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

#include <optional>
#include <vector>

#include "operators.h"

namespace {

using torch::Tensor;

constexpr double kLargestCode = 448;   // what the conversion instruction saturates at
constexpr double kLeastFloor = 1e-30;  // over the largest code still far from what is denormal

int64_t ceil_div(int64_t value, int64_t divisor) {
    return (value + divisor - 1) / divisor;
}

struct Recipe {
    int64_t block;
    double element_max;
    double amax_floor;
    double divisor;
    double scale_floor;
    bool power_of_two;
};

jetrl::ScaleRule rule_of(const Recipe& recipe) {
    TORCH_CHECK_VALUE(recipe.block == jetrl::kBlock, "block=", recipe.block, ": the extension is built for ",
                      jetrl::kBlock);
    TORCH_CHECK_VALUE(recipe.element_max == kLargestCode, "element_max=", recipe.element_max,
                      ": the hardware saturates at ", kLargestCode);
    TORCH_CHECK_VALUE(recipe.amax_floor >= kLeastFloor, "amax_floor=", recipe.amax_floor,
                      ": scales are built for normal numbers, from a floor of at least ", kLeastFloor);
    return {float(recipe.amax_floor), float(recipe.divisor), float(recipe.scale_floor), recipe.power_of_two};
}

void check_matrix(const Tensor& x, const char* name, torch::ScalarType dtype) {
    TORCH_CHECK_VALUE(x.is_cuda() && x.dim() == 2 && x.scalar_type() == dtype, name, " is ", x.scalar_type(), " ",
                      x.sizes(), " on ", x.device(), ": expected a CUDA matrix of ", dtype);
    TORCH_CHECK_VALUE(x.size(1) <= 1 || x.stride(1) == 1, name, " has strides ", x.strides(),
                      ": rows must be contiguous");
    TORCH_CHECK_VALUE(x.size(0) < (1 << 23) && x.size(1) < (1 << 23), name, " is ", x.sizes(), ": at most 2^23 a side");
}

bool aligned(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

bool vector_rows(const Tensor& x) {
    return x.size(1) % 8 == 0 && (x.size(0) <= 1 || x.stride(0) % 8 == 0) && aligned(x.data_ptr());
}

// Checks an output [rows, columns] with its scales, stored group by group.
jetrl::Codes codes_of(const std::optional<Tensor>& data, const std::optional<Tensor>& scale, const char* name,
                      int64_t rows, int64_t columns) {
    if (!data.has_value())
        return {nullptr, nullptr, 0};
    check_matrix(*data, name, torch::kFloat8_e4m3fn);
    TORCH_CHECK_VALUE(data->size(0) == rows && data->size(1) == columns && data->is_contiguous(), name, " is ",
                      data->sizes(), ": expected contiguous [", rows, ", ", columns, "]");
    const int64_t groups = ceil_div(columns, jetrl::kBlock);
    TORCH_CHECK_VALUE(
        scale.has_value() && scale->is_cuda() && scale->scalar_type() == torch::kFloat && scale->dim() == 2 &&
            scale->size(0) == rows && scale->size(1) == groups && (rows <= 1 || scale->stride(0) == 1),
        "the scale of ", name, " must be float32 [", rows, ", ", groups, "] with its rows next to each other");
    return {static_cast<uint8_t*>(data->data_ptr()), scale->data_ptr<float>(), scale->stride(1)};
}

void quantize_both(const Tensor& x, const std::optional<Tensor>& rows, const std::optional<Tensor>& rows_scale,
                   const std::optional<Tensor>& columns, const std::optional<Tensor>& columns_scale,
                   const Recipe& recipe) {
    check_matrix(x, "x", torch::kBFloat16);
    const auto rule = rule_of(recipe);
    const int64_t m = x.size(0), c = x.size(1);
    const auto of_rows = codes_of(rows, rows_scale, "rows", m, c);
    const auto of_columns = codes_of(columns, columns_scale, "columns", c, ceil_div(m, jetrl::kBlock) * jetrl::kBlock);
    if (m == 0 || c == 0 || (!rows && !columns))
        return;
    const c10::cuda::CUDAGuard guard(x.device());
    jetrl::quantize_both(x.data_ptr(), x.stride(0), m, c, of_rows, of_columns, rule, vector_rows(x),
                         c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void requantize_along_tokens(const Tensor& codes, const Tensor& scale, const Tensor& columns,
                             const Tensor& columns_scale, const Recipe& recipe) {
    check_matrix(codes, "codes", torch::kFloat8_e4m3fn);
    const auto rule = rule_of(recipe);
    const int64_t m = codes.size(0), c = codes.size(1);
    TORCH_CHECK_VALUE(codes.is_contiguous(), "codes must be contiguous");
    TORCH_CHECK_VALUE(scale.is_cuda() && scale.scalar_type() == torch::kFloat && scale.dim() == 2 &&
                          scale.size(0) == m && scale.size(1) == ceil_div(c, jetrl::kBlock),
                      "scale is ", scale.sizes(), ": expected float32 [", m, ", ", ceil_div(c, jetrl::kBlock), "]");
    const auto out = codes_of(columns, columns_scale, "columns", c, ceil_div(m, jetrl::kBlock) * jetrl::kBlock);
    if (m == 0 || c == 0)
        return;
    const c10::cuda::CUDAGuard guard(codes.device());
    jetrl::requantize_along_tokens(static_cast<const uint8_t*>(codes.data_ptr()), scale.data_ptr<float>(),
                                   scale.stride(0), scale.stride(1), m, c, out, rule,
                                   c % 16 == 0 && aligned(codes.data_ptr()), c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void swiglu(const Tensor& y, const std::optional<Tensor>& h, const std::optional<Tensor>& codes,
            const std::optional<Tensor>& scale, const Recipe& recipe) {
    check_matrix(y, "y", torch::kBFloat16);
    const auto rule = rule_of(recipe);
    const int64_t m = y.size(0), f = y.size(1) / 2;
    TORCH_CHECK_VALUE(y.size(1) % (2 * jetrl::kBlock) == 0 && y.is_contiguous() && aligned(y.data_ptr()), "y is ",
                      y.sizes(), ": expected contiguous and aligned [M, 2 F], F a multiple of ", jetrl::kBlock);
    TORCH_CHECK_VALUE(h.has_value() != codes.has_value(), "swiglu writes either h or its codes");
    const auto out = codes_of(codes, scale, "codes", m, f);
    if (h) {
        check_matrix(*h, "h", torch::kBFloat16);
        TORCH_CHECK_VALUE(h->size(0) == m && h->size(1) == f && h->is_contiguous() && aligned(h->data_ptr()), "h is ",
                          h->sizes(), ": expected contiguous and aligned [", m, ", ", f, "]");
    }
    if (m == 0 || f == 0)
        return;
    const c10::cuda::CUDAGuard guard(y.device());
    jetrl::swiglu(y.data_ptr(), m, f, h ? h->data_ptr() : nullptr, out, rule, c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void swiglu_backward(const Tensor& dh, const Tensor& y, const std::optional<Tensor>& dy,
                     const std::optional<Tensor>& rows, const std::optional<Tensor>& rows_scale,
                     const std::optional<Tensor>& columns, const std::optional<Tensor>& columns_scale,
                     const Recipe& recipe) {
    check_matrix(dh, "dh", torch::kBFloat16);
    check_matrix(y, "y", torch::kBFloat16);
    const auto rule = rule_of(recipe);
    const int64_t m = dh.size(0), f = dh.size(1);
    TORCH_CHECK_VALUE(y.size(0) == m && y.size(1) == 2 * f && y.is_contiguous() && dh.is_contiguous(), "y is ",
                      y.sizes(), " for dh ", dh.sizes(), ": expected contiguous [", m, ", ", 2 * f, "]");
    TORCH_CHECK_VALUE(dy.has_value() != rows.has_value() && rows.has_value() == columns.has_value(),
                      "swiglu_backward writes either dy or both orientations of its codes");
    TORCH_CHECK_VALUE(!rows || f % jetrl::kBlock == 0, "f=", f, " is no multiple of ", jetrl::kBlock,
                      ": a group would hold elements of gate and up; quantise the BF16 gradient instead");
    const auto of_rows = codes_of(rows, rows_scale, "rows", m, 2 * f);
    const auto of_columns =
        codes_of(columns, columns_scale, "columns", 2 * f, ceil_div(m, jetrl::kBlock) * jetrl::kBlock);
    if (dy) {
        check_matrix(*dy, "dy", torch::kBFloat16);
        TORCH_CHECK_VALUE(dy->sizes() == y.sizes() && dy->is_contiguous(), "dy is ", dy->sizes(), ": expected ",
                          y.sizes());
    }
    if (m == 0 || f == 0)
        return;
    const c10::cuda::CUDAGuard guard(dh.device());
    const bool vectorized = vector_rows(dh) && aligned(y.data_ptr()) && (!dy || aligned(dy->data_ptr()));
    jetrl::swiglu_backward(dh.data_ptr(), y.data_ptr(), m, f, dy ? dy->data_ptr() : nullptr, of_rows, of_columns, rule,
                           vectorized, c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void check_norm(const Tensor& x, const Tensor& weight) {
    const int64_t k = x.size(1);
    TORCH_CHECK_VALUE(k % 8 == 0 && k <= jetrl::kMostFeatures, "RMSNorm over ", k,
                      " features: a multiple of 8, at most ", jetrl::kMostFeatures);
    TORCH_CHECK_VALUE(weight.is_cuda() && weight.scalar_type() == torch::kBFloat16 && weight.numel() == k &&
                          weight.is_contiguous() && aligned(weight.data_ptr()),
                      "weight is ", weight.scalar_type(), " ", weight.sizes(), ": expected aligned bfloat16 [", k, "]");
}

void* dense(const std::optional<Tensor>& x, const char* name, const Tensor& like) {
    if (!x)
        return nullptr;
    check_matrix(*x, name, torch::kBFloat16);
    TORCH_CHECK_VALUE(x->sizes() == like.sizes() && x->is_contiguous() && aligned(x->data_ptr()), name, " is ",
                      x->sizes(), ": expected contiguous and aligned ", like.sizes());
    return x->data_ptr();
}

float* per_row(const Tensor& rstd, const Tensor& x) {
    TORCH_CHECK_VALUE(
        rstd.is_cuda() && rstd.scalar_type() == torch::kFloat && rstd.numel() == x.size(0) && rstd.is_contiguous(),
        "rstd is ", rstd.scalar_type(), " ", rstd.sizes(), ": expected float32 [", x.size(0), "]");
    return rstd.data_ptr<float>();
}

void rms_norm(const Tensor& x, const std::optional<Tensor>& residual, const Tensor& weight, double eps,
              const std::optional<Tensor>& y, const std::optional<Tensor>& codes, const std::optional<Tensor>& scale,
              const Tensor& rstd, const std::optional<Tensor>& sums, const std::optional<Recipe>& recipe) {
    const void* source = dense(x, "x", x);
    check_norm(x, weight);
    TORCH_CHECK_VALUE(residual.has_value() == sums.has_value(), "a residual goes with sums to write");
    TORCH_CHECK_VALUE(y.has_value() != codes.has_value(), "rms_norm writes either y or its codes");
    TORCH_CHECK_VALUE(codes.has_value() == recipe.has_value(), "a recipe goes with codes");
    const auto rule = recipe ? rule_of(*recipe) : jetrl::ScaleRule{};
    const auto out = codes_of(codes, scale, "codes", x.size(0), x.size(1));
    const void* added = dense(residual, "residual", x);
    void *normed = dense(y, "y", x), *total = dense(sums, "sums", x);
    float* inverse = per_row(rstd, x);
    if (x.numel() == 0)
        return;
    const c10::cuda::CUDAGuard guard(x.device());
    int multiprocessors = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, x.device().index()));
    jetrl::rms_norm(source, added, weight.data_ptr(), x.size(0), x.size(1), float(eps), normed, out, inverse, total,
                    rule, multiprocessors, c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& dx,
                       const Tensor& partial) {
    const void *source = dense(x, "x", x), *gradient = dense(dy, "dy", x);
    void* target = dense(dx, "dx", x);
    check_norm(x, weight);
    TORCH_CHECK_VALUE(partial.is_cuda() && partial.scalar_type() == torch::kFloat && partial.dim() == 2 &&
                          partial.is_contiguous() && partial.size(1) == x.size(1),
                      "partial is ", partial.scalar_type(), " ", partial.sizes(), ": expected float32 [P, ", x.size(1),
                      "]");
    const float* inverse = per_row(rstd, x);
    if (x.numel() == 0)
        return;
    const c10::cuda::CUDAGuard guard(x.device());
    jetrl::rms_norm_backward(gradient, source, weight.data_ptr(), inverse, x.size(0), x.size(1), partial.size(0),
                             target, partial.data_ptr<float>(), c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void quantize_weights(const std::vector<Tensor>& weights, const std::vector<Tensor>& codes,
                      const std::vector<Tensor>& transposed, const std::vector<Tensor>& scales,
                      const std::optional<Tensor>& amax, const Recipe& recipe) {
    const auto rule = rule_of(recipe);
    const size_t count = weights.size();
    TORCH_CHECK_VALUE(codes.size() == count && transposed.size() == count && scales.size() == count,
                      "one output of each kind for each of ", count, " weights");
    TORCH_CHECK_VALUE(!amax || count == 1, "amax goes with a single weight");
    if (count == 0)
        return;
    const c10::cuda::CUDAGuard guard(weights[0].device());
    const auto stream = c10::cuda::getCurrentCUDAStream();
    jetrl::WeightTable table{};
    bool vectorized = true;
    const auto launch = [&] {
        if (table.tiles > 0)
            jetrl::quantize_weights(table, rule, vectorized, stream);
        C10_CUDA_KERNEL_LAUNCH_CHECK();
        table = {};
        vectorized = true;
    };
    for (size_t i = 0; i < count; ++i) {
        const auto& w = weights[i];
        check_matrix(w, "w", torch::kBFloat16);
        TORCH_CHECK_VALUE(w.device() == weights[0].device(), "weights lie on ", w.device(), " and ",
                          weights[0].device());
        const int64_t n = w.size(0), k = w.size(1), nb = ceil_div(n, jetrl::kBlock), kb = ceil_div(k, jetrl::kBlock);
        const auto matches = [](const Tensor& x, torch::ScalarType dtype, int64_t r, int64_t c) {
            return x.is_cuda() && x.scalar_type() == dtype && x.dim() == 2 && x.size(0) == r && x.size(1) == c &&
                   x.is_contiguous();
        };
        TORCH_CHECK_VALUE(
            matches(codes[i], torch::kFloat8_e4m3fn, n, k) && matches(transposed[i], torch::kFloat8_e4m3fn, k, n) &&
                matches(scales[i], torch::kFloat, nb, kb) && (!amax || matches(*amax, torch::kFloat, nb, kb)),
            "outputs of a weight [", n, ", ", k, "] have wrong shapes or dtypes");
        if (n == 0 || k == 0)
            continue;
        table.weights[table.count++] = {w.data_ptr(),
                                        w.stride(0),
                                        amax ? amax->data_ptr<float>() : nullptr,
                                        static_cast<uint8_t*>(codes[i].data_ptr()),
                                        static_cast<uint8_t*>(transposed[i].data_ptr()),
                                        scales[i].data_ptr<float>(),
                                        int(n),
                                        int(k),
                                        table.tiles};
        table.tiles += nb * kb;
        vectorized = vectorized && vector_rows(w) && n % 8 == 0;
        if (table.count == jetrl::kWeightsPerLaunch)
            launch();
    }
    launch();
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    pybind11::class_<Recipe>(m, "Recipe")
        .def(pybind11::init([](int64_t block, double element_max, double amax_floor, double divisor, double scale_floor,
                               bool power_of_two) {
                 return Recipe{block, element_max, amax_floor, divisor, scale_floor, power_of_two};
             }),
             pybind11::kw_only(), pybind11::arg("block"), pybind11::arg("element_max"), pybind11::arg("amax_floor"),
             pybind11::arg("divisor"), pybind11::arg("scale_floor"), pybind11::arg("power_of_two"));
    m.attr("MOST_FEATURES") = jetrl::kMostFeatures;
    m.def("quantize_both", &quantize_both);
    m.def("requantize_along_tokens", &requantize_along_tokens);
    m.def("swiglu", &swiglu);
    m.def("swiglu_backward", &swiglu_backward);
    m.def("rms_norm", &rms_norm);
    m.def("rms_norm_backward", &rms_norm_backward);
    m.def("quantize_weights", &quantize_weights);
}
