// Plans a decode step. Host code: no CUDA call, no allocation beyond the standard library's, no state.
#include "decode_plan.h"

#include <algorithm>
#include <array>
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

using Item = std::array<int32_t, kItemWords>;

// Items that one CTA takes one behind another: a whole chain, or one.
struct Unit {
  size_t first;
  size_t items;
  int64_t pages;
  int32_t cta;
};

// A request's pages, and how many runs each KV head's are cut into.
struct Cut {
  Visible visible;
  int64_t front;
  int64_t pages;
  int64_t splits;

  int64_t run_begin(int64_t i) const { return front + i * pages / splits; }
};

int cut_requests(const char *entry, const tilepress_decode_plan_args &args, std::vector<Cut> *cuts) {
  for (int64_t r = 0; r < args.batch; ++r) {
    Cut cut{};
    if (int code = visible_of(entry, args, r, &cut.visible)) return code;
    cut.front = cut.visible.begin / args.page_size;
    cut.pages = (cut.visible.end + args.page_size - 1) / args.page_size - cut.front;
    cut.splits = splits_of(args, cut.pages);
    cuts->push_back(cut);
  }
  return TILEPRESS_OK;
}

// How many of the first requests have their chains taken whole: as many as leave behind them, run by run, a longest chain's
// pages for every CTA, which is what it takes to even out the CTAs' loads.
size_t whole_chains(const tilepress_decode_plan_args &args, const std::vector<Cut> &cuts) {
  int64_t behind = 0;
  for (const Cut &cut : cuts) behind += cut.pages * args.num_kv_heads;
  int64_t longest = 0;
  for (size_t r = 0; r < cuts.size(); ++r) {
    const Cut &cut = cuts[r];
    behind -= cut.pages * args.num_kv_heads;
    if (cut.splits > 0) longest = std::max(longest, (cut.pages + cut.splits - 1) / cut.splits * std::min(kChain, cut.splits));
    if (behind < longest * args.sm_count) return r;
  }
  return cuts.size();
}

// Cuts every request into runs of pages and gives each KV head of each run, or of each whole chain, a slot. Boundaries are
// floor(i * pages / splits).
int cut_items(const char *entry, const tilepress_decode_plan_args &args, int64_t max_slots, const std::vector<Cut> &cuts,
              int32_t *requests, std::vector<Item> *items, std::vector<Unit> *units) {
  const size_t whole = whole_chains(args, cuts);
  int64_t slot = 0;
  for (size_t r = 0; r < cuts.size(); ++r) {
    const Cut &cut = cuts[r];
    const int64_t unit_runs = r < whole ? kChain : 1;
    const int64_t partials = (cut.splits + unit_runs - 1) / unit_runs;
    if (slot + partials * args.num_kv_heads > max_slots)
      return fail(TILEPRESS_INVALID_ARGUMENT, "%s: max_slots is %lld; request %lld needs slots up to %lld", entry,
                  static_cast<long long>(max_slots), static_cast<long long>(r),
                  static_cast<long long>(slot + partials * args.num_kv_heads));
    const auto hidden = static_cast<int32_t>(cut.visible.begin - cut.front * args.page_size);
    int32_t *words = requests + r * kRequestWords;
    words[kRequestFirstSlot] = static_cast<int32_t>(slot);
    words[kRequestSplits] = static_cast<int32_t>(partials);
    words[kRequestFirstPage] = static_cast<int32_t>(args.page_indptr[r] + cut.front);
    words[kRequestPages] = static_cast<int32_t>(cut.pages);
    words[kRequestLastLen] =
        cut.pages > 0 ? static_cast<int32_t>(cut.visible.end - (cut.front + cut.pages - 1) * args.page_size) : 0;
    words[kRequestHidden] = hidden;
    words[kRequestChained] = static_cast<int32_t>(kChain / unit_runs);
    for (int32_t head = 0; head < args.num_kv_heads; ++head) {
      for (int64_t i = 0; i < cut.splits; ++i) {
        const int64_t first = cut.run_begin(i);
        const int64_t last = cut.run_begin(i + 1);
        const int64_t end = std::min<int64_t>(last * args.page_size, cut.visible.end);
        const bool ends_unit = (i + 1) % unit_runs == 0 || i + 1 == cut.splits;
        if (i % unit_runs == 0) units->push_back({items->size(), 0, 0, 0});
        units->back().items += 1;
        units->back().pages += last - first;
        Item item{};
        item[kItemRequest] = static_cast<int32_t>(r);
        item[kItemKvHead] = head;
        item[kItemFirstPage] = static_cast<int32_t>(args.page_indptr[r] + first);
        item[kItemTiles] = static_cast<int32_t>(last - first);
        item[kItemSlot] = ends_unit ? static_cast<int32_t>(slot++) : kCarried;
        item[kItemLastLen] = static_cast<int32_t>(end - (last - 1) * args.page_size);
        item[kItemHidden] = i == 0 ? hidden : 0;
        items->push_back(item);
      }
    }
  }
  return TILEPRESS_OK;
}

// Longest unit first, each to the CTA with the fewest pages so far: which CTA runs an item changes no bit of it.
void assign(int32_t sm_count, std::vector<Unit> *units) {
  std::stable_sort(units->begin(), units->end(), [](const Unit &a, const Unit &b) { return a.pages > b.pages; });
  using Load = std::pair<int64_t, int32_t>;  // pages, CTA
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> loads;
  for (int32_t cta = 0; cta < sm_count; ++cta) loads.push({0, cta});
  for (Unit &unit : *units) {
    const Load load = loads.top();
    loads.pop();
    unit.cta = load.second;
    loads.push({load.first + unit.pages, load.second});
  }
  std::stable_sort(units->begin(), units->end(), [](const Unit &a, const Unit &b) { return a.cta < b.cta; });
}

// Writes the items of the units, which are in the order of their CTAs: CTA c's first as item c, the others behind the CTAs'
// first ones.
void place(int32_t sm_count, const std::vector<Unit> &units, const std::vector<Item> &items, int32_t *plan) {
  for (int32_t cta = 0; cta < sm_count; ++cta) plan[cta * kItemWords + kItemSlot] = -1;  // empty unless an item follows here
  int32_t behind = sm_count;
  int32_t cta = -1;
  int32_t *previous = nullptr;
  for (const Unit &unit : units) {
    for (size_t i = unit.first; i < unit.first + unit.items; ++i) {
      const bool first = unit.cta != cta;
      cta = unit.cta;
      const int32_t at = first ? cta : behind++;
      int32_t *words = plan + static_cast<int64_t>(at) * kItemWords;
      std::copy(items[i].begin(), items[i].end(), words);
      if (!first) previous[kItemNext] = at;
      previous = words;
    }
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
  std::vector<Cut> cuts;
  std::vector<Item> items;
  std::vector<Unit> units;
  if (int code = cut_requests(entry, args, &cuts)) return code;
  if (int code = cut_items(entry, args, slots, cuts, requests.data(), &items, &units)) return code;
  assign(args.sm_count, &units);

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
  place(args.sm_count, units, items, plan + layout.items);
  return TILEPRESS_OK;
}

}  // namespace tilepress
