// FuXi's position and time channels over jagged rows, forward and backward, fp32 and bf16.
#include "fuxi_attention_backward.h"
#include "fuxi_attention_forward.h"

template <class N>
static void forward(const FuxiCall& call) {
  const Maps maps(call, true);
  const std::vector<ForwardUnit> units = forward_units(call.offsets, call.rows);
  const size_t count = units.size();
  in_parallel(count, count, call.threads, [&](size_t n, size_t) { forward_unit<N>(call, maps, units[n]); });
}

template <class N>
static void backward(const FuxiCall& call) {
  const Maps maps(call, false);
  const BackwardPlan plan(call.offsets, call.rows, call.tables);
  const size_t count = plan.units.size();
  in_parallel(count, count, call.threads, [&](size_t n, size_t) {
    const BackwardUnit& unit = plan.units[n];
    unit.shared ? long_row<N>(call, maps, plan, unit) : short_rows<N>(call, maps, plan, unit);
  });
  plan.finish(call.tables, call.max_len, call.dposition, call.dtime);
  if (!call.decay) return;
  // sums of gate, gate * power and gate * power * log are alpha's gradient, gamma's and beta's but for a factor
  const double scale = call.tables.time[0], beta = call.dtime[2], gamma = call.dtime[1];
  call.dtime[1] = float(scale * maps.decay.log_gamma * beta);
  call.dtime[2] = float(scale / call.tables.time[2] * gamma);
}

EXPORT void fuxi_forward(const FuxiCall* call) { call->bf16 ? forward<Half>(*call) : forward<Single>(*call); }
EXPORT void fuxi_backward(const FuxiCall* call) { call->bf16 ? backward<Half>(*call) : backward<Single>(*call); }
