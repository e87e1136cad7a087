// Refusals that every call over a plan makes, of whichever planner: the plan was built for something else, or reaches past
// what the call gives it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "error.h"
#include "tilepress.h"

namespace tilepress {

// A number that the call names, and the word of the plan that holds it.
struct PlannedNumber {
  const char *name;
  size_t word;
  int64_t named;
};

template <size_t N>
static int check_planned(const char *entry, const int32_t *plan, const PlannedNumber (&numbers)[N]) {
  for (const PlannedNumber &number : numbers)
    if (plan[number.word] != number.named)
      return fail(TILEPRESS_INVALID_ARGUMENT, "%s: %s is %lld, but plan_host was built for %d", entry, number.name,
                  static_cast<long long>(number.named), plan[number.word]);
  return TILEPRESS_OK;
}

// A decode's plan of `batch` requests, whose items reach into `page_ids` page ids.
template <typename Args>
static int check_reach(const char *entry, const Args &args, int32_t batch, int32_t page_ids) {
  if (static_cast<int64_t>(args.row_offset) + batch > args.q_rows)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: row_offset %d and the plan's batch %d run past q_rows, %d", entry,
                args.row_offset, batch, args.q_rows);
  if (args.num_page_ids < page_ids)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: num_page_ids is %d, but plan_host reaches into %d page ids", entry,
                args.num_page_ids, page_ids);
  return TILEPRESS_OK;
}

// need: bytes of the plan's workspace; negative where they do not count.
template <typename Args>
static int check_workspace(const char *entry, const Args &args, int64_t need) {
  if (need >= 0 && args.workspace_bytes >= need) return TILEPRESS_OK;
  return fail(TILEPRESS_INVALID_ARGUMENT, "%s: workspace_bytes is %lld; this plan needs %lld", entry,
              static_cast<long long>(args.workspace_bytes), static_cast<long long>(need));
}

}  // namespace tilepress
