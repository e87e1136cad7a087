// The routed prefill in the incumbent's mode: its planner, and what a call hands to FlashInfer.
#pragma once

#include <cstdint>
#include <cstring>

#include "heads.h"
#include "query_tiles.h"
#include "routes.h"

namespace tilepress {

constexpr int64_t kSmallestQueryTile = 16;  // rows, the heads of a group counted as rows

// A plan_size's answer: the words of the largest plan, that of the smallest tile.
template <typename Args>
static int plan_size_route(const char *entry, const Args &args) {
  if (int code = check_groups(entry, args)) return code;
  const int64_t rows = static_cast<int64_t>(args.max_rows) * (args.num_q_heads / args.num_kv_heads);
  const int64_t words = RouteLayout(args.max_batch, rows / kSmallestQueryTile + args.max_batch).words;
  if (words > kRouteMaxWords)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: max_rows %d and max_batch %d make a plan of %lld words; at most %lld", entry,
                args.max_rows, args.max_batch, static_cast<long long>(words), static_cast<long long>(kRouteMaxWords));
  *args.plan_words_out = words;
  return TILEPRESS_OK;
}

// Rows of all requests, or a refusal: q_indptr must be a list of row ranges within q_rows.
template <typename Args>
static int count_rows(const char *entry, const Args &args, int32_t *rows) {
  *rows = 0;
  if (int code = check_groups(entry, args)) return code;
  if (int code = check_row_ranges(entry, "q_indptr", args.q_indptr, args)) return code;
  *rows = args.q_indptr[args.batch] - args.q_indptr[0];
  return TILEPRESS_OK;
}

// Plans query tiles of `tile` rows into args.plan.
template <typename Args>
static int plan_route(const char *entry, const Args &args, int32_t rows, int32_t tile) {
  const int64_t group = args.num_q_heads / args.num_kv_heads;
  int64_t blocks = 0;
  for (int32_t r = 0; r < args.batch; ++r) blocks += ((args.q_indptr[r + 1] - args.q_indptr[r]) * group + tile - 1) / tile;
  const RouteLayout layout(args.batch, blocks);
  if (args.plan_words < layout.words)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: plan_words is %lld; this plan needs %lld", entry,
                static_cast<long long>(args.plan_words), static_cast<long long>(layout.words));
  int32_t *plan = args.plan;
  std::memset(plan, 0, static_cast<size_t>(layout.words) * sizeof *plan);
  int64_t block = 0;
  for (int32_t r = 0; r < args.batch; ++r) {
    const int64_t packed = (args.q_indptr[r + 1] - args.q_indptr[r]) * group;
    for (int64_t i = 0; i * tile < packed; ++i, ++block) {
      plan[layout.requests + block] = r;
      plan[layout.tiles + block] = static_cast<int32_t>(i);
    }
  }
  plan[layout.chunk_tokens] = static_cast<int32_t>(kRouteUnsplit);
  plan[layout.total_rows] = rows;
  plan[kRouteMagic] = kRoutePrefillMagic;
  plan[kRouteBatch] = args.batch;
  plan[kRouteBlocks] = static_cast<int32_t>(blocks);
  plan[kRouteMaxBatch] = args.batch;
  plan[kRouteMaxBlocks] = static_cast<int32_t>(blocks);
  plan[kRouteNumQHeads] = args.num_q_heads;
  plan[kRouteNumKvHeads] = args.num_kv_heads;
  plan[kRouteHeadDim] = args.head_dim;
  plan[kRouteRows] = rows;
  plan[kRouteRowsEnd] = args.q_indptr[args.batch];
  return TILEPRESS_OK;
}

template <typename Args>
static int prepare_prefill_route(const char *entry, const Args &args, const int32_t *plan, const int32_t *plan_host,
                                 int32_t window_left, Route *route) {
  const PlannedNumber numbers[] = {{"num_q_heads", kRouteNumQHeads, args.num_q_heads},
                                   {"num_kv_heads", kRouteNumKvHeads, args.num_kv_heads},
                                   {"head_dim", kRouteHeadDim, args.head_dim},
                                   {"batch", kRouteBatch, args.batch}};
  if (int code = check_route_plan(entry, plan_host, kRoutePrefillMagic, numbers)) return code;
  if (int code = prepare_route(entry, args, plan, plan_host, route)) return code;
  if (plan_host[kRouteRowsEnd] > args.q_rows)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: plan_host has rows up to %d, past q_rows, %d", entry, plan_host[kRouteRowsEnd],
                args.q_rows);
  route->page_indptr = const_cast<int32_t *>(args.page_indptr);
  route->last_page_len = const_cast<int32_t *>(args.last_page_len);
  route->q_indptr = const_cast<int32_t *>(args.q_indptr);
  route->rows = plan_host[kRouteRows];
  route->window_left = window_left;
  return TILEPRESS_OK;
}

}  // namespace tilepress
