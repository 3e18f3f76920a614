// Kernels that only tests call.
#pragma once

#include <ATen/core/Tensor.h>

namespace phantom {

// Sleeps in stream order, then fills.
void slow_fill(const at::Tensor& tensor, double value, double seconds);
// A copy on the host, made when all streams are idle. It counts nowhere.
at::Tensor read(const at::Tensor& tensor, double timeout);

}  // namespace phantom
