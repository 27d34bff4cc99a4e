// From the op's arguments to the record that kernels read, with everything checked that needs no look at contents.
#pragma once
#include "attention_op.h"
#include "plan.h"

namespace attn_cpu {

Call call_of(const AttentionTensors& t, const PlanHeader& plan);
// The same over a whole cache, of which the plan and the layer's record say the rest.
Call call_of(const CachedTensors& t, const PlanView& plan, const LayerRecord& layer);
// Contents that only checked mode looks at: multimodal ranges.
void check_contents(const Call& c);

}  // namespace attn_cpu
