// The experts of a step: each multiplies the rows that chose it where they are.
#include "products.h"

// See ops.experts.
extern "C" AOTITorchError aoti_torch_cpu_experts(
    AtenTensorHandle x_, AtenTensorHandle residual_, AtenTensorHandle weights_, AtenTensorHandle chosen_,
    AtenTensorHandle gate_up_, AtenTensorHandle down_, AtenTensorHandle* out_
) {
    return guarded("experts", [&] {
        const Tensor<float> x(x_), residual(residual_), weights(weights_), gate_up(gate_up_), down(down_);
        const Tensor<int64_t> chosen(chosen_);
        const int64_t tokens = x.sizes[0], hidden = x.sizes[1], top_k = chosen.sizes[1];
        const int64_t count = down.sizes[0], inner = down.sizes[1];
        require(hidden % WIDTH == 0 && inner % WIDTH == 0, "the widths are no multiples of a vector");
        const Tensor<float> out = new_tensor({tokens, hidden}, out_);
        std::copy_n(residual.data, tokens * hidden, out.data);
        std::vector<const float*> rows(tokens);
        std::vector<int64_t> pairs(tokens);
        std::vector<float> halves(tokens * 2 * inner);
        for (int64_t expert = 0; expert < count; expert++) {
            int64_t own = 0;
            for (int64_t pair = 0; pair < tokens * top_k; pair++)
                if (chosen.data[pair] == expert) pairs[own] = pair, rows[own++] = x.data + pair / top_k * hidden;
            if (!own) continue;
            const Matrix into{gate_up.data + expert * hidden * 2 * inner, hidden, 2 * inner, 2 * inner};
            const Matrix back{down.data + expert * inner * hidden, inner, hidden, hidden};
            multiply(rows.data(), own, into, [&](int64_t m, int64_t column, Vector sum) {
                store(&halves[m * 2 * inner + column], sum);
            });
            for (int64_t m = 0; m < own; m++) {
                float *gate = &halves[m * 2 * inner], *up = gate + inner;
                for (int64_t i = 0; i < inner; i += WIDTH) {
                    const Vector value = load(gate + i);
                    store(gate + i, value / (1.0f + exponential(-value)) * load(up + i));
                }
                rows[m] = gate;
            }
            multiply(rows.data(), own, back, [&](int64_t m, int64_t column, Vector sum) {
                float* to = out.data + pairs[m] / top_k * hidden + column;
                store(to, load(to) + weights.data[pairs[m]] * sum);
            });
        }
    });
}
