// Who is gone, who is late: of processes of this machine.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <string>

#include "health/calls.h"
#include "health/peer_table.h"
#include "local_ranks.h"

namespace ddpx::health {
namespace {

// Another process as rank 1, that does nothing until it is ended. Its page is shared with us.
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
    return page_.view().layout().token.load();
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

std::shared_ptr<Peer> peer_of(const Introduction& introduction) {
  return std::make_shared<Peer>(introduction, this_process(), nullptr);
}

bool differ(const PeerTable& peers, const StepCalls& ours) {
  return peers.compare(ours, /*is_over=*/false) == Comparison::kDifferent;
}

class PeerTableTest : public testing::Test {
 protected:
  void SetUp() override {
    peers.add(peer_of(child.introduction()));
    ASSERT_NE(peers.peer(1)->page(), nullptr);
  }
  std::string what() const {
    const auto failure = peers.find_dead(false);
    return failure ? failure->lost.front().what : "nothing";
  }

  Child child;
  PeerTable peers{0, 2, /*same_sequence=*/false};
};

TEST_F(PeerTableTest, TheLivingAreNotMissed) {
  EXPECT_FALSE(peers.find_dead(true));
  EXPECT_FALSE(peers.find_unknown(/*store_answers=*/true));
  EXPECT_FALSE(peers.any_remote());
}

TEST_F(PeerTableTest, WhoWasKilledIsNamedWithWhatItDidLast) {
  child.page().note(Doing::kHook, StepCalls{0, 3, 1, 0, 0, 0}, 1);
  peers.names().set(0, {{"a"}, {"b"}});
  child.end(SIGKILL);
  child.await_end(true);
  const auto failure = peers.find_dead(false);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->kind, FailureKind::kDead);
  EXPECT_EQ(failure->lost.front().rank, 1);
  EXPECT_EQ(failure->lost.front().pid, child.pid());
  EXPECT_EQ(what(), "was killed by SIGKILL");
  EXPECT_EQ(failure->lost.front().last_seen, "step 3, phase communication hook, bucket 1 ('b')");
}

TEST_F(PeerTableTest, HowItEndedIsKnownBehindItsParentsBackOnNewKernels) {
  child.end(SIGTERM);
  child.await_end(false);
  const auto found = what();
  EXPECT_TRUE(found == "was killed by SIGTERM" || found == "died") << found;
}

TEST_F(PeerTableTest, AFailingRankIsDeadThoughItsProcessLives) {
  child.page().fail("ValueError: no", std::nullopt);
  EXPECT_EQ(what(), "raised an exception that ended its script");
  EXPECT_EQ(peers.find_dead(false)->lost.front().cause, "ValueError: no");
}

TEST_F(PeerTableTest, WhoFailsBecauseOfAnotherIsNoReasonUntilItIsGone) {
  child.page().fail("ddpx.RankFailure: it lost rank 2", 2);
  EXPECT_FALSE(peers.find_dead(true));
  child.end(SIGKILL);
  child.await_end(true);
  EXPECT_TRUE(peers.find_dead(false));
}

TEST_F(PeerTableTest, LeavingIsNoDeathUnlessAsked) {
  child.page().leave();
  EXPECT_FALSE(peers.find_dead(false));
  const auto failure = peers.find_dead(true);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->kind, FailureKind::kLeft);
}

TEST_F(PeerTableTest, WhoWasToldToEndIsNoReasonUnlessSomebodyWaits) {
  child.page().mark_terminated();
  EXPECT_FALSE(peers.find_dead(true));
  child.end(SIGTERM);
  child.await_end(true);
  EXPECT_FALSE(peers.find_dead(false));
  const auto failure = peers.find_dead(true);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->lost.front().what, "ended after SIGTERM");
}

TEST_F(PeerTableTest, WhoLeavesWithAnErrorIsNoGoodEnd) {
  child.page().leave();
  EXPECT_EQ(peers.find_dead(true)->kind, FailureKind::kLeft);
  child.end(SIGKILL);  // as good as an exit code
  child.await_end(true);
  EXPECT_FALSE(peers.find_dead(false));
  const auto failure = peers.find_dead(true);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->kind, FailureKind::kDead);
  EXPECT_EQ(failure->lost.front().what, "was killed by SIGKILL");
}

