// Each function registers the classes of one header. No other folder includes Python's headers.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace ddpx::bindings {

void bind_phase(pybind11::module_& module);
void bind_bucket_plan(pybind11::module_& module);
void bind_collective(pybind11::module_& module);
void bind_recording(pybind11::module_& module);
void bind_reducer(pybind11::module_& module);
void bind_health(pybind11::module_& module);
void bind_shm(pybind11::module_& module);

}  // namespace ddpx::bindings
