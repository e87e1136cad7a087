// Which geometry a public entry has been compiled for.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tilepress {

// One compiled instance of an entry. `group` is query heads per KV head; page_format is a TILEPRESS_PAGE_FORMAT_* value.
struct Instance {
  const char *entry;
  int32_t head_dim;
  int32_t page_size;
  int32_t page_format;
  int32_t group;
};

// Every instance of the library, rendered from the table.
extern const Instance instances[];
extern const size_t instance_count;

// The geometry of a call.
struct Geometry {
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t page_size;
  int32_t page_format;
};

// TILEPRESS_OK where an instance of `entry` serves the geometry; otherwise fails with the argument's name and what is compiled.
int serves(const char *entry, const Geometry &geometry);

}  // namespace tilepress
