// The decode plan: which CTA reads which pages of which request, as one array of int32 that the caller copies to the device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "error.h"
#include "heads.h"
#include "page_formats.h"
#include "tilepress.h"

namespace tilepress {

// Words of the header. It names what the plan was built for, so that a call that names something else is refused.
// kPlanPageIds: the page ids that its items reach into.
enum PlanHeader : size_t {
  kPlanMagic,
  kPlanBatch,
  kPlanItems,
  kPlanNumQHeads,
  kPlanNumKvHeads,
  kPlanPageSize,
  kPlanPageFormat,
  kPlanMaxBatch,
  kPlanMaxSlots,
  kPlanSmCount,
  kPlanPageIds,
  kPlanHeaderWords = 16,
};

// Words of an item, as codegen/kernels/decode.py reads them. An item is `kItemTiles` pages of one request and KV head, from
// page_ids[kItemFirstPage] on; its partial goes to slot kItemSlot, nowhere where that is -1, or into that of the next item
// where it is kCarried; kItemLastLen tokens of its last page are the request's, and kItemHidden tokens at the start of its
// first page are older than the window. kItemNext is the item that its CTA takes next; 0: none.
enum PlanItem : size_t {
  kItemRequest,
  kItemKvHead,
  kItemFirstPage,
  kItemTiles,
  kItemSlot,
  kItemLastLen,
  kItemHidden,
  kItemNext,
  kItemWords,
};

// Runs of pages that are combined in their order before anything else is: by the merge, or by the CTA that takes them all.
constexpr int64_t kChain = 5;
constexpr int32_t kCarried = -2;

// Words of a request: the slot of its first KV head's first partial, and the partials of each of its KV heads. Then what its
// row sees, for a kernel that cuts it by itself, as an item has it: kRequestPages pages from page_ids[kRequestFirstPage] on.
// kRequestChained: how many of its partials make a chain, kChain or, where CTAs have combined them, 1.
enum PlanRequest : size_t {
  kRequestFirstSlot,
  kRequestSplits,
  kRequestFirstPage,
  kRequestPages,
  kRequestLastLen,
  kRequestHidden,
  kRequestChained,
  kRequestWords = 8,
};

constexpr int64_t kMaxSlots = int64_t{1} << 24;

constexpr int32_t kPlanMagicValue = 0x54504434;  // "TPD4": changes with this layout

// Where the parts of a plan lie, in words. Padded to fixed sizes: a captured graph reads the same places in every replay.
struct PlanLayout {
  int64_t requests;  // [max_batch, kRequestWords]
  int64_t items;     // [max_items, kItemWords]: item c is CTA c's first, the others lie behind those
  int64_t max_items;
  int64_t words;

  PlanLayout(int64_t sm_count, int64_t max_batch, int64_t max_slots)
      : requests(kPlanHeaderWords),
        items(requests + round_up(max_batch * static_cast<int64_t>(kRequestWords))),
        max_items(sm_count + max_slots),
        words(items + max_items * static_cast<int64_t>(kItemWords)) {}

 private:
  static int64_t round_up(int64_t words) { return (words + 3) / 4 * 4; }
};

// Bytes of a workspace, all fp32: partial outputs [max_slots, group, head_dim], then [max_slots, group, 2], the base-2 maximum
// of their scores and the sum of the weights that they hold. -1 where they do not count in 63 bits.
static inline int64_t decode_workspace_bytes(int64_t max_slots, int64_t group, int64_t head_dim) {
  int64_t bytes = 0;
  if (__builtin_mul_overflow(max_slots * group, (head_dim + 2) * static_cast<int64_t>(sizeof(float)), &bytes)) return -1;
  return bytes;
}

// Partials of a KV head at most, where no chunk_tokens says otherwise: one for each of its share of the SMs.
static inline int64_t most_splits(int32_t sm_count, int32_t num_kv_heads) { return std::max(1, sm_count / num_kv_heads); }

// Partials of each KV head of a request, as equal as whole pages allow: one for each of the head's share of the SMs. But where
// fewer than two thirds of those would leave no run longer, as few as that: in a batch the others cost more than they bring a
// request alone. The request's own pages, the head count and the SM count decide, nothing else of the batch: that is what makes
// a request's bits its own.
static inline int64_t splits_of(const tilepress_decode_plan_args &args, int64_t pages) {
  if (args.chunk_tokens > 0) {
    const int64_t longest = args.chunk_tokens / args.page_size;
    return (pages + longest - 1) / longest;
  }
  const int64_t most = most_splits(args.sm_count, args.num_kv_heads);
  const int64_t longest = std::max<int64_t>((pages + most - 1) / most, 1);
  const int64_t splits = (pages + longest - 1) / longest;
  return longest > 1 && 3 * splits >= 2 * most ? most : splits;
}

// The declared maximum of slots, or the most that max_batch requests can need under the rule.
template <typename Args>
static int64_t declared_slots(const Args &args) {
  if (args.max_slots > 0) return args.max_slots;
  return static_cast<int64_t>(args.max_batch) * args.num_kv_heads * most_splits(args.sm_count, args.num_kv_heads);
}

// What both entries refuse.
template <typename Args>
static int check_plan_numbers(const char *entry, const Args &args) {
  if (int code = check_groups(entry, args)) return code;
  if (find_page_format(args.page_format) == nullptr)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: page_format is %d, which is none", entry, args.page_format);
  if (args.chunk_tokens % args.page_size != 0)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: chunk_tokens is %d, not whole tiles of page_size, %d", entry,
                args.chunk_tokens, args.page_size);
  if (args.chunk_tokens > 0 && args.max_slots == 0)
    return fail(TILEPRESS_INVALID_ARGUMENT,
                "%s: max_slots is 0, but chunk_tokens leaves their number to the lengths; declare it", entry);
  if (declared_slots(args) > kMaxSlots)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: max_slots comes to %lld; at most %lld", entry,
                static_cast<long long>(declared_slots(args)), static_cast<long long>(kMaxSlots));
  return TILEPRESS_OK;
}

// What a request's row sees, in tokens from the start of its page list: [begin, end).
struct Visible {
  int64_t begin;
  int64_t end;
};

// Fills `visible` or fails: a request that is none, or that has too few pages.
int visible_of(const char *entry, const tilepress_decode_plan_args &args, int64_t request, Visible *visible);

}  // namespace tilepress
