// Each function registers the classes of one header. No other folder includes Python's headers.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "../comm/collective.h"

namespace ddpx::bindings {

void bind_phase(pybind11::module_& module);
void bind_bucket_plan(pybind11::module_& module);
void bind_collective(pybind11::module_& module);
void bind_recording(pybind11::module_& module);
void bind_reducer(pybind11::module_& module);
void bind_health(pybind11::module_& module);
void bind_shm(pybind11::module_& module);

// Whether the class of the group is a Python class. Takes the GIL.
WrittenIn language_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace ddpx::bindings
