#include "observe/device_marks.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "observe/recording.h"

namespace ddpx {
namespace {

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kDeviceType, 0);
constexpr int64_t kSecond = 1'000'000'000;

// A device whose one stream lags behind its host, and the host's clock.
struct FakeDevice {
  int64_t host_ns = 0;
  int64_t reached_ns = 0;  // what was queued by then has been done
  double drift = 0;        // of its clock against the host's
  int64_t last_queued_ns = 0;
  bool captured = false;
  bool breaks = false;
  int num_refused = 0;  // calls that would have broken a capture

  void pass(int64_t ns) {
    host_ns += ns;
    reached_ns = host_ns;
  }
  void forbidden_in_capture() {
    if (captured) {
      ++num_refused;
      throw std::runtime_error("the stream is captured");
    }
  }
};

FakeDevice fake;

// As CUDA's: elapsed times are floats in ms.
struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDeviceType;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return kDevice;
  }
  c10::Device getDevice() const override {
    return kDevice;
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 0;  // autograd needs no threads for it
  }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    fake.forbidden_in_capture();
    if (fake.breaks) {
      throw std::runtime_error("out of events");
    }
    fake.last_queued_ns = fake.host_ns;
    if (*event == nullptr) {
      *event = new int64_t;
    }
    *static_cast<int64_t*>(*event) = fake.host_ns;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<int64_t*>(event);
  }
  bool queryEvent(void* event) const override {
    fake.forbidden_in_capture();
    return *static_cast<int64_t*>(event) <= fake.reached_ns;
  }
  void synchronizeEvent(void* event) const override {
    fake.forbidden_in_capture();
    fake.reached_ns = std::max(fake.reached_ns, *static_cast<int64_t*>(event));
  }
  bool queryStream(const c10::Stream&) const override {
    fake.forbidden_in_capture();
    return fake.last_queued_ns <= fake.reached_ns;
  }
  bool isStreamCapturing(const c10::Stream&) const override {
    return fake.captured;
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    const auto ns = *static_cast<int64_t*>(to) - *static_cast<int64_t*>(from);
    return static_cast<float>(static_cast<double>(ns) * (1 + fake.drift) / 1e6);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeGuard);

int64_t host_now() {
  return fake.host_ns;
}

class DeviceMarksTest : public testing::Test {
 protected:
  DeviceMarksTest() {
    fake = FakeDevice{};
  }

  // Of each event of the log, how far it is off, if a mark was made every `every_ns`.
  static int64_t worst(const EventLog& log, const std::vector<int64_t>& made_at) {
    const auto events = log.read();
    EXPECT_EQ(events.size(), made_at.size());
    int64_t worst_ns = 0;
    for (std::size_t i = 0; i < std::min(events.size(), made_at.size()); ++i) {
      worst_ns = std::max(worst_ns, std::abs(events[i].time_ns - made_at[i]));
    }
    return worst_ns;
  }

  EventLog log{64};
};

TEST_F(DeviceMarksTest, AreReadWhenTheDeviceHasPassedThem) {
  DeviceMarks marks(kDevice, 64, &host_now);
  fake.host_ns = 1000;
  EXPECT_TRUE(marks.mark(EventKind::kForwardBegin, 3, 0));
  marks.collect(log);
  EXPECT_TRUE(log.read().empty());
  fake.pass(0);
  marks.collect(log);
  ASSERT_EQ(log.read().size(), 1u);
  EXPECT_EQ(log.read()[0].time_ns, 1000);
  EXPECT_EQ(log.read()[0].step, 3u);
}

TEST_F(DeviceMarksTest, AreBounded) {
  DeviceMarks marks(kDevice, 3, &host_now);
  fake.host_ns = 1000;
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(marks.mark(EventKind::kForwardBegin, 0, 0), i < 3);
  }
  fake.pass(0);
  marks.collect(log);
  EXPECT_EQ(log.read().size(), 3u);
  EXPECT_TRUE(marks.mark(EventKind::kForwardBegin, 1, 0));
}

TEST_F(DeviceMarksTest, LeaveACaptureAlone) {
  DeviceMarks marks(kDevice, 64, &host_now);
  EXPECT_TRUE(marks.mark(EventKind::kForwardBegin, 0, 0));
  fake.captured = true;
  EXPECT_FALSE(marks.mark(EventKind::kForwardEnd, 0, 0));
  marks.collect(log);
  marks.collect_all(log);
  EXPECT_TRUE(log.read().empty());
  EXPECT_EQ(fake.num_refused, 0);
  fake.captured = false;
  marks.collect(log);
  EXPECT_EQ(log.read().size(), 1u);
}

