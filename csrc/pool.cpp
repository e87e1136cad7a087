#include "pool.h"

namespace tilepress {
namespace {

int pool_bytes(int64_t num_pages, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, int32_t page_size,
               int32_t page_format, int32_t k_eq_v, int64_t *bytes) {
  constexpr char kEntry[] = "tilepress_pool_bytes";
  const struct {
    const char *name;
    int64_t value;
  } counts[] = {{"num_pages", num_pages},
                {"num_layers", num_layers},
                {"num_kv_heads", num_kv_heads},
                {"head_dim", head_dim},
                {"page_size", page_size}};
  for (const auto &count : counts)
    if (count.value < 1)
      return fail(TILEPRESS_INVALID_ARGUMENT, "%s: %s is %lld; it must be 1 or more", kEntry, count.name,
                  static_cast<long long>(count.value));
  if (bytes == nullptr) return fail(TILEPRESS_INVALID_ARGUMENT, "%s: bytes is null", kEntry);
  if (k_eq_v != 0 && k_eq_v != 1)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: k_eq_v is %d; it must be 0 or 1", kEntry, k_eq_v);
  const PageFormat *format = find_page_format(page_format);
  if (format == nullptr) return fail(TILEPRESS_INVALID_ARGUMENT, "%s: page_format is %d, which is none", kEntry, page_format);
  if (format->needs_k_eq_v && k_eq_v == 0)
    return fail(TILEPRESS_INVALID_ARGUMENT,
                "%s: page_format %s needs k_eq_v: it keeps one row for K and V, which must be one projection", kEntry,
                format->name);
  // Multiplied factor by factor, so that no product wraps.
  const int64_t factors[] = {
      num_pages, num_layers, num_kv_heads, page_size, format->tiles, int64_t{head_dim} + format->extra_columns, 2};
  int64_t total = 1;
  for (const int64_t factor : factors)
    if (__builtin_mul_overflow(total, factor, &total))
      return fail(TILEPRESS_INVALID_ARGUMENT, "%s: num_pages %lld makes a pool of 2^63 bytes or more", kEntry,
                  static_cast<long long>(num_pages));
  *bytes = total;
  return TILEPRESS_OK;
}

}  // namespace
}  // namespace tilepress

extern "C" int32_t tilepress_pool_bytes(int64_t num_pages, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim,
                                        int32_t page_size, int32_t page_format, int32_t k_eq_v, int64_t *bytes) {
  return tilepress::pool_bytes(num_pages, num_layers, num_kv_heads, head_dim, page_size, page_format, k_eq_v, bytes);
}
