#include "isa.h"

#include "kernels/table.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace attn_cpu {
namespace {

#if defined(__x86_64__)
struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned sub) {
  Registers r;
  if (!__get_cpuid_count(leaf, sub, &r.a, &r.b, &r.c, &r.d)) return Registers{};
  return r;
}

// XCR0: which register files the system saves on a context switch. Without it an instruction set that the CPU
// has would lose its registers, or fault.
uint64_t saved_state() {
  if (!(cpuid(1, 0).c & (1u << 27))) return 0;  // OSXSAVE
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

uint64_t detect() {
  const Registers one = cpuid(1, 0), seven = cpuid(7, 0), seven1 = cpuid(7, 1);
  const uint64_t os = saved_state();
  auto bit = [](unsigned word, int n) { return (word >> n) & 1u; };
  uint64_t f = 0;
  if (bit(seven.b, 5)) f |= kHasAvx2;
  if (bit(one.c, 12)) f |= kHasFma;
  if (bit(one.c, 29)) f |= kHasF16c;
  if (bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) && bit(seven.b, 31)) f |= kHasAvx512;
  if (bit(seven.c, 1)) f |= kHasAvx512Vbmi;
  if (bit(seven1.a, 5)) f |= kHasAvx512Bf16;
  if (bit(seven.d, 24)) f |= kHasAmxTile;
  if (bit(seven.d, 22)) f |= kHasAmxBf16;
  if ((os & 0x6) == 0x6) f |= kOsYmm;
  if ((os & 0xe6) == 0xe6) f |= kOsZmm;
  if ((os & 0x60000) == 0x60000) f |= kOsTiles;
  return f;
}

bool ask_for_tiles() {
  // ARCH_REQ_XCOMP_PERM for XFEATURE_XTILEDATA: Linux keeps tiles off until a process asks. oneDNN asks too,
  // but only once it has multiplied.
  if (!(cpu_features() & kOsTiles)) return false;
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#elif defined(__aarch64__)
uint64_t detect() { return kHasNeon; }
bool ask_for_tiles() { return false; }
#else
uint64_t detect() { return 0; }
bool ask_for_tiles() { return false; }
#endif

uint64_t needs(int isa) {
  const uint64_t avx2 = kHasAvx2 | kHasFma | kHasF16c | kOsYmm, avx512 = avx2 | kHasAvx512 | kOsZmm;
  switch (isa) {
    case kAvx2: return avx2;
    case kAvx512: return avx512;
    case kAvx512Bf16: return avx512 | kHasAvx512Bf16;
    case kAmxBf16: return avx512 | kHasAvx512Bf16 | kHasAvx512Vbmi | kHasAmxTile | kHasAmxBf16 | kOsTiles;
    case kNeon: return kHasNeon;
    default: return 0;
  }
}

}  // namespace

uint64_t cpu_features() {
  static const uint64_t features = detect();
  return features;
}

uint64_t isa_built() {
  uint64_t built = 0;
  for (int isa = 0; isa < kIsaCount; isa++)
    if (kernels_of(isa)) built |= uint64_t{1} << isa;
  return built;
}

uint64_t isa_supported(uint64_t features) {
  uint64_t levels = 0;
  for (int isa = 0; isa < kIsaCount; isa++)
    if (kernels_of(isa) && (features & needs(isa)) == needs(isa)) levels |= uint64_t{1} << isa;
  return levels;
}

bool amx_permission() {
  static const bool granted = ask_for_tiles();
  return granted;
}

int choose_isa(int64_t wanted) {
  static const uint64_t here = isa_supported(cpu_features());
  if (wanted >= 0) {
    if (wanted >= kIsaCount || !((here >> wanted) & 1)) return -1;
    return wanted == kAmxBf16 && !amx_permission() ? -1 : static_cast<int>(wanted);
  }
  for (int isa = kIsaCount - 1; isa >= 0; isa--)
    if (((here >> isa) & 1) && (isa != kAmxBf16 || amx_permission())) return isa;
  return -1;
}

const char* isa_name(int isa) {
  static const char* names[] = {"generic", "avx2", "avx512", "avx512_bf16", "amx_bf16", "neon"};
  return isa >= 0 && isa < kIsaCount ? names[isa] : "none";
}

}  // namespace attn_cpu
