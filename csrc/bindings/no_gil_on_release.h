// Python's holder of objects that must not be destroyed with the GIL held.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>

namespace ddpx::bindings {

// A smart pointer that releases the GIL while it releases its object. The destruction may wait for
// threads that need the GIL to release a tensor that Python has seen. torch does the same for its
// backends. A deleter would not do: pybind11 uses the shared_ptr of a class that has
// enable_shared_from_this.
template <class Pointer>
class NoGilOnRelease {
 public:
  using element_type = typename Pointer::element_type;

  NoGilOnRelease() = default;
  explicit NoGilOnRelease(element_type* raw) : held_(hold(raw, Pointer())) {}
  NoGilOnRelease(Pointer held) : held_(std::move(held)) {}  // NOLINT: implicit
  NoGilOnRelease(const NoGilOnRelease&) = default;
  NoGilOnRelease(NoGilOnRelease&&) noexcept = default;
  NoGilOnRelease& operator=(NoGilOnRelease other) noexcept {
    std::swap(held_, other.held_);  // `other` releases what was held, without the GIL
    return *this;
  }

  ~NoGilOnRelease() {
    if (held_ && PyGILState_Check()) {
      const pybind11::gil_scoped_release no_gil;
      held_.reset();
    }
  }

  element_type* get() const {
    return held_.get();
  }

 private:
  template <class T>
  static std::shared_ptr<T> hold(T* raw, const std::shared_ptr<T>&) {
    return std::shared_ptr<T>(raw);
  }
  template <class T>
  static c10::intrusive_ptr<T> hold(T* raw, const c10::intrusive_ptr<T>&) {
    return c10::intrusive_ptr<T>::unsafe_steal_from_new(raw);
  }

  Pointer held_;
};

template <class T>
using NoGilShared = NoGilOnRelease<std::shared_ptr<T>>;
template <class T>
using NoGilIntrusive = NoGilOnRelease<c10::intrusive_ptr<T>>;

}  // namespace ddpx::bindings

PYBIND11_DECLARE_HOLDER_TYPE(T, ddpx::bindings::NoGilShared<T>)
PYBIND11_DECLARE_HOLDER_TYPE(T, ddpx::bindings::NoGilIntrusive<T>, true)
