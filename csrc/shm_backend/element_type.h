// Translates torch's dtypes, reductions and tensors into those of the transport.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstddef>
#include <optional>

#include "../shm/types.h"

namespace ddpx {

// The elements of a tensor as the transport counts them.
struct Elements {
  shm::DType dtype;
  std::size_t count;
};

// Returns nullopt if the tensor is not on CPU, or the transport lacks its dtype. A complex number
// counts as two reals. All ranks must take the same way, so the result depends only on properties
// that are the same on all ranks. Strides are not.
std::optional<Elements> elements_of(const at::Tensor& tensor);

// Like elements_of(), for operations that only copy: supports every dtype, as bytes.
std::optional<Elements> bytes_of(const at::Tensor& tensor);

// Returns the tensor itself if its elements have no gaps between them, in any order of dimensions
// (gloo uses such tensors as they are, too). Otherwise returns a copy.
at::Tensor dense(const at::Tensor& tensor);

// The same in row-major order, for operations that concatenate or split tensors.
at::Tensor row_major(const at::Tensor& tensor);

// Returns nullopt if the transport does not support `op` for tensors like `tensor`.
std::optional<shm::ReduceOp> reduction(const c10d::ReduceOp& op, const at::Tensor& tensor);

}  // namespace ddpx
