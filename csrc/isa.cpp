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

bool has_avx512() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// Tiles are 8 KiB of state per thread, which Linux gives only to processes that ask (arch_prctl, since 5.16).
bool may_use_tiles() {
#ifdef __linux__
    constexpr long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

bool has_amx_bf16() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
    if (!(d & amx_bf16) || !(d & amx_tile)) return false;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return false;
    constexpr unsigned avx512_bf16 = 1u << 5;
    return (a & avx512_bf16) && may_use_tiles();
}

#endif

}  // namespace

std::vector<std::string> usable_isas() {
    std::vector<std::string> names;
#ifdef HAS_X86_KERNELS
    if (has_avx512()) {
        if (has_amx_bf16()) names.push_back("amx");
        names.push_back("avx512");
    }
#endif
    names.push_back("portable");
    return names;
}

const Kernels* chosen = &portable::kernels;

void use_isa(const std::string& name) {
    for (const std::string& usable : usable_isas())
        if (usable == name) {
#ifdef HAS_X86_KERNELS
            chosen = name == "amx" ? &amx::kernels : name == "avx512" ? &avx512::kernels : &portable::kernels;
#endif
            return;
        }
    throw std::invalid_argument("the instruction set " + name + " was not built, or this CPU does not have it");
}

}  // namespace quire
