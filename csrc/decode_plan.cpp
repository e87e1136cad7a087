// Plans a decode step. Host code: no CUDA call, no allocation beyond the standard library's, no state.
#include "decode_plan.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "error.h"
#include "hand_written.h"
#include "page_formats.h"
#include "tilepress.h"

namespace tilepress {

int visible_of(const char *entry, const tilepress_decode_plan_args &args, int64_t request, Visible *visible) {
  const auto r = static_cast<long long>(request);
  const int64_t kv_len = args.kv_len[request];
  const int64_t origin = args.kv_origin != nullptr ? args.kv_origin[request] : 0;
  const int64_t first = args.window > 0 ? std::max<int64_t>(kv_len - args.window, 0) : 0;
  const int64_t listed = static_cast<int64_t>(args.page_indptr[request + 1]) - args.page_indptr[request];
  if (kv_len < 0)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: kv_len[%lld] is %d; it must be 0 or more", entry, r, args.kv_len[request]);
  if (args.page_indptr[request] < 0 || listed < 0)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: page_indptr[%lld] and the next are %d and %d; they must not decrease from 0",
                entry, r, args.page_indptr[request], args.page_indptr[request + 1]);
  if (origin < 0 || origin % args.page_size != 0)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: kv_origin[%lld] is %lld; it must be a multiple of page_size, %d", entry, r,
                static_cast<long long>(origin), args.page_size);
  if (kv_len > 0 && origin > first)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: kv_origin[%lld] is %lld, past %lld, the first key that its row sees", entry, r,
                static_cast<long long>(origin), static_cast<long long>(first));
  const int64_t tokens = std::max<int64_t>(kv_len - origin, 0);
  if (listed < (tokens + args.page_size - 1) / args.page_size)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: page_indptr lists %lld pages for request %lld, but its %lld tokens need %lld",
                entry, static_cast<long long>(listed), r, static_cast<long long>(tokens),
                static_cast<long long>((tokens + args.page_size - 1) / args.page_size));
  *visible = {kv_len > 0 ? first - origin : 0, tokens};
  return TILEPRESS_OK;
}

namespace {

// One run of pages, on its way into the plan.
struct Item {
  int32_t words[kItemWords];
  int32_t cta;
};

// Cuts every request into runs of pages and gives each KV head of each run a slot. Boundaries are floor(i * pages / splits).
int cut(const char *entry, const tilepress_decode_plan_args &args, int64_t max_slots, int32_t *requests,
        std::vector<Item> *items) {
  int64_t slot = 0;
  for (int64_t r = 0; r < args.batch; ++r) {
    Visible visible{};
    if (int code = visible_of(entry, args, r, &visible)) return code;
    const int64_t front = visible.begin / args.page_size;
    const int64_t pages = (visible.end + args.page_size - 1) / args.page_size - front;
    const int64_t splits = splits_of(args, pages);
    if (slot + splits * args.num_kv_heads > max_slots)
      return fail(TILEPRESS_INVALID_ARGUMENT, "%s: max_slots is %lld; request %lld needs slots up to %lld", entry,
                  static_cast<long long>(max_slots), static_cast<long long>(r),
                  static_cast<long long>(slot + splits * args.num_kv_heads));
    int32_t *words = requests + r * kRequestWords;
    words[kRequestFirstSlot] = static_cast<int32_t>(slot);
    words[kRequestSplits] = static_cast<int32_t>(splits);
    words[kRequestFirstPage] = static_cast<int32_t>(args.page_indptr[r] + front);
    words[kRequestPages] = static_cast<int32_t>(pages);
    words[kRequestLastLen] = pages > 0 ? static_cast<int32_t>(visible.end - (front + pages - 1) * args.page_size) : 0;
    words[kRequestHidden] = static_cast<int32_t>(visible.begin - front * args.page_size);
    for (int64_t head = 0; head < args.num_kv_heads; ++head) {
      for (int64_t i = 0; i < splits; ++i, ++slot) {
        const int64_t first = front + i * pages / splits;
        const int64_t last = front + (i + 1) * pages / splits;
        const int64_t end = std::min<int64_t>(last * args.page_size, visible.end);
        Item item{};
        item.words[kItemRequest] = static_cast<int32_t>(r);
        item.words[kItemKvHead] = static_cast<int32_t>(head);
        item.words[kItemFirstPage] = static_cast<int32_t>(args.page_indptr[r] + first);
        item.words[kItemTiles] = static_cast<int32_t>(last - first);
        item.words[kItemSlot] = static_cast<int32_t>(slot);
        item.words[kItemLastLen] = static_cast<int32_t>(end - (last - 1) * args.page_size);
        item.words[kItemHidden] = static_cast<int32_t>(i == 0 ? visible.begin - front * args.page_size : 0);
        items->push_back(item);
      }
    }
  }
  return TILEPRESS_OK;
}

// Longest item first, each to the CTA with the fewest pages so far: which CTA runs an item changes no bit of it.
void assign(int32_t sm_count, std::vector<Item> *items) {
  std::stable_sort(items->begin(), items->end(),
                   [](const Item &a, const Item &b) { return a.words[kItemTiles] > b.words[kItemTiles]; });
  using Load = std::pair<int64_t, int32_t>;  // pages, CTA
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> loads;
  for (int32_t cta = 0; cta < sm_count; ++cta) loads.push({0, cta});
  for (Item &item : *items) {
    const Load load = loads.top();
    loads.pop();
    item.cta = load.second;
    loads.push({load.first + item.words[kItemTiles], load.second});
  }
  std::stable_sort(items->begin(), items->end(), [](const Item &a, const Item &b) { return a.cta < b.cta; });
}

// Writes the items, which are in the order of their CTAs: CTA c's first as item c, the others behind the CTAs' first ones.
void place(int32_t sm_count, const std::vector<Item> &items, int32_t *plan) {
  for (int32_t cta = 0; cta < sm_count; ++cta) plan[cta * kItemWords + kItemSlot] = -1;  // empty unless an item follows here
  int32_t behind = sm_count;
  int32_t *previous = nullptr;
  for (size_t i = 0; i < items.size(); ++i) {
    const bool first = i == 0 || items[i].cta != items[i - 1].cta;
    const int32_t at = first ? items[i].cta : behind++;
    int32_t *words = plan + static_cast<int64_t>(at) * kItemWords;
    std::copy_n(items[i].words, static_cast<size_t>(kItemWords), words);
    if (!first) previous[kItemNext] = at;
    previous = words;
  }
}

}  // namespace

