// Prints a table of simulated jobs: requests to the store, times to start and to report failures,
// false reports.
//
//   health_simulation [most ranks]
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "simulation.h"

using namespace ddpx::health;

namespace {

constexpr int kRanksPerHost = 8;

double in_seconds(int64_t ns) {
  return static_cast<double>(ns) / kSecond;
}

double start(Simulation& job) {
  const auto begin = job.now();
  while (!job.started_ns() && job.now() < begin + 120 * kSecond) {
    job.run(job.now() + 50 * kMillisecond);
  }
  return in_seconds(job.now() - begin);
}

// Requests per second.
double rate(Simulation& job) {
  const auto before = job.num_requests();
  job.run(job.now() + 30 * kSecond);
  return static_cast<double>(job.num_requests() - before) / 30;
}

// Seconds until all hosts report what `fail` does, or a text without a report.
std::string report_of(int num_ranks, const std::function<void(Simulation&)>& fail) {
  Simulation job({.num_ranks = num_ranks, .ranks_per_host = kRanksPerHost});
  start(job);
  job.run(job.now() + 7 * kSecond + 700 * kMillisecond);
  const auto failed_ns = job.now();
  fail(job);
  while (!job.reported_ns() && job.now() < failed_ns + 60 * kSecond) {
    job.run(job.now() + 50 * kMillisecond);
  }
  const auto reported_ns = job.reported_ns();
  char text[32] = "none";
  if (reported_ns) {
    std::snprintf(text, sizeof text, "%.1f", in_seconds(*reported_ns - failed_ns));
  }
  return std::string(text) + (job.reports_falsely() ? " (false)" : "");
}

void print_row(int num_ranks) {
  Simulation job({.num_ranks = num_ranks, .ranks_per_host = kRanksPerHost});
  const auto start_s = start(job);
  const auto of_start = static_cast<double>(job.num_requests()) / num_ranks;
  const auto steady = rate(job);
  job.stall(true);
  const auto stalled = rate(job);
  job.stall(false);
  job.set_latency(3 * kSecond);
  job.run(job.now() + 300 * kSecond);
  const bool slow_is_false = job.reports_falsely();
  const bool many = job.num_hosts() > 1;
  const auto death = report_of(num_ranks, [](Simulation& dies) { dies.kill_rank(1); });
  const auto host =
      many ? report_of(num_ranks, [](Simulation& loses) { loses.lose_host(1); }) : "-";
  const auto eight = num_ranks > 16 * kRanksPerHost ? report_of(
                                                          num_ranks,
                                                          [](Simulation& loses) {
                                                            for (int i = 2; i < 10; ++i) {
                                                              loses.lose_host(i);
                                                            }
                                                          })
                                                    : "-";
  std::printf(
      "| %d | %d | %.1f | %.1f | %.0f | %.0f | %s | %s | %s | %s |\n",
      num_ranks,
      job.num_hosts(),
      start_s,
      of_start,
      steady,
      stalled,
      death.c_str(),
      host.c_str(),
      eight.c_str(),
      slow_is_false ? "yes" : "no");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int most = argc > 1 ? std::atoi(argv[1]) : 4096;
  std::printf(
      "| ranks | hosts | start, s | requests of the start, a rank | steady, requests/s | stall, "
      "requests/s | death reported, s | host reported, s | eight hosts reported, s | false report "
      "with a slow store |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
  for (const int num_ranks : {8, 16, 64, 256, 1024, 4096}) {
    if (num_ranks <= most) {
      print_row(num_ranks);
    }
  }
  Simulation hours(
      {.num_ranks = 64, .jitter_ns = 5 * kMillisecond, .hiccups_per_hour = 5, .look_ns = kSecond});
  hours.run(100 * 3600 * kSecond);
  std::printf(
      "\n100 hours of 64 ranks with jitter and hiccups of up to 12 s: %s\n",
      hours.reports_falsely() ? "false report"
      : hours.reported_ns()   ? "a report"
                              : "no report");
  return 0;
}
