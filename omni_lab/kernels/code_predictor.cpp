// The code predictor: all residual codes of a frame, for many rows together.
#include "decoder.h"

namespace {

struct Layer {
    Projection front;
    Joint joint;
    SwiGLU mlp;
};

// The tensors of a layer, in the order of ops.predict_codes.
constexpr int64_t OF_LAYER = 7;

std::vector<Layer> layers_of(const AtenTensorHandle* tensors, int64_t count, int64_t size, double eps) {
    std::vector<Layer> layers;
    for (const AtenTensorHandle* own = tensors; own < tensors + count; own += OF_LAYER) {
        const Tensor<float> norm(own[0]), qkv(own[1]), head_norm(own[2]), out(own[3]), mlp_norm(own[4]);
        const Tensor<float> gate_up(own[5]), down(own[6]);
        const int64_t width = qkv.sizes[0], inner = down.sizes[0], turned = head_norm.sizes[0];
        const int64_t kv_heads = qkv.sizes[1] / size - turned, heads = turned - kv_heads;
        require(!(width % WIDTH || inner % WIDTH || size % WIDTH), "the widths are no multiples of a vector");
        layers.push_back({
            {norm.data, qkv.data, head_norm.data, width, heads, kv_heads, size, eps},
            {out.data, mlp_norm.data, out.sizes[0], width, eps},
            {gate_up.data, down.data, width, inner},
        });
    }
    return layers;
}

// A batch of rows on its way through the positions of one frame; keys and values are forgotten with it.
struct Frame {
    const std::vector<Layer>& layers;
    int64_t rows, positions, width = layers[0].front.hidden, heads = layers[0].front.heads;
    int64_t kv_heads = layers[0].front.kv_heads, size = layers[0].front.size, group = heads / kv_heads;
    std::vector<float> x = std::vector<float>(rows * width), normed = x;
    std::vector<float> attended = std::vector<float>(rows * heads * size);
    std::vector<float> projected = std::vector<float>(rows * layers[0].front.width());
    std::vector<float> halves = std::vector<float>(rows * 2 * layers[0].mlp.inner);
    std::vector<float> memory = std::vector<float>(layers.size() * rows * 2 * kv_heads * positions * size);
    std::vector<const float*> normed_lines = lines_of(normed.data(), rows, width);
    Attention attention{group, size};

    // x -> the output of the last layer, in its place.
    void step(int64_t position, const float* cos, const float* sin) {
        float* own = memory.data();
        for (const Layer& layer : layers) {
            layer.front.run(x.data(), rows, cos + position * size, sin + position * size, 0, projected.data());
            for (int64_t m = 0; m < rows; m++, own += 2 * kv_heads * positions * size) attend(m, position, own);
            layer.joint.run(x.data(), attended.data(), rows, x.data(), normed.data());
            layer.mlp.run(normed_lines.data(), rows, halves, [&](int64_t m, int64_t column, Vector sum) {
                store(&x[m * width + column], load(&x[m * width + column]) + sum);
            });
        }
    }

    // Row m of a layer: its key and value join those of earlier positions, own [2, kv_heads, positions, size].
    void attend(int64_t m, int64_t position, float* own) {
        const float* token = &projected[m * (heads + 2 * kv_heads) * size];
        for (int64_t kv = 0; kv < 2 * kv_heads; kv++)
            std::copy_n(token + (heads + kv) * size, size, own + (kv * positions + position) * size);
        for (int64_t kv = 0; kv < kv_heads; kv++) {
            const float *keys = own + kv * positions * size, *values = keys + kv_heads * positions * size;
            float* out = &attended[(m * heads + kv * group) * size];
            attention.run(token + kv * group * size, keys, values, position + 1, out);
        }
    }
};

// The first of the likeliest codes.
int64_t likeliest(const float* logits, int64_t codes) {
    Vector highest = load(logits + codes - WIDTH);
    for (int64_t code = 0; code + WIDTH <= codes; code += WIDTH) highest = larger(highest, load(logits + code));
    return std::min(std::find(logits, logits + codes, largest(highest)) - logits, codes - 1);
}

// A code and its score, which becomes its weight.
struct Ranked {
    double weight;
    int64_t code;
};

// One code by inverse transform of `uniform`: from the k likeliest, and of these from as many as together reach top_p.
int64_t drawn(const float* logits, int64_t top_k, double top_p, double uniform, std::vector<Ranked>& kept) {
    const int64_t codes = kept.size();
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
    const AtenTensorHandle* tensors, int64_t count, AtenTensorHandle norm_, AtenTensorHandle embedding_,
    AtenTensorHandle head_, AtenTensorHandle uniforms_, double eps, int64_t top_k, double top_p,
    AtenTensorHandle* codes_out, AtenTensorHandle* embeds_out
) {
    return guarded("predict_codes", [&] {
        const Tensor<float> hidden(hidden_), embed0(embed0_), cos(cos_), sin(sin_), norm(norm_);
        const Tensor<float> embedding(embedding_), head(head_);
        const Tensor<double> uniforms(uniforms_);
        const int64_t rows = hidden.sizes[0], width = hidden.sizes[1], positions = cos.sizes[0], codes = head.sizes[2];
        require(embedding.sizes[0] == positions - 1 && uniforms.sizes[1] == positions, "the groups are not as many");
        require(codes >= WIDTH, "there are fewer codes than numbers of a vector");
        const std::vector<Layer> layers = layers_of(tensors, count, cos.sizes[1], eps);
        const Tensor<int64_t> chosen = new_tensor<int64_t>({rows, positions - 1}, codes_out);
        const Tensor<float> embeds = new_tensor({rows, width}, embeds_out);
        std::fill_n(embeds.data, rows * width, 0.0f);
        Frame frame{layers, rows, positions};
        std::vector<float> logits(rows * codes);
        std::vector<Ranked> ranked(codes);
        std::copy_n(hidden.data, rows * width, frame.x.data());
        frame.step(0, cos.data, sin.data);
        std::copy_n(embed0.data, rows * width, frame.x.data());
        for (int64_t group = 0; group < positions - 1; group++) {
            frame.step(group + 1, cos.data, sin.data);
            rms_norm(frame.x.data(), rows, width, norm.data, eps, frame.normed.data());
            const Matrix own_head{head.data + group * width * codes, width, codes, codes};
            multiply(frame.normed_lines.data(), rows, own_head, [&](int64_t m, int64_t column, Vector sum) {
                store(&logits[m * codes + column], sum);
            });
            for (int64_t m = 0; m < rows; m++) {
                const float* own = &logits[m * codes];
                const double uniform = uniforms.data[m * positions + group + 1];
                const int64_t code = uniform < 0 ? likeliest(own, codes) : drawn(own, top_k, top_p, uniform, ranked);
                const float* vector = embedding.data + (group * codes + code) * width;
                chosen.data[m * (positions - 1) + group] = code;
                std::copy_n(vector, width, &frame.x[m * width]);
                for (int64_t i = 0; i < width; i++) embeds.data[m * width + i] += vector[i];
            }
        }
        for (int64_t i = 0; i < rows * width; i++) embeds.data[i] += embed0.data[i];
    });
}
