// What only GPU callers need.
//
// Index data on a GPU (offsets, page tables, block ids, slots) is checked by the kernels that read it, without making the host wait.
// A fault found there is thrown by the next call on that device, or by synchronize(); the results of the faulty call are undefined,
// but nothing is read or written out of bounds.
#pragma once

#include "openmsa/tensor.hpp"

namespace openmsa {

// Waits for the stream (cudaStream_t; null: the default stream) and throws Error if a call on this device found a fault.
void synchronize(Device device, void* cuda_stream = nullptr);

}  // namespace openmsa
