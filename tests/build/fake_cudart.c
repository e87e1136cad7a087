/* A CUDA runtime for a host without one: it counts calls, answers for a device that the test describes, and records what
 * would be launched. The library's archive links against it in place of libcudart. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <string.h>

#include "tilepress.h"

/* The library's own symbols are hidden in a shared object: these are how a test calls them. */
#define CALL(entry, struct) \
  int call_##entry(const struct *args) { return tilepress_##entry(args); }
CALL(global_prefill, tilepress_prefill_args)
CALL(sliding_prefill, tilepress_sliding_prefill_args)
CALL(global_decode, tilepress_decode_args)
CALL(sliding_decode, tilepress_decode_args)
CALL(decode_plan_size, tilepress_decode_plan_size_args)
CALL(decode_plan, tilepress_decode_plan_args)
CALL(merge_states, tilepress_merge_states_args)
CALL(prep_global_prompt, tilepress_prep_prompt_args)
CALL(prep_global_decode, tilepress_prep_decode_args)
CALL(prep_sliding_prompt, tilepress_prep_prompt_args)
CALL(prep_sliding_decode, tilepress_prep_decode_args)
CALL(gelu_mul, tilepress_gelu_mul_args)
CALL(routed_global_prefill, tilepress_routed_prefill_args)
CALL(routed_global_prefill_plan_size, tilepress_routed_prefill_plan_size_args)
CALL(routed_global_prefill_plan, tilepress_routed_prefill_plan_args)
CALL(routed_sliding_prefill, tilepress_routed_sliding_prefill_args)
CALL(routed_sliding_prefill_plan_size, tilepress_routed_prefill_plan_size_args)
CALL(routed_sliding_prefill_plan, tilepress_routed_prefill_plan_args)
CALL(routed_global_decode, tilepress_routed_decode_args)
CALL(routed_global_decode_plan_size, tilepress_routed_decode_plan_size_args)
CALL(routed_global_decode_plan, tilepress_routed_decode_plan_args)
CALL(routed_sliding_decode, tilepress_routed_decode_args)
CALL(routed_sliding_decode_plan_size, tilepress_routed_decode_plan_size_args)
CALL(routed_sliding_decode_plan, tilepress_routed_decode_plan_args)
int32_t call_parse_mode(const char *text, int32_t *mode) { return tilepress_parse_mode(text, mode); }
int32_t call_mode_pool_bytes(int32_t mode, int64_t num_pages, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim,
                             int32_t page_size, int32_t k_eq_v, int64_t *bytes) {
  return tilepress_mode_pool_bytes(mode, num_pages, num_layers, num_kv_heads, head_dim, page_size, k_eq_v, bytes);
}
int32_t call_pool_bytes(int64_t num_pages, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, int32_t page_size,
                        int32_t page_format, int32_t k_eq_v, int64_t *bytes) {
  return tilepress_pool_bytes(num_pages, num_layers, num_kv_heads, head_dim, page_size, page_format, k_eq_v, bytes);
}
const char *call_last_error(void) { return tilepress_last_error(); }
const char *call_version(void) { return tilepress_version(); }
const char *call_build_info(void) { return tilepress_build_info(); }
int32_t call_supports(const char *entry, int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim, int32_t page_size,
                      int32_t page_format) {
  return tilepress_supports(entry, num_q_heads, num_kv_heads, head_dim, page_size, page_format);
}

int fake_error;  /* what cudaGetDevice returns */
int fake_device; /* the current device */
int fake_major = 9;
int fake_minor = 0;
int fake_shared_memory = 232448;
int fake_sm_count = 132;

int fake_clusters = 17; /* that the device holds at once */

int fake_calls; /* of any function but the registration at load time */
int fake_attribute_calls;
int fake_launches;
enum { LAUNCHES = 4, ARGUMENTS = 32 };
struct {
  unsigned grid[3], block[3];
  size_t dynamic_shared;
  void *stream;
  unsigned cluster; /* blocks of a cluster along x; 0: no clusters */
  unsigned programmatic;
  uint64_t arguments[ARGUMENTS];
} fake_launch[LAUNCHES];
int fake_argument_bytes[LAUNCHES][ARGUMENTS]; /* set by the test: how many to read of each argument, 8 at most */

int fake_maps;
struct {
  uint64_t address, rank, dims[5], strides[4], box[5];
} fake_map[2 * LAUNCHES];