TEST_F(PeerTableTest, WhoIsBehindIsMissing) {
  const auto missing = [&](Doing doing, uint32_t step, uint16_t num_launched, uint16_t bucket = 0) {
    const StepCalls ours{0, step, num_launched, 0, 0, 0};
    return !peers.missing({doing, 0, bucket, step, 0}, ours.progress(doing)).empty();
  };
  child.page().note(Doing::kBackward, StepCalls{0, 3, 1, 0, 0, 0}, 0);
  EXPECT_TRUE(missing(Doing::kWaiting, 3, 2, 1));
  EXPECT_FALSE(missing(Doing::kWaiting, 3, 2, 0));  // it has launched that one
  EXPECT_TRUE(missing(Doing::kAgreeing, 3, 1));
  EXPECT_TRUE(missing(Doing::kBuffers, 4, 0));
  EXPECT_FALSE(missing(Doing::kBuffers, 3, 0));
}

TEST_F(PeerTableTest, OfAConstructionWhoHasBegunFewerCallsIsBehind) {
  const auto missing = [&](uint16_t num_calls) {
    const StepCalls ours{kNoModel, 1, num_calls, 0, 0, 0};
    const Activity activity{Doing::kConstruction, kNoModel, 0, 1, 0};
    return peers.missing(activity, ours.progress(Doing::kConstruction)).size();
  };
  child.page().note(Doing::kConstructing, StepCalls{kNoModel, 1, 1, 0, 0, 0}, 0);
  EXPECT_EQ(missing(1), 0u);
  EXPECT_EQ(missing(2), 1u);
}

TEST_F(PeerTableTest, WhoTrainsIsThroughWithTheConstruction) {
  const StepCalls making{kNoModel, 1, 0, 0, 0, 0};
  const auto missing = [&](const StepCalls& ours, Doing doing) {
    return peers.missing({doing, ours.model, 0, ours.step, 0}, ours.progress(doing)).size();
  };
  child.page().note(Doing::kBuffers, StepCalls{0, 0, 0, 0, 0, 0}, 0);
  EXPECT_EQ(missing(making, Doing::kConstruction), 0u);
  EXPECT_EQ(missing(StepCalls{kNoModel, 2, 0, 0, 0, 0}, Doing::kConstruction), 1u);
  child.page().note(Doing::kConstruction, making, 0);
  EXPECT_EQ(missing(StepCalls{0, 0, 0, 0, 0, 0}, Doing::kBuffers), 1u);
  EXPECT_EQ(missing(making, Doing::kConstruction), 0u);
}

TEST_F(PeerTableTest, ABucketInAHookIsNotOnItsWay) {
  child.page().note(Doing::kHook, StepCalls{0, 3, 2, 0, 0, 0}, 1);
  const StepCalls ours{0, 3, 2, 0, 0, 0};
  const auto missing = [&](uint16_t bucket) {
    return peers.missing({Doing::kWaiting, 0, bucket, 3, 0}, ours.progress(Doing::kWaiting));
  };
  EXPECT_EQ(missing(1), std::vector<int>{1});
  EXPECT_TRUE(missing(0).empty());
}

TEST_F(PeerTableTest, AHookWaitsForThoseThatHaveNotCalledTheirs) {
  const StepCalls ours{0, 3, 2, 0, 0, 0};
  const auto missing = [&] {
    return peers.missing({Doing::kHook, 0, 1, 3, 0}, ours.progress(Doing::kHook));
  };
  child.page().note(Doing::kBackward, StepCalls{0, 3, 1, 0, 0, 0}, 0);
  EXPECT_EQ(missing(), std::vector<int>{1});
  child.page().note(Doing::kHook, ours, 1);
  EXPECT_TRUE(missing().empty());
}

