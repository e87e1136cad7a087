#include "cuda_host.h"

#include "error.h"
#include "tilepress.h"

namespace tilepress {

int check_cuda(const char *what, cudaError_t error) {
  if (error == cudaSuccess) return TILEPRESS_OK;
  return fail(TILEPRESS_CUDA, "%s: %s", what, cudaGetErrorString(error));
}

int check_device(const char *entry, const BuiltFor &built_for) {
  int device = 0;
  int major = 0;
  int minor = 0;
  int shared_memory_bytes = 0;
  if (int code = check_cuda("cudaGetDevice", cudaGetDevice(&device))) return code;
  if (int code =
          check_cuda("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)))
    return code;
  if (int code =
          check_cuda("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device)))
    return code;
  if (int code = check_cuda("cudaDeviceGetAttribute",
                            cudaDeviceGetAttribute(&shared_memory_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)))
    return code;
  if (major != built_for.major || minor != built_for.minor)
    return fail(TILEPRESS_DEVICE, "%s: device %d has compute capability %d.%d; this library is built for %d.%d", entry, device,
                major, minor, built_for.major, built_for.minor);
  if (shared_memory_bytes < built_for.shared_memory_bytes)
    return fail(TILEPRESS_DEVICE, "%s: device %d offers a block %d bytes of shared memory; the kernel needs %d", entry, device,
                shared_memory_bytes, built_for.shared_memory_bytes);
  return TILEPRESS_OK;
}

int count_sms(int32_t *count) {
  static std::atomic<int32_t> counts[kTrackedDevices];
  int device = 0;
  if (int code = check_cuda("cudaGetDevice", cudaGetDevice(&device))) return code;
  *count = device < kTrackedDevices ? counts[device].load(std::memory_order_relaxed) : 0;
  if (*count != 0) return TILEPRESS_OK;
  int found = 0;
  if (int code = check_cuda("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device)))
    return code;
  if (device < kTrackedDevices) counts[device].store(found, std::memory_order_relaxed);
  *count = found;
  return TILEPRESS_OK;
}

int configure(const char *kernel_name, const void *kernel, int dynamic_shared_bytes, KernelState *state) {
  int device = 0;
  if (int code = check_cuda("cudaGetDevice", cudaGetDevice(&device))) return code;
  const bool tracked = device < kTrackedDevices;
  std::atomic<uint64_t> &word = state->configured[tracked ? device / 64 : 0];
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (tracked && (word.load(std::memory_order_acquire) & bit) != 0) return TILEPRESS_OK;
  if (int code = check_cuda(kernel_name,
                            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic_shared_bytes)))
    return code;
  if (tracked) word.fetch_or(bit, std::memory_order_release);
  return TILEPRESS_OK;
}

int count_resident_clusters(const char *kernel_name, const void *kernel, cudaLaunchConfig_t config, KernelState *state,
                            int32_t *clusters) {
  int device = 0;
  if (int code = check_cuda("cudaGetDevice", cudaGetDevice(&device))) return code;
  const bool tracked = device < kTrackedDevices;
  *clusters = tracked ? state->clusters[device].load(std::memory_order_relaxed) : 0;
  if (*clusters > 0) return TILEPRESS_OK;
  unsigned size = 1;
  for (unsigned i = 0; i < config.numAttrs; ++i)
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension)
      size = config.attrs[i].val.clusterDim.x * config.attrs[i].val.clusterDim.y * config.attrs[i].val.clusterDim.z;
  config.gridDim = dim3(size);
  int found = 0;
  if (int code = check_cuda(kernel_name, cudaOccupancyMaxActiveClusters(&found, kernel, &config))) return code;
  *clusters = found > 0 ? found : 1;
  if (tracked) state->clusters[device].store(*clusters, std::memory_order_relaxed);
  return TILEPRESS_OK;
}

int encode_tensor_map(const char *kernel_name, const TensorMapShape &shape, const void *address, CUtensorMap *map) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static std::atomic<Encode> resolved{nullptr};
  Encode encode = resolved.load(std::memory_order_acquire);
  if (encode == nullptr) {
    void *symbol = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    if (int code =
            check_cuda("cudaGetDriverEntryPointByVersion",
                       cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &found)))
      return code;
    if (found != cudaDriverEntryPointSuccess || symbol == nullptr)
      return fail(TILEPRESS_CUDA, "%s: the driver has no cuTensorMapEncodeTiled; it must be of CUDA 12.0 or later",
                  kernel_name);
    encode = reinterpret_cast<Encode>(symbol);
    resolved.store(encode, std::memory_order_release);
  }
  const CUresult result =
      encode(map, shape.dtype, shape.rank, const_cast<void *>(address), shape.dims, shape.strides, shape.box,
             shape.element_strides, shape.interleave, shape.swizzle, shape.l2_promotion, shape.oob_fill);
  if (result != CUDA_SUCCESS)
    return fail(TILEPRESS_CUDA, "%s: cuTensorMapEncodeTiled refuses the tensor map of %s (CUresult %d)", kernel_name,
                shape.tensor, static_cast<int>(result));
  return TILEPRESS_OK;
}

}  // namespace tilepress
