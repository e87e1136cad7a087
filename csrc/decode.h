// The decode's launch values, and the refusals that no field of its arguments states alone.
#pragma once

#include <cstdint>

#include "decode_plan.h"
#include "error.h"
#include "plan_checks.h"
#include "pool.h"
#include "scale.h"
#include "tilepress.h"

namespace tilepress {

// What the decode kernels take besides the arguments: the parts of the plan and of the workspace, as device pointers.
struct DecodeLaunch : PoolTiles {
  int32_t ctas;
  int32_t group;
  int32_t max_batch;
  int32_t max_slots;
  int32_t max_items;
  int32_t merge_blocks;  // of a head's columns, a CTA of the merge each
  int32_t want_lse;
  int32_t want_status;
  const int32_t *plan_header;
  const int32_t *plan_requests;
  const int32_t *plan_items;
  float *partial_out;
  float *partial_sums;
  bool nothing;

  bool empty() const { return nothing; }
};

// Fails where the plan was not built for what the call names.
static inline int check_plan(const char *entry, const tilepress_decode_args &args) {
  const int32_t *plan = args.plan_host;
  if (plan == nullptr) return fail(TILEPRESS_INVALID_ARGUMENT, "%s: plan_host is null", entry);
  if (plan[kPlanMagic] != kPlanMagicValue)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: plan_host is no plan that this library's tilepress_decode_plan wrote", entry);
  const PlannedNumber numbers[] = {{"num_q_heads", kPlanNumQHeads, args.num_q_heads},
                                   {"num_kv_heads", kPlanNumKvHeads, args.num_kv_heads},
                                   {"page_size", kPlanPageSize, args.page_size},
                                   {"page_format", kPlanPageFormat, args.page_format}};
  return check_planned(entry, plan, numbers);
}

// Fills `launch` or fails: what every decode takes. The fields' own limits and the geometry have been checked.
static inline int prepare_decode(const char *entry, const tilepress_decode_args &args, DecodeLaunch *launch) {
  if (int code = check_scale(entry, args.sm_scale)) return code;
  if (int code = prepare_pool(entry, args, launch)) return code;
  if (int code = check_plan(entry, args)) return code;
  const int32_t *plan = args.plan_host;
  launch->ctas = plan[kPlanSmCount];
  launch->group = args.num_q_heads / args.num_kv_heads;
  launch->max_batch = plan[kPlanMaxBatch];
  launch->max_slots = plan[kPlanMaxSlots];
  launch->want_lse = args.lse != nullptr;
  launch->want_status = args.status != nullptr;
  launch->nothing = plan[kPlanBatch] == 0;
  if (int code = check_reach(entry, args, plan[kPlanBatch], plan[kPlanPageIds])) return code;
  const PlanLayout layout(launch->ctas, launch->max_batch, launch->max_slots);
  launch->max_items = static_cast<int32_t>(layout.max_items);
  launch->plan_header = args.plan;
  launch->plan_requests = args.plan + layout.requests;
  launch->plan_items = args.plan + layout.items;
  return TILEPRESS_OK;
}

// Fills `launch` or fails: an entry that splits, and so needs a workspace.
static inline int prepare(const char *entry, const tilepress_decode_args &args, DecodeLaunch *launch) {
  if (int code = prepare_decode(entry, args, launch)) return code;
  const int64_t need = decode_workspace_bytes(launch->max_slots, launch->group, args.head_dim);
  if (int code = check_workspace(entry, args, need)) return code;
  if (args.workspace == nullptr && !launch->nothing) return fail(TILEPRESS_INVALID_ARGUMENT, "%s: workspace is null", entry);
  launch->partial_out = static_cast<float *>(args.workspace);
  launch->partial_sums = launch->partial_out + static_cast<int64_t>(launch->max_slots) * launch->group * args.head_dim;
  // A merging CTA of 128 columns has eight lanes of threads, of 32 columns 32: enough for a request's chains at once.
  constexpr int32_t kFewLanes = 8;
  launch->merge_blocks = args.head_dim / (most_splits(launch->ctas, args.num_kv_heads) > kFewLanes * kChain ? 32 : 128);
  return TILEPRESS_OK;
}

}  // namespace tilepress
