// From checked arguments to a running kernel.
#pragma once

#include <cstddef>
#include <new>
#include <string>
#include <vector>

#include "api/check.hpp"
#include "cuda/device.hpp"

namespace openmsa::api {

// The first kernel of the backend that covers the request, or null and why not.
template <typename Params>
const core::Kernel<Params>* find_kernel(const std::vector<core::Kernel<Params>>& kernels, Backend backend,
                                        const core::Request& request, std::string* why_not) {
  for (const core::Kernel<Params>& kernel : kernels) {
    if (kernel.backend != backend) continue;
    const std::string reason = core::why_unsupported(kernel.limits, request);
    if (reason.empty()) return &kernel;
    *why_not += (why_not->empty() ? "" : "; ") + reason + " (" + kernel.name + " supports " + core::describe(kernel.limits) + ")";
  }
  return nullptr;
}

// `why_not` is empty where the backend has no kernel of the stage at all.
[[noreturn]] inline void refuse_unsupported(const char* stage, Backend asked, Backend backend, const std::string& why_not) {
  if (why_not.empty()) {
    refuse("options.backend",
           std::string("is ") + backend_name(asked) + ", and the " + backend_name(backend) + " backend has no " + stage +
               " kernel in this version, for any size. " +
               (backend == Backend::kCuda ? "Copy the tensors to the CPU for this call, or use PyTorch's own operations on the GPU."
                                          : "Use the reference backend (any size, slow)."),
           ErrorCode::kUnsupported);
  }
  refuse("options.backend",
         std::string("is ") + backend_name(asked) + ", and no " + stage + " kernel of the " + backend_name(backend) +
             " backend takes this call: " + why_not +
             (backend == Backend::kCuda ? ". Change the dtype or the sizes, or move the tensors to the CPU."
                                        : ". Change the sizes, or use the reference backend (any size, slow)."),
         ErrorCode::kUnsupported);
}

template <typename Params>
const core::Kernel<Params>& require_kernel(const char* stage, const std::vector<core::Kernel<Params>>& kernels, Backend asked,
                                           Backend backend, const core::Request& request) {
  std::string why_not;
  const core::Kernel<Params>* kernel = find_kernel(kernels, backend, request, &why_not);
  if (kernel == nullptr) refuse_unsupported(stage, asked, backend, why_not);
  return *kernel;
}

// One public call after its checks: params ready to run but for the arena.
template <typename Params>
struct Call {
  Params params;
  const core::Kernel<Params>* kernel;
};

template <typename Params>
std::int32_t device_of(const Params& params) {
  if constexpr (requires { params.k_pages; }) {
    return params.k_pages.device.index;
  } else if constexpr (requires { params.q; }) {
    return params.q.device.index;
  } else if constexpr (requires { params.q_idx; }) {
    return params.q_idx.device.index;
  } else {
    return params.scores.device.index;
  }
}

// An empty batch has nothing to do and needs no scratch. Training is different: without queries, the keys' gradients are still
// zeros to be written, and so is the loss.
template <typename Params>
bool nothing_to_do(const Params& params) {
  constexpr bool kIsBackward = requires { params.d_k; };
  constexpr bool kIsIndexKl = requires { params.d_k_idx; };
  if constexpr (requires { params.geo; }) {
    return !kIsBackward && !kIsIndexKl && params.geo.total_q == 0;
  } else {
    return params.slots.shape[0] == 0;
  }
}

template <typename Params>
std::size_t scratch_bytes(Call<Params> call) {
  if (call.kernel->reserve == nullptr || nothing_to_do(call.params)) return 0;
  core::Arena counting;
  call.params.context.arena = &counting;
  call.kernel->reserve(call.params);
  return counting.used();
}

template <typename Params>
void run(Call<Params> call, const RunOptions& options) {
  const bool on_gpu = call.kernel->backend == Backend::kCuda;
  if (on_gpu) cuda::throw_device_fault(device_of(call.params));
  if (nothing_to_do(call.params)) return;
  const std::size_t needed = scratch_bytes(call);
  if (options.workspace != nullptr) {
    const Workspace& workspace = *options.workspace;
    if (on_gpu != (workspace.device().type == DeviceType::kCuda)) {
      refuse("options.workspace", on_gpu ? "is host memory, but this call runs on a GPU. Pass memory of that GPU, or none."
                                         : "is GPU memory, but this call runs on the CPU. Pass host memory, or none.");
    }
    if (workspace.bytes() < needed || (workspace.data() == nullptr && needed > 0)) {
      refuse("options.workspace",
             "holds " + std::to_string(workspace.bytes()) + " bytes, but this call needs " + std::to_string(needed) +
                 ". Allocate workspace_bytes(args) bytes.",
             ErrorCode::kOutOfWorkspace);
    }
    core::Arena arena(static_cast<std::byte*>(workspace.data()), workspace.bytes());
    call.params.context.arena = &arena;
    call.kernel->run(call.params);
    return;
  }
  if (on_gpu) {
    const cuda::StreamScratch scratch(device_of(call.params), needed, options.cuda_stream);
    core::Arena arena(static_cast<std::byte*>(scratch.data()), needed);
    call.params.context.arena = &arena;
    call.kernel->run(call.params);
    return;
  }
  Workspace scratch;
  try {
    scratch = Workspace(needed);
  } catch (const std::bad_alloc&) {
    refuse("options.workspace",
           "is not given, and " + std::to_string(needed) +
               " bytes of scratch could not be allocated. Use smaller shapes or fewer threads.",
           ErrorCode::kOutOfWorkspace);
  }
  core::Arena arena(static_cast<std::byte*>(scratch.data()), scratch.bytes());
  call.params.context.arena = &arena;
  call.kernel->run(call.params);
}

}  // namespace openmsa::api
