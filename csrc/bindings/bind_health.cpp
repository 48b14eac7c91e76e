#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "../errors.h"
#include "../health/machine/peer.h"
#include "../health/machine/record.h"
#include "../health/watchdog.h"
#include "../health_c10d/aborted_groups.h"
#include "../health_c10d/group_monitor.h"
#include "../os/forks.h"
#include "../os/threads.h"
#include "bindings.h"
#include "no_gil_on_release.h"
#include "python_calls.h"

namespace py = pybind11;

namespace ddpx::bindings {
namespace {

using health::Monitor;

// Raises ddpx.RankFailure, which keeps its type on the way through autograd's engine.
void raise_in_python(const health::RankReport& report) {
  const py::gil_scoped_acquire gil;
  const py::object error = py::module_::import("ddpx.health.failure").attr("from_report")(report);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw_python_error();
}

// Throws in a forked child, whose page is that of its parent.
health::OwnPage& page_of(Monitor& monitor) {
  monitor.check_process();
  return monitor.page();
}

// Decodes any bytes: another process may have been killed while it wrote them.
py::str any_text(const std::string& text) {
  auto* decoded =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
  if (decoded == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::str>(decoded);
}

// A property of type str.
template <class Class>
auto text_of(std::string Class::* member) {
  return [member](const Class& object) { return any_text(object.*member); };
}

// Whether the rank's script has ended, or is failing for a reason of its own.
bool is_ending(const health::Peer& peer) {
  const auto presence = peer.presence();
  return presence == health::Presence::kLeft ||
         (presence != health::Presence::kThere && !peer.page()->blames_peer);
}

// The part of the status that is known of this rank and of any peer.
py::dict status_of(
    const Monitor& monitor,
    const health::Introduction& who,
    const std::optional<health::Activity>& activity,
    bool alive) {
  std::optional<std::string> doing;
  std::optional<double> since_s;
  if (activity) {
    doing = monitor.peers().names().describe(*activity);
    since_s = static_cast<double>(health::now_ns() - activity->since_ns) / 1e9;
  }
  py::dict rank;
  rank["rank"] = who.rank;
  rank["host"] = any_text(who.host);
  rank["pid"] = who.process.pid;
  rank["doing"] = doing;
  rank["since_s"] = since_s;
  rank["alive"] = alive;
  return rank;
}

py::dict status_of_peer(const Monitor& monitor, const health::Peer& peer) {
  auto rank = status_of(monitor, peer.introduction(), peer.activity(), !peer.ended());
  rank["agreement"] =
      peer.page() ? std::make_optional(any_text(peer.page()->agreement.read())) : std::nullopt;
  rank["local"] = peer.local();
  rank["ending"] = is_ending(peer);
  return rank;
}

std::vector<py::dict> status_of_ranks(Monitor& monitor) {
  std::vector<std::shared_ptr<health::Peer>> peers;
  {
    const py::gil_scoped_release no_gil;
    monitor.state().meet();
    peers = monitor.peers().all();
  }
  std::vector<py::dict> ranks;
  for (const auto& peer : peers) {
    ranks.push_back(peer ? status_of_peer(monitor, *peer) : py::dict());
  }
  const auto& own = monitor.state().own;
  ranks.at(static_cast<std::size_t>(own.rank)) =
      status_of(monitor, own, monitor.state().activity(), /*alive=*/true);
  return ranks;
}

std::optional<py::str> stack_of(Monitor& monitor, int rank, std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kMost = std::chrono::hours(24);
  std::optional<std::string> stack;
  {
    const py::gil_scoped_release no_gil;
    stack = health::request_stack(
        monitor.peers().peer(rank), std::chrono::nanoseconds(std::min(timeout, kMost)).count());
  }
  return stack ? std::make_optional(any_text(*stack)) : std::nullopt;
}

int64_t nanoseconds(double seconds) {
  constexpr double kMostSeconds = 1e9;  // 30 years; beyond 9e9 it would not fit
  if (!(seconds > 0 && seconds <= kMostSeconds)) {
    throw UserError(
        std::to_string(seconds) +
        " is not a valid number of seconds. Pass more than 0 and at most 1e9 seconds.");
  }
  return static_cast<int64_t>(seconds * 1e9);
}

// Where a thread waits for the GIL while the interpreter ends, Python ends the thread. So no object
// here has a destructor: pybind's guard would clear the thread state of the main thread.
void call_with_gil(PyObject* function) {
  const auto gil = PyGILState_Ensure();
  PyObject* result = PyObject_CallNoArgs(function);
  if (result == nullptr) {
    PyErr_WriteUnraisable(function);
  }
  Py_XDECREF(result);
  PyGILState_Release(gil);
}

// The threads of this process that call the function of set_log_reader().
struct Starters {
  std::atomic<int> num{0};
};

// The thread that adds a record must not wait for the GIL, so another thread calls `start`. Without
// `start`, waits for such threads: the interpreter may end next.
void set_log_reader(const std::optional<py::function>& start) {
  constexpr auto kMostWait = std::chrono::seconds(1);
  auto& starters = os::instance_in_process<Starters>();
  std::function<bool()> with_gil;
  if (start) {
    // Never released: the GIL may be gone by then.
    with_gil = [function = py::function(*start).release().ptr(), &starters] {
      ++starters.num;
      const bool started = os::start_thread([function, &starters] {
        call_with_gil(function);
        --starters.num;
      });
      starters.num -= started ? 0 : 1;
      return started;
    };
  }
  const py::gil_scoped_release no_gil;
  health::LogQueue::instance().set_reader(std::move(with_gil));
  const auto deadline = std::chrono::steady_clock::now() + kMostWait;
  while (!start && starters.num != 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Raises the failure of the group with this token, unless the script has met it or has ended.
void raise_between_calls(uint64_t token) {
  for (const auto& monitor : health::Watchdog::instance().monitors()) {
    const bool is_there = monitor->page().view().presence() == health::Presence::kThere;
    if (monitor->state().own.token == token && is_there) {
      const py::gil_scoped_release no_gil;
      monitor->mark_interrupted();
      monitor->raise_if_failed();
    }
  }
}

// See health::interrupt. A pending call of Python runs in the main thread, at its next bytecode.
void raise_in_main_thread(uint64_t token) {
  static constexpr int kAttempts = 100;  // the interpreter keeps 32 calls
  static const auto call = [](void* argument) {
    static auto* raise = new py::function(py::cpp_function(&raise_between_calls));
    const std::unique_ptr<uint64_t> failed(static_cast<uint64_t*>(argument));
    const auto number = py::int_(*failed);
    auto* result = PyObject_CallOneArg(raise->ptr(), number.ptr());
    Py_XDECREF(result);
    return result == nullptr ? -1 : 0;
  };
  auto argument = std::make_unique<uint64_t>(token);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    if (Py_AddPendingCall(call, argument.get()) == 0) {
      (void)argument.release();
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

void bind_health(py::module_& module) {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) {
        std::rethrow_exception(thrown);
      }
    } catch (python_error& error) {
      error.restore();
    }
  });
  health::raiser = &raise_in_python;
  health::interrupt = &raise_in_main_thread;

  py::enum_<health::Doing>(module, "Doing")
      .value("OUTSIDE", health::Doing::kOutside)
      .value("BUFFERS", health::Doing::kBuffers)
      .value("FORWARD", health::Doing::kForward);
  py::class_<health::LostRank>(module, "LostRank")
      .def_readonly("rank", &health::LostRank::rank)
      .def_property_readonly("host", text_of(&health::LostRank::host))
      .def_readonly("pid", &health::LostRank::pid)
      .def_property_readonly("what", text_of(&health::LostRank::what))
      .def_property_readonly("cause", text_of(&health::LostRank::cause))
      .def_property_readonly("last_seen", text_of(&health::LostRank::last_seen));
  py::class_<health::RankReport>(module, "RankReport")
      .def_property_readonly(
          "error_name",
          [](const health::RankReport& report) { return health::error_name(report.failure.kind); })
      .def_property_readonly(
          "lost", [](const health::RankReport& report) { return report.failure.lost; })
      .def_readonly("rank", &health::RankReport::rank)
      .def_readonly("step", &health::RankReport::step)
      .def_property_readonly(
          "phase", [](const health::RankReport& report) { return health::to_string(report.doing); })
      .def_readonly("bucket", &health::RankReport::bucket)
      .def_readonly("params", &health::RankReport::params)
      .def_property_readonly("own_stack", text_of(&health::RankReport::own_stack))
      .def_property_readonly(
          "how", [](const health::RankReport& report) { return any_text(report.failure.how); })
      .def_property_readonly(
          "text", [](const health::RankReport& report) { return any_text(report.text()); });

  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<health::Record>(module, "HealthRecord")
      .def_readonly("event", &health::Record::event)
      .def_property_readonly("message", text_of(&health::Record::message))
      .def_readonly("fields", &health::Record::fields)
      .def(
          "answer_stack_request",
          [](const health::Record& self, const std::string& stack) {
            if (const auto group = self.group.lock()) {
              group->page.view().stack.write(stack);
            }
          },
          py::arg("stack"),
          NoGil())
      .def(
          "publish_recorded_calls",
          [](const health::Record& self,
             const std::vector<std::pair<uint64_t, std::string>>& calls) {
            std::string record;
            for (const auto& [number, call] : calls) {
              record += health::encode(number, call);
            }
            if (const auto group = self.group.lock()) {
              group->page.view().recorded.write(record);
            }
          },
          py::arg("calls"),
          NoGil());

  py::class_<Monitor, NoGilShared<Monitor>>(module, "Monitor")
      .def_property_readonly("rank", [](Monitor& self) { return self.state().group.rank; })
      .def_property_readonly("failed", &Monitor::failed)
      .def_property_readonly(
          "has_raised",
          [](Monitor& self) { return self.page().view().presence() == health::Presence::kFailing; })
      .def_property_readonly("interrupted", &Monitor::interrupted)
      .def_property_readonly("report", py::cpp_function(&Monitor::report, NoGil()))
      .def(
          "raise_if_failed", [](Monitor& self) { self.raise_if_failed(); }, NoGil())
      .def("explain_error", &Monitor::explain_error, py::arg("said"), NoGil())
      .def("begin_construction", [](Monitor& self) { page_of(self).begin_construction(); })
      .def("begin_call", [](Monitor& self) { page_of(self).begin_call(); })
      .def("end_call", [](Monitor& self) { page_of(self).end_call(); })
      .def(
          "publish",
          [](Monitor& self, health::Doing doing) { page_of(self).publish(doing); },
          py::arg("doing"))
      .def("introduction", [](Monitor& self) { return py::bytes(self.state().introduction()); })
      .def(
          "find_host",
          [](Monitor& self, const std::vector<std::string>& introductions) {
            return self.state().find_host(introductions);
          },
          py::arg("introductions"),
          NoGil())
      .def(
          "meet",
          [](Monitor& self,
             const std::vector<std::string>& introductions,
             const std::vector<uint64_t>& hosts) { self.state().meet(introductions, hosts); },
          py::arg("introductions"),
          py::arg("hosts"),
          NoGil())
      .def(
          "introduce", [](Monitor& self) { self.state().channel->introduce(); }, NoGil())
      .def("ranks", &status_of_ranks)
      .def(
          "name_ranks",
          [](Monitor& self, std::vector<int> in_job) {
            self.peers().name_ranks(health::RankNames(std::move(in_job)));
          },
          py::arg("in_job"))
      .def(
          "publish_fault",
          [](Monitor& self, const std::string& text, bool is_of_module) {
            if (!self.failed()) {
              self.page().publish_fault(
                  is_of_module ? health::Fault::kOfModule : health::Fault::kOfStep, text);
            }
          },
          py::arg("text"),
          py::arg("is_of_module"))
      .def("retire", &Monitor::retire)
      .def(
          "publish_agreement",
          [](Monitor& self, const std::string& text) { self.page().view().agreement.write(text); },
          py::arg("text"),
          NoGil())
      .def("stack_of", &stack_of, py::arg("rank"), py::arg("timeout"));

  module.attr("INTRODUCTION_BYTES") = health::Introduction::kMostBytes;
  module.def(
      "monitor_of",
      [](c10::intrusive_ptr<c10d::ProcessGroup> process_group) {
        return NoGilShared<Monitor>(monitor_of(process_group));
      },
      py::arg("process_group").none(false),
      NoGil());
  module.def("take_health_record", [] { return health::LogQueue::instance().take(); }, NoGil());
  module.def("set_health_log_reader", &set_log_reader, py::arg("start").none(true));
  module.def("abort_group", &abort_and_keep, py::arg("process_group").none(false), NoGil());
  module.def("await_watchdogs_of_aborted", &await_watchdogs_of_aborted, NoGil());
  module.def(
      "fail_rank",
      [](const std::string& cause) { health::Watchdog::instance().fail_all(cause); },
      py::arg("cause"),
      NoGil());
  module.def(
      "explain_error",
      [](const std::string& said) {
        for (const auto& monitor : health::Watchdog::instance().monitors()) {
          monitor->explain_error(said);
        }
      },
      py::arg("said"),
      NoGil());
  module.def(
      "begin_printing_report", [] { health::Watchdog::instance().begin_printing(); }, NoGil());
  module.def("end_printing_report", [] { health::Watchdog::instance().end_printing(); });
  module.def("leave_groups", [] { health::Watchdog::instance().leave_all(); }, NoGil());
  module.def(
      "set_stall_timeouts",
      [](std::optional<double> warn_s, std::optional<double> raise_s, bool with_stacks) {
        auto& timeouts = health::StallTimeouts::instance();
        const auto warn_ns = warn_s ? nanoseconds(*warn_s) : health::StallTimeouts::kNever;
        const auto raise_ns = raise_s ? nanoseconds(*raise_s) : health::StallTimeouts::kNever;
        timeouts.raise_ns = raise_ns;
        timeouts.warn_ns = warn_ns;
        timeouts.with_stacks = with_stacks;
      },
      py::arg("warn_s"),
      py::arg("raise_s"),
      py::arg("with_stacks"));
}

}  // namespace ddpx::bindings
