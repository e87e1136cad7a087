// The routed decode in the incumbent's mode: its planner, and what a call hands to FlashInfer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "decode_plan.h"
#include "routes.h"

namespace tilepress {

// What the incumbent's entry can do: cut a request into chunks, and hide keys that are older than a window.
struct RouteDecode {
  bool split;
  bool windowed;
};

// Blocks that a plan has room for: one a request where the entry does not split, else the slots of one KV head.
template <typename Args>
static int64_t route_max_blocks(const Args &args, bool split) {
  return split ? declared_slots(args) / args.num_kv_heads : args.max_batch;
}

// Bytes of bf16 partials [max_blocks, num_q_heads, head_dim], then their lse, fp32 [max_blocks, num_q_heads]; -1 where they do
// not count in 63 bits.
static inline int64_t route_workspace_bytes(int64_t max_blocks, int64_t q_heads, int64_t head_dim, bool split) {
  int64_t bytes = 0;
  if (split && __builtin_mul_overflow(max_blocks * q_heads, head_dim * 2 + 4, &bytes)) return -1;
  return bytes;
}

static inline int plan_size_route(const char *entry, const tilepress_decode_plan_size_args &args, RouteDecode able) {
  if (int code = check_plan_numbers(entry, args)) return code;
  const int64_t blocks = route_max_blocks(args, able.split);
  const int64_t words = RouteLayout(args.max_batch, blocks).words;
  const int64_t bytes = route_workspace_bytes(blocks, args.num_q_heads, args.head_dim, able.split);
  if (bytes < 0)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: head_dim %d of %lld blocks makes a workspace of 2^63 bytes or more", entry,
                args.head_dim, static_cast<long long>(blocks));
  *args.plan_words_out = words;
  *args.workspace_bytes_out = bytes;
  return TILEPRESS_OK;
}

// Plans into args.plan. Every request's page list is read whole: the windowed entry masks what the window has left behind.
static inline int plan_route(const char *entry, const tilepress_decode_plan_args &args, RouteDecode able) {
  if (int code = check_plan_numbers(entry, args)) return code;
  const bool split = able.split;
  if (args.window > 0 && !able.windowed)
    return fail(TILEPRESS_UNSUPPORTED,
                "%s: window is %d, but the incumbent's entry sees whole contexts; it must be 0 in its mode", entry,
                args.window);
  if (args.batch > args.max_batch)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: batch is %d, past max_batch, %d", entry, args.batch, args.max_batch);
  const int64_t max_blocks = route_max_blocks(args, split);
  const RouteLayout layout(args.max_batch, max_blocks);
  if (args.plan_words < layout.words)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: plan_words is %lld; this plan needs %lld", entry,
                static_cast<long long>(args.plan_words), static_cast<long long>(layout.words));
  std::vector<int64_t> tokens(static_cast<size_t>(args.batch));
  int64_t longest = 0;
  for (int32_t r = 0; r < args.batch; ++r) {
    Visible visible{};
    if (int code = visible_of(entry, args, r, &visible)) return code;
    tokens[static_cast<size_t>(r)] = visible.end;
    longest = std::max(longest, (visible.end + args.page_size - 1) / args.page_size);
  }
  // Pages of a chunk: one length for all requests is what the incumbent's entries take.
  int64_t chunk = std::max<int64_t>(kRouteUnsplit / args.page_size, 1);
  if (split && args.chunk_tokens > 0) {
    chunk = args.chunk_tokens / args.page_size;
  } else if (split && longest > 0) {
    const int64_t splits = splits_of(args, longest);
    chunk = (longest + splits - 1) / splits;
  }
  std::vector<int32_t> words(static_cast<size_t>(layout.words), 0);
  uint8_t *valid = reinterpret_cast<uint8_t *>(words.data() + layout.valid);
  int64_t blocks = 0;
  for (int32_t r = 0; r < args.batch; ++r) {
    const int64_t pages = (tokens[static_cast<size_t>(r)] + args.page_size - 1) / args.page_size;
    // An entry that does not split has a block for every request, an empty one too.
    const int64_t count = split ? (pages + chunk - 1) / chunk : 1;
    if (blocks + count > max_blocks)
      return fail(TILEPRESS_INVALID_ARGUMENT, "%s: max_slots is %lld; request %d needs slots up to %lld", entry,
                  static_cast<long long>(declared_slots(args)), r,
                  static_cast<long long>((blocks + count) * args.num_kv_heads));
    for (int64_t i = 0; i < count; ++i, ++blocks) {
      words[static_cast<size_t>(layout.requests + blocks)] = r;
      words[static_cast<size_t>(layout.chunks + blocks)] = static_cast<int32_t>(i);
      valid[blocks] = 1;
    }
    words[static_cast<size_t>(layout.o_indptr + r + 1)] = static_cast<int32_t>(blocks);
    // The incumbent reads all that page_indptr gives a request.
    if (args.page_indptr[r + 1] - args.page_indptr[r] != pages)
      return fail(TILEPRESS_INVALID_ARGUMENT,
                  "%s: page_indptr lists %d pages for request %d, whose tokens need %lld; the incumbent's mode takes no more",
                  entry, args.page_indptr[r + 1] - args.page_indptr[r], r, static_cast<long long>(pages));
    words[static_cast<size_t>(layout.page_indptr + r)] = args.page_indptr[r];
    words[static_cast<size_t>(layout.page_indptr + r + 1)] = args.page_indptr[r + 1];
    words[static_cast<size_t>(layout.last_page_len + r)] =
        static_cast<int32_t>(tokens[static_cast<size_t>(r)] - std::max<int64_t>(pages - 1, 0) * args.page_size);
  }
  // A chunk past INT32_MAX tokens holds any request whole, and so does one that ends there.
  words[static_cast<size_t>(layout.chunk_tokens)] = static_cast<int32_t>(std::min<int64_t>(chunk * args.page_size, INT32_MAX));
  words[kRouteMagic] = kRouteDecodeMagic;
  words[kRouteBatch] = args.batch;
  words[kRouteBlocks] = static_cast<int32_t>(blocks);
  words[kRouteMaxBatch] = args.max_batch;
  words[kRouteMaxBlocks] = static_cast<int32_t>(max_blocks);
  words[kRouteNumQHeads] = args.num_q_heads;
  words[kRouteNumKvHeads] = args.num_kv_heads;
  words[kRoutePageSize] = args.page_size;
  words[kRouteWindow] = args.window;
  words[kRouteSplit] = split;
  words[kRoutePageIds] = args.batch > 0 ? args.page_indptr[args.batch] : 0;
  std::memcpy(args.plan, words.data(), words.size() * sizeof words[0]);
  return TILEPRESS_OK;
}

