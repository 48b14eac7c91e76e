#include "rendezvous.h"

#include <sys/random.h>

#include <map>
#include <sstream>

#include "error.h"

namespace ddpx::shm {
namespace {

// What a rank tells everyone about itself.
struct Card {
  std::string socket_name;
  std::string token;
  std::string identity;
};

std::string random_bytes(std::size_t count) {
  std::string bytes(count, '\0');
  if (getrandom(bytes.data(), count, 0) != static_cast<ssize_t>(count)) {
    throw system_error("getrandom");
  }
  return bytes;
}

std::string to_hex(const std::string& bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const auto byte : bytes) {
    text += kDigits[static_cast<unsigned char>(byte) >> 4];
    text += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return text;
}

// The socket's name and the token have fixed lengths; the identity is the rest.
constexpr std::size_t kNameBytes = 5 + 2 * kTokenBytes;

std::string encode(const Card& card) {
  return card.socket_name + card.token + card.identity;
}

Card decode_card(const std::string& text) {
  if (text.size() < kNameBytes + kTokenBytes) {
    throw Error(ErrorKind::kSystem, "[ddpx shm] a rank's entry in the store is not ours");
  }
  return {
      text.substr(0, kNameBytes),
      text.substr(kNameBytes, kTokenBytes),
      text.substr(kNameBytes + kTokenBytes)};
}

// One rank's part in a meeting.
class Attendant {
 public:
  Attendant(Channel& channel, int rank, int size, const MeetingOptions& options)
      : channel_(channel),
        rank_(rank),
        size_(size),
        options_(options),
        deadline_(Clock::now() + options.timeout),
        card_{"ddpx-" + to_hex(random_bytes(kTokenBytes)), random_bytes(kTokenBytes), ""},
        own_home_(
            std::make_shared<HomeSegment>(HomeSegment::create(rank, options.sizes, card_.token))),
        listener_(card_.socket_name, size) {
    card_.identity = options.host_identity;
  }

  // Lower ranks are called, higher ranks call. A call needs no answer to succeed, so that nobody
  // waits in a circle: first all call, then all answer, then all hear the answers.
  Meeting attend() {
    publish("card", encode(card_));
    for (int rank = 0; rank < size_; ++rank) {
      cards_.push_back(rank == rank_ ? card_ : decode_card(hear(rank, "card")));
    }
    for (int rank = 0; rank < rank_; ++rank) {
      call(rank);
    }
    publish("called", called());
    answer_callers();
    for (auto& [rank, connection] : connections_) {
      if (rank < rank_) {
        finish_call(rank, *connection);
      }
    }
    return agree();
  }

 private:
  void publish(const std::string& what, const std::string& value) {
    channel_.set("shm/" + what + "/" + std::to_string(rank_), value);
  }

  std::string hear(int rank, const std::string& what) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now());
    try {
      return channel_.get(
          "shm/" + what + "/" + std::to_string(rank), std::max(left, std::chrono::milliseconds(1)));
    } catch (const std::exception& cause) {
      throw missing(rank, what, cause.what());
    }
  }

  Error missing(int rank, const std::string& what, const std::string& cause) const {
    return Error(
        ErrorKind::kTimeout,
        opening(rank_, "rendezvous") + "rank " + std::to_string(rank) + " did not send its '" +
            what + "' within " + std::to_string(options_.timeout.count()) + " ms: " + cause +
            ". See that rank's output: it may have died, or never started.",
        {rank});
  }

  void call(int rank) {
    const auto& card = cards_[rank];
    if (card.identity != card_.identity) {
      return;
    }
    auto connection = connect_to(card.socket_name);
    if (!connection || !connection->same_user()) {
      return;
    }
    // The callee's token shows that this is a rank of the job, not some program of the same user.
    connection->send(card.token + std::to_string(rank_), own_home_->fd());
    connections_.emplace(rank, std::make_shared<Connection>(std::move(*connection)));
  }

  std::string called() const {
    std::string ranks;
    for (const auto& entry : connections_) {
      ranks += std::to_string(entry.first) + " ";
    }
    return ranks;
  }

  void answer_callers() {
    int num_callers = 0;
    for (int rank = rank_ + 1; rank < size_; ++rank) {
      std::istringstream called(hear(rank, "called"));
      for (int callee = 0; called >> callee;) {
        num_callers += callee == rank_ ? 1 : 0;
      }
    }
    for (int answered = 0; answered < num_callers;) {
      auto connection = listener_.accept(deadline_);
      if (!connection) {
        throw Error(
            ErrorKind::kTimeout,
            opening(rank_, "rendezvous") + std::to_string(num_callers - answered) +
                " local ranks called, and were gone before they could be answered. See the "
                "output of the other ranks.");
      }
      // Strangers are not counted, and not answered.
      if (answer(std::move(*connection))) {
        ++answered;
      }
    }
  }

  bool answer(Connection connection) {
    auto hello = connection.receive(deadline_);
    if (!hello || !connection.same_user() || hello->bytes.rfind(card_.token, 0) != 0) {
      return false;
    }
    const int rank = std::atoi(hello->bytes.c_str() + kTokenBytes);
    if (rank <= rank_ || rank >= size_) {
      return false;
    }
    open_home(rank, std::move(hello->fd));
    connection.send(card_.token, own_home_->fd());
    connections_.emplace(rank, std::make_shared<Connection>(std::move(connection)));
    return true;
  }

  void finish_call(int rank, const Connection& connection) {
    auto welcome = connection.receive(deadline_);
    if (welcome && welcome->bytes == cards_[rank].token) {
      open_home(rank, std::move(welcome->fd));
    }
  }

  // Mapping it and finding the token in it is the proof that memory is shared.
  void open_home(int rank, UniqueFd fd) {
    if (fd) {
      homes_[rank] = HomeSegment::open(std::move(fd), rank, options_.sizes, cards_[rank].token);
    }
  }

  Meeting agree() {
    std::string reached(static_cast<std::size_t>(size_), '0');
    for (const auto& [rank, home] : homes_) {
      reached[rank] = home ? '1' : '0';
    }
    reached[rank_] = '1';
    publish("reached", reached);
    std::vector<std::vector<bool>> all;
    for (int rank = 0; rank < size_; ++rank) {
      const auto text = rank == rank_ ? reached : hear(rank, "reached");
      auto& row = all.emplace_back(static_cast<std::size_t>(size_), false);
      for (std::size_t i = 0; i < std::min(row.size(), text.size()); ++i) {
        row[i] = text[i] == '1';
      }
    }
    Meeting meeting{group_by_reach(all), {}};
    for (const int rank : meeting.topology.neighbours(rank_)) {
      meeting.neighbours.push_back(
          rank == rank_ ? Neighbour{own_home_, nullptr}
                        : Neighbour{homes_.at(rank), connections_.at(rank)});
    }
    return meeting;
  }

  Channel& channel_;
  int rank_;
  int size_;
  const MeetingOptions& options_;
  Clock::time_point deadline_;
  Card card_;
  std::shared_ptr<HomeSegment> own_home_;
  Listener listener_;
  std::vector<Card> cards_;
  std::map<int, std::shared_ptr<Connection>> connections_;
  std::map<int, std::shared_ptr<HomeSegment>> homes_;
};

}  // namespace

Meeting meet(Channel& channel, int rank, int size, const MeetingOptions& options) {
  return Attendant(channel, rank, size, options).attend();
}

}  // namespace ddpx::shm
