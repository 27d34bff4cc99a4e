#include "table.h"

namespace attn_cpu {

namespace generic { extern const Kernels kKernels; }
#if defined(ATTN_CPU_X86)
namespace avx2 { extern const Kernels kKernels; }
namespace avx512 { extern const Kernels kKernels; }
namespace avx512_bf16 { extern const Kernels kKernels; }
namespace amx_bf16 { extern const Kernels kKernels; }
#endif

const Kernels* kernels_of(int isa) {
  switch (isa) {
    case 0: return &generic::kKernels;
#if defined(ATTN_CPU_X86)
    case 1: return &avx2::kKernels;
    case 2: return &avx512::kKernels;
    case 3: return &avx512_bf16::kKernels;
    case 4: return &amx_bf16::kKernels;
#elif defined(__aarch64__)
    case 5: return &generic::kKernels;  // four lanes are what NEON has: the same source, compiled for it
#endif
    default: return nullptr;
  }
}

int64_t partial_stride(int head_size_v) { return (head_size_v + 15) / 16 * 16 + 16; }

}  // namespace attn_cpu
