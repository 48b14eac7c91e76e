// Every pair of phases: the legal transitions of docs/architecture.md, and no other.
#include "reducer/phase.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>

#include "errors.h"

namespace ddpx {
namespace {

constexpr Phase kPhases[] = {
    Phase::kIdle,
    Phase::kRebuilding,
    Phase::kCollecting,
    Phase::kFinalizing,
    Phase::kFailed,
    Phase::kReady,
    Phase::kFinalized};

const std::set<std::pair<Phase, Phase>> kLegal = {
    {Phase::kIdle, Phase::kCollecting},
    {Phase::kIdle, Phase::kRebuilding},
    {Phase::kRebuilding, Phase::kIdle},
    {Phase::kRebuilding, Phase::kFailed},
    {Phase::kCollecting, Phase::kFinalizing},
    {Phase::kCollecting, Phase::kFailed},
    {Phase::kFinalizing, Phase::kIdle},
    {Phase::kFinalizing, Phase::kFailed},
    {Phase::kFailed, Phase::kIdle},
    {Phase::kCollecting, Phase::kReady},
    {Phase::kReady, Phase::kFinalizing},
    {Phase::kIdle, Phase::kFinalized},
    {Phase::kFinalized, Phase::kIdle},
};

TEST(Phase, LegalTransitionsReturnTheNewPhase) {
  for (const auto& [from, to] : kLegal) {
    EXPECT_EQ(transition(from, to), to) << to_string(from) << " to " << to_string(to);
  }
}

TEST(Phase, EveryOtherPairThrowsAndNamesBoth) {
  for (const auto from : kPhases) {
    for (const auto to : kPhases) {
      if (kLegal.count({from, to}) != 0) {
        continue;
      }
      const auto pair = std::string("from '") + to_string(from) + "' to '" + to_string(to) + "'";
      try {
        transition(from, to);
        ADD_FAILURE() << pair << " was allowed";
      } catch (const InternalError& error) {
        EXPECT_NE(std::string(error.what()).find(pair), std::string::npos) << error.what();
      }
    }
  }
}

TEST(Phase, NamesDiffer) {
  std::set<std::string> names;
  for (const auto phase : kPhases) {
    names.insert(to_string(phase));
  }
  EXPECT_EQ(names.size(), std::size(kPhases));
}

}  // namespace
}  // namespace ddpx
