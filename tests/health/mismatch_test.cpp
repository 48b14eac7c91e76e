// Ranks that find at the same moment that their calls differ.
#include <gtest/gtest.h>

#include "lookout.h"

namespace ddpx::health {
namespace {

TEST(MismatchTest, AllRanksUseTheWordsOfTheFirst) {
  Ranks ranks("AAA");
  std::vector<std::string> texts(3);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&ranks, &texts, rank] {
      const auto words = "the words of rank " + std::to_string(rank);
      texts[rank] = error_of([&] { ranks[rank].raise_mismatch(words); });
      texts[rank] = texts[rank].substr(texts[rank].find("the words"), 19);
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(texts[0], texts[1]);
  EXPECT_EQ(texts[0], texts[2]);
}

}  // namespace
}  // namespace ddpx::health
