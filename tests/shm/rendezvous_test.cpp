// The rendezvous: ranks that are late or fail, strangers, and limits of open files.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>

#include "os/limits.h"
#include "ranks.h"
#include "shm/unix_socket.h"

namespace ddpx::shm {
namespace {

int local_size(const Rank& rank) {
  return static_cast<int>(rank.group.topology().local_ranks(rank.rank).size());
}

constexpr std::size_t kNameBytes = 37;  // of the socket, at the start of an endpoint

// The error of a constructor, which must come in time.
Error error_of_group(
    Channel& channel, int rank, int size, const GroupOptions& options = test_options()) {
  const auto begin = Clock::now();
  try {
    const Group group(channel, rank, size, options, nullptr);
  } catch (const Error& error) {
    EXPECT_LT(Clock::now() - begin, kInTime);
    return error;
  }
  return Error(ErrorKind::kMisuse, "no error");
}

TEST(RendezvousTest, NamesTheRankThatDoesNotCome) {
  MemoryChannel channel;
  auto options = test_options();
  options.rendezvous_timeout = std::chrono::milliseconds(200);
  const auto error = error_of_group(channel, 0, 2, options);
  EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
  EXPECT_TRUE(contains(error.what(), "rank 1 did not")) << error.what();
  EXPECT_EQ(error.culprit(), 1);
}

// A rank fails before it has come to the first meeting.
TEST(RendezvousTest, OtherRanksHearOfAnErrorAtItsBeginning) {
  MemoryChannel channel;
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  const rlimit none{0, files.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  const auto first = error_of_group(channel, 1, 2);
  setrlimit(RLIMIT_NOFILE, &files);
  EXPECT_EQ(first.kind(), ErrorKind::kSystem) << first.what();
  const auto error = error_of_group(channel, 0, 2);
  EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();
  EXPECT_EQ(error.culprit(), 1);
  EXPECT_TRUE(contains(error.what(), "rank 1 failed: ")) << error.what();
}

TEST(RendezvousTest, TooLittleMemoryIsAnErrorBeforeTheStart) {
  MemoryChannel channel;
  os::override_available_memory(1000);
  const auto error = error_of_group(channel, 0, 1);
  os::override_available_memory(0);
  EXPECT_EQ(error.kind(), ErrorKind::kOutOfMemory) << error.what();
}

// Ranks that check the memory at the same moment count the segments of all of them.
TEST(RendezvousTest, MemoryMustSufficeForAllLocalRanks) {
  MemoryChannel channel;
  os::override_available_memory(60'000);  // one home has 24 KiB
  std::thread other(
      [&] { EXPECT_EQ(error_of_group(channel, 1, 3).kind(), ErrorKind::kOutOfMemory); });
  std::thread third(
      [&] { EXPECT_EQ(error_of_group(channel, 2, 3).kind(), ErrorKind::kOutOfMemory); });
  const auto error = error_of_group(channel, 0, 3);
  other.join();
  third.join();
  os::override_available_memory(0);
  EXPECT_TRUE(contains(error.what(), "staging buffers of 3 local ranks")) << error.what();
}

TEST(RendezvousTest, OtherRanksQuoteTheErrorOfARank) {
  const TemporaryDirectory directory;
  const auto child = fork();
  if (child == 0) {
    os::override_available_memory(1000);
    FileChannel channel(directory.path());
    _exit(error_of_group(channel, 1, 2).kind() == ErrorKind::kOutOfMemory ? 0 : 1);
  }
  FileChannel channel(directory.path());
  const auto error = error_of_group(channel, 0, 2);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(error.culprit(), 1);
  EXPECT_TRUE(contains(error.what(), "rank 1 failed: could not allocate")) << error.what();
}

// A channel that changes the text of the key that begins with `prefix`.
class CorruptChannel : public MemoryChannel {
 public:
  using Change = std::function<std::string(const std::string&)>;

  CorruptChannel(std::string prefix, Change change)
      : prefix_(std::move(prefix)), change_(std::move(change)) {}

  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    const auto value = MemoryChannel::get(key, timeout);
    return key.rfind(prefix_, 0) == 0 ? change_(value) : value;
  }

 private:
  std::string prefix_;
  Change change_;
};

TEST(RendezvousTest, ImpossibleTextsInTheStoreAreErrors) {
  for (const auto& [prefix, text] : std::vector<std::pair<std::string, std::string>>{
           {"shm/endpoints/", "0 short"},
           {"shm/endpoints/", "5 of another job"},
           {"shm/endpoints/", "no number"},
           {"shm/endpoints/", ""},
           {"shm/hosts/answer", "0 0 0"},
           {"shm/hosts/answer", ""}}) {
    CorruptChannel channel(prefix, [text = text](const auto&) { return text; });
    std::thread other([&] { error_of_group(channel, 1, 2); });
    const auto error = error_of_group(channel, 0, 2);
    other.join();
    EXPECT_TRUE(contains(error.what(), "the store has an invalid")) << text << error.what();
  }
}

// As where two machines claim the same identity, such as copies of a virtual machine.
TEST(RendezvousTest, RanksThatCannotConnectAreOnDifferentHosts) {
  CorruptChannel channel("shm/endpoints/", [](std::string text) {
    return text.replace(text.find("0 ddpx-") + 7, 4, "none");
  });
  run_threads_over(channel, 3, [](const Rank& rank) {
    EXPECT_EQ(rank.group.topology().hosts, (std::vector<std::vector<int>>{{0}, {1, 2}}));
    rank.group.run(barrier_call());
  });
}

// Counts requests and bytes. c10d's Store needs two requests for a `get`.
class CountingChannel : public MemoryChannel {
 public:
  void set(const std::string& key, const std::string& value) override {
    count(1, value);
    MemoryChannel::set(key, value);
  }
  void append(const std::string& key, const std::string& value) override {
    count(1, value);
    MemoryChannel::append(key, value);
  }
  int64_t count_up(const std::string& key) override {
    count(1, "");
    return MemoryChannel::count_up(key);
  }
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    const auto value = MemoryChannel::get(key, timeout);
    count(2, value);
    return value;
  }

  std::atomic<int> num_requests{0};
  std::atomic<std::size_t> longest{0};

 private:
  void count(int num, const std::string& text) {
    num_requests += num;
    auto longest_yet = longest.load();
    while (text.size() > longest_yet && !longest.compare_exchange_weak(longest_yet, text.size())) {
    }
  }
};

TEST(RendezvousTest, RequestsGrowWithRanksAndTextsToo) {
  for (const auto& [num_hosts, num_local] :
       std::vector<std::pair<int, int>>{{1, 2}, {1, 8}, {1, 32}, {2, 16}, {8, 4}, {32, 1}}) {
    CountingChannel channel;
    const int size = num_hosts * num_local;
    run_threads_over(
        channel,
        size,
        [&](const Rank& rank) { EXPECT_EQ(local_size(rank), num_local); },
        [&](int rank) {
          auto options = test_options();
          options.host_identity = std::to_string(rank / num_local);
          return options;
        });
    EXPECT_LE(channel.num_requests, 15 * size + num_hosts + 4);
    EXPECT_LE(channel.longest, 80 * static_cast<std::size_t>(size));
  }
}

// A socket that is connected to the listener of a rank; empty if the queue is full.
os::UniqueFd connect_stranger(const std::string& name) {
  os::UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length) == 0 ? std::move(fd)
                                                                               : os::UniqueFd();
}

// Calls `act` with the name of rank 0's socket, as soon as the socket exists.
class ChannelWithStranger : public MemoryChannel {
 public:
  explicit ChannelWithStranger(std::function<void(const std::string&)> act)
      : act_(std::move(act)) {}

