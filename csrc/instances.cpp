#include "instances.h"

#include <cstdio>
#include <cstring>

#include "error.h"
#include "heads.h"
#include "tilepress.h"

namespace tilepress {
namespace {

// One number that must equal an instance's, with the argument it comes from.
struct Axis {
  const char *argument;
  int32_t Instance::*field;
  int32_t value;
};

// The values of `axis` among the instances of `entry` that agree on the axes before it, as "4, 8, 16".
void list_compiled(char *text, size_t size, const char *entry, const Axis *axes, size_t axis) {
  size_t used = 0;
  text[0] = '\0';
  for (size_t i = 0; i < instance_count; ++i) {
    bool listed = std::strcmp(instances[i].entry, entry) == 0;
    for (size_t before = 0; before < axis; ++before) listed = listed && instances[i].*axes[before].field == axes[before].value;
    for (size_t earlier = 0; earlier < i && listed; ++earlier)
      listed = std::strcmp(instances[earlier].entry, entry) != 0 ||
               instances[earlier].*axes[axis].field != instances[i].*axes[axis].field;
    if (!listed || used >= size) continue;
    const int32_t value = instances[i].*axes[axis].field;
    used += static_cast<size_t>(std::snprintf(text + used, size - used, used ? ", %d" : "%d", value));
  }
}

}  // namespace

int serves(const char *entry, const Geometry &geometry) {
  if (entry == nullptr) return fail(TILEPRESS_INVALID_ARGUMENT, "entry is null; pass an entry's name");
  if (geometry.num_q_heads < 1 || geometry.num_kv_heads < 1)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: num_q_heads is %d and num_kv_heads is %d; both must be 1 or more", entry,
                geometry.num_q_heads, geometry.num_kv_heads);
  if (int code = check_groups(entry, geometry)) return code;
  if (geometry.num_kv_heads > 65535)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: num_kv_heads is %d; it must be 65535 or less", entry, geometry.num_kv_heads);
  if (geometry.head_dim < 1 || geometry.page_size < 1 || geometry.page_format < 1)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: head_dim is %d, page_size is %d and page_format is %d; each must be 1 or more",
                entry, geometry.head_dim, geometry.page_size, geometry.page_format);
  const Axis axes[] = {
      {"head_dim", &Instance::head_dim, geometry.head_dim},
      {"page_size", &Instance::page_size, geometry.page_size},
      {"page_format", &Instance::page_format, geometry.page_format},
      {"num_q_heads / num_kv_heads, the group,", &Instance::group, geometry.num_q_heads / geometry.num_kv_heads},
  };
  constexpr size_t axis_count = sizeof axes / sizeof axes[0];
  // The axis that fails is the first on which no instance agrees with everything up to it.
  size_t reached = 0;
  bool known = false;
  for (size_t i = 0; i < instance_count; ++i) {
    if (std::strcmp(instances[i].entry, entry) != 0) continue;
    known = true;
    size_t agreed = 0;
    while (agreed < axis_count && instances[i].*axes[agreed].field == axes[agreed].value) ++agreed;
    if (agreed == axis_count) return TILEPRESS_OK;
    if (agreed > reached) reached = agreed;
  }
  if (!known) return fail(TILEPRESS_INVALID_ARGUMENT, "entry '%s' is not in this library", entry);
  char compiled[128];
  list_compiled(compiled, sizeof compiled, entry, axes, reached);
  return fail(TILEPRESS_UNSUPPORTED, "%s: %s is %d; compiled for %s", entry, axes[reached].argument, axes[reached].value,
              compiled);
}

}  // namespace tilepress

extern "C" int32_t tilepress_supports(const char *entry, int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim,
                                      int32_t page_size, int32_t page_format) {
  return tilepress::serves(entry, {num_q_heads, num_kv_heads, head_dim, page_size, page_format});
}
