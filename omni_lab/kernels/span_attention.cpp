// Causal attention inside each of several packed prompts: as two products for a few tokens at a time.
#include "products.h"

namespace {

constexpr int64_t TOKENS = 16;

// One number of all of a vector, by halves.
template <typename Join>
float joined(Vector vector, Join join) {
    float numbers[WIDTH];
    store(numbers, vector);
    for (int64_t half = WIDTH / 2; half; half /= 2)
        for (int64_t i = 0; i < half; i++) numbers[i] = join(numbers[i], numbers[i + half]);
    return numbers[0];
}

// The softmax of the first `seen` of `width` scores, in place; those behind become too small to count.
void softmax(float* scores, int64_t seen, int64_t width) {
    for (int64_t j = seen; j < width; j++) scores[j] = -1e30f;
    Vector highest = load(scores), sum = {};
    for (int64_t j = WIDTH; j < width; j += WIDTH) {
        const Vector next = load(scores + j);
        highest = next > highest ? next : highest;
    }
    const float most = joined(highest, [](float a, float b) { return a > b ? a : b; });
    for (int64_t j = 0; j < width; j += WIDTH) {
        const Vector weight = exponential(load(scores + j) - most);
        sum += weight;
        store(scores + j, weight);
    }
    const float share = 1.0f / joined(sum, [](float a, float b) { return a + b; });
    for (int64_t j = 0; j < width; j += WIDTH) store(scores + j, load(scores + j) * share);
}

}  // namespace

// See ops.span_attention.
extern "C" AOTITorchError aoti_torch_cpu_span_attention(
    AtenTensorHandle qk_, AtenTensorHandle value_, AtenTensorHandle starts_, AtenTensorHandle* out_
) {
    return guarded("span_attention", [&] {
        const Tensor<float> qk(qk_), value(value_);
        const int64_t* starts = Tensor<int64_t>(starts_).data;
        const int64_t tokens = qk.sizes[0], kv_heads = value.sizes[1], size = value.sizes[2];
        const int64_t heads = qk.sizes[1] - kv_heads, group = heads / kv_heads;
        require(size % WIDTH == 0, "the heads are no multiple of a vector");
        const Tensor<float> out = new_tensor({tokens, heads * size}, out_);
        std::vector<float> keys, values, scores;
        std::vector<const float*> rows(TOKENS * group);
        std::vector<float*> results(TOKENS * group);
        for (int64_t first = 0, end; first < tokens; first = end) {
            for (end = first; end < tokens && starts[end] == starts[first];) end++;
            const int64_t length = end - first, stride = (length + WIDTH - 1) / WIDTH * WIDTH;
            keys.assign(size * stride, 0), values.resize(length * size), scores.resize(TOKENS * group * stride);
            for (int64_t kv = 0; kv < kv_heads; kv++) {
                for (int64_t t = 0; t < length; t++) {
                    const float* key = qk.data + ((first + t) * (heads + kv_heads) + heads + kv) * size;
                    for (int64_t d = 0; d < size; d++) keys[d * stride + t] = key[d];
                    std::copy_n(value.data + ((first + t) * kv_heads + kv) * size, size, &values[t * size]);
                }
                for (int64_t t = 0; t < length; t += TOKENS) {
                    const int64_t own = std::min(TOKENS, length - t) * group, seen = std::min(t + TOKENS, length);
                    const int64_t width = (seen + WIDTH - 1) / WIDTH * WIDTH;
                    for (int64_t m = 0; m < own; m++) {
                        const int64_t token = first + t + m / group, head = kv * group + m % group;
                        rows[m] = qk.data + (token * (heads + kv_heads) + head) * size;
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
