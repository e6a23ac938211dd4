// Shared-memory tiles: where they start, how registers get into them, and plain bulk copies (PTX ISA "stmatrix", "cp.async.bulk").
#pragma once

#include <cstdint>

#include "cuda/ptx/barrier.cuh"

// Declares `name` as the dynamic shared memory of a kernel without such tiles. A macro, since behind a function the compiler schedules
// kernels differently.
#define OPENMSA_DYNAMIC_SMEM(name) extern __shared__ __align__(16) unsigned char name[]

namespace openmsa::cuda::ptx {

// The dynamic shared memory, 1024-byte aligned as 128-byte-swizzled tiles have to be. Aligned by declaration, its address is a constant.
__device__ inline unsigned char* dynamic_smem() {
  extern __shared__ __align__(1024) unsigned char aligned_smem[];
  return aligned_smem;
}

// The same, aligned at run time (a launch asks for 1024 bytes more than it uses): for a kernel that spills where the address is a constant.
__device__ inline unsigned char* dynamic_smem_aligned_late() {
  extern __shared__ unsigned char raw_smem[];
  return reinterpret_cast<unsigned char*>((reinterpret_cast<std::uintptr_t>(raw_smem) + 1023) & ~std::uintptr_t{1023});
}

// Stores four 8x8 matrices of 16-bit elements; lane i gives the address of row i%8 of matrix i/8. Lane i holds elements 2*(i%4) and
// 2*(i%4) + 1 of row i/4 of each matrix, which is how wgmma lays out its accumulators.
__device__ inline void stmatrix_x4(std::uint32_t address, std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, std::uint32_t a3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a0), "r"(a1), "r"(a2), "r"(a3)
               : "memory");
}

// The same, each matrix transposed: lane i holds elements 2*(i%4) and 2*(i%4) + 1 of column i/4.
__device__ inline void stmatrix_x4_trans(std::uint32_t address, std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                                         std::uint32_t a3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a0), "r"(a1), "r"(a2),
               "r"(a3)
               : "memory");
}

// The same value, computed here and not before a loop, where it would hold a register all through it.
__device__ inline int not_hoisted(int value) {
  asm volatile("mov.b32 %0, %0;" : "+r"(value));
  return value;
}

// Two neighbouring words by their shared address, 8-byte aligned: a generic pointer would take two registers and 64-bit arithmetic.
__device__ inline float2 load_shared_float2(std::uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
  return value;
}
__device__ inline int2 load_shared_int2(std::uint32_t address) {
  int2 value;
  asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address) : "memory");
  return value;
}

// Copies `bytes` contiguous bytes, completing on the barrier. Addresses and size are multiples of 16.
__device__ inline void bulk_load(void* smem, const void* global, std::uint32_t bytes, std::uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_address(smem)),
               "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(smem_address(barrier))
               : "memory");
}

}  // namespace openmsa::cuda::ptx
