// Products of a few rows with matrices that lie in a cache. Nothing is packed or copied first, and a row's sums run in
// one order whatever the batch, so that a result does not depend on its neighbours.
#pragma once

#include "tensors.h"
#include "vector.h"

#include <algorithm>

// ROWS rows times LINES vectors of columns; store_sum(row, column, vector) takes the sums.
template <int64_t ROWS, int64_t LINES, typename Store>
inline void multiply_block(
    const float* const* rows, const float* weight, int64_t depth, int64_t stride, Store store_sum
) {
    Vector sums[ROWS][LINES] = {}, line[LINES];
    const float* own[ROWS];
    std::copy_n(rows, ROWS, own);
    for (int64_t k = 0; k < depth; k++, weight += stride) {
        for (int64_t v = 0; v < LINES; v++) line[v] = load(weight + v * WIDTH);
        for (int64_t m = 0; m < ROWS; m++)
            for (int64_t v = 0; v < LINES; v++) sums[m][v] += own[m][k] * line[v];
    }
    for (int64_t m = 0; m < ROWS; m++)
        for (int64_t v = 0; v < LINES; v++) store_sum(m, v * WIDTH, sums[m][v]);
}

// A matrix [depth, width] whose lines lie `stride` numbers apart.
struct Matrix {
    const float* data;
    int64_t depth, width, stride;
};

// Where each of `count` lines begins that stand one behind the other.
inline std::vector<const float*> lines_of(const float* data, int64_t count, int64_t width) {
    std::vector<const float*> lines(count);
    for (int64_t m = 0; m < count; m++) lines[m] = data + m * width;
    return lines;
}

// `count` rows times a matrix of at least WIDTH columns, column after column. Where the width is no multiple of WIDTH
// (the heads of a vocabulary), the last vector of columns begins early, so that some sums are stored twice.
template <typename Store>
void multiply(const float* const* rows, int64_t count, const Matrix& matrix, Store store_sum) {
    auto columns = [&]<int64_t LINES>(int64_t column) {
        for (int64_t m = 0; m < count; m += BLOCK)
            block(count - m, [&]<int64_t ROWS>() {
                auto store_here = [&](int64_t row, int64_t at, Vector sum) { store_sum(m + row, column + at, sum); };
                multiply_block<ROWS, LINES>(rows + m, matrix.data + column, matrix.depth, matrix.stride, store_here);
            });
    };
    int64_t column = 0;
    if (count == 1)  // bound by reading: longer stretches of each line
        for (; column + 4 * LINE <= matrix.width; column += 4 * LINE) {
            auto store_here = [&](int64_t row, int64_t at, Vector sum) { store_sum(row, column + at, sum); };
            multiply_block<1, 4 * VECTORS>(rows, matrix.data + column, matrix.depth, matrix.stride, store_here);
        }
    for (; column + LINE <= matrix.width; column += LINE) columns.template operator()<VECTORS>(column);
    for (; column + WIDTH <= matrix.width; column += WIDTH) columns.template operator()<1>(column);
    if (column < matrix.width) columns.template operator()<1>(matrix.width - WIDTH);
}
