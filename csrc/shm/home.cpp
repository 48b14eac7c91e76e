#include "home.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "../count.h"
#include "error.h"

namespace ddpx::shm {
namespace {

std::size_t header_bytes() {
  return os::round_up(sizeof(Home), os::page_bytes());
}

std::size_t half_bytes(const HomeSizes& sizes) {
  return sizes.piece_bytes + sizes.piece_bytes / 2;
}

std::size_t total_bytes(const HomeSizes& sizes) {
  return os::round_up(
      header_bytes() + kRing * sizes.one_shot_bytes + 2 * half_bytes(sizes), os::page_bytes());
}

HomeSizes aligned(HomeSizes sizes) {
  sizes.one_shot_bytes = os::round_up(sizes.one_shot_bytes, kLine);
  sizes.piece_bytes = os::round_up(sizes.piece_bytes, os::page_bytes());
  return sizes;
}

}  // namespace

HomeSegment HomeSegment::create(
    int rank,
    const HomeSizes& wanted_sizes,
    const std::string& token,
    std::size_t num_local_ranks) {
  const auto sizes = aligned(wanted_sizes);
  const auto num_bytes = total_bytes(sizes);
  auto segment = with_own_errors([&] {
    os::check_memory(
        num_local_ranks * num_bytes,
        "the staging buffers of " + count(num_local_ranks, "local rank"));
    auto fd = os::create_memory(num_bytes, "the staging buffers of rank " + std::to_string(rank));
    auto mapping = os::map_shared(fd.get());
    return HomeSegment(std::move(fd), std::move(mapping), sizes);
  });
  auto& home = *new (&segment.home()) Home();
  home.version = kLayoutVersion;
  home.one_shot_bytes = sizes.one_shot_bytes;
  home.piece_bytes = sizes.piece_bytes;
  std::memcpy(home.token, token.data(), std::min(token.size(), kTokenBytes));
  home.cpu_limits = os::cpu_limits();
  return segment;
}

std::shared_ptr<HomeSegment> HomeSegment::open(
    os::UniqueFd fd, const HomeSizes& wanted_sizes, const std::string& token) {
  const auto sizes = aligned(wanted_sizes);
  std::shared_ptr<os::Mapping> mapping;
  try {
    mapping = os::map_shared(fd.get(), os::PageTable::kAtAccess);
  } catch (const os::Error&) {
    return nullptr;
  }
  if (mapping->num_bytes() != total_bytes(sizes)) {
    return nullptr;
  }
  const auto& home = *reinterpret_cast<const Home*>(mapping->data());
  if (home.version != kLayoutVersion || home.one_shot_bytes != sizes.one_shot_bytes ||
      home.piece_bytes != sizes.piece_bytes || token.size() != kTokenBytes ||
      std::memcmp(home.token, token.data(), kTokenBytes) != 0) {
    return nullptr;
  }
  return std::shared_ptr<HomeSegment>(new HomeSegment(os::UniqueFd(), std::move(mapping), sizes));
}

std::byte* HomeSegment::one_shot(uint64_t sequence) const {
  return mapping_->data() + header_bytes() + (sequence % kRing) * sizes_.one_shot_bytes;
}

std::byte* HomeSegment::input_area(int half) const {
  return one_shot(0) + kRing * sizes_.one_shot_bytes +
         static_cast<std::size_t>(half) * half_bytes(sizes_);
}

std::byte* HomeSegment::result_area(int half) const {
  return input_area(half) + sizes_.piece_bytes;
}

}  // namespace ddpx::shm
