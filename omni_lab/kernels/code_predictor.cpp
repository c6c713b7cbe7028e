// The code predictor: all residual codes of a frame, for many rows together.
#include "decoder.h"

namespace {

// The tensors of a layer, in the order of ops.predict_codes.
constexpr int64_t OF_LAYER = 7;

// The first of the likeliest codes.
int64_t likeliest(const float* logits, int64_t codes) {
    Vector highest = load(logits + codes - WIDTH);
    for (int64_t code = 0; code + WIDTH <= codes; code += WIDTH) highest = larger(highest, load(logits + code));
    return std::min(std::find(logits, logits + codes, largest(highest)) - logits, codes - 1);
}

// Scores and ids of the likeliest codes, the likeliest first.
struct Ranked {
    double weight;
    int64_t code;
};

// One code by inverse transform of `uniform`: from the k likeliest, and of these from as many as together reach top_p.
int64_t drawn(const float* logits, int64_t codes, int64_t top_k, double top_p, double uniform, std::vector<Ranked>& kept) {
    kept.resize(codes);
    for (int64_t code = 0; code < codes; code++) kept[code] = {logits[code], code};
    const auto likelier = [](const Ranked& a, const Ranked& b) { return a.weight > b.weight; };
    const int64_t count = std::min(top_k, codes);
    std::nth_element(kept.begin(), kept.begin() + count - 1, kept.end(), likelier);
    std::sort(kept.begin(), kept.begin() + count, likelier);
    const double most = kept[0].weight;
    double sum = 0, edge = 0;
    for (int64_t i = 0; i < count; i++) sum += kept[i].weight = std::exp(kept[i].weight - most);
    int64_t last = 0;
    for (; last < count; last++)
        if ((edge += kept[last].weight / sum) >= top_p) break;
    const double target = uniform * (last < count ? edge : 1.0);
    edge = 0;
    for (int64_t i = 0; i < count; i++)
        if ((edge += kept[i].weight / sum) > target) return kept[i].code;
    return kept[count - 1].code;
}

}  // namespace

// See ops.predict_codes.
extern "C" AOTITorchError aoti_torch_cpu_predict_codes(
    AtenTensorHandle hidden_, AtenTensorHandle embed0_, AtenTensorHandle cos_, AtenTensorHandle sin_,
    const AtenTensorHandle* layers_, int64_t tensors, AtenTensorHandle norm_, AtenTensorHandle embedding_,
    AtenTensorHandle head_, AtenTensorHandle uniforms_, double eps, int64_t top_k, double top_p,
    AtenTensorHandle* codes_out, AtenTensorHandle* embeds_out
) {
    return guarded("predict_codes", [&] {
        const Tensor<float> hidden(hidden_), embed0(embed0_), cos(cos_), sin(sin_), norm(norm_);
        const Tensor<float> embedding(embedding_), head(head_);
        const Tensor<double> uniforms(uniforms_);
        const int64_t rows = hidden.sizes[0], width = hidden.sizes[1], positions = cos.sizes[0], size = cos.sizes[1];
        const int64_t codes = head.sizes[2];
        require(width % WIDTH == 0 && size % WIDTH == 0 && codes >= WIDTH, "the widths are no multiples of a vector");
        require(embedding.sizes[0] == positions - 1 && uniforms.sizes[1] == positions, "the groups are not as many");
        std::vector<Projection> projections;
        std::vector<Joint> joints;
        std::vector<SwiGLU> mlps;
        for (int64_t layer = 0; layer < tensors; layer += OF_LAYER) {
            const AtenTensorHandle* own = layers_ + layer;
            const Tensor<float> in(own[0]), qkv(own[1]), head_norm(own[2]), out(own[3]), after(own[4]), gate_up(own[5]);
            const Tensor<float> down(own[6]);
            const int64_t turned = head_norm.sizes[0], kv_heads = qkv.sizes[1] / size - turned;
            projections.push_back(
                {in.data, qkv.data, head_norm.data, width, turned - kv_heads, kv_heads, size, eps}
            );
            joints.push_back({out.data, after.data, out.sizes[0], width, eps});
            mlps.push_back({gate_up.data, down.data, width, down.sizes[0]});
            require(down.sizes[0] % WIDTH == 0, "the widths are no multiples of a vector");
        }
        const Tensor<int64_t> chosen = new_tensor<int64_t>({rows, positions - 1}, codes_out);
        const Tensor<float> embeds = new_tensor<float>({rows, width}, embeds_out);
        const int64_t kv_heads = projections[0].kv_heads, heads = projections[0].heads, group = heads / kv_heads;
        const int64_t row_size = 2 * kv_heads * positions * size;
        std::vector<float> memory(projections.size() * rows * row_size), x(rows * width), normed(rows * width);
        std::vector<float> projected(rows * projections[0].width()), attended(rows * heads * size);
        std::vector<float> halves(rows * 2 * mlps[0].inner), logits(rows * codes);
        const auto normed_lines = lines_of(normed.data(), rows, width);
        Attention attention{group, size};
        std::vector<Ranked> kept;
        const auto step = [&](int64_t position) {  // x -> the output of the last layer, in its place
            float* own = memory.data();
            for (size_t layer = 0; layer < projections.size(); layer++) {
                const Projection& front = projections[layer];
                const float *turn_cos = cos.data + position * size, *turn_sin = sin.data + position * size;
                front.run(x.data(), rows, turn_cos, turn_sin, 0, projected.data());
                for (int64_t m = 0; m < rows; m++, own += row_size) {
                    const float* token = &projected[m * front.width()];
                    for (int64_t kv = 0; kv < 2 * kv_heads; kv++)
                        std::copy_n(token + (heads + kv) * size, size, own + (kv * positions + position) * size);
                    for (int64_t kv = 0; kv < kv_heads; kv++) {
                        const float *keys = own + kv * positions * size, *values = keys + kv_heads * positions * size;
                        float* out = &attended[(m * heads + kv * group) * size];
                        attention.run(token + kv * group * size, keys, values, position + 1, out);
                    }
                }
                joints[layer].run(x.data(), attended.data(), rows, x.data(), normed.data());
                mlps[layer].run(normed_lines.data(), rows, halves, [&](int64_t m, int64_t column, Vector sum) {
                    store(&x[m * width + column], load(&x[m * width + column]) + sum);
                });
            }
        };
        std::copy_n(hidden.data, rows * width, x.data());
        step(0);
        std::copy_n(embed0.data, rows * width, x.data());
        std::fill_n(embeds.data, rows * width, 0.0f);
        for (int64_t group = 1; group < positions; group++) {
            step(group);
            rms_norm(x.data(), rows, width, norm.data, eps, normed.data());
            const Matrix own_head{head.data + (group - 1) * width * codes, width, codes, codes};
            multiply(normed_lines.data(), rows, own_head, [&](int64_t m, int64_t column, Vector sum) {
                store(&logits[m * codes + column], sum);
            });
            for (int64_t m = 0; m < rows; m++) {
                const float* own = &logits[m * codes];
                const double uniform = uniforms.data[m * positions + group];
                const int64_t code = uniform < 0 ? likeliest(own, codes)
                                                 : drawn(own, codes, top_k, top_p, uniform, kept);
                const float* vector = embedding.data + ((group - 1) * codes + code) * width;
                chosen.data[m * (positions - 1) + group - 1] = code;
                std::copy_n(vector, width, &x[m * width]);
                for (int64_t i = 0; i < width; i++) embeds.data[m * width + i] += vector[i];
            }
        }
        for (int64_t i = 0; i < rows * width; i++) embeds.data[i] += embed0.data[i];
    });
}
