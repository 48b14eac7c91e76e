#include "bulletin.h"

#include <vector>

namespace ddpx {
namespace {

constexpr const char* kFailure = "bulletin/failure";
constexpr const char* kRoll = "bulletin/roll";

std::string answer_key(int rank) {
  return "bulletin/answer/" + std::to_string(rank);
}

std::vector<uint8_t> to_bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

}  // namespace

Bulletin::Bulletin(const c10::intrusive_ptr<c10d::Store>& store) : store_(store->clone()) {}

std::string Bulletin::post(const std::string& failure) {
  const auto standing = store_->compareSet(kFailure, std::vector<uint8_t>(), to_bytes(failure));
  return {standing.begin(), standing.end()};
}

std::optional<std::string> Bulletin::failure() {
  return read(kFailure);
}

void Bulletin::call_roll() {
  store_->set(kRoll, to_bytes("called"));
}

bool Bulletin::roll_is_called() {
  return store_->check({kRoll});
}

void Bulletin::answer(int rank, uint64_t num_begun) {
  store_->set(answer_key(rank), to_bytes(std::to_string(num_begun)));
}

std::optional<uint64_t> Bulletin::answer_of(int rank) {
  const auto text = read(answer_key(rank));
  return text ? std::optional<uint64_t>(std::stoull(*text)) : std::nullopt;
}

std::optional<std::string> Bulletin::read(const std::string& key) {
  if (!store_->check({key})) {
    return std::nullopt;
  }
  const auto value = store_->get(key);
  return std::string(value.begin(), value.end());
}

}  // namespace ddpx
