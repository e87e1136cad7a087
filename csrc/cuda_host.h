// What every launcher needs of the CUDA runtime: the device it was built for, tensor maps, kernel attributes.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace tilepress {

// What the kernels were compiled for. shared_memory_bytes: a block's largest need, dynamic and static.
struct BuiltFor {
  int major;
  int minor;
  int shared_memory_bytes;
};

// TILEPRESS_OK where the current device is of that compute capability and offers the shared memory.
int check_device(const char *entry, const BuiltFor &built_for);

constexpr int kTrackedDevices = 256;

// The multiprocessors of the current device, asked for once per device.
int count_sms(int32_t *count);

// What is set or asked once per device. Zero-initialised at namespace scope. configured: the kernel's attributes are set, a bit
// a device ordinal. clusters: that the device holds at once; 0: not asked yet.
struct KernelState {
  std::atomic<uint64_t> configured[kTrackedDevices / 64];
  std::atomic<int32_t> clusters[kTrackedDevices];
};

// Raises the kernel's dynamic shared memory limit on the current device, the first time it runs there.
int configure(const char *kernel_name, const void *kernel, int dynamic_shared_bytes, KernelState *state);

// How many clusters of a launch the current device holds at once, at least one. `config` is whole but for its grid.
int count_resident_clusters(const char *kernel_name, const void *kernel, cudaLaunchConfig_t config, KernelState *state,
                            int32_t *clusters);

// Arguments of cuTensorMapEncodeTiled. Dims in elements, innermost first; strides in bytes, from the second dimension on.
struct TensorMapShape {
  const char *tensor;
  CUtensorMapDataType dtype;
  cuuint32_t rank;
  cuuint64_t dims[5];
  cuuint64_t strides[4];
  cuuint32_t box[5];
  cuuint32_t element_strides[5];
  CUtensorMapInterleave interleave;
  CUtensorMapSwizzle swizzle;
  CUtensorMapL2promotion l2_promotion;
  CUtensorMapFloatOOBfill oob_fill;
};

// Encodes a tensor map over the array at `address`. The driver's encoder is found through the runtime: nothing links libcuda.
int encode_tensor_map(const char *kernel_name, const TensorMapShape &shape, const void *address, CUtensorMap *map);

// TILEPRESS_OK or TILEPRESS_CUDA with the runtime's text for `error`.
int check_cuda(const char *what, cudaError_t error);

// An argument's address as the kernel's parameter type.
template <typename T>
static T *pointer_to(const void *address) {
  return static_cast<T *>(const_cast<void *>(address));
}

}  // namespace tilepress
