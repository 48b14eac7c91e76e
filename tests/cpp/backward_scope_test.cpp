// Graph tasks that cannot be joined.
#include "autograd/backward_scope.h"

#include <gtest/gtest.h>

namespace ddpx {
namespace {

TEST(BackwardScope, ATaskWhoseEndCannotBeReportedIsNotJoined) {
  BackwardScope scope;
  // Outside a backward the engine accepts no callback.
  EXPECT_ANY_THROW(scope.track({}));
  EXPECT_TRUE(scope.empty());
  EXPECT_ANY_THROW(scope.track({})) << "a second attempt must not count as tracked";
}

}  // namespace
}  // namespace ddpx
