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
constexpr int kHours = 100;
constexpr int kRanksOfHours = 64;

double in_seconds(int64_t ns) {
  return static_cast<double>(ns) / kSecond;
}

std::string to_text(double number, int num_digits) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", num_digits, number);
  return text;
}

SimulationSettings job_of(int num_ranks) {
  return {.num_ranks = num_ranks, .ranks_per_host = kRanksPerHost};
}

// Requests per second.
double rate(Simulation& job, int seconds = 30) {
  const auto before = job.num_requests();
  job.run(job.now() + seconds * kSecond);
  return static_cast<double>(job.num_requests() - before) / seconds;
}

// The start without a collective call: seconds, and requests of a rank.
std::string start_through_store(int num_ranks) {
  auto settings = job_of(num_ranks);
  settings.through_store = true;
  Simulation job(settings);
  const auto begin = job.now();
  while (!job.started_ns() && job.now() < begin + 120 * kSecond) {
    job.run(job.now() + 50 * kMillisecond);
  }
  return to_text(in_seconds(job.now() - begin), 1) + " | " +
         to_text(static_cast<double>(job.num_requests()) / num_ranks, 1);
}

// Seconds until all hosts report what `fail` does. Ranks that wait need the states of other hosts
// after 5 s.
std::string report_of(int num_ranks, const std::function<void(Simulation&)>& fail, bool& is_false) {
  Simulation job(job_of(num_ranks));
  job.run(job.now() + 17 * kSecond + 700 * kMillisecond);
  const auto failed_ns = job.now();
  fail(job);
  while (!job.reported_ns() && job.now() < failed_ns + 60 * kSecond) {
    job.stall(job.now() > failed_ns + 5 * kSecond);
    job.run(job.now() + 50 * kMillisecond);
  }
  is_false = is_false || job.reports_falsely();
  const auto reported_ns = job.reported_ns();
  return reported_ns ? to_text(in_seconds(*reported_ns - failed_ns), 1) : "none";
}

void print_row(int num_ranks) {
  Simulation job(job_of(num_ranks));
  const int num_hosts = job.num_hosts();
  job.run(job.now() + 10 * kSecond);
  const auto steady = rate(job);
  job.stall(true);
  job.stop_rank(num_ranks - 1, 30 * kSecond);
  job.stop_rank(num_ranks - kRanksPerHost, 30 * kSecond);  // a keeper
  const auto stalled = rate(job);
  job.stall(false);
  job.set_latency(3 * kSecond);
  job.run(job.now() + 300 * kSecond);
  bool is_false = job.reported_ns().has_value() || job.reports_falsely();

  const auto lose = [](int first, int num_lost) {
    return [first, num_lost](Simulation& losing) {
      for (int host = first; host < first + num_lost; ++host) {
        losing.lose_host(host);
      }
    };
  };
  const auto report = [&](const std::function<void(Simulation&)>& fail) {
    return report_of(num_ranks, fail, is_false);
  };
  const auto death = report([](Simulation& dying) { dying.kill_rank(1); });
  const auto one = num_hosts > 1 ? report(lose(1, 1)) : "-";
  const auto eight = num_hosts > 9 ? report(lose(2, 8)) : "-";
  std::printf(
      "| %d | %d | %s | %.0f | %.0f | %s | %s | %s | %s |\n",
      num_ranks,
      num_hosts,
      start_through_store(num_ranks).c_str(),
      steady,
      stalled,
      death.c_str(),
      one.c_str(),
      eight.c_str(),
      is_false ? "yes" : "none");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int most = argc > 1 ? std::atoi(argv[1]) : 4096;
  std::printf(
      "| ranks | hosts | start, s | requests of a rank in it | requests/s, steady | requests/s, "
      "stall | death, s | host lost, s | eight hosts lost, s | false reports |\n"
      "| -: | -: | -: | -: | -: | -: | -: | -: | -: | - |\n");
  for (const int num_ranks : {8, 16, 64, 256, 1024, 4096}) {
    if (num_ranks <= most) {
      print_row(num_ranks);
    }
  }
  auto settings = job_of(kRanksOfHours);
  settings.jitter_ns = 5 * kMillisecond;
  settings.hiccups_per_hour = 5;
  settings.look_ns = kSecond;
  Simulation hours(settings);
  hours.run(int64_t{kHours} * 3600 * kSecond);
  std::printf(
      "\n%d hours of %d ranks with jitter, and with stops of up to 12 s, of the store or of a "
      "keeper, 5 times an hour for each host: %s.\n",
      kHours,
      kRanksOfHours,
      hours.reports_falsely() || hours.reported_ns() ? "a false report" : "no report");
  return 0;
}
