#include "bulletin.h"

#include <charconv>

#include "../health_c10d/store_text.h"

namespace ddpx {
namespace {

constexpr const char* kFailure = "bulletin/failure";
constexpr const char* kQuery = "bulletin/query";

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

void Bulletin::start_query() {
  store_->set(kQuery, to_bytes("called"));
}

bool Bulletin::query_started() {
  return store_->check({kQuery});
}

void Bulletin::answer(int rank, uint64_t num_begun) {
  store_->set(answer_key(rank), to_bytes(std::to_string(num_begun)));
}

std::optional<uint64_t> Bulletin::answer_of(int rank) {
  const auto text = get_text(*store_, answer_key(rank));
  uint64_t num_begun = 0;
  return text && std::from_chars(text->data(), text->data() + text->size(), num_begun).ec ==
                     std::errc()
             ? std::optional(num_begun)
             : std::nullopt;
}

}  // namespace ddpx