  void append(const std::string& key, const std::string& value) override {
    if (key.rfind("shm/endpoints/", 0) == 0 && value[0] == '0') {
      act_(value.substr(2, kNameBytes));
    }
    MemoryChannel::append(key, value);
  }

 private:
  std::function<void(const std::string&)> act_;
};

void expect_rendezvous(Channel& channel) {
  const auto begin = Clock::now();
  const auto run_rank = [&](int rank) {
    Group group(channel, rank, 2, test_options(), nullptr);
    EXPECT_EQ(group.topology().local_ranks(rank).size(), 2u);
    group.run(barrier_call());
  };
  std::thread other(run_rank, 1);
  run_rank(0);
  other.join();
  EXPECT_LT(Clock::now() - begin, kInTime);
}

// A process that knows the socket's name, but not the token, gets no reply.
TEST(StrangerTest, GetsNoReply) {
  os::UniqueFd fd;
  ChannelWithStranger channel([&](const std::string& name) {
    fd = connect_stranger(name);
    ASSERT_TRUE(fd);
    const std::string text = "a message without the token, from rank 1";
    EXPECT_GT(send(fd.get(), text.data(), text.size(), 0), 0);
  });
  expect_rendezvous(channel);
  const Connection stranger(std::move(fd));
  EXPECT_FALSE(stranger.receive(Clock::now()));
  EXPECT_TRUE(stranger.hung_up());
}

TEST(StrangerTest, ThatSendsNothingStopsNobody) {
  os::UniqueFd stranger;
  ChannelWithStranger channel([&](const std::string& name) {
    stranger = connect_stranger(name);
    ASSERT_TRUE(stranger);
  });
  expect_rendezvous(channel);
}

TEST(StrangerTest, ThatFillsTheQueueStopsNobody) {
  std::vector<os::UniqueFd> strangers;
  ChannelWithStranger channel([&](const std::string& name) {
    for (int i = 0; i < 100; ++i) {
      strangers.push_back(connect_stranger(name));
    }
  });
  expect_rendezvous(channel);
}

TEST(StrangerTest, AListenerThatAcceptsNothingIsNotAwaitedForever) {
  const std::string name = "ddpx-test-" + std::to_string(getpid());
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const os::UniqueFd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  ASSERT_EQ(
      bind(
          listener.get(),
          reinterpret_cast<sockaddr*>(&address),
          static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())),
      0);
  ASSERT_EQ(listen(listener.get(), 1), 0);
  std::vector<os::UniqueFd> strangers;
  while (auto stranger = connect_stranger(name)) {
    strangers.push_back(std::move(stranger));
  }
  const auto begin = Clock::now();
  EXPECT_FALSE(connect_to(name, begin + std::chrono::milliseconds(100)));
  EXPECT_LT(Clock::now() - begin, kInTime);
}

