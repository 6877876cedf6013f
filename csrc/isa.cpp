#include <algorithm>
#include <stdexcept>

#include "kernels.hpp"

#ifdef HAS_X86_KERNELS
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {
namespace {

#ifdef HAS_X86_KERNELS

bool has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

#ifdef IMITATE  // tests/support/imitated_intrinsics.hpp

bool has_avx512() { return has_avx2(); }
bool has_avx512_vnni() { return has_avx2(); }
bool has_avx512_bf16() { return has_avx2(); }
bool has_amx() { return has_avx2(); }

#else

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

// Tiles are 8 KiB of state per thread, which Linux gives only to processes that ask (arch_prctl, since 5.16).
bool may_use_tiles() {
#ifdef __linux__
    constexpr long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

bool has_amx() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24, amx_int8 = 1u << 25, all = amx_bf16 | amx_tile | amx_int8;
    return (d & all) == all && has_avx512_bf16() && may_use_tiles();
}

#endif
#endif

struct Isa {
    const char* name;
    const Kernels* kernels;
    bool (*is_there)();
};

// The best first.
const Isa isas[] = {
#ifdef HAS_X86_KERNELS
    {"amx", &amx::kernels, has_amx},
    {"avx512_bf16", &avx512_bf16::kernels, has_avx512_bf16},
    {"avx512_vnni", &avx512_vnni::kernels, has_avx512_vnni},
    {"avx512", &avx512::kernels, has_avx512},
    {"avx2", &avx2::kernels, has_avx2},
#endif
    {"portable", &portable::kernels, [] { return true; }},
};

}  // namespace

std::vector<std::string> usable_isas() {
    std::vector<std::string> names;
    for (const Isa& isa : isas)
        if (isa.is_there()) names.push_back(isa.name);
#ifdef HAS_X86_KERNELS
    if (__builtin_cpu_is("intel")) {
        const auto bf16 = std::find(names.begin(), names.end(), "avx512_bf16");
        if (bf16 != names.end()) std::iter_swap(bf16, bf16 + 1);
    }
#endif
    return names;
}

const Kernels* chosen = &portable::kernels;

void use_isa(const std::string& name) {
    for (const Isa& isa : isas)
        if (name == isa.name && isa.is_there()) {
            chosen = isa.kernels;
            return;
        }
    throw std::invalid_argument("the instruction set " + name + " was not built, or this CPU does not have it");
}

}  // namespace quire
