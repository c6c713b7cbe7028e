// Causal attention inside each of several packed prompts: as two products for a few tokens at a time.
#include "decoder.h"

namespace {

constexpr int64_t TOKENS = 16;

}  // namespace

// See ops.span_attention.
extern "C" AOTITorchError aoti_torch_cpu_span_attention(
    AtenTensorHandle heads_, int64_t kv_heads, AtenTensorHandle starts_, AtenTensorHandle* out_
) {
    return guarded("span_attention", [&] {
        const Tensor<float> all(heads_);
        const int64_t* starts = Tensor<int64_t>(starts_).data;
        const int64_t tokens = all.sizes[0], size = all.sizes[2], heads = all.sizes[1] - 2 * kv_heads;
        const int64_t group = heads / kv_heads, width_of_token = all.sizes[1] * size;
        require(size % WIDTH == 0, "the heads are no multiple of a vector");
        const Tensor<float> out = new_tensor({tokens, heads * size}, out_);
        std::vector<float> keys, values, scores;
        std::vector<const float*> rows(TOKENS * group);
        std::vector<float*> results(TOKENS * group);
        for (int64_t first = 0, end; first < tokens; first = end) {
            for (end = first; end < tokens && starts[end] == starts[first];) end++;
            const int64_t length = end - first, stride = whole_vectors(length);
            keys.assign(size * stride, 0), values.resize(length * size), scores.resize(TOKENS * group * stride);
            for (int64_t kv = 0; kv < kv_heads; kv++) {
                for (int64_t t = 0; t < length; t++) {
                    const float* key = all.data + (first + t) * width_of_token + (heads + kv) * size;
                    for (int64_t d = 0; d < size; d++) keys[d * stride + t] = key[d];
                    std::copy_n(key + kv_heads * size, size, &values[t * size]);
                }
                for (int64_t t = 0; t < length; t += TOKENS) {
                    const int64_t own = std::min(TOKENS, length - t) * group, seen = std::min(t + TOKENS, length);
                    const int64_t width = whole_vectors(seen);
                    for (int64_t m = 0; m < own; m++) {
                        const int64_t token = first + t + m / group, head = kv * group + m % group;
                        rows[m] = all.data + token * width_of_token + head * size;
                        results[m] = out.data + (token * heads + head) * size;
                    }
                    const Matrix seen_keys{keys.data(), size, width, stride};
                    const Matrix seen_values{values.data(), seen, size, size};
                    multiply(rows.data(), own, seen_keys, [&](int64_t m, int64_t column, Vector sum) {
                        store(&scores[m * stride + column], sum);
                    });
                    for (int64_t m = 0; m < own; m++) {
                        softmax(&scores[m * stride], t + m / group + 1, width);
                        rows[m] = &scores[m * stride];
                    }
                    multiply(rows.data(), own, seen_values, [&](int64_t m, int64_t column, Vector sum) {
                        store(results[m] + column, sum);
                    });
                }
            }
        }
    });
}
