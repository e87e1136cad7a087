// The knob's value, read once by the server, and the pool that a mode needs. Host code: makes no CUDA call, reads no
// environment.
#include "modes.h"

#include <cstring>

#include "error.h"
#include "tilepress.h"

namespace tilepress {
namespace {

int parse_mode(const char *text, int32_t *mode) {
  constexpr char kEntry[] = "tilepress_parse_mode";
  if (mode == nullptr) return fail(TILEPRESS_INVALID_ARGUMENT, "%s: mode is null", kEntry);
  if (text == nullptr) {
    *mode = TILEPRESS_MODE_INCUMBENT;
    return TILEPRESS_OK;
  }
  for (const Mode &known : kModes)
    if (std::strcmp(text, known.text) == 0) {
      *mode = known.code;
      return TILEPRESS_OK;
    }
  return fail(TILEPRESS_INVALID_ARGUMENT, "%s: %s is '%s'; it must be unset or one of %s", kEntry, kModeVariable, text,
              kModeTexts);
}

int mode_pool_bytes(int32_t mode, int64_t num_pages, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim,
                    int32_t page_size, int32_t k_eq_v, int64_t *bytes) {
  const Mode *known = find_mode(mode);
  if (known == nullptr) return fail(TILEPRESS_INVALID_ARGUMENT, "tilepress_mode_pool_bytes: mode is %d, which is none", mode);
  return tilepress_pool_bytes(num_pages, num_layers, num_kv_heads, head_dim, page_size, known->page_format, k_eq_v, bytes);
}

}  // namespace
}  // namespace tilepress

extern "C" int32_t tilepress_parse_mode(const char *text, int32_t *mode) { return tilepress::parse_mode(text, mode); }

extern "C" int32_t tilepress_mode_pool_bytes(int32_t mode, int64_t num_pages, int32_t num_layers, int32_t num_kv_heads,
                                             int32_t head_dim, int32_t page_size, int32_t k_eq_v, int64_t *bytes) {
  return tilepress::mode_pool_bytes(mode, num_pages, num_layers, num_kv_heads, head_dim, page_size, k_eq_v, bytes);
}
