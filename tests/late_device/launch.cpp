#include "launch.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "allocator.h"
#include "streams.h"

namespace late {

at::Tensor cpu_view(const at::Tensor& tensor) {
  auto view = at::from_blob(
      const_cast<void*>(tensor.unsafeGetTensorImpl()->data()),
      tensor.sizes(),
      tensor.strides(),
      at::TensorOptions(tensor.scalar_type()));
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

Position launch(
    const std::string& name,
    Queue& queue,
    const std::vector<at::Tensor>& read,
    const std::vector<at::Tensor>& written,
    std::function<void()> run,
    Kind kind) {
  int64_t num_bytes = 0;
  for (const auto* tensors : {&read, &written}) {
    for (const auto& tensor : *tensors) {
      num_bytes += static_cast<int64_t>(tensor.nbytes());
    }
  }
  count(kind, queue.device(), name, num_bytes);
  const auto position = queue.push(name, [run = std::move(run)] {
    // The bits of a matrix product depend on the number of threads; tests run with one.
    thread_local const bool one_thread = (at::set_num_threads(1), true);
    static_cast<void>(one_thread);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::NoGradGuard no_grad;
    run();
  });
  for (const auto* tensors : {&read, &written}) {
    for (const auto& tensor : *tensors) {
      record_use(tensor.storage().data_ptr(), queue, position);
    }
  }
  return position;
}

void resize_storage(const c10::Storage& storage, std::size_t num_bytes) {
  const c10::DeviceGuard guard(storage.device());
  auto memory = device_allocator()->allocate(num_bytes);
  if (const auto num_kept = std::min(num_bytes, storage.nbytes()); num_kept != 0) {
    auto& queue = current_queue(storage.device());
    const auto kept = [to = memory.get(), from = storage.data(), num_kept] {
      std::memcpy(to, from, num_kept);
    };
    const auto position = queue.push("resize_", kept);
    record_use(storage.data_ptr(), queue, position);
    record_use(memory, queue, position);
  }
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(num_bytes);
}

}  // namespace late
