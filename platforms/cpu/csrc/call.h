// From the op's arguments to the record that kernels read, with everything checked that needs no look at contents.
#pragma once
#include "attention_op.h"
#include "plan.h"

namespace attn_cpu {

Call call_of(const AttentionTensors& t, const PlanHeader& plan);
// Lengths, offsets and table width against each other: what a kernel would otherwise read past.
void check_lengths(const Call& c, const AttentionTensors& t);
// Table entries that are read: one comparison per block beside the reading of that block, and never a stray read.
void check_table(const Call& c, const AttentionTensors& t);
// Contents that only checked mode looks at: multimodal ranges.
void check_contents(const Call& c);

}  // namespace attn_cpu
