#include "bulletin.h"

#include "../health_c10d/store_text.h"

namespace ddpx {
namespace {

constexpr const char* kFailure = "bulletin/failure";
constexpr const char* kRoll = "bulletin/roll";

std::string answer_key(int rank) {
  return "bulletin/answer/" + std::to_string(rank);
}

}  // namespace

Bulletin::Bulletin(const c10::intrusive_ptr<c10d::Store>& store) : store_(store->clone()) {}

std::string Bulletin::post(const std::string& failure) {
  return set_first_text(*store_, kFailure, failure);
}

std::optional<std::string> Bulletin::failure() {
  return get_text(*store_, kFailure);
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
  const auto text = get_text(*store_, answer_key(rank));
  return text ? std::optional<uint64_t>(std::stoull(*text)) : std::nullopt;
}

}  // namespace ddpx
