// The vocoder's activations and convolutions, a stretch of time after the other: what lies between the input and the
// output of a kernel never leaves the processor's nearest caches.
#include "tensors.h"
#include "vector.h"

#include <algorithm>

namespace {

using Floats = Tensor<float>;

constexpr int64_t STRETCH = 4 * LINE;

struct Snake {
    const float *turns, *gain;

    // x + gain * sin(pi * x * turns)^2. The square of the sine repeats with every turn, and in between it is a
    // polynomial in the square of the distance from the nearest whole turn (interpolated at Chebyshev nodes; off by
    // 2e-7 at most).
    Vector operator()(Vector x, int64_t channel) const {
        const Vector turn = x * turns[channel], off = turn - rounded(turn), square = off * off;
        const float series[] = {9.86960431f, -32.46967117f, 42.72719634f, -30.10146584f, 13.05009892f, -3.35659262f};
        return x + gain[channel] * (square * polynomial(square, series));
    }

    // `count` steps of every channel in place, in whole vectors: a line ends in room for one.
    void operator()(float* lines, int64_t stride, int64_t channels, int64_t count) const {
        for (int64_t c = 0; c < channels; c++)
            for (float *at = lines + c * stride, *end = at + count; at < end; at += WIDTH)
                store(at, (*this)(load(at), c));
    }
};

struct Convolution {
    const float *weight, *bias;  // [inputs, taps, outputs] and [outputs]
    int64_t inputs, taps, outputs, dilation;

    // out[o][t] = bias[o] + sum over c and k of weight[c][k][o] * in[c][t + k * dilation]; lines of STRETCH numbers, of
    // which `count` are wanted, in whole vectors.
    void operator()(const float* in, int64_t stride, float* out, int64_t count) const {
        for (int64_t o = 0; o < outputs; o += BLOCK)
            block(outputs - o, [&]<int64_t ROWS>() {
                for (int64_t t = 0; t < count;)
                    if (count - t > LINE / 2) sum<ROWS, VECTORS>(in + t, stride, o, out + o * STRETCH + t), t += LINE;
                    else sum<ROWS, 1>(in + t, stride, o, out + o * STRETCH + t), t += WIDTH;
            });
    }

    template <int64_t ROWS, int64_t LINES>
    void sum(const float* in, int64_t stride, int64_t first, float* out) const {
        Vector sums[ROWS][LINES], line[LINES];
        for (int64_t m = 0; m < ROWS; m++)
            for (int64_t v = 0; v < LINES; v++) sums[m][v] = filled(bias[first + m]);
        const float* tap = weight + first;
        for (int64_t c = 0; c < inputs; c++)
            for (int64_t k = 0; k < taps; k++, tap += outputs) {
                for (int64_t v = 0; v < LINES; v++) line[v] = load(in + c * stride + k * dilation + v * WIDTH);
                for (int64_t m = 0; m < ROWS; m++)
                    for (int64_t v = 0; v < LINES; v++) sums[m][v] += tap[m] * line[v];
            }
        for (int64_t m = 0; m < ROWS; m++)
            for (int64_t v = 0; v < LINES; v++) store(out + m * STRETCH + v * WIDTH, sums[m][v]);
    }
};

// Activates the steps of each row of signal [B, C, T], behind those `before` [B, C, P], and calls
// work(row, at, count, lines, stride) for the places at .. at + count of the row that have `padding` steps behind them.
// `kept` [B, C, padding] takes the last steps of row b up to signal[ends[b]].
template <typename Work>
void each_stretch(
    const Floats& signal, const Floats& before, const int64_t* ends, const Snake& snake, int64_t padding, float* kept,
    Work work
) {
    const int64_t channels = signal.sizes[1], steps = signal.sizes[2], earlier = before.sizes[2];
    const int64_t stride = padding + STRETCH + LINE;
    require(steps > 0 && earlier <= padding, "there are no steps, or more before them than are looked back on");
    std::vector<float> lines(channels * stride);
    for (int64_t b = 0; b < signal.sizes[0]; b++) {
        for (int64_t c = 0; c < channels; c++)
            std::copy_n(before.data + (b * channels + c) * earlier, earlier, &lines[c * stride]);
        const int64_t first_kept = ends[b] + earlier - padding, end_kept = ends[b] + earlier;
        for (int64_t t = 0, at = 0, held = earlier; t < steps; t += STRETCH) {
            const int64_t fresh = std::min(STRETCH, steps - t), total = held + fresh, count = total - padding;
            for (int64_t c = 0; c < channels; c++)
                std::copy_n(signal.data + (b * channels + c) * steps + t, fresh, &lines[c * stride + held]);
            snake(&lines[held], stride, channels, fresh);
            if (count > 0) work(b, at, count, lines.data(), stride);
            const int64_t first = std::max(at, first_kept), last = std::min(at + total, end_kept);
            held = std::min(total, padding);
            for (int64_t c = 0; c < channels; c++) {
                float* line = &lines[c * stride];
                float* keep = kept + (b * channels + c) * padding - first_kept;
                if (first < last) std::copy_n(line + first - at, last - first, keep + first);
                std::copy_n(line + total - held, held, line);
            }
            at += total - held;
        }
    }
}

}  // namespace

