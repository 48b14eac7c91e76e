// Ranks of this machine that have ended, or are late.
#include <grp.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <optional>
#include <string>

#include "health/calls/call_comparison.h"
#include "health/verdict/lost_ranks.h"
#include "health/verdict/peer_table.h"
#include "local_ranks.h"

namespace ddpx::health {
namespace {

// Rank 1: a child process that does nothing until it is ended. Rank 0 has mapped its page.
class Child {
 public:
  Child() : page_(new_token(), /*world_size=*/2) {
    pid_ = fork();
    if (pid_ == 0) {
      // The watchdog of an earlier test may still hold SIGTERM, and ThreadSanitizer keeps signals
      // from a handler in the child of a process with threads.
      std::signal(SIGTERM, SIG_DFL);
      while (true) {
        pause();
      }
    }
  }
  ~Child() {
    end(SIGKILL);
    reap();
  }

  OwnPage& page() {
    return page_;
  }
  pid_t pid() const {
    return pid_;
  }
  void end(int signal) {
    if (!reaped_) {
      kill(pid_, signal);
    }
  }
  void reap() {
    if (!reaped_) {
      waitpid(pid_, nullptr, 0);
      reaped_ = true;
    }
  }
  void await_end(bool leave_it_dead) {
    siginfo_t info{};
    waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | (leave_it_dead ? WNOWAIT : 0));
    reaped_ = !leave_it_dead;
  }

  Introduction introduction() const {
    Introduction introduction = Introduction::own(1, "", page_.fd(), token());
    // The start time is a field of the file that only this pid has.
    introduction.process.pid = pid_;
    introduction.process.start_time = start_time();
    return introduction;
  }

 private:
  uint64_t token() const {
    return page_.view().token;
  }
  uint64_t start_time() const {
    const auto command = "cut -d' ' -f22 /proc/" + std::to_string(pid_) + "/stat";
    FILE* out = popen(command.c_str(), "r");
    unsigned long long value = 0;
    EXPECT_EQ(fscanf(out, "%llu", &value), 1);
    pclose(out);
    return value;
  }

  OwnPage page_;
  pid_t pid_ = 0;
  bool reaped_ = false;
};

// While an object exists, this process is at its limit of open files.
class NoFreeFiles {
 public:
  NoFreeFiles() {
    getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit none{1, before_.rlim_max};  // `poll` needs one
    setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoFreeFiles() {
    setrlimit(RLIMIT_NOFILE, &before_);
  }
  NoFreeFiles(const NoFreeFiles&) = delete;
  NoFreeFiles& operator=(const NoFreeFiles&) = delete;

 private:
  rlimit before_{};
};

// The table of a host that has only rank 0.
std::shared_ptr<HostTable> new_table() {
  auto table = OwnPage(1, /*world_size=*/2).host();
  table->decide_host(1);
  return table;
}

std::shared_ptr<Peer> peer_of(const Introduction& introduction) {
  return std::make_shared<Peer>(introduction, os::this_process(), new_table());
}

bool differ(const PeerTable& peers, const StepCalls& ours) {
  return compare(peers, ours, /*is_over=*/false) == Comparison::kDifferent;
}

class PeerTableTest : public testing::Test {
 protected:
  void SetUp() override {
    peers.add(peer_of(child.introduction()));
    ASSERT_NE(peers.peer(1)->page(), nullptr);
  }
  void publish(const StepCalls& calls) {
    child.page().view().calls.publish(calls);
  }
  std::string what() const {
    const auto failure = find_dead(peers, Left::kNone);
    return failure ? failure->lost.front().what : "nothing";
  }

