// Tensors as AOTInductor's C interface hands them over: contiguous, on the CPU.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <exception>
#include <iostream>
#include <stdexcept>
#include <type_traits>
#include <vector>

inline void require(bool fulfilled, const char* otherwise) {
    if (!fulfilled) throw std::runtime_error(otherwise);
}

template <typename Number>
int32_t dtype_of() {
    if (std::is_same_v<Number, float>) return aoti_torch_dtype_float32();
    return std::is_same_v<Number, double> ? aoti_torch_dtype_float64() : aoti_torch_dtype_int64();
}

template <typename Number>
struct Tensor {
    Number* data;
    const int64_t* sizes;

    explicit Tensor(AtenTensorHandle handle) {
        int32_t dtype;
        require(!aoti_torch_get_dtype(handle, &dtype), "a tensor has no type");
        require(dtype == dtype_of<Number>(), "a tensor has numbers of another type");
        bool contiguous;
        require(!aoti_torch_is_contiguous(handle, &contiguous), "a tensor cannot be asked");
        require(contiguous, "a tensor is not contiguous");
        void* memory;
        int64_t* shape;
        require(!aoti_torch_get_data_ptr(handle, &memory), "a tensor has no memory");
        require(!aoti_torch_get_sizes(handle, &shape), "a tensor has no sizes");
        data = static_cast<Number*>(memory);
        sizes = shape;
    }
};

// A new tensor, whose handle goes to `handle`.
template <typename Number = float>
Tensor<Number> new_tensor(std::vector<int64_t> sizes, AtenTensorHandle* handle) {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (int64_t axis = static_cast<int64_t>(sizes.size()) - 2; axis >= 0; axis--)
        strides[axis] = strides[axis + 1] * sizes[axis + 1];
    require(
        !aoti_torch_empty_strided(
            sizes.size(), sizes.data(), strides.data(), dtype_of<Number>(), aoti_torch_device_type_cpu(), 0,
            handle
        ),
        "there is no memory for a result"
    );
    return Tensor<Number>(*handle);
}

// Runs a kernel; what goes wrong is said on stderr, as AOTInductor does, and returned as an error.
template <typename Kernel>
AOTITorchError guarded(const char* name, Kernel kernel) {
    try {
        kernel();
        return AOTI_TORCH_SUCCESS;
    } catch (const std::exception& error) {
        std::cerr << name << ": " << error.what() << std::endl;
        return AOTI_TORCH_FAILURE;
    }
}
