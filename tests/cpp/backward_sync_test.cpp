// The rule by which a backward averages or stays local.
#include "autograd/backward_sync.h"

#include <gtest/gtest.h>

#include <vector>

namespace ddpx {
namespace {

TEST(BackwardSync, AveragesUnlessALocalOutputWasReached) {
  BackwardSync sync;
  EXPECT_FALSE(sync.local());
  sync.reach_output(ForwardSync::kOff);
  EXPECT_TRUE(sync.local());
  EXPECT_FALSE(sync.output_reached());
}

TEST(BackwardSync, OneSynchronisingOutputIsEnough) {
  BackwardSync sync;
  sync.reach_output(ForwardSync::kOff);
  sync.keep_local(2);
  sync.keep_local(0);
  sync.reach_output(ForwardSync::kOn);
  EXPECT_FALSE(sync.local());
  EXPECT_TRUE(sync.output_reached());
  EXPECT_EQ(sync.take_local_arrivals(), (std::vector<std::size_t>{2, 0}));
  EXPECT_TRUE(sync.take_local_arrivals().empty());
  sync.reach_output(ForwardSync::kOff);
  EXPECT_FALSE(sync.local());
}

TEST(BackwardSync, APreparedBackwardAveragesOnce) {
  BackwardSync sync;
  sync.prepare();
  sync.reach_output(ForwardSync::kOff);
  EXPECT_FALSE(sync.local());
  EXPECT_TRUE(sync.output_reached());
  sync.end(/*was_prepared=*/true);
  sync.reach_output(ForwardSync::kOff);
  EXPECT_TRUE(sync.local());
}

TEST(BackwardSync, AnotherBackwardIsNotTheOnePreparedFor) {
  BackwardSync sync;
  sync.prepare();
  sync.end(/*was_prepared=*/false);
  EXPECT_TRUE(sync.prepared());
}

TEST(BackwardSync, NothingIsLeftAtTheEnd) {
  BackwardSync sync;
  sync.reach_output(ForwardSync::kOff);
  sync.keep_local(1);
  sync.end(/*was_prepared=*/true);
  EXPECT_FALSE(sync.local());
  EXPECT_TRUE(sync.take_local_arrivals().empty());
}

}  // namespace
}  // namespace ddpx
