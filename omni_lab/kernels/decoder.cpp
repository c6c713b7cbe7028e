// The parts of a decoder layer as operators, and the mixture of experts.
#include "decoder.h"

namespace {

// Rows that go through a part together: what they leave behind stays in the cache.
constexpr int64_t ROWS = 64;

// Top-k of many experts, and where there is one a shared expert behind a sigmoid gate. Router, shared gate and shared
// expert are columns of one matrix.
struct Experts {
    const float *front, *gate_up, *down, *shared_down;
    int64_t hidden, width, count, inner, shared, top_k;
    bool norm_topk;

    // normed [rows, hidden] -> added to out [rows, hidden].
    void run(const float* normed, int64_t rows, float* out) const {
        std::vector<float> fronts(rows * width), halves(rows * 2 * std::max(inner, shared)), weights(rows * count);
        std::vector<const float*> lines = lines_of(normed, rows, hidden);
        multiply(lines.data(), rows, {front, hidden, width, width}, [&](int64_t m, int64_t column, Vector sum) {
            store(&fronts[m * width + column], sum);
        });
        if (shared) add_shared(fronts.data(), rows, out);
        for (int64_t m = 0; m < rows; m++) route(&fronts[m * width], &weights[m * count]);
        std::vector<int64_t> chosen(rows);
        for (int64_t expert = 0; expert < count; expert++) {
            int64_t own = 0;
            for (int64_t m = 0; m < rows; m++)
                if (weights[m * count + expert]) chosen[own] = m, lines[own++] = normed + m * hidden;
            if (!own) continue;
            const SwiGLU mlp{gate_up + expert * hidden * 2 * inner, down + expert * inner * hidden, hidden, inner};
            mlp.run(lines.data(), own, halves, [&](int64_t m, int64_t column, Vector sum) {
                float* to = out + chosen[m] * hidden + column;
                store(to, load(to) + weights[chosen[m] * count + expert] * sum);
            });
        }
    }

    void add_shared(float* fronts, int64_t rows, float* out) const {
        const float* gates = fronts + count;
        for (int64_t m = 0; m < rows; m++) swiglu(fronts + m * width + count + 1, shared);
        const auto lines = lines_of(fronts + count + 1, rows, width);
        multiply(lines.data(), rows, {shared_down, shared, hidden, hidden}, [&](int64_t m, int64_t column, Vector sum) {
            float* to = out + m * hidden + column;
            store(to, load(to) + sum / (1.0f + std::exp(-gates[m * width])));
        });
    }

    // The weight of each expert [count]: those of the k likeliest, and 0.
    void route(const float* logits, float* weights) const {
        std::vector<int64_t> order(count);
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + top_k, order.end(), [&](int64_t a, int64_t b) {
            return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
        });
        const float most = logits[order[0]];
        const int64_t summed = norm_topk ? top_k : count;
        float sum = 0;
        for (int64_t i = 0; i < summed; i++) sum += std::exp(logits[order[i]] - most);
        for (int64_t i = 0; i < top_k; i++) weights[order[i]] = std::exp(logits[order[i]] - most) / sum;
    }
};

// Calls part(first, count) for `rows` rows in pieces.
template <typename Part>
void in_pieces(int64_t rows, Part part) {
    for (int64_t first = 0; first < rows; first += ROWS) part(first, std::min(ROWS, rows - first));
}

}  // namespace

// See ops.project_heads.
extern "C" AOTITorchError aoti_torch_cpu_project_heads(
    AtenTensorHandle x_, AtenTensorHandle norm_, AtenTensorHandle weight_, AtenTensorHandle head_norm_,
    AtenTensorHandle cos_, AtenTensorHandle sin_, double eps, AtenTensorHandle* out_
) {
    return guarded("project_heads", [&] {
        const Tensor<float> x(x_), norm(norm_), weight(weight_), head_norm(head_norm_), cos(cos_), sin(sin_);
        const int64_t rows = x.sizes[0], hidden = x.sizes[1], turned = head_norm.sizes[0], size = head_norm.sizes[1];
        const int64_t kv_heads = weight.sizes[1] / size - turned;
        const Projection part{
            norm.data, weight.data, head_norm.data, hidden, turned - kv_heads, kv_heads, size, eps
        };
        require(hidden % WIDTH == 0 && size % WIDTH == 0, "the widths are no multiples of a vector");
        const Tensor<float> out = new_tensor({rows, turned + kv_heads, size}, out_);
        in_pieces(rows, [&](int64_t first, int64_t count) {
            const int64_t at = first * size;
            float* to = out.data + first * part.width();
            part.run(x.data + first * hidden, count, cos.data + at, sin.data + at, size, to);
        });
    });
}

