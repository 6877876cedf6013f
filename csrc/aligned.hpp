// Scratch memory that begins at a cache line and only ever grows: used again from call to call.
//
// A step of 2,048 tokens has 40 MiB of activations, more than the second level of a TLB covers in small pages, and a
// block of rows is spread over all of them: on small pages dense layers are 1 to 3 % slower. So large scratch is on huge
// pages, where the system has them.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

#include <sys/mman.h>

#include "kernels.hpp"

namespace quire::ISA {

template <typename T>
class Aligned {
public:
    T* data() const { return memory_.get(); }

    // Make room for `count` elements; what was there is lost if the room grows.
    T* at_least(long count) {
        if (count > room_) {
            memory_.reset(allocate(count * static_cast<long>(sizeof(T))));
            room_ = count;
        }
        return data();
    }

private:
    static_assert(std::is_trivial_v<T>);
    static constexpr long CACHE_LINE = 64, HUGE_PAGE = 2 << 20;

    struct Free {
        void operator()(T* memory) const { std::free(memory); }
    };

    static T* allocate(long bytes) {
        const long unit = bytes < HUGE_PAGE ? CACHE_LINE : HUGE_PAGE, rounded = rounded_up(bytes, unit);
        void* memory = std::aligned_alloc(unit, rounded);
        if (!memory) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
        if (unit == HUGE_PAGE) madvise(memory, rounded, MADV_HUGEPAGE);  // on small pages if that fails
#endif
        return static_cast<T*>(memory);
    }

    std::unique_ptr<T[], Free> memory_;
    long room_ = 0;
};

}  // namespace quire::ISA
