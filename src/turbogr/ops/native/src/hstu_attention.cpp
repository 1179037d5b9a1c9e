// HSTU attention over jagged rows, forward and backward, fp32 and bf16.
#include "hstu_attention_backward.h"
#include "hstu_attention_forward.h"
#if defined(__AMX_BF16__)
#include "hstu_attention_amx.h"
typedef HalfTiles InHalf;
#else
typedef Half InHalf;
#endif

template <class N>
static void forward(const HstuCall& call) {
  const Bias bias(call.tables, call.max_len, !N::TILES);  // tiles have queries as rows, both ways
  const std::vector<ForwardUnit> units = forward_units(call.offsets, call.rows);
  in_parallel(units.size(), call.threads, [&](size_t n) {
    const typename N::Registers registers;
    forward_unit<N>(call, bias, units[n]);
  });
}

template <class N>
static void backward(const HstuCall& call) {
  const Bias bias(call.tables, call.max_len, false);
  const BackwardPlan plan(call.offsets, call.rows, call.tables, KEY_BLOCKS);
  in_parallel(plan.units.size(), call.threads, [&](size_t n) {
    const typename N::Registers registers;
    const BackwardUnit& unit = plan.units[n];
    unit.shared ? long_row<N>(call, bias, plan, unit) : short_rows<N>(call, bias, plan, unit);
  });
  plan.finish(call.tables, call.max_len, call.dposition, call.dtime);
}

EXPORT void hstu_forward(const HstuCall* call) { call->bf16 ? forward<InHalf>(*call) : forward<Single>(*call); }
EXPORT void hstu_backward(const HstuCall* call) { call->bf16 ? backward<InHalf>(*call) : backward<Single>(*call); }