  Child child;
  PeerTable peers{0, 2};
};

TEST_F(PeerTableTest, RanksThatLiveAreNotDead) {
  EXPECT_FALSE(find_dead(peers, Left::kAll));
  EXPECT_FALSE(find_unknown(peers, /*store_answers=*/true));
  EXPECT_FALSE(peers.any_remote());
}

TEST_F(PeerTableTest, AKilledRankIsNamedWithItsLastActivity) {
  child.page().publish({.doing = Doing::kHook, .bucket = 1, .step = 3});
  peers.names().set(0, {.buckets = {{"a"}, {"b"}}});
  child.end(SIGKILL);
  child.await_end(true);
  const auto failure = find_dead(peers, Left::kNone);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->kind, FailureKind::kDead);
  EXPECT_EQ(failure->lost.front().rank, 1);
  EXPECT_EQ(failure->lost.front().pid, child.pid());
  EXPECT_EQ(what(), "was killed by SIGKILL");
  EXPECT_EQ(failure->lost.front().last_seen, "step 3, phase communication hook, bucket 1 ('b')");
}

TEST_F(PeerTableTest, NewKernelsKeepTheStatusAfterTheParentHasReadIt) {
  child.end(SIGTERM);
  child.await_end(false);
  const auto failure = find_dead(peers, Left::kAll);
  ASSERT_TRUE(failure);
  const auto found = failure->lost.front().what;
  EXPECT_TRUE(found == "was killed by SIGTERM" || found == "died") << found;
  EXPECT_EQ(what(), found == "died" ? "nothing" : found) << "an unknown end harms who waits";
}

// The /proc of a rank hides processes of other users. The rank has opened a page before.
TEST_F(PeerTableTest, AHiddenProcessIsNotDead) {
  const auto process = child.introduction().process;
  const auto hides = fork();
  if (hides == 0) {
    const bool can = unshare(CLONE_NEWNS) == 0 &&
                     mount("", "/", "", MS_REC | MS_PRIVATE, "") == 0 &&
                     mount("proc", "/proc", "proc", 0, "hidepid=2") == 0 &&
                     setgroups(0, nullptr) == 0 && setgid(65534) == 0 && setuid(65534) == 0;
    if (!can) {
      _exit(2);
    }
    const os::ProcessWatch watch(process);
    _exit(watch.state() == 0 && !watch.ended() ? 0 : 1);
  }
  int status = 0;
  waitpid(hides, &status, 0);
  if (WEXITSTATUS(status) == 2) {
    GTEST_SKIP() << "needs root";
  }
  EXPECT_EQ(status, 0);
}

TEST(ProcessWatchTest, AtTheLimitOfOpenFilesOnlyTheDeadAreDead) {
  Child child;
  const auto process = child.introduction().process;
  std::optional<os::ProcessWatch> watch;
  {
    const NoFreeFiles limit;
    watch.emplace(process);
    EXPECT_LT(watch->fd(), 0);
    EXPECT_FALSE(watch->ended());
  }
  EXPECT_FALSE(watch->ended());
  child.end(SIGKILL);
  child.await_end(/*leave_it_dead=*/true);
  EXPECT_TRUE(watch->ended());
  child.reap();
  const NoFreeFiles limit;
  EXPECT_TRUE(watch->ended());
}

TEST(ProcessIdTest, AtTheLimitOfOpenFilesIsAnError) {
  const NoFreeFiles limit;
  const auto error = error_of([] { os::this_process(); });
  EXPECT_TRUE(contains(error, "Too many open files")) << error;
}

TEST_F(PeerTableTest, AFailingRankIsDeadThoughItsProcessLives) {
  child.page().fail("ValueError: no", /*blames_peer=*/false);
  EXPECT_EQ(what(), "raised an exception that ended its script");
  EXPECT_EQ(find_dead(peers, Left::kNone)->lost.front().cause, "ValueError: no");
}

TEST_F(PeerTableTest, ARankThatFailsBecauseOfAnotherIsDeadOnlyOnceItHasEnded) {
  child.page().fail("ddpx.RankFailure: it lost rank 2", /*blames_peer=*/true);
  EXPECT_FALSE(find_dead(peers, Left::kAll));
  child.end(SIGKILL);
  child.await_end(true);
  EXPECT_TRUE(find_dead(peers, Left::kNone));
}

TEST_F(PeerTableTest, LeavingIsNoDeathUnlessAsked) {
  child.page().end_as(Presence::kLeft);
  EXPECT_FALSE(find_dead(peers, Left::kNone));
  const auto failure = find_dead(peers, Left::kAll);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->kind, FailureKind::kLeft);
}

