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

// Nothing if the transport cannot work on the memory of `tensor`: it is not on CPU, has gaps, or
// is of a dtype that it does not know. A complex number counts as two reals.
std::optional<Elements> elements_of(const at::Tensor& tensor);

// As elements_of(), but for moving only: every dtype will do, as bytes.
std::optional<Elements> bytes_of(const at::Tensor& tensor);

// Nothing if the transport cannot reduce `tensor` in this way.
std::optional<shm::ReduceOp> reduction(const c10d::ReduceOp& op, const at::Tensor& tensor);

}  // namespace ddpx