// See ops.row_attention.
extern "C" AOTITorchError aoti_torch_cpu_row_attention(
    AtenTensorHandle heads_, AtenTensorHandle lines_, AtenTensorHandle first_lines_, AtenTensorHandle lengths_,
    AtenTensorHandle* out_
) {
    return guarded("row_attention", [&] {
        const Tensor<float> all(heads_), lines(lines_);
        const Tensor<int64_t> first_lines(first_lines_), lengths(lengths_);
        const int64_t rows = all.sizes[0], size = all.sizes[2], kv_heads = first_lines.sizes[1] / 2;
        const int64_t heads = all.sizes[1] - 2 * kv_heads, group = heads / kv_heads;
        require(size % WIDTH == 0, "the heads are no multiple of a vector");
        const Tensor<float> out = new_tensor({rows, heads * size}, out_);
        Attention attention{group, size};
        for (int64_t row = 0; row < rows; row++)
            for (int64_t kv = 0; kv < kv_heads; kv++) {
                const int64_t* first = first_lines.data + row * 2 * kv_heads + kv;
                const float *keys = lines.data + first[0] * size, *values = lines.data + first[kv_heads] * size;
                const float* queries = all.data + (row * all.sizes[1] + kv * group) * size;
                float* to = out.data + (row * heads + kv * group) * size;
                attention.run(queries, keys, values, lengths.data[row] + 1, to);
            }
    });
}

// See ops.finish_dense.
extern "C" AOTITorchError aoti_torch_cpu_finish_dense(
    AtenTensorHandle x_, AtenTensorHandle attended_, AtenTensorHandle out_weight_, AtenTensorHandle norm_,
    AtenTensorHandle gate_up_, AtenTensorHandle down_, double eps, AtenTensorHandle* out_
) {
    return guarded("finish_dense", [&] {
        const Tensor<float> x(x_), attended(attended_), weight(out_weight_), norm(norm_);
        const Tensor<float> gate_up(gate_up_), down(down_);
        const int64_t rows = x.sizes[0], hidden = x.sizes[1], inner = attended.sizes[1];
        const Joint joint{weight.data, norm.data, inner, hidden, eps};
        const SwiGLU mlp{gate_up.data, down.data, hidden, down.sizes[0]};
        require(hidden % WIDTH == 0 && mlp.inner % WIDTH == 0, "the widths are no multiples of a vector");
        const Tensor<float> out = new_tensor({rows, hidden}, out_);
        in_pieces(rows, [&](int64_t first, int64_t count) {
            std::vector<float> normed(count * hidden), halves(count * 2 * mlp.inner);
            float* to = out.data + first * hidden;
            joint.run(x.data + first * hidden, attended.data + first * inner, count, to, normed.data());
            const auto lines = lines_of(normed.data(), count, hidden);
            mlp.run(lines.data(), count, halves, [&](int64_t m, int64_t column, Vector sum) {
                store(to + m * hidden + column, load(to + m * hidden + column) + sum);
            });
        });
    });
}

// See ops.finish_experts.
extern "C" AOTITorchError aoti_torch_cpu_finish_experts(
    AtenTensorHandle x_, AtenTensorHandle attended_, AtenTensorHandle out_weight_, AtenTensorHandle norm_,
    AtenTensorHandle front_, AtenTensorHandle gate_up_, AtenTensorHandle down_, AtenTensorHandle shared_down_,
    int64_t top_k, bool norm_topk, double eps, AtenTensorHandle* out_
) {
    return guarded("finish_experts", [&] {
        const Tensor<float> x(x_), attended(attended_), weight(out_weight_), norm(norm_);
        const Tensor<float> front(front_), gate_up(gate_up_), down(down_), shared_down(shared_down_);
        const int64_t rows = x.sizes[0], hidden = x.sizes[1], inner = attended.sizes[1];
        const Joint joint{weight.data, norm.data, inner, hidden, eps};
        const Experts experts{
            front.data, gate_up.data, down.data, shared_down.data, hidden, front.sizes[1], down.sizes[0], down.sizes[1],
            shared_down.sizes[0], top_k, norm_topk
        };
        for (const int64_t width : {hidden, experts.width, experts.inner, experts.shared})
            require(width % WIDTH == 0, "the widths are no multiples of a vector");
        const Tensor<float> out = new_tensor({rows, hidden}, out_);
        in_pieces(rows, [&](int64_t first, int64_t count) {
            std::vector<float> normed(count * hidden);
            float* to = out.data + first * hidden;
            joint.run(x.data + first * hidden, attended.data + first * inner, count, to, normed.data());
            experts.run(normed.data(), count, to);
        });
    });
}