TEST_F(PeerTableTest, ATerminatedRankIsDeadOnlyForRanksThatWait) {
  child.page().end_as(Presence::kTerminated);
  EXPECT_FALSE(find_dead(peers, Left::kAll));
  child.end(SIGTERM);
  child.await_end(true);
  EXPECT_FALSE(find_dead(peers, Left::kNone));
  const auto failure = find_dead(peers, Left::kAll);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->lost.front().what, "ended after SIGTERM");
}

TEST_F(PeerTableTest, ARankThatLeavesAndIsKilledIsDead) {
  child.page().end_as(Presence::kLeft);
  EXPECT_EQ(find_dead(peers, Left::kAll)->kind, FailureKind::kLeft);
  child.end(SIGKILL);  // as after an exit code
  child.await_end(true);
  EXPECT_FALSE(find_dead(peers, Left::kNone));
  const auto failure = find_dead(peers, Left::kAll);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->kind, FailureKind::kDead);
  EXPECT_EQ(failure->lost.front().what, "was killed by SIGKILL");
}

TEST_F(PeerTableTest, ARankThatIsBehindIsMissing) {
  const auto missing = [&](const Activity& ours) { return !peers.missing(ours).empty(); };
  child.page().publish({.doing = Doing::kBackward, .bucket = 1, .step = 3});
  EXPECT_TRUE(missing({.doing = Doing::kWaiting, .bucket = 1, .step = 3}));
  EXPECT_FALSE(missing({.doing = Doing::kWaiting, .bucket = 0, .step = 3})) << "it is launched";
  EXPECT_TRUE(missing({.doing = Doing::kAgreeing, .bucket = 1, .step = 3}));
  EXPECT_TRUE(missing({.doing = Doing::kBuffers, .step = 4}));
  EXPECT_FALSE(missing({.doing = Doing::kBuffers, .step = 3}));
}

TEST_F(PeerTableTest, ARankThatHasBegunFewerCallsOfAConstructionIsBehind) {
  const auto missing = [&](uint16_t num_calls) {
    return peers.missing({Doing::kConstruction, kNoModel, num_calls, 1}).size();
  };
  child.page().publish({Doing::kConstructing, kNoModel, 1, 1});
  EXPECT_EQ(missing(1), 0u);
  EXPECT_EQ(missing(2), 1u);
}

TEST_F(PeerTableTest, ARankThatTrainsHasEndedItsConstruction) {
  const Activity first{Doing::kConstruction, kNoModel, 0, 1};
  const Activity second{Doing::kConstruction, kNoModel, 0, 2};
  const Activity training{.doing = Doing::kBuffers};
  child.page().publish(training);
  EXPECT_TRUE(peers.missing(first).empty());
  EXPECT_EQ(peers.missing(second), std::vector<int>{1});
  child.page().publish(first);
  EXPECT_EQ(peers.missing(training), std::vector<int>{1});
  EXPECT_TRUE(peers.missing(first).empty());
}

TEST_F(PeerTableTest, ABucketInAHookIsNotLaunched) {
  const auto missing = [&](uint16_t bucket) {
    return peers.missing({.doing = Doing::kWaiting, .bucket = bucket, .step = 3});
  };
  child.page().publish({.doing = Doing::kHook, .bucket = 1, .step = 3});
  EXPECT_EQ(missing(1), std::vector<int>{1});
  EXPECT_TRUE(missing(0).empty());
  child.page().publish({.doing = Doing::kWaiting, .bucket = 0, .step = 3});  // after all launches
  EXPECT_TRUE(missing(1).empty());
}

TEST_F(PeerTableTest, AHookWaitsForRanksThatHaveNotCalledTheirHook) {
  const Activity ours{.doing = Doing::kHook, .bucket = 1, .step = 3};
  child.page().publish({.doing = Doing::kBackward, .bucket = 1, .step = 3});
  EXPECT_EQ(peers.missing(ours), std::vector<int>{1});
  child.page().publish(ours);
  EXPECT_TRUE(peers.missing(ours).empty());
}

