// Which instruction sets this CPU and its operating system offer, and which kernels follow from that.
#pragma once
#include <cstdint>

namespace attn_cpu {

enum Isa : int { kGeneric = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmxBf16 = 4, kNeon = 5, kIsaCount = 6 };

enum Feature : uint64_t {
  kHasAvx2 = 1 << 0,
  kHasFma = 1 << 1,
  kHasF16c = 1 << 2,
  kHasAvx512 = 1 << 3,  // F, BW, DQ and VL
  kHasAvx512Bf16 = 1 << 4,
  kHasAmxTile = 1 << 5,
  kHasAmxBf16 = 1 << 6,
  kOsYmm = 1 << 7,    // the system saves the upper halves of ymm registers
  kOsZmm = 1 << 8,    // and zmm and mask registers
  kOsTiles = 1 << 9,  // and tiles
  kHasNeon = 1 << 10,
  kHasAvx512Vbmi = 1 << 11,
};

uint64_t cpu_features();
uint64_t isa_built();
// Levels that are built and run on a CPU with these features. A pure function, so that tests can mask flags.
uint64_t isa_supported(uint64_t features);
bool amx_permission();
// The level to use: `wanted`, or the best one for -1; -1 where `wanted` cannot run here.
int choose_isa(int64_t wanted);
const char* isa_name(int isa);

}  // namespace attn_cpu
