#include "all_reduce_times.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstddef>
#include <string>

#include "../buckets/device_stream.h"
#include "../observe/event_log.h"

namespace ddpx {

std::vector<int64_t> time_all_reduces(Reducer& reducer, int64_t num_bytes, int repeats) {
  return reducer.run_alone("time_all_reduces()", [&](ReducerContext& context) {
    const at::NoGradGuard no_grad;
    const auto device = context.params.device();
    auto& collective = *context.collective;
    const auto num_floats = std::max<int64_t>(num_bytes / static_cast<int64_t>(sizeof(float)), 1);
    const auto buffer =
        collective.allocate(num_floats, at::TensorOptions(at::kFloat).device(device)).zero_();
    return context.communicate(
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
  });
}

}  // namespace ddpx
