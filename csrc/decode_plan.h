// The decode plan: which CTA reads which pages of which request, as one array of int32 that the caller copies to the device.
#pragma once

#include <cstddef>
#include <cstdint>

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
// page_ids[kItemFirstPage] on; its partial goes to slot kItemSlot; kItemLastLen tokens of its last page are the request's, and
// kItemHidden tokens at the start of its first page are older than the window.
enum PlanItem : size_t {
  kItemRequest,
  kItemKvHead,
  kItemFirstPage,
  kItemTiles,
  kItemSlot,
  kItemLastLen,
  kItemHidden,
  kItemWords = 8,
};

// Words of a request: the slot of its first KV head's first partial, and the partials of each of its KV heads.
enum PlanRequest : size_t { kRequestFirstSlot, kRequestSplits, kRequestWords };

constexpr int64_t kMaxSlots = int64_t{1} << 24;

constexpr int32_t kPlanMagicValue = 0x54504432;  // "TPD2": changes with this layout

// Where the parts of a plan lie, in words. Padded to fixed sizes: a captured graph reads the same places in every replay.
struct PlanLayout {
  int64_t ctas;      // [sm_count + 1]: CTA c has the items ctas[c] to ctas[c + 1]
  int64_t requests;  // [max_batch, kRequestWords]
  int64_t items;     // [max_slots, kItemWords]
  int64_t words;

  PlanLayout(int64_t sm_count, int64_t max_batch, int64_t max_slots)
      : ctas(kPlanHeaderWords),
        requests(ctas + round_up(sm_count + 1)),
        items(requests + round_up(max_batch * static_cast<int64_t>(kRequestWords))),
        words(items + max_slots * static_cast<int64_t>(kItemWords)) {}

 private:
  static int64_t round_up(int64_t words) { return (words + 3) / 4 * 4; }
};

// Bytes of a workspace: fp32 partial outputs [max_slots, group, head_dim], then their base-2 lse [max_slots, group]. -1 where
// they do not count in 63 bits.
static inline int64_t decode_workspace_bytes(int64_t max_slots, int64_t group, int64_t head_dim) {
  int64_t bytes = 0;
  if (__builtin_mul_overflow(max_slots * group, (head_dim + 1) * static_cast<int64_t>(sizeof(float)), &bytes)) return -1;
  return bytes;
}

}  // namespace tilepress
