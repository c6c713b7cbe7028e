// The parts of a decoder layer for rows of numbers, each the same whatever rows are beside it.
#pragma once

#include "products.h"

#include <cmath>
#include <numeric>

// x / sqrt(mean(x^2) + eps) * weight for each of `rows`; `scale` is sqrt(size) * weight.
inline void rms_norm(const float* x, int64_t rows, int64_t size, const float* scale, double eps, float* out) {
    for (int64_t m = 0; m < rows; m++, x += size, out += size) {
        Vector squares = {};
        for (int64_t i = 0; i < size; i += WIDTH) squares += load(x + i) * load(x + i);
        const float factor = 1.0f / std::sqrt(total(squares) + float(size * eps));
        for (int64_t i = 0; i < size; i += WIDTH) store(out + i, load(x + i) * factor * load(scale + i));
    }
}

// x * cos + (-x2, x1) * sin for x of two halves (x1, x2), in place.
inline void rotate(float* x, int64_t size, const float* cos, const float* sin) {
    const int64_t half = size / 2;
    float* y = x + half;
    for (int64_t i = 0; i < half; i++) {
        const float first = x[i], second = y[i];
        x[i] = first * cos[i] - second * sin[i];
        y[i] = second * cos[half + i] + first * sin[half + i];
    }
}

// silu(gate) * up of two halves of `size` numbers, in the place of the first.
inline void swiglu(float* gate, int64_t size) {
    for (int64_t i = 0; i < size; i += WIDTH) {
        const Vector value = load(gate + i);
        store(gate + i, value / (1.0f + exponential(-value)) * load(gate + size + i));
    }
}

// The softmax of the first `seen` of `width` scores, in place; those behind become too small to count.
inline void softmax(float* scores, int64_t seen, int64_t width) {
    std::fill(scores + seen, scores + width, -1e30f);
    Vector highest = load(scores), sum = {};
    for (int64_t j = WIDTH; j < width; j += WIDTH) highest = larger(highest, load(scores + j));
    const float most = largest(highest);
    for (int64_t j = 0; j < width; j += WIDTH) {
        const Vector weight = exponential(load(scores + j) - most);
        sum += weight;
        store(scores + j, weight);
    }
    const float share = 1.0f / total(sum);
    for (int64_t j = 0; j < width; j += WIDTH) store(scores + j, load(scores + j) * share);
}

inline int64_t whole_vectors(int64_t count) { return (count + WIDTH - 1) / WIDTH * WIDTH; }

// Attention of single tokens. Heads have `size` numbers, and `group` queries share the keys and values of one head,
// which stand one behind the other.
struct Attention {
    int64_t group, size;
    std::vector<float> scores = {};

    // The queries [group, size] of one head attend to its first `seen` keys and values -> out [group, size].
    void run(const float* queries, const float* keys, const float* values, int64_t seen, float* out) {
        const int64_t width = whole_vectors(seen);
        scores.resize(group * width);
        for (int64_t j = 0; j < width; j += WIDTH)
            for (int64_t g = 0; g < group; g++) {
                Vector sums[WIDTH];
                for (int64_t i = 0; i < WIDTH; i++) {
                    const float *key = keys + std::min(j + i, seen - 1) * size, *query = queries + g * size;
                    sums[i] = load(query) * load(key);
                    for (int64_t d = WIDTH; d < size; d += WIDTH) sums[i] += load(query + d) * load(key + d);
                }
                store(&scores[g * width + j], totals(sums));
            }
        for (int64_t g = 0; g < group; g++) softmax(&scores[g * width], seen, width);
        for (int64_t g = 0; g < group; g += BLOCK) {
            const float* rows[BLOCK];
            const int64_t own = std::min(BLOCK, group - g);
            for (int64_t m = 0; m < own; m++) rows[m] = &scores[(g + m) * width];
            multiply(rows, own, {values, seen, size, size}, [&](int64_t m, int64_t column, Vector sum) {
                store(out + (g + m) * size + column, sum);
            });
        }
    }
};

// The front half of a layer: norm, and one product for queries, keys and values.
struct Projection {
    const float *norm, *weight, *head_norm;  // head_norm [heads + kv_heads, size]
    int64_t hidden, heads, kv_heads, size;
    double eps;

    int64_t width() const { return (heads + 2 * kv_heads) * size; }

    // x [rows, hidden] -> heads [rows, heads + 2 * kv_heads, size]; cos and sin [rows, size], `step` numbers apart.
    void run(const float* x, int64_t rows, const float* cos, const float* sin, int64_t step, float* out) const {
        std::vector<float> normed(rows * hidden);
        rms_norm(x, rows, hidden, norm, eps, normed.data());
        const auto lines = lines_of(normed.data(), rows, hidden);
        multiply(lines.data(), rows, {weight, hidden, width(), width()}, [&](int64_t m, int64_t column, Vector sum) {
            store(out + m * width() + column, sum);
        });
        for (int64_t m = 0; m < rows; m++)
            for (int64_t head = 0; head < heads + kv_heads; head++) {
                float* own = out + m * width() + head * size;
                rms_norm(own, 1, size, head_norm + head * size, eps, own);
                rotate(own, size, cos + m * step, sin + m * step);
            }
    }
};

// The back half of a layer up to its MLP: output projection and residual, and the norm of the sum.
struct Joint {
    const float *weight, *norm;  // weight [inner, hidden]
    int64_t inner, hidden;
    double eps;

    // x and attended [rows, inner] -> out [rows, hidden] and normed [rows, hidden]; out may be x.
    void run(const float* x, const float* attended, int64_t rows, float* out, float* normed) const {
        const auto lines = lines_of(attended, rows, inner);
        multiply(lines.data(), rows, {weight, inner, hidden, hidden}, [&](int64_t m, int64_t column, Vector sum) {
            const int64_t at = m * hidden + column;
            store(out + at, load(x + at) + sum);
        });
        rms_norm(out, rows, hidden, norm, eps, normed);
    }
};

// down(silu(gate x) * up x), added with a weight for each row to the rows of `out`. A row may be anywhere.
struct SwiGLU {
    const float *gate_up, *down;  // [hidden, 2 * inner], [inner, hidden]
    int64_t hidden, inner;

    template <typename Add>
    void run(const float* const* rows, int64_t count, std::vector<float>& halves, Add add) const {
        multiply(rows, count, {gate_up, hidden, 2 * inner, 2 * inner}, [&](int64_t m, int64_t column, Vector sum) {
            store(&halves[m * 2 * inner + column], sum);
        });
        for (int64_t m = 0; m < count; m++) swiglu(&halves[m * 2 * inner], inner);
        const auto lines = lines_of(halves.data(), count, 2 * inner);
        multiply(lines.data(), count, {down, inner, hidden, hidden}, add);
    }
};
