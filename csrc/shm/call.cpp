#include "call.h"

#include "error.h"
#include "kernels.h"

namespace ddpx::shm {

std::size_t input_bytes(const Call& call, int num_ranks) {
  const int num_parts = call.kind == Kind::kReduceScatter ? num_ranks : 1;
  return static_cast<std::size_t>(num_parts) * call.num_bytes();
}

Call all_reduce_call(const void* input, void* output, std::size_t count, DType dtype, ReduceOp op) {
  return {
      .kind = Kind::kAllReduce,
      .dtype = dtype,
      .op = op,
      .count = count,
      .input = input,
      .output = output};
}

Call broadcast_call(void* data, std::size_t count, DType dtype, int root) {
  return {.kind = Kind::kBroadcast, .dtype = dtype, .root = root, .count = count, .output = data};
}

Call all_gather_call(const void* input, void* output, std::size_t count, DType dtype) {
  return {
      .kind = Kind::kAllGather, .dtype = dtype, .count = count, .input = input, .output = output};
}

Call reduce_scatter_call(
    const void* input, void* output, std::size_t count, DType dtype, ReduceOp op) {
  auto call = all_reduce_call(input, output, count, dtype, op);
  call.kind = Kind::kReduceScatter;
  return call;
}

Call barrier_call() {
  return {.kind = Kind::kBarrier};
}

namespace {

bool reduces(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduceScatter;
}

}  // namespace

std::string describe(const Descriptor& descriptor) {
  auto text = std::string(name_of(descriptor.kind)) + " #" + std::to_string(descriptor.sequence);
  if (descriptor.kind == Kind::kBarrier) {
    return text;
  }
  text += " (";
  if (reduces(descriptor.kind)) {
    text += std::string(name_of(descriptor.op)) + " of ";
  }
  text += std::to_string(descriptor.count) + " " + name_of(descriptor.dtype);
  if (descriptor.kind == Kind::kBroadcast) {
    text += " from local rank " + std::to_string(descriptor.root);
  }
  if (reduces(descriptor.kind)) {
    text += std::string(", order ") + name_of(descriptor.order);
  }
  return text + ")";
}

bool same_operation(const Descriptor& a, const Descriptor& b) {
  return a.sequence == b.sequence && a.kind == b.kind && a.dtype == b.dtype && a.op == b.op &&
         a.order == b.order && a.root == b.root && a.count == b.count;
}

void check_call(const Call& call, int num_ranks) {
  const auto fail = [&](const std::string& text) {
    throw Error(ErrorKind::kMisuse, std::string("[ddpx shm] ") + name_of(call.kind) + ": " + text);
  };
  const auto ranks = static_cast<std::size_t>(num_ranks);
  if (reduces(call.kind) && find_kernel(call.dtype, call.op) == nullptr) {
    fail(
        std::string(name_of(call.op)) + " of " + name_of(call.dtype) +
        " is not defined. Convert the input to a dtype that supports it.");
  }
  if (call.root < 0 || call.root >= num_ranks) {
    fail("the root, local rank " + std::to_string(call.root) + ", does not exist");
  }
  if (call.kind == Kind::kBarrier || call.count == 0) {
    return;
  }
  const bool needs_input = call.kind != Kind::kBroadcast && call.inputs.empty();
  if ((needs_input && call.input == nullptr) || (call.outputs.empty() && call.output == nullptr)) {
    fail("the input or output buffer is missing");
  }
  if ((!call.inputs.empty() && call.inputs.size() != ranks) ||
      (!call.outputs.empty() && call.outputs.size() != ranks)) {
    fail(
        "a list of buffers must have one buffer for each of the " + std::to_string(num_ranks) +
        " local ranks");
  }
}

}  // namespace ddpx::shm