// See ops.snake_convolution.
extern "C" AOTITorchError aoti_torch_cpu_snake_convolution(
    AtenTensorHandle signal_, AtenTensorHandle before_, AtenTensorHandle ends, int64_t rate, AtenTensorHandle turns,
    AtenTensorHandle gain, AtenTensorHandle weight_, AtenTensorHandle bias, AtenTensorHandle* out_,
    AtenTensorHandle* kept_
) {
    return guarded("snake_convolution", [&] {
        const Floats signal(signal_), before(before_), weight(weight_);
        const int64_t batch = signal.sizes[0], inputs = signal.sizes[1], padding = weight.sizes[1] - 1;
        const int64_t places = before.sizes[2] + signal.sizes[2] - padding, outputs = weight.sizes[2] / rate;
        const Floats out = new_tensor({batch, outputs, places * rate}, out_);
        const Floats kept = new_tensor({batch, inputs, padding}, kept_);
        const Convolution convolution{weight.data, Floats(bias).data, inputs, padding + 1, outputs * rate, 1};
        std::vector<float> sums(outputs * rate * STRETCH);
        each_stretch(
            signal, before, Tensor<int64_t>(ends).data, {Floats(turns).data, Floats(gain).data}, padding, kept.data,
            [&](int64_t row, int64_t at, int64_t count, const float* lines, int64_t stride) {
                convolution(lines, stride, sums.data(), count);
                for (int64_t o = 0; o < outputs; o++) {
                    float* to = out.data + ((row * outputs + o) * places + at) * rate;
                    for (int64_t r = 0; r < rate; r++)
                        for (int64_t i = 0; i < count; i++) to[i * rate + r] = sums[(o * rate + r) * STRETCH + i];
                }
            }
        );
    });
}

// See ops.residual_unit.
extern "C" AOTITorchError aoti_torch_cpu_residual_unit(
    AtenTensorHandle signal_, AtenTensorHandle before_, AtenTensorHandle ends, int64_t dilation,
    AtenTensorHandle turns1, AtenTensorHandle gain1, AtenTensorHandle weight1_, AtenTensorHandle bias1,
    AtenTensorHandle turns2, AtenTensorHandle gain2, AtenTensorHandle weight2, AtenTensorHandle bias2,
    AtenTensorHandle* out_, AtenTensorHandle* kept_
) {
    return guarded("residual_unit", [&] {
        const Floats signal(signal_), before(before_), weight1(weight1_);
        const int64_t batch = signal.sizes[0], channels = signal.sizes[1], steps = signal.sizes[2];
        const int64_t taps = weight1.sizes[1], padding = (taps - 1) * dilation;
        require(before.sizes[2] == padding, "there is not as much before the steps as is looked back on");
        const Floats out = new_tensor({batch, channels, steps}, out_);
        const Floats kept = new_tensor({batch, channels, padding}, kept_);
        const Convolution wide{weight1.data, Floats(bias1).data, channels, taps, channels, dilation};
        const Convolution narrow{Floats(weight2).data, Floats(bias2).data, channels, 1, channels, 1};
        const Snake snake{Floats(turns2).data, Floats(gain2).data};
        std::vector<float> mixed(channels * STRETCH), sums(channels * STRETCH);
        each_stretch(
            signal, before, Tensor<int64_t>(ends).data, {Floats(turns1).data, Floats(gain1).data}, padding, kept.data,
            [&](int64_t row, int64_t at, int64_t count, const float* lines, int64_t stride) {
                wide(lines, stride, mixed.data(), count);
                snake(mixed.data(), STRETCH, channels, count);
                narrow(mixed.data(), STRETCH, sums.data(), count);
                for (int64_t c = 0; c < channels; c++) {
                    const int64_t place = (row * channels + c) * steps + at;
                    const float *base = signal.data + place, *added = &sums[c * STRETCH];
                    for (int64_t i = 0; i < count; i++) out.data[place + i] = base[i] + added[i];
                }
            }
        );
    });
}
