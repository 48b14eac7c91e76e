// torch's dtypes and reductions as the transport's.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstddef>
#include <optional>

#include "../shm/types.h"

namespace ddpx {

// The memory of a tensor as the transport sees it.
struct Elements {
  shm::DType dtype;
  std::size_t count;
};

// Nothing if the transport cannot work on tensors like this one: they are not on CPU, or of a dtype
// that it does not know. A complex number counts as two reals. Only what is the same on all ranks
// may count, since all must go the same way: so not the strides.
std::optional<Elements> elements_of(const at::Tensor& tensor);

// As elements_of(), but for moving only: every dtype will do, as bytes.
std::optional<Elements> bytes_of(const at::Tensor& tensor);

// The memory to work on in a tensor's stead: its own where its elements lie side by side, in
// whatever order (gloo takes them as they lie, too), else a copy.
at::Tensor dense(const at::Tensor& tensor);

// The same in row-major order, for operations that put tensors together or take them apart.
at::Tensor row_major(const at::Tensor& tensor);

// Nothing if the transport cannot reduce `tensor` in this way.
std::optional<shm::ReduceOp> reduction(const c10d::ReduceOp& op, const at::Tensor& tensor);

}  // namespace ddpx
