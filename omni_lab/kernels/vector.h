// Vectors of the widest registers that the processor has, in the notation that GCC and Clang share.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
constexpr int64_t WIDTH = 16, VECTORS = 4;  // numbers of a vector, and vectors of a line: what fits beside BLOCK sums
#elif defined(__AVX2__)
constexpr int64_t WIDTH = 8, VECTORS = 2;
#else
constexpr int64_t WIDTH = 4, VECTORS = 4;
#endif
constexpr int64_t LINE = WIDTH * VECTORS;
constexpr int64_t BLOCK = 6;  // lines of sums that are kept in registers at a time

typedef float Vector __attribute__((vector_size(WIDTH * sizeof(float))));

inline Vector load(const float* from) {
    Vector value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store(float* to, Vector value) { std::memcpy(to, &value, sizeof value); }

inline Vector filled(float value) { return value - Vector{}; }

// The nearest whole number: what is added to 1.5 * 2^23 loses its fraction. For |x| up to 2^22.
inline Vector rounded(Vector x) {
    const Vector large = filled(12582912.0f);
    return (x + large) - large;
}

// The sum of coefficients[i] * x^i.
template <size_t COUNT>
inline Vector polynomial(Vector x, const float (&coefficients)[COUNT]) {
    Vector sum = filled(coefficients[COUNT - 1]);
    for (size_t i = COUNT - 1; i-- > 0;) sum = sum * x + coefficients[i];
    return sum;
}

// e^x: a power of two, which is written into the exponent of a number, times 2 to what is left, a polynomial
// (interpolated at Chebyshev nodes; off by 1e-7 of the value). 0 below -87, and above 87 as at 87.
inline Vector exponential(Vector x) {
    typedef int32_t Bits __attribute__((vector_size(sizeof(Vector))));
    const float series[] = {1.0f, 0.69314718f, 0.24022651f, 0.05550327f, 0.00961803f, 0.00134004f, 0.00015470f};
    const Vector most = filled(87.0f), least = filled(-87.0f);
    const Vector power = (x > most ? most : x < least ? least : x) * 1.44269504f, whole = rounded(power);
    const Bits exponent = (__builtin_convertvector(whole, Bits) + 127) << 23;
    Vector scale;
    std::memcpy(&scale, &exponent, sizeof scale);
    return x < least ? Vector{} : scale * polynomial(power - whole, series);
}

// One number of all of a vector, by halves.
template <int64_t HALF = WIDTH / 2, typename Join>
inline float joined(Vector vector, Join join) {
    if constexpr (HALF == 0) {
        return vector[0];
    } else {
        const auto other = [&]<size_t... I>(std::index_sequence<I...>) {
            return __builtin_shufflevector(vector, vector, (I + HALF) % WIDTH...);
        };
        return joined<HALF / 2>(join(vector, other(std::make_index_sequence<WIDTH>())), join);
    }
}

inline float total(Vector vector) {
    return joined(vector, [](Vector a, Vector b) { return a + b; });
}

inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

inline float largest(Vector vector) { return joined(vector, larger); }

// The sums of neighbours in two vectors, those of the first one in front.
template <size_t... I>
inline Vector neighbours(Vector a, Vector b, std::index_sequence<I...>) {
    return __builtin_shufflevector(a, b, 2 * I...) + __builtin_shufflevector(a, b, 2 * I + 1 ...);
}

// The totals of WIDTH vectors as one; they are overwritten.
inline Vector totals(Vector* vectors) {
    for (int64_t left = WIDTH / 2; left; left /= 2)
        for (int64_t i = 0; i < left; i++)
            vectors[i] = neighbours(vectors[2 * i], vectors[2 * i + 1], std::make_index_sequence<WIDTH>());
    return vectors[0];
}

// Calls function.template operator()<n>() for n = min(left, BLOCK): the compiler knows how many sums a loop keeps.
template <typename Function>
inline void block(int64_t left, Function function) {
    switch (left) {
        case 1: return function.template operator()<1>();
        case 2: return function.template operator()<2>();
        case 3: return function.template operator()<3>();
        case 4: return function.template operator()<4>();
        case 5: return function.template operator()<5>();
        default: return function.template operator()<BLOCK>();
    }
}