TEST_F(PeerTableTest, AStoppedRankIsMissingWhereverItStopped) {
  child.page().note(Doing::kAgreeing, StepCalls{0, 9, 9, 0, 0, 0}, 0);
  child.end(SIGSTOP);
  ASSERT_TRUE(eventually([&] { return peers.peer(1)->watch()->state() == 'T'; }));
  EXPECT_EQ(peers.missing({Doing::kWaiting, 0, 0, 3, 0}, {}), std::vector<int>{1});
  EXPECT_TRUE(contains(peers.describe_missing(1), "stopped by a signal (SIGSTOP)"));
}

TEST_F(PeerTableTest, DifferentCallsAreTold) {
  const StepCalls ours{0, 3, 2, 77, 0, 0};
  EXPECT_FALSE(differ(peers, ours));
  child.page().publish(ours);
  EXPECT_FALSE(differ(peers, ours));
  child.page().publish(StepCalls{0, 3, 1, 5, 0, 0});  // not there yet
  EXPECT_FALSE(differ(peers, ours));
  child.page().publish(StepCalls{0, 3, 2, 5, 0, 0});
  EXPECT_TRUE(differ(peers, ours));
}

TEST_F(PeerTableTest, WrappersWhoseNumbersWentAroundAreNotTakenForEachOther) {
  child.page().publish(StepCalls{0, 3, 2, 5, 0, 0, 0, kNumConstructed});
  EXPECT_FALSE(differ(peers, StepCalls{0, 3, 2, 77, 0, 0, 0, 0}));
  EXPECT_TRUE(differ(peers, StepCalls{0, 3, 2, 77, 0, 0, 0, kNumConstructed}));
}

TEST_F(PeerTableTest, SequencesAreComparedWhereCollectiveCallsAloneAreCounted) {
  const StepCalls ours{0, 3, 2, 77, 41, 0};
  child.page().publish(StepCalls{0, 3, 2, 77, 42, 0});
  EXPECT_FALSE(differ(peers, ours));
  EXPECT_EQ(peers.uneven_sequences(ours), "rank 0: 41, rank 1: 42");
  child.page().publish(ours);
  EXPECT_FALSE(peers.uneven_sequences(ours));

  PeerTable strict(0, 2, /*same_sequence=*/true);
  strict.add(peer_of(child.introduction()));
  EXPECT_FALSE(differ(strict, ours));
  child.page().publish(StepCalls{0, 3, 2, 77, 42, 0});
  EXPECT_TRUE(differ(strict, ours));
  const auto how = describe_mismatch(strict.step_calls(ours));
  EXPECT_TRUE(contains(how, "the first as call number 42 of the group")) << how;
}

// ---- which ranks are local ----------------------------------------------------------------------

// The table of a host, of which the child is a member.
std::shared_ptr<HostTable> table_with(const Introduction& introduction) {
  const auto table = OwnPage(1, /*world_size=*/2).view().host();
  table->decide_host(1);
  table->introduce(introduction, 1);
  return table;
}

TEST(PeerTest, ARankWhosePageCannotBeOpenedIsLocalIfItsProcessIsSeen) {
  Child child;
  auto introduction = child.introduction();
  ++introduction.token;
  const auto peer = peer_of(introduction);
  EXPECT_EQ(peer->page(), nullptr);
  EXPECT_TRUE(peer->local());
}

// As a copy of a virtual machine does, with other processes.
TEST(PeerTest, ARankThatOnlyClaimsThisMachineIsNotLocal) {
  Child child;
  auto introduction = child.introduction();
  ++introduction.process.start_time;
  ++introduction.token;
  PeerTable peers(0, 2, /*same_sequence=*/false);
  peers.add(peer_of(introduction));
  EXPECT_TRUE(peers.any_remote());
  EXPECT_FALSE(peers.find_dead(true));
}

// Its page was opened by another rank of the host before it ended.
TEST(PeerTest, AMemberOfTheHostThatHasEndedIsDead) {
  Child child;
  auto introduction = child.introduction();
  ++introduction.process.start_time;
  ++introduction.token;
  PeerTable peers(0, 2, /*same_sequence=*/false);
  peers.meet(table_with(introduction), this_process());
  ASSERT_TRUE(peers.peer(1));
  EXPECT_TRUE(peers.find_dead(true));
}

}  // namespace
}  // namespace ddpx::health
