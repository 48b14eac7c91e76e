#include "rendezvous.h"

#include <sys/random.h>

#include <cstdlib>
#include <map>

#include "error.h"

namespace ddpx::shm {
namespace {

// What a rank publishes so that peers can connect to it.
struct Endpoint {
  std::string socket_name;
  std::string token;
  std::string identity;
};

// `kTokenBytes` random hexadecimal digits.
std::string random_token() {
  unsigned char bytes[kTokenBytes / 2];
  if (getrandom(bytes, sizeof(bytes), 0) != static_cast<ssize_t>(sizeof(bytes))) {
    throw system_error("getrandom");
  }
  constexpr char kDigits[] = "0123456789abcdef";
  std::string token;
  for (const auto byte : bytes) {
    token += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return token;
}

// The lengths of the socket name and the token are fixed; the identity is the rest of the text.
constexpr std::size_t kNameBytes = 5 + kTokenBytes;

std::string encode(const Endpoint& endpoint) {
  return endpoint.socket_name + endpoint.token + endpoint.identity;
}

Endpoint decode_endpoint(const std::string& text, int rank) {
  if (text.size() < kNameBytes + kTokenBytes) {
    throw Error(
        ErrorKind::kSystem,
        "[ddpx shm] the store has an invalid endpoint of rank " + std::to_string(rank) +
            ". All ranks must use the same version of ddpx, and no other program may use this part "
            "of the store.",
        {rank});
  }
  return {
      text.substr(0, kNameBytes),
      text.substr(kNameBytes, kTokenBytes),
      text.substr(kNameBytes + kTokenBytes)};
}

// One rank's side of the rendezvous. Lives on the stack of run_rendezvous(); one thread uses it.
class Rendezvous {
 public:
  Rendezvous(Channel& channel, int rank, int size, const RendezvousOptions& options)
      : channel_(channel),
        rank_(rank),
        size_(size),
        options_(options),
        deadline_(Clock::now() + options.timeout),
        endpoint_{"ddpx-" + random_token(), random_token(), options.host_identity},
        listener_(endpoint_.socket_name, size) {}

  // Each rank connects to all lower ranks, and then publishes 'connected'. A rank that has read
  // this key of all higher ranks has all their connections, and their first messages.
  RendezvousResult run() {
    publish("endpoint", encode(endpoint_));
    for (int rank = 0; rank < size_; ++rank) {
      endpoints_.push_back(
          rank == rank_ ? endpoint_ : decode_endpoint(read(rank, "endpoint"), rank));
    }
    for (int rank = 0; rank < rank_; ++rank) {
      connect_to_rank(rank);
    }
    publish("connected", "yes");
    for (int rank = rank_ + 1; rank < size_; ++rank) {
      read(rank, "connected");
    }
    try {
      identify_higher_ranks();
      exchange_homes();
    } catch (const Error& error) {
      publish("reached", without_opening(error.what()));  // other ranks need not wait
      throw;
    }
    return exchange_reachability();
  }

 private:
  void publish(const std::string& what, const std::string& value) {
    channel_.set("shm/" + what + "/" + std::to_string(rank_), value);
  }

  std::string read(int rank, const std::string& what) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now());
    try {
      return channel_.get(
          "shm/" + what + "/" + std::to_string(rank), std::max(left, std::chrono::milliseconds(1)));
    } catch (const std::exception& cause) {
      throw late(rank, "did not publish its '" + what + "'", std::string(": ") + cause.what());
    }
  }

  Error late(int rank, const std::string& fault, const std::string& cause = "") const {
    return Error(
        ErrorKind::kTimeout,
        opening(rank_, "rendezvous") + "rank " + std::to_string(rank) + " " + fault + " within " +
            std::to_string(options_.timeout.count()) + " ms" + cause +
            ". See the output of that rank: it may have died, or never started.",
        {rank});
  }

  // The token proves that the sender is a rank of the job.
  static std::string hello(const Endpoint& receiver, long sender) {
    return receiver.token + std::to_string(sender);
  }