int run_decode_plan_size(const char *entry, const tilepress_decode_plan_size_args &args) {
  if (int code = check_plan_numbers(entry, args)) return code;
  const int64_t slots = declared_slots(args);
  const int64_t bytes = decode_workspace_bytes(slots, args.num_q_heads / args.num_kv_heads, args.head_dim);
  if (bytes < 0)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: head_dim %d of %lld slots makes a workspace of 2^63 bytes or more", entry,
                args.head_dim, static_cast<long long>(slots));
  *args.plan_words_out = PlanLayout(args.sm_count, args.max_batch, slots).words;
  *args.workspace_bytes_out = bytes;
  return TILEPRESS_OK;
}

int run_decode_plan(const char *entry, const tilepress_decode_plan_args &args) {
  if (int code = check_plan_numbers(entry, args)) return code;
  if (args.batch > args.max_batch)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: batch is %d, past max_batch, %d", entry, args.batch, args.max_batch);
  const int64_t slots = declared_slots(args);
  const PlanLayout layout(args.sm_count, args.max_batch, slots);
  if (args.plan_words < layout.words)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: plan_words is %lld; this plan needs %lld", entry,
                static_cast<long long>(args.plan_words), static_cast<long long>(layout.words));
  // Refuse before writing: a caller's last plan stays whole.
  std::vector<int32_t> requests(static_cast<size_t>(args.max_batch) * kRequestWords, 0);
  std::vector<Item> items;
  if (int code = cut(entry, args, slots, requests.data(), &items)) return code;
  assign(args.sm_count, &items);

  int32_t *plan = args.plan;
  std::memset(plan, 0, static_cast<size_t>(layout.words) * sizeof *plan);
  plan[kPlanMagic] = kPlanMagicValue;
  plan[kPlanBatch] = args.batch;
  plan[kPlanItems] = static_cast<int32_t>(items.size());
  plan[kPlanNumQHeads] = args.num_q_heads;
  plan[kPlanNumKvHeads] = args.num_kv_heads;
  plan[kPlanPageSize] = args.page_size;
  plan[kPlanPageFormat] = args.page_format;
  plan[kPlanMaxBatch] = args.max_batch;
  plan[kPlanMaxSlots] = static_cast<int32_t>(slots);
  plan[kPlanSmCount] = args.sm_count;
  plan[kPlanPageIds] = args.batch > 0 ? args.page_indptr[args.batch] : 0;
  std::copy(requests.begin(), requests.end(), plan + layout.requests);
  place(args.sm_count, items, plan + layout.items);
  return TILEPRESS_OK;
}

}  // namespace tilepress
