// The methods of Reducer for a search of the best bucket plan (ddpx/planning/search.py).
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../buckets/device_stream.h"
#include "../observe/event_log.h"
#include "reducer.h"

namespace ddpx {

void Reducer::use_buckets(std::vector<std::vector<std::size_t>> buckets) {
  const auto lock = lock_after_abort();
  check_idle("use_buckets()");  // no backward of this wrapper runs, but for the end of one
  if (!scope_.empty()) {
    throw errors::inside_backward(context_.where(), "use_buckets()");
  }
  auto plan = BucketPlan::listed(context_.params.metas(), std::move(buckets));
  rebuild([&] { return std::move(plan); });
}

std::vector<int64_t> Reducer::time_all_reduces(int64_t num_bytes, int repeats) {
  const auto lock = lock_after_abort();
  check_idle("time_all_reduces()");
  const ExclusiveMutex::Occupation occupation(context_.mutex);
  const at::NoGradGuard no_grad;
  const auto device = context_.params.device();
  auto& collective = *context_.collective;
  const auto num_floats = std::max<int64_t>(num_bytes / static_cast<int64_t>(sizeof(float)), 1);
  const auto buffer =
      collective.allocate(num_floats, at::TensorOptions(at::kFloat).device(device)).zero_();
  return context_.communicate(
      [&] {
        std::vector<int64_t> times_ns;
        for (int repeat = 0; repeat < repeats; ++repeat) {
          const auto stream = current_stream(device);
          if (stream) {
            stream->synchronize();
          }
          const auto begin = steady_now();
          collective.wait(*collective.all_reduce_sum(buffer), device);
          if (stream) {
            stream->synchronize();
          }
          times_ns.push_back(steady_now() - begin);
        }
        return times_ns;
      },
      [] { return std::string("the measurement of an all-reduce"); });
}

}  // namespace ddpx