void fake_reset(void) {
  fake_calls = fake_attribute_calls = fake_launches = fake_maps = 0;
  memset(fake_argument_bytes, 0, sizeof fake_argument_bytes);
}

cudaError_t cudaGetDevice(int *device) {
  ++fake_calls;
  *device = fake_device;
  return (cudaError_t)fake_error;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  (void)device;
  ++fake_calls;
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? fake_major
           : attribute == cudaDevAttrComputeCapabilityMinor ? fake_minor
           : attribute == cudaDevAttrMultiProcessorCount    ? fake_sm_count
                                                            : fake_shared_memory;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
  (void)function, (void)attribute, (void)value;
  ++fake_calls, ++fake_attribute_calls;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *function, const cudaLaunchConfig_t *config) {
  (void)function, (void)config;
  ++fake_calls;
  *clusters = fake_clusters;
  return cudaSuccess;
}

static CUresult encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *dims,
                       const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *element_strides,
                       CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                       CUtensorMapFloatOOBfill fill) {
  (void)type, (void)element_strides, (void)interleave, (void)swizzle, (void)promotion, (void)fill;
  memset(map, 0, sizeof *map);
  fake_map[fake_maps].address = (uint64_t)address;
  fake_map[fake_maps].rank = rank;
  for (unsigned i = 0; i < rank; ++i) fake_map[fake_maps].dims[i] = dims[i], fake_map[fake_maps].box[i] = box[i];
  for (unsigned i = 0; i + 1 < rank; ++i) fake_map[fake_maps].strides[i] = strides[i];
  ++fake_maps;
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
  (void)name, (void)version, (void)flags;
  ++fake_calls;
  *function = (void *)encode;
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
  (void)function;
  ++fake_calls;
  const int n = fake_launches++;
  memcpy(fake_launch[n].grid, &config->gridDim, sizeof fake_launch[n].grid);
  memcpy(fake_launch[n].block, &config->blockDim, sizeof fake_launch[n].block);
  fake_launch[n].dynamic_shared = config->dynamicSmemBytes;
  fake_launch[n].stream = config->stream;
  fake_launch[n].cluster = fake_launch[n].programmatic = 0;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute *attribute = &config->attrs[i];
    if (attribute->id == cudaLaunchAttributeClusterDimension) fake_launch[n].cluster = attribute->val.clusterDim.x;
    if (attribute->id == cudaLaunchAttributeProgrammaticStreamSerialization)
      fake_launch[n].programmatic = (unsigned)attribute->val.programmaticStreamSerializationAllowed;
  }
  memset(fake_launch[n].arguments, 0, sizeof fake_launch[n].arguments);
  for (int i = 0; i < ARGUMENTS; ++i)
    if (fake_argument_bytes[n][i] > 0) memcpy(&fake_launch[n].arguments[i], arguments[i], fake_argument_bytes[n][i]);
  return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "a made-up error"; }

/* Called when the library is loaded. */
void **__cudaRegisterFatBinary(void *binary) {
  static void *handle;
  (void)binary;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *tid, void *bid,
                            void *block, void *grid, int *size) {
  (void)handle, (void)host, (void)device, (void)name, (void)limit, (void)tid, (void)bid, (void)block, (void)grid, (void)size;
}

void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size, int constant,
                       int global) {
  (void)handle, (void)host, (void)device, (void)name, (void)external, (void)size, (void)constant, (void)global;
}

/* Never called: launches go through cudaLaunchKernelExC. The incumbent's are tested in test_incumbent.py. */
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t bytes, cudaStream_t stream) {
  (void)function, (void)grid, (void)block, (void)arguments, (void)bytes, (void)stream;
  ++fake_calls;
  return cudaErrorUnknown;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads, size_t bytes,
                                                                   unsigned flags) {
  (void)blocks, (void)function, (void)threads, (void)bytes, (void)flags;
  ++fake_calls;
  return cudaErrorUnknown;
}
cudaError_t __cudaGetKernel(void **kernel, const void *function) {
  (void)kernel, (void)function;
  ++fake_calls;
  return cudaErrorUnknown;
}
cudaError_t __cudaLaunchKernel(void) {
  ++fake_calls;
  return cudaErrorUnknown;
}
unsigned __cudaPopCallConfiguration(void) {
  ++fake_calls;
  return 1;
}
