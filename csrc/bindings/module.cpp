#include "bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The C++ core of ddpx: bucket plan and reducer.";
  ddpx::bindings::bind_phase(module);
  ddpx::bindings::bind_bucket_plan(module);
  ddpx::bindings::bind_reducer(module);
}
