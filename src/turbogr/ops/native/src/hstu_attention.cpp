// HSTU attention over jagged rows, forward and backward, fp32 and bf16.
#include "hstu_attention_backward.h"
#include "hstu_attention_forward.h"

template <class N>
static void forward(const HstuCall& call) {
  const Bias bias(call.tables, call.max_len, true);
  const std::vector<ForwardUnit> units = forward_units(call.offsets, call.rows);
  in_parallel(units.size(), call.threads, [&](size_t n) { forward_unit<N>(call, bias, units[n]); });
}

template <class N>
static void backward(const HstuCall& call) {
  const Bias bias(call.tables, call.max_len, false);
  const BackwardPlan plan(call.offsets, call.rows, call.tables);
  in_parallel(plan.units.size(), call.threads, [&](size_t n) {
    const BackwardUnit& unit = plan.units[n];
    unit.shared ? long_row<N>(call, bias, plan, unit) : short_rows<N>(call, bias, plan, unit);
  });
  plan.finish(call.tables, call.max_len, call.dposition, call.dtime);
}

EXPORT void hstu_forward(const HstuCall* call) { call->bf16 ? forward<Half>(*call) : forward<Single>(*call); }
EXPORT void hstu_backward(const HstuCall* call) { call->bf16 ? backward<Half>(*call) : backward<Single>(*call); }
