// HSTU attention over jagged rows, forward and backward, fp32 and bf16.
#include "hstu_attention_backward.h"
#include "hstu_attention_forward.h"
#if defined(__AMX_BF16__)
#include "hstu_attention_amx.h"
typedef HalfTiles InHalf;
#else
typedef Half InHalf;
#endif

// Units up to the last one of a long row.
static size_t up_to_long_rows(const std::vector<ForwardUnit>& units, const int64_t* offsets) {
  size_t end = units.size();
  while (end > 0 && offsets[units[end - 1].row + 1] - offsets[units[end - 1].row] <= SHORT_ROW) end--;
  return end;
}

template <class N>
static void forward(const HstuCall& call) {
  const Bias bias(call.tables, call.max_len, !N::TILES);  // tiles have queries as rows, both ways
  const std::vector<ForwardUnit> units = forward_units(call.offsets, call.rows);
  in_parallel(units.size(), up_to_long_rows(units, call.offsets), call.threads, [&](size_t n, size_t next) {
    const typename N::Registers registers;
    const int64_t* row = next < units.size() ? &units[next].row : nullptr;
    const int64_t* end = row ? row + 1 : row;
    const auto parts = {&call.q, &call.k, &call.v, &call.y};
    forward_unit<N>(call, bias, units[n], fetch_ahead<typename N::In>(call, row, end, parts));
  });
}

template <class N>
static void backward(const HstuCall& call) {
  const Bias bias(call.tables, call.max_len, false);
  const BackwardPlan plan(call.offsets, call.rows, call.tables, KEY_BLOCKS);
  in_parallel(plan.units.size(), plan.units_of_long_rows(), call.threads, [&](size_t n, size_t next) {
    const typename N::Registers registers;
    const BackwardUnit& unit = plan.units[n];
    if (unit.shared) return long_row<N>(call, bias, plan, unit);
    const bool more = next < plan.units.size();
    const int64_t* row = plan.order.data() + (more ? plan.units[next].first : 0);
    const int64_t* end = plan.order.data() + (more ? plan.units[next].last : 0);
    const auto parts = {&call.q, &call.k, &call.v, &call.dy, &call.dq, &call.dk, &call.dv_out};
    short_rows<N>(call, bias, plan, unit, fetch_ahead<typename N::In>(call, row, end, parts));
  });
  plan.finish(call.tables, call.max_len, call.dposition, call.dtime);
}

EXPORT void hstu_forward(const HstuCall* call) { call->bf16 ? forward<InHalf>(*call) : forward<Single>(*call); }
EXPORT void hstu_backward(const HstuCall* call) { call->bf16 ? backward<InHalf>(*call) : backward<Single>(*call); }
