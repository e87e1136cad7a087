// Bulk copies between global and shared memory, and the barrier that counts the bytes of those that load. Addresses and sizes
// are multiples of 16 bytes. One thread starts the copies; which, is the caller's business.
#pragma once

#include <cstdint>

namespace tilepress {

static __device__ uint32_t shared_address(const void *at) { return static_cast<uint32_t>(__cvta_generic_to_shared(at)); }

// A barrier for one arrival, known to the copies that this thread starts next.
static __device__ void init_barrier(uint64_t *barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives, and has the barrier's phase end once so many bytes are there.
static __device__ void expect_bytes(uint64_t *barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

static __device__ void wait_barrier(uint64_t *barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

static __device__ void load_bulk(void *to, const void *from, uint32_t bytes, uint64_t *barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

static __device__ void store_bulk(void *to, const void *from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}

// Hands what the warp wrote to shared memory to the copies that one of its lanes starts next.
static __device__ void publish() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
}

// Until the stores that this thread started have read their shared memory.
static __device__ void drain_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

}  // namespace tilepress