// As an unprivileged user, since the kernel lets root exceed the limit of descriptors in flight.
TEST(OpenFilesTest, ALowLimitIsEnoughForManyRanks) {
  constexpr rlim_t kLimit = 80;
  constexpr int kNumRanks = 16;  // 240 memory files for each exchange
  const auto lower_limit = [] {
    if (geteuid() == 0 && setuid(65534) != 0) {
      throw std::runtime_error("setuid failed");
    }
    const rlimit limit{kLimit, kLimit};
    setrlimit(RLIMIT_NOFILE, &limit);
  };
  const auto outcomes = run_processes(
      kNumRanks,
      [](const Rank& rank) -> std::string {
        constexpr std::size_t kCount = 100'000;
        auto* data = static_cast<float*>(rank.arena->allocate(kCount * sizeof(float)));
        std::fill_n(data, kCount, 1.0f);
        rank.group.run(all_reduce_call(data, data, kCount, DType::kFloat32, ReduceOp::kSum));
        const bool right = std::all_of(data, data + kCount, [](float value) {
          return value == static_cast<float>(kNumRanks);
        });
        rank.arena->free(data);
        return right && local_size(rank) == kNumRanks ? "fine" : "wrong";
      },
      test_options(),
      lower_limit);
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.text, "fine");
  }
}

TEST(OpenFilesTest, ALostDescriptorIsAnErrorWithARemedy) {
  const auto name = "ddpx-test-" + std::to_string(getpid());
  Listener listener(name, 1);
  const auto sender = connect_to(name, Clock::now() + kInTime);
  ASSERT_TRUE(sender);
  ASSERT_TRUE(sender->send("file", STDOUT_FILENO));
  const auto connections = listener.stop();
  ASSERT_EQ(connections.size(), 1u);
  rlimit usual{};
  getrlimit(RLIMIT_NOFILE, &usual);
  const rlimit none{1, usual.rlim_max};  // `poll` needs one
  setrlimit(RLIMIT_NOFILE, &none);
  auto message = connections.front().receive(Clock::now());
  setrlimit(RLIMIT_NOFILE, &usual);
  ASSERT_TRUE(message);
  try {
    message->take_fd();
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_TRUE(contains(error.what(), "ulimit -n")) << error.what();
  }
}

}  // namespace
}  // namespace ddpx::shm