static inline int prepare_decode_route(const char *entry, const tilepress_decode_args &args, RouteDecode able, Route *route) {
  const int32_t *plan = args.plan_host;
  const PlannedNumber numbers[] = {{"num_q_heads", kRouteNumQHeads, args.num_q_heads},
                                   {"num_kv_heads", kRouteNumKvHeads, args.num_kv_heads},
                                   {"page_size", kRoutePageSize, args.page_size}};
  if (int code = check_route_plan(entry, plan, kRouteDecodeMagic, numbers)) return code;
  if ((plan[kRouteSplit] != 0) != able.split || (plan[kRouteWindow] > 0 && !able.windowed))
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: plan_host was written by another entry's planner", entry);
  if (int code = prepare_route(entry, args, args.plan, plan, route)) return code;
  if (int code = check_reach(entry, args, plan[kRouteBatch], plan[kRoutePageIds])) return code;
  const int64_t max_blocks = plan[kRouteMaxBlocks];
  const int64_t need = route_workspace_bytes(max_blocks, args.num_q_heads, args.head_dim, able.split);
  if (int code = check_workspace(entry, args, need)) return code;
  const RouteLayout layout(plan[kRouteMaxBatch], max_blocks);
  int32_t *words = const_cast<int32_t *>(args.plan);
  const int64_t rows_bytes = static_cast<int64_t>(args.row_offset) * args.num_q_heads * args.head_dim * 2;
  route->q = static_cast<char *>(route->q) + rows_bytes;
  route->out = static_cast<char *>(route->out) + rows_bytes;
  route->page_indptr = words + layout.page_indptr;
  route->last_page_len = words + layout.last_page_len;
  route->o_indptr = words + layout.o_indptr;
  route->valid = reinterpret_cast<uint8_t *>(words + layout.valid);
  if (able.split && args.workspace != nullptr) {
    char *lse = static_cast<char *>(args.workspace) + max_blocks * args.num_q_heads * args.head_dim * 2;
    route->partial_out = args.workspace;
    route->partial_lse = reinterpret_cast<float *>(lse);
  }
  route->rows = plan[kRouteBatch];
  // Where no request has a key there is no chunk, but the merge has their zeros to write.
  if (able.split) route->blocks = plan[kRouteBatch] > 0 ? static_cast<int32_t>(max_blocks) : 0;
  route->window_left = plan[kRouteWindow] - 1;
  return TILEPRESS_OK;
}

}  // namespace tilepress
