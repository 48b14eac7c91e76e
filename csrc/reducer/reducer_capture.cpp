// The methods of Reducer that refuse steps which cannot be captured into a graph of the device.
#include "../buckets/device_stream.h"
#include "reducer.h"

namespace ddpx {

// UserError if the step that begins cannot be captured. Raised before a capture contains any work
// of ddpx, so that the capture stays valid.
void Reducer::refuse_capture() const {
  const auto where = context_.where();
  if (context_.observer.recorded() && !is_capturing(context_.params.device())) {
    throw errors::capture_while_recording(where);
  }
  if (sync_enabled_ && context_.settings.check_finite) {
    throw errors::host_read_under_capture(where, "set_check_finite()");
  }
  if (sync_enabled_ && context_.options.mode == GraphMode::kFindUnused) {
    throw errors::host_read_under_capture(where, "find_unused_parameters");
  }
  if (!context_.communicates()) {
    return;
  }
  if (sync_enabled_ && context_.weights.has_number()) {
    throw errors::number_under_capture(where);
  }
  const auto& metas = context_.params.metas();
  for (std::size_t i = 0; sync_enabled_ && i < metas.size(); ++i) {
    if (metas[i].expect_sparse) {
      throw errors::sparse_under_capture(where, context_.params.name(i));
    }
  }
  if (context_.history.order.due() || (sync_enabled_ && context_.history.order.wanted())) {
    throw errors::capture_too_early(where);
  }
}

void Reducer::check_join_capture(bool captured) const {
  const auto lock = context_.mutex.lock();
  if (captured || is_capturing(context_.params.device())) {
    throw errors::capture_in_join(context_.where());
  }
}

}  // namespace ddpx
