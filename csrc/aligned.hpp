// Scratch memory that begins at a cache line and only ever grows: used again from call to call.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels.hpp"

namespace quire::ISA {

template <typename T>
class Aligned {
public:
    T* data() const { return data_; }

    // Make room for `count` elements; what was there is lost if the room grows.
    T* at_least(long count) {
        if (count > room_) {
            constexpr long line = (64 + sizeof(T) - 1) / sizeof(T);
            memory_.reset(new T[count + line]);
            data_ = memory_.get() + (-reinterpret_cast<std::uintptr_t>(memory_.get()) & 63) / sizeof(T);
            room_ = count;
        }
        return data_;
    }

private:
    std::unique_ptr<T[]> memory_;
    T* data_ = nullptr;
    long room_ = 0;
};

}  // namespace quire::ISA