  void connect_to_rank(int rank) {
    const auto& endpoint = endpoints_[rank];
    if (endpoint.identity != endpoint_.identity) {
      return;
    }
    auto connection = connect_to(endpoint.socket_name, deadline_);
    if (!connection && Clock::now() >= deadline_) {
      throw late(rank, "did not accept a connection");
    }
    if (connection && connection->same_user() && connection->send(hello(endpoint, rank_))) {
      connections_.emplace(rank, std::move(*connection));
    }
  }

  // Connections without a valid first message are those of other programs.
  void identify_higher_ranks() {
    for (auto& connection : listener_.stop()) {
      const auto message = connection.receive(Clock::now());
      if (!message || message->bytes.size() <= kTokenBytes) {
        continue;
      }
      const auto rank = std::strtol(message->bytes.c_str() + kTokenBytes, nullptr, 10);
      if (rank > rank_ && rank < size_ && message->bytes == hello(endpoint_, rank)) {
        connections_.emplace(static_cast<int>(rank), std::move(connection));
      }
    }
  }

  // A rank that cannot send, since too many memory files are on their way, receives meanwhile. All
  // ranks come here without waiting for a home, and receive from all ranks until the end, so all
  // memory files arrive.
  void exchange_homes() {
    own_home_ = std::make_shared<HomeSegment>(
        HomeSegment::create(rank_, options_.sizes, endpoint_.token, connections_.size() + 1));
    for (const auto& [rank, connection] : connections_) {
      connection.send("home", own_home_->fd(), [this] { receive_homes(); });
    }
    while (homes_.size() < connections_.size()) {
      receive_homes();
    }
  }

  // The token in the mapped segment proves that both ranks share the memory. The home of a rank
  // that is gone is null.
  void receive_homes() {
    constexpr auto kSlice = std::chrono::milliseconds(1);
    for (const auto& [rank, connection] : connections_) {
      if (homes_.count(rank) > 0) {
        continue;
      }
      if (auto message = connection.receive(Clock::now() + kSlice)) {
        homes_[rank] =
            HomeSegment::open(message->take_fd(), rank, options_.sizes, endpoints_[rank].token);
      } else if (connection.hung_up()) {
        homes_[rank] = nullptr;
      } else if (Clock::now() >= deadline_) {
        throw late(rank, "did not pass its memory file");
      }
    }
  }

  RendezvousResult exchange_reachability() {
    std::string reached(static_cast<std::size_t>(size_), '0');
    for (const auto& [rank, home] : homes_) {
      reached[rank] = home ? '1' : '0';
    }
    reached[rank_] = '1';
    publish("reached", reached);
    std::vector<std::vector<bool>> all;
    for (int rank = 0; rank < size_; ++rank) {
      const auto text = rank == rank_ ? reached : read(rank, "reached");
      if (text.size() != reached.size() || text.find_first_not_of("01") != std::string::npos) {
        throw Error(
            ErrorKind::kPeerLost,
            opening(rank_, "rendezvous") + "rank " + std::to_string(rank) + " failed: " + text,
            {rank});
      }
      auto& row = all.emplace_back();
      for (const auto digit : text) {
        row.push_back(digit == '1');
      }
    }
    RendezvousResult result{group_by_reachability(all), {}};
    for (const int rank : result.topology.local_ranks(rank_)) {
      result.local_peers.push_back(
          rank == rank_ ? LocalPeer{own_home_, nullptr}
                        : LocalPeer{
                              homes_.at(rank),
                              std::make_shared<Connection>(std::move(connections_.at(rank)))});
    }
    return result;
  }

  Channel& channel_;
  int rank_;
  int size_;
  const RendezvousOptions& options_;
  Clock::time_point deadline_;
  Endpoint endpoint_;
  Listener listener_;
  std::vector<Endpoint> endpoints_;  // by rank
  std::map<int, Connection> connections_;
  std::shared_ptr<HomeSegment> own_home_;
  std::map<int, std::shared_ptr<HomeSegment>> homes_;
};

}  // namespace

RendezvousResult run_rendezvous(
    Channel& channel, int rank, int size, const RendezvousOptions& options) {
  return Rendezvous(channel, rank, size, options).run();
}

}  // namespace ddpx::shm