TEST_F(DeviceMarksTest, ClocksAreRelatedAnewAfterAPause) {
  DeviceMarks marks(kDevice, 64, &host_now);
  std::vector<int64_t> made_at;
  for (int i = 0; i < 10; ++i) {
    fake.pass(3600 * kSecond + 123'457);
    marks.collect(log);  // a forward begins
    for (int j = 0; j < 3; ++j) {
      made_at.push_back(fake.host_ns);
      marks.mark(EventKind::kForwardBegin, 0, 0);
      fake.pass(1'234'567);
    }
    marks.collect(log);
  }
  EXPECT_LE(worst(log, made_at), 1000);
  EXPECT_LE(worst(log, made_at), marks.error_ns());
}

TEST_F(DeviceMarksTest, RoundingOfABusyDevicesPauseIsStated) {
  DeviceMarks marks(kDevice, 64, &host_now);
  std::vector<int64_t> made_at;
  for (int i = 0; i < 10; ++i) {
    fake.host_ns += 3600 * kSecond + 123'457;
    made_at.push_back(fake.host_ns);
    fake.reached_ns = fake.host_ns - 1;
    marks.mark(EventKind::kForwardBegin, 0, 0);
    marks.collect(log);  // the device is not there yet, so the mark holds clocks as they are
    fake.pass(10);
    marks.collect(log);
  }
  EXPECT_LE(worst(log, made_at), marks.error_ns());
  EXPECT_LT(marks.error_ns(), 20 * 3600 * kSecond >> 23);
}

TEST_F(DeviceMarksTest, RoundingIsSmallWithoutAPause) {
  DeviceMarks marks(kDevice, 64, &host_now);
  std::vector<int64_t> made_at;
  for (int i = 0; i < 60; ++i) {
    fake.pass(1'000'000'007);
    made_at.push_back(fake.host_ns);
    marks.mark(EventKind::kForwardBegin, 0, 0);
    marks.collect(log);
  }
  EXPECT_LE(worst(log, made_at), marks.error_ns());
  EXPECT_LT(marks.error_ns(), 20'000);
}

TEST_F(DeviceMarksTest, DriftIsFoundAtTheEnd) {
  DeviceMarks marks(kDevice, 64, &host_now);
  fake.drift = 1e-5;
  std::vector<int64_t> made_at;
  for (int i = 0; i < 20; ++i) {
    fake.pass(kSecond);
    made_at.push_back(fake.host_ns);
    marks.mark(EventKind::kForwardBegin, 0, 0);
    marks.collect(log);
  }
  marks.collect_all(log);
  EXPECT_GE(worst(log, made_at), 190'000);
  EXPECT_LE(worst(log, made_at), marks.error_ns());
  EXPECT_LT(marks.error_ns(), 250'000);
}

std::vector<EventKind> kinds_of(const Recording& recording) {
  std::vector<EventKind> kinds;
  for (const auto& event : recording.log().read()) {
    kinds.push_back(event.kind);
  }
  return kinds;
}

TEST_F(DeviceMarksTest, AStepWhoseMarksCannotBeMadeIsGivenUp) {
  const auto recording = std::make_shared<Recording>(64, kDevice, 0);
  bool FakeDevice::* const obstacles[] = {&FakeDevice::captured, &FakeDevice::breaks};
  uint32_t step = 0;
  for (const auto obstacle : obstacles) {
    recording->record(EventKind::kStepBegin, step, 0);
    fake.*obstacle = true;
    recording->record(EventKind::kLaunched, step, 0);
    fake.*obstacle = false;
    recording->record(EventKind::kStepEnd, step, 0);  // has a gap, and must not look complete
    recording->record(EventKind::kStepEnd, step + 1, 0);
    step += 2;
  }
  fake.pass(1);
  recording->collect();
  EXPECT_EQ(
      kinds_of(*recording),
      (std::vector<EventKind>{
          EventKind::kStepBegin, EventKind::kStepEnd, EventKind::kStepBegin, EventKind::kStepEnd}));
  EXPECT_EQ(fake.num_refused, 0);
}

}  // namespace
}  // namespace ddpx
