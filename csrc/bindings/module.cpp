#include "bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The C++ core of ddpx: bucket plan, reducer, shared-memory transport.";
  ddpx::bindings::bind_phase(module);
  ddpx::bindings::bind_bucket_plan(module);
  ddpx::bindings::bind_collective(module);
  ddpx::bindings::bind_health(module);
  ddpx::bindings::bind_recording(module);
  ddpx::bindings::bind_reducer(module);
  ddpx::bindings::bind_shm(module);
}
