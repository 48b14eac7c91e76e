// The end of an operation of the shm backend, and whoever asks for its future meanwhile.
#include <ATen/ops/ones.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <string>
#include <thread>

#include "../shm/failing_new.h"
#include "shm/error.h"
#include "shm_backend/shm_work.h"

namespace ddpx {
namespace {

// Runs on a thread where it next notifies all who wait on a condition: ShmWork does so after the
// operation counts as ended, so that others can be let in at this very place.
thread_local std::function<void()> at_next_notice;

}  // namespace
}  // namespace ddpx

// std::condition_variable::notify_all of the whole process.
extern "C" __attribute__((visibility("default"))) void notify_all_with_pause(
    std::condition_variable* condition) noexcept __asm__("_ZNSt18condition_variable10notify_allEv");

extern "C" void notify_all_with_pause(std::condition_variable* condition) noexcept {
  using NotifyAll = void (*)(std::condition_variable*);
  static const auto original =
      reinterpret_cast<NotifyAll>(dlsym(RTLD_NEXT, "_ZNSt18condition_variable10notify_allEv"));
  original(condition);
  if (const auto pause = std::exchange(ddpx::at_next_notice, {})) {
    pause();
  }
}

namespace ddpx {
namespace {

using Which = shm::FailingNew::Which;

c10::intrusive_ptr<ShmWork> make_work() {
  const std::vector<at::Tensor> tensors = {at::ones({2})};
  return c10::make_intrusive<ShmWork>(
      0, c10d::OpType::ALLREDUCE, "shm:all_reduce", tensors, tensors, tensors, 1);
}

std::exception_ptr lost() {
  return std::make_exception_ptr(
      shm::Error(shm::ErrorKind::kPeerLost, "[ddpx shm rank 0, phase all_reduce] rank 1 died"));
}

// Until torch's thread has let go of the work.
void await_pool(const c10::intrusive_ptr<ShmWork>& work) {
  while (work.use_count() > 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// What torch prints if a future is completed on one of its threads, and was completed before.
std::string printed_by(const std::function<void()>& body) {
  testing::internal::CaptureStderr();
  body();
  return testing::internal::GetCapturedStderr();
}

TEST(ShmWorkTest, AFutureThatIsAskedForRightAfterTheEndIsCompletedOnce) {
  for (const bool fails : {false, true}) {
    const auto work = make_work();
    c10::intrusive_ptr<c10::ivalue::Future> future;
    const auto printed = printed_by([&] {
      at_next_notice = [&] {
        EXPECT_TRUE(work->isCompleted());
        future = work->getFuture();
        EXPECT_TRUE(future->completed());
      };
      work->end(fails ? lost() : nullptr);
      ASSERT_TRUE(future) << "the end gave no notice";
      await_pool(work);
    });
    EXPECT_EQ(printed, "");
    EXPECT_EQ(future->hasError(), fails);
  }
}

TEST(ShmWorkTest, AFutureThatIsAskedForBeforeTheEndIsCompletedByIt) {
  for (const bool fails : {false, true}) {
    const auto work = make_work();
    const auto future = work->getFuture();
    EXPECT_FALSE(future->completed());
    work->end(fails ? lost() : nullptr);
    future->wait();
    EXPECT_EQ(future->hasError(), fails);
    EXPECT_EQ(work->getFuture(), future);
    await_pool(work);
  }
}

TEST(ShmWorkTest, TheNoticeComesOnceWheneverItIsAskedFor) {
  const auto work = make_work();
  int num_notices = 0;
  work->notify_at_end([&] { ++num_notices; });
  at_next_notice = [&] { work->notify_at_end([&] { ++num_notices; }); };
  work->end(nullptr);
  EXPECT_EQ(num_notices, 2);
}

// Whichever allocations fail at the end of an operation that failed: it does not count as done
// well.
TEST(ShmWorkTest, AnErrorSurvivesALackOfMemory) {
  for (const auto which : {Which::kOne, Which::kAllFrom}) {
    bool happened = true;
    for (long nth = 1; happened; ++nth) {
      const auto work = make_work();
      const auto future = work->getFuture();
      const auto error = lost();
      {
        const shm::FailingNew failing(nth, which);
        EXPECT_NO_THROW(work->end(error)) << nth;
        happened = failing.happened();
      }
      EXPECT_TRUE(work->isCompleted()) << nth;
      EXPECT_ANY_THROW(work->wait(kNoTimeout)) << nth;
      while (!future->completed()) {
        std::this_thread::yield();
      }
      EXPECT_TRUE(future->hasError()) << nth;
      await_pool(work);
    }
  }
}

}  // namespace
}  // namespace ddpx
