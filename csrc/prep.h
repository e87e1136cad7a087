// The refusals of the preps that no field of their arguments states alone. Host code, so a stub refuses the same.
#pragma once

#include <cmath>
#include <cstdint>

#include "band.h"
#include "error.h"
#include "heads.h"
#include "page_formats.h"
#include "pool.h"
#include "tilepress.h"

namespace tilepress {

// What a prep was compiled for. folds: whether it writes folded pages too, and takes V from K's projection.
struct PrepKind {
  int32_t head_dim;
  bool folds;
};

template <typename Args>
static int check_prep_geometry(const char *entry, const Args &args, const PrepKind &kind) {
  if (args.head_dim != kind.head_dim)
    return fail(TILEPRESS_UNSUPPORTED, "%s: head_dim is %d; compiled for %d", entry, args.head_dim, kind.head_dim);
  if (args.page_size != kTileRows)
    return fail(TILEPRESS_UNSUPPORTED, "%s: page_size is %d; compiled for %d", entry, args.page_size, kTileRows);
  if (int code = check_groups(entry, args)) return code;
  PoolTiles tiles{};
  if (int code = prepare_pool(entry, args, &tiles)) return code;
  const PageFormat &format = *find_page_format(args.page_format);
  if (args.k_eq_v != 0 && !kind.folds)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: k_eq_v is %d; V of these layers is a projection of its own", entry,
                args.k_eq_v);
  if (format.needs_k_eq_v && !kind.folds)
    return fail(TILEPRESS_UNSUPPORTED, "%s: page_format is %s; this entry writes split pages alone", entry, format.name);
  if (format.needs_k_eq_v && args.k_eq_v == 0)
    return fail(TILEPRESS_INVALID_ARGUMENT,
                "%s: page_format %s needs k_eq_v: it keeps one row for K and V, which must be one projection", entry,
                format.name);
  if (args.rotary > args.head_dim)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: rotary is %d, more than head_dim, %d", entry, args.rotary, args.head_dim);
  if (format.needs_k_eq_v && args.rotary > format.extra_columns)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: rotary is %d; a %s row keeps %d rotated columns", entry, args.rotary,
                format.name, format.extra_columns);
  if (!std::isfinite(args.eps) || args.eps <= 0.0f)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: eps is %g; it must be finite and above 0", entry,
                static_cast<double>(args.eps));
  return TILEPRESS_OK;
}

template <typename Args>
static int check_prep_bands(const char *entry, const Args &args) {
  const int64_t q_columns = static_cast<int64_t>(args.num_q_heads) * args.head_dim;
  const int64_t kv_columns = static_cast<int64_t>(args.num_kv_heads) * args.head_dim;
  if (int code = check_band(entry, {"q", args.q_band_offset, args.q_band_length, args.q_row_stride}, q_columns)) return code;
  if (args.k_in == nullptr) return TILEPRESS_OK;
  if (int code = check_band(entry, {"k", args.k_band_offset, args.k_band_length, args.k_row_stride}, kv_columns)) return code;
  if (args.k_eq_v != 0) return TILEPRESS_OK;
  return check_band(entry, {"v", args.v_band_offset, args.v_band_length, args.v_row_stride}, kv_columns);
}

// Which of the pointers around K and V belong together. Without rows nothing is read.
template <typename Args>
static int check_prep_pointers(const char *entry, const Args &args) {
  if (args.rows == 0) return TILEPRESS_OK;
  if (args.k_in == nullptr) {
    if (args.v_in != nullptr || args.k_eq_v != 0)
      return fail(TILEPRESS_INVALID_ARGUMENT, "%s: k_in is null, but %s is given", entry,
                  args.v_in != nullptr ? "v_in" : "k_eq_v");
    return TILEPRESS_OK;
  }
  if (args.k_eq_v != 0 && args.v_in != nullptr)
    return fail(TILEPRESS_INVALID_ARGUMENT, "%s: v_in is given, but k_eq_v takes V from k_in", entry);
  const struct {
    const char *name;
    bool missing;
  } needed[] = {{"v_in", args.k_eq_v == 0 && args.v_in == nullptr},
                {"k_norm", args.k_norm == nullptr},
                {"pool", args.pool == nullptr},
                {"page_indptr", args.page_indptr == nullptr},
                {"page_ids", args.page_ids == nullptr && args.num_page_ids > 0}};
  for (const auto &pointer : needed)
    if (pointer.missing) return fail(TILEPRESS_INVALID_ARGUMENT, "%s: %s is null", entry, pointer.name);
  return TILEPRESS_OK;
}

template <typename Args>
static int check_prep(const char *entry, const Args &args, const PrepKind &kind) {
  if (int code = check_prep_geometry(entry, args, kind)) return code;
  if (int code = check_prep_bands(entry, args)) return code;
  return check_prep_pointers(entry, args);
}

constexpr PrepKind kPrepGlobal = {512, true};
constexpr PrepKind kPrepSliding = {256, false};

static inline int check_prep_global_prompt(const char *entry, const tilepress_prep_prompt_args &args) {
  return check_prep(entry, args, kPrepGlobal);
}

static inline int check_prep_global_decode(const char *entry, const tilepress_prep_decode_args &args) {
  return check_prep(entry, args, kPrepGlobal);
}

static inline int check_prep_sliding_prompt(const char *entry, const tilepress_prep_prompt_args &args) {
  return check_prep(entry, args, kPrepSliding);
}

static inline int check_prep_sliding_decode(const char *entry, const tilepress_prep_decode_args &args) {
  return check_prep(entry, args, kPrepSliding);
}

}  // namespace tilepress
