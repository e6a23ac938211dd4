// Errors: every fault the library can detect before it starts work is thrown as openmsa::Error, and then nothing was written.
#pragma once

#include <stdexcept>
#include <string>

namespace openmsa {

enum class ErrorCode {
  kInvalidArgument,  // an argument breaks the contract; the text names it, the value found, the rule, and how to mend it
  kUnsupported,      // the contract allows it, but no kernel of the chosen backend does it; the text lists what is supported
  kOutOfWorkspace,   // the caller's Workspace is smaller than workspace_bytes() asks for
  kDevice,           // no such device, or its driver reported a failure
};

// Thrown by every public function. `what()` is one readable sentence per fact: argument, value found, rule, mend.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, std::string argument, const std::string& message)
      : std::runtime_error(message), code_(code), argument_(std::move(argument)) {}

  ErrorCode code() const noexcept { return code_; }
  // Name of the argument at fault as it is spelled in the args struct ("batch.cu_seqlens_q"); empty if there is none.
  const std::string& argument() const noexcept { return argument_; }

 private:
  ErrorCode code_;
  std::string argument_;
};

}  // namespace openmsa
