// The exported functions: choice of the instruction set and huge-page memory. The kernels hang on the
// table that mp_find returns, so that two callers in one process may use different ones.
#include "packed.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

// Fastest first; the build says which tables exist.
#if defined(MP_X86)
namespace mp_avx512bf16 { extern const mp_kernels table; }
namespace mp_avx512 { extern const mp_kernels table; }
namespace mp_avx2 { extern const mp_kernels table; }
#endif
namespace mp_portable { extern const mp_kernels table; }

namespace {

bool runs_here(const mp_kernels* k) {
#if defined(MP_X86)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (k == &mp_avx512bf16::table) return avx512 && __builtin_cpu_supports("avx512bf16");
    if (k == &mp_avx512::table) return avx512;
    if (k == &mp_avx2::table) return avx2;
#endif
    return k == &mp_portable::table;
}

const mp_kernels* const tables[] = {
#if defined(MP_X86)
    &mp_avx512bf16::table, &mp_avx512::table, &mp_avx2::table,
#endif
    &mp_portable::table};

constexpr size_t HUGE_PAGE = 2u << 20;

}  // namespace

#define MP_API extern "C" __attribute__((visibility("default")))

// The kernels of that name, or the fastest that this CPU runs if name is empty. Null if there are none.
MP_API const mp_kernels* mp_find(const char* name) {
    for (const mp_kernels* k : tables)
        if ((!name || !*name || !strcmp(name, k->name)) && runs_here(k)) return k;
    return nullptr;
}

// The i-th instruction set that this build has, and whether it runs here; null past the last one.
MP_API const char* mp_isa(int i, int* supported) {
    if (i < 0 || i >= (int)(sizeof tables / sizeof *tables)) return nullptr;
    *supported = runs_here(tables[i]);
    return tables[i]->name;
}

// Zeroed memory on 2 MiB boundaries that the kernel may back with huge pages; pages appear when they are first touched.
MP_API void* mp_allocate(size_t bytes) {
    bytes = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    char* raw = (char*)mmap(nullptr, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return nullptr;
    char* start = (char*)(((uintptr_t)raw + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    if (start > raw) munmap(raw, start - raw);
    if (start + bytes < raw + bytes + HUGE_PAGE) munmap(start + bytes, raw + HUGE_PAGE - start);
#if defined(MADV_HUGEPAGE)
    madvise(start, bytes, MADV_HUGEPAGE);  // a hint: without it everything works, a little slower
#endif
    return start;
}

MP_API void mp_release(void* p, size_t bytes) { munmap(p, (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE); }

MP_API int64_t mp_packed_bytes(const mp_weight* w) { return packed_bytes(*w); }