TEST_F(PeerTableTest, AStoppedRankIsMissingWhereverItStopped) {
  child.page().publish({.doing = Doing::kAgreeing, .bucket = 9, .step = 9});
  child.end(SIGSTOP);
  ASSERT_TRUE(eventually([&] { return peers.peer(1)->watch()->state() == 'T'; }));
  EXPECT_EQ(peers.missing({.doing = Doing::kWaiting, .step = 3}), std::vector<int>{1});
  EXPECT_TRUE(contains(peers.describe_missing(1), "stopped by a signal (SIGSTOP)"));
}

TEST(PeerTableOfUnknownRanksTest, AnUnknownRankHasNoWrapperOfTheGroup) {
  const PeerTable unknown(/*rank=*/0, /*world_size=*/2);
  EXPECT_EQ(unknown.missing({.doing = Doing::kWaiting}), std::vector<int>{1});
  const auto text = unknown.describe_missing(1);
  EXPECT_TRUE(contains(text, "which has no wrapper of this process group yet")) << text;
  const auto failure = find_unknown(unknown, /*store_answers=*/true);
  ASSERT_TRUE(failure);
  EXPECT_TRUE(contains(failure->describe(), "before it wrapped a model with this process group"))
      << failure->describe();
}

TEST_F(PeerTableTest, DifferentCallsAreFound) {
  const StepCalls ours{0, 3, 2, 77};
  EXPECT_FALSE(differ(peers, ours));
  publish(ours);
  EXPECT_FALSE(differ(peers, ours));
  publish({0, 3, 1, 5});  // has not launched the second bucket
  EXPECT_FALSE(differ(peers, ours));
  publish({0, 3, 2, 5});
  EXPECT_TRUE(differ(peers, ours));
}

TEST_F(PeerTableTest, WrappersWithTheSameByteAreNotCompared) {
  publish({kNumModels, 3, 2, 5});
  EXPECT_FALSE(differ(peers, {0, 3, 2, 77}));
  EXPECT_TRUE(differ(peers, {kNumModels, 3, 2, 77}));
}

TEST_F(PeerTableTest, NumbersOfCallsAreNamed) {
  const StepCalls ours{0, 3, 2, 77, 41};
  publish({0, 3, 2, 77, 42});
  EXPECT_FALSE(differ(peers, ours)) << "they count send and receive, too";
  const auto known = calls_by_rank(peers, ours);
  EXPECT_EQ(uneven_sequences(known), "rank 0: 41, rank 1: 42");
  const auto how = describe_mismatch(known);
  EXPECT_TRUE(contains(how, "the first as call number 42 of the group")) << how;
  publish(ours);
  EXPECT_FALSE(uneven_sequences(calls_by_rank(peers, ours)));
}

// ---- which ranks are local ----------------------------------------------------------------------

TEST(PeerTest, ARankWhosePageCannotBeOpenedIsLocalIfItsProcessIsSeen) {
  Child child;
  auto introduction = child.introduction();
  ++introduction.token;
  const auto peer = peer_of(introduction);
  EXPECT_EQ(peer->page(), nullptr);
  EXPECT_TRUE(peer->local());
}

// A copy of a virtual machine claims to be this machine, and has other processes.
TEST(PeerTest, ARankThatOnlyClaimsThisMachineIsNotLocal) {
  Child child;
  auto introduction = child.introduction();
  ++introduction.process.start_time;
  ++introduction.token;
  PeerTable peers(0, 2);
  peers.add(peer_of(introduction));
  EXPECT_TRUE(peers.any_remote());
  EXPECT_FALSE(find_dead(peers, Left::kAll));
}

// Another rank of the host opened the page before the rank ended.
TEST(PeerTest, AMemberOfTheHostThatHasEndedIsDead) {
  Child child;
  auto introduction = child.introduction();
  ++introduction.process.start_time;
  ++introduction.token;
  PeerTable peers(0, 2);
  const auto table = new_table();
  table->introduce(introduction, 1);
  peers.meet(table, os::this_process());
  ASSERT_TRUE(peers.peer(1));
  EXPECT_TRUE(find_dead(peers, Left::kAll));
}

}  // namespace
}  // namespace ddpx::health
