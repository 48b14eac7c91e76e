#include "range_reducer.h"

#include <algorithm>

namespace ddpx::shm {

RangeReducer::RangeReducer(Order order, DType dtype, ReduceOp op, int num_ranks, std::size_t count)
    : order_(order, num_ranks, count, size_of(dtype)),
      kernel_(find_kernel(dtype, op)),
      element_bytes_(size_of(dtype)),
      num_ranks_(num_ranks),
      ordered_sources_(static_cast<std::size_t>(num_ranks)) {}

void RangeReducer::reduce(
    std::size_t begin,
    std::size_t end,
    const std::vector<const std::byte*>& sources,
    const std::vector<std::byte*>& results) {
  run_results_.resize(results.size());
  for (auto run = begin; run < end;) {
    const auto run_end = std::min(order_.run_end(run), end);
    const auto offset = (run - begin) * element_bytes_;
    const auto& ranks = order_.ranks(run);
    for (std::size_t k = 0; k < ranks.size(); ++k) {
      ordered_sources_[k] = sources[ranks[k]] + offset;
    }
    for (std::size_t k = 0; k < results.size(); ++k) {
      run_results_[k] = results[k] + offset;
    }
    kernel_(
        {ordered_sources_.data(),
         num_ranks_,
         run_results_.data(),
         static_cast<int>(results.size()),
         run_end - run,
         num_ranks_});
    run = run_end;
  }
}

}  // namespace ddpx::shm
