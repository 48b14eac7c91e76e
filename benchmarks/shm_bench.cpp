// Measures the all-reduce of the shared-memory transport, and a copy as its lower bound.
//
//   shm_bench RANKS [seconds per figure]
//
// Prints one JSON object per line, with three times per size: resident (in place in an arena),
// staged (private buffers), and the copy. For the copy, all ranks at the same time copy as many
// bytes from one private buffer to another. An in-place all-reduce must move at least as many
// bytes. Each time is the median over repetitions of the time of the slowest rank.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "channels.h"
#include "shm/group.h"

namespace {

using namespace ddpx::shm;

constexpr std::size_t kSizes[] = {
    4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20};

double now_ms() {
  return std::chrono::duration<double, std::milli>(Clock::now().time_since_epoch()).count();
}

class Bench {
 public:
  Bench(Group& group, double seconds) : group_(group), seconds_(seconds) {}

  // Median time of the slowest rank.
  template <class Work>
  double time(const Work& work) {
    work();
    const double one = slowest(once(work));
    const auto repetitions =
        static_cast<int>(std::clamp(seconds_ * 1000 / std::max(one, 1e-3), 5.0, 2000.0));
    std::vector<double> times;
    for (int i = 0; i < repetitions; ++i) {
      times.push_back(once(work));
    }
    // The maximum over ranks, per repetition.
    group_.run(
        all_reduce_call(times.data(), times.data(), times.size(), DType::kFloat64, ReduceOp::kMax));
    std::nth_element(times.begin(), times.begin() + repetitions / 2, times.end());
    return times[repetitions / 2];
  }

 private:
  template <class Work>
  double once(const Work& work) {
    group_.run(barrier_call());
    const auto begin = now_ms();
    work();
    return now_ms() - begin;
  }

  double slowest(double time) {
    group_.run(all_reduce_call(&time, &time, 1, DType::kFloat64, ReduceOp::kMax));
    return time;
  }

  Group& group_;
  double seconds_;
};

void run_rank(const std::filesystem::path& directory, int rank, int size, double seconds) {
  FileChannel channel(directory);
  const auto arena = std::make_shared<Arena>();
  GroupOptions options;
  if (const char* piece = std::getenv("DDPX_SHM_PIECE_KIB")) {
    options.sizes.piece_bytes = static_cast<std::size_t>(std::atoi(piece)) << 10;
  }
  if (const char* bytes = std::getenv("DDPX_SHM_ONE_SHOT_KIB")) {
    options.sizes.one_shot_bytes = static_cast<std::size_t>(std::atoi(bytes)) << 10;
  }
  if (const char* spin = std::getenv("DDPX_SHM_SPIN_US")) {
    const char* yields = std::getenv("DDPX_SHM_YIELDS");
    options.spin_policy =
        SpinPolicy{std::chrono::microseconds(std::atoi(spin)), yields ? std::atoi(yields) : 0};
  }
  Group group(channel, rank, size, options, arena);
  Bench bench(group, seconds);
  for (const auto num_bytes : kSizes) {
    auto* resident = static_cast<float*>(arena->allocate(num_bytes));
    std::vector<float> data(num_bytes / sizeof(float), 1.0f);
    std::vector<float> other(data.size(), 2.0f);
    std::fill_n(resident, data.size(), 1.0f);
    const auto reduce = [&](float* buffer) {
      group.run(all_reduce_call(buffer, buffer, data.size(), DType::kFloat32, ReduceOp::kAvg));
    };
    const auto resident_ms = bench.time([&] { reduce(resident); });
    const auto staged_ms = bench.time([&] { reduce(data.data()); });
    const auto copy_ms = bench.time([&] { std::memcpy(other.data(), data.data(), num_bytes); });
    if (rank == 0) {
      std::printf(
          "{\"ranks\": %d, \"bytes\": %zu, \"resident_ms\": %.4f, \"staged_ms\": %.4f, "
          "\"copy_ms\": %.4f}\n",
          size,
          num_bytes,
          resident_ms,
          staged_ms,
          copy_ms);
      std::fflush(stdout);
    }
    arena->free(resident);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 2;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 1.0;
  const TemporaryDirectory directory;
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    const auto child = fork();
    if (child == 0) {
      try {
        run_rank(directory.path(), rank, size, seconds);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        _exit(1);
      }
      _exit(0);
    }
    children.push_back(child);
  }
  int failures = 0;
  for (const auto child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    failures += status != 0;
  }
  return failures == 0 ? 0 : 1;
}
