#include "element_type.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

namespace ddpx {
namespace {

std::optional<shm::DType> real_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return shm::DType::kFloat16;
    case at::kBFloat16:
      return shm::DType::kBFloat16;
    case at::kFloat:
    case at::kComplexFloat:
      return shm::DType::kFloat32;
    case at::kDouble:
    case at::kComplexDouble:
      return shm::DType::kFloat64;
    case at::kChar:
      return shm::DType::kInt8;
    case at::kByte:
      return shm::DType::kUint8;
    case at::kShort:
      return shm::DType::kInt16;
    case at::kInt:
      return shm::DType::kInt32;
    case at::kLong:
      return shm::DType::kInt64;
    case at::kBool:
      return shm::DType::kBool;
    default:
      return std::nullopt;
  }
}

bool on_cpu(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided;
}

bool lazy(const at::Tensor& tensor) {
  return tensor.is_neg() || tensor.is_conj();
}

at::Tensor copy_of(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return at::empty(tensor.sizes(), tensor.options()).copy_(tensor);
}

}  // namespace

std::optional<Elements> elements_of(const at::Tensor& tensor) {
  const auto dtype = real_dtype(tensor.scalar_type());
  if (!dtype || !on_cpu(tensor)) {
    return std::nullopt;
  }
  const auto reals = static_cast<std::size_t>(tensor.numel()) * (tensor.is_complex() ? 2 : 1);
  return Elements{*dtype, reals};
}

std::optional<Elements> bytes_of(const at::Tensor& tensor) {
  if (!on_cpu(tensor)) {
    return std::nullopt;
  }
  return Elements{shm::DType::kUint8, static_cast<std::size_t>(tensor.nbytes())};
}

at::Tensor dense(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !lazy(tensor) ? tensor : copy_of(tensor);
}

at::Tensor row_major(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !lazy(tensor) ? tensor : copy_of(tensor);
}

std::optional<shm::ReduceOp> reduction(const c10d::ReduceOp& op, const at::Tensor& tensor) {
  const bool complex = tensor.is_complex();
  const bool floating = complex || tensor.is_floating_point();
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM:
      return shm::ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return floating ? std::optional(shm::ReduceOp::kAvg) : std::nullopt;
    case c10d::ReduceOp::MIN:
      return complex ? std::nullopt : std::optional(shm::ReduceOp::kMin);
    case c10d::ReduceOp::MAX:
      return complex ? std::nullopt : std::optional(shm::ReduceOp::kMax);
    case c10d::ReduceOp::PRODUCT:
      return complex ? std::nullopt : std::optional(shm::ReduceOp::kProduct);
    case c10d::ReduceOp::BAND:
      return floating ? std::nullopt : std::optional(shm::ReduceOp::kBitAnd);
    case c10d::ReduceOp::BOR:
      return floating ? std::nullopt : std::optional(shm::ReduceOp::kBitOr);
    case c10d::ReduceOp::BXOR:
      return floating ? std::nullopt : std::optional(shm::ReduceOp::kBitXor);
    default:
      return std::nullopt;
  }
}

}  // namespace ddpx
