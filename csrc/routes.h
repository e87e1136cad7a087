// A routed call in the incumbent's mode: the plan that its entries read, and their parameters.
#pragma once

#include <cstddef>
#include <cstdint>

#include "error.h"
#include "plan_checks.h"
#include "pool.h"
#include "scale.h"
#include "tilepress.h"

namespace tilepress {

// Words of a plan's header: what it was built for, so that a call that names something else is refused. A block is one CTA's
// work for a KV head: a chunk of a decode's keys, or a query tile of a prefill. kRouteMaxBatch, kRouteMaxBlocks: what the plan
// has room for; a decode is launched with that many blocks, those past kRouteBlocks being marked as empty.
enum RoutePlanHeader : size_t {
  kRouteMagic,
  kRouteBatch,
  kRouteBlocks,
  kRouteMaxBatch,
  kRouteMaxBlocks,
  kRouteNumQHeads,
  kRouteNumKvHeads,
  kRoutePageSize,  // decode
  kRouteWindow,    // decode
  kRoutePageIds,   // decode: the page ids that it reaches into
  kRouteHeadDim,   // prefill
  kRouteRows,      // prefill: of all requests
  kRouteRowsEnd,   // prefill: the row after the last
  kRouteSplit,     // decode: whether it was written for an entry that splits
  kRouteHeaderWords = 16,
};

constexpr int32_t kRouteDecodeMagic = 0x54504931;    // "TPI1": changes with this layout
constexpr int32_t kRoutePrefillMagic = 0x54504a31;   // "TPJ1"
constexpr int64_t kRouteUnsplit = int64_t{1} << 30;  // tokens of a chunk that holds any context
constexpr int64_t kRouteMaxWords = INT32_MAX;

// Where the parts of a plan lie, in words, each on 16 bytes. A prefill has no use for page_indptr, last_page_len, o_indptr and
// valid, a decode none for tiles and total_rows.
struct RouteLayout {
  int64_t chunk_tokens;
  int64_t total_rows;
  int64_t page_indptr;    // [max_batch + 1]
  int64_t last_page_len;  // [max_batch]
  int64_t o_indptr;       // [max_batch + 1]
  int64_t requests;       // [max_blocks]
  int64_t tiles;          // [max_blocks]
  int64_t chunks;         // [max_blocks]
  int64_t valid;          // bytes [max_blocks]
  int64_t words;

  RouteLayout(int64_t max_batch, int64_t max_blocks)
      : chunk_tokens(kRouteHeaderWords),
        total_rows(chunk_tokens + 4),
        page_indptr(total_rows + 4),
        last_page_len(page_indptr + round_up(max_batch + 1)),
        o_indptr(last_page_len + round_up(max_batch)),
        requests(o_indptr + round_up(max_batch + 1)),
        tiles(requests + round_up(max_blocks)),
        chunks(tiles + round_up(max_blocks)),
        valid(chunks + round_up(max_blocks)),
        words(valid + round_up((max_blocks + 3) / 4)) {}

 private:
  static int64_t round_up(int64_t words) { return (words + 3) / 4 * 4; }
};

// What the incumbent's entries take beyond the call's own arguments.
struct Route {
  void *q;
  void *out;
  void *pool;
  int64_t k_offset;
  int64_t v_offset;
  int64_t page_stride;
  int32_t *page_ids;
  int32_t *page_indptr;
  int32_t *last_page_len;
  int32_t *q_indptr;
  int32_t *request_indices;
  int32_t *tile_indices;
  int32_t *chunk_indices;
  int32_t *chunk_tokens;
  int32_t *o_indptr;
  uint8_t *valid;
  void *partial_out;
  float *partial_lse;
  uint32_t *total_rows;
  int32_t rows;
  int32_t batch;
  int32_t blocks;
  int32_t window_left;
};

// Fails where the plan is not the incumbent's, or was not built for what the call names.
template <size_t N>
static int check_route_plan(const char *entry, const int32_t *plan, int32_t magic, const PlannedNumber (&numbers)[N]) {
  if (plan == nullptr)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: plan_host is null; the incumbent's mode needs the plan of %s_plan", entry,
                entry);
  if (plan[kRouteMagic] != magic)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: plan_host is no plan that %s_plan wrote in the incumbent's mode", entry,
                entry);
  return check_planned(entry, plan, numbers);
}

// What every call in the incumbent's mode has: the pool, and the places of the plan's parts on the device.
template <typename Args>
static int prepare_route(const char *entry, const Args &args, const int32_t *plan, const int32_t *plan_host, Route *route) {
  if (int code = check_scale(entry, args.sm_scale)) return code;
  if (args.lse != nullptr)
    return fail(TILEPRESS_UNSUPPORTED, "%s: lse is given, but the incumbent's entries give none; pass null in its mode", entry);
  PoolTiles tiles{};
  if (int code = prepare_pool(entry, args, &tiles)) return code;
  if (plan == nullptr) return fail(TILEPRESS_INVALID_ARGUMENT, "%s: plan is null", entry);
  const RouteLayout layout(plan_host[kRouteMaxBatch], plan_host[kRouteMaxBlocks]);
  int32_t *words = const_cast<int32_t *>(plan);
  const int64_t row = static_cast<int64_t>(args.num_kv_heads) * args.head_dim;
  route->q = const_cast<void *>(args.q);
  route->out = args.out;
  route->pool = const_cast<void *>(args.pool);
  route->k_offset = args.layer_row * row;
  route->v_offset = (args.layer_row + args.page_size) * row;
  route->page_stride = args.rows_per_page * row;
  // Without page ids nobody reads one, but the incumbent's entries want an address.
  route->page_ids = args.page_ids != nullptr ? const_cast<int32_t *>(args.page_ids) : words;
  route->request_indices = words + layout.requests;
  route->tile_indices = words + layout.tiles;
  route->chunk_indices = words + layout.chunks;
  route->chunk_tokens = words + layout.chunk_tokens;
  route->total_rows = reinterpret_cast<uint32_t *>(words + layout.total_rows);
  route->batch = plan_host[kRouteBatch];
  route->blocks = plan_host[kRouteBlocks];
  return TILEPRESS_OK;
}

}  // namespace tilepress
