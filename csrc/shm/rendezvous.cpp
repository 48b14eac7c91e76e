#include "rendezvous.h"

#include <sys/random.h>

#include <map>
#include <sstream>

#include "../count.h"
#include "error.h"

namespace ddpx::shm {
namespace {

// What a rank publishes so that peers can connect to it.
struct Endpoint {
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

// The lengths of the socket name and the token are fixed; the identity is the rest of the text.
constexpr std::size_t kNameBytes = 5 + 2 * kTokenBytes;

std::string encode(const Endpoint& endpoint) {
  return endpoint.socket_name + endpoint.token + endpoint.identity;
}

Endpoint decode_endpoint(const std::string& text) {
  if (text.size() < kNameBytes + kTokenBytes) {
    throw Error(
        ErrorKind::kSystem,
        "[ddpx shm] the store has an invalid endpoint of a rank. All ranks must use the same "
        "version of ddpx, and no other program may use this part of the store.");
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
        endpoint_{"ddpx-" + to_hex(random_bytes(kTokenBytes)), random_bytes(kTokenBytes), ""},
        own_home_(
            std::make_shared<HomeSegment>(
                HomeSegment::create(rank, options.sizes, endpoint_.token))),
        listener_(endpoint_.socket_name, size) {
    endpoint_.identity = options.host_identity;
  }

  // Each rank connects to all lower ranks. Connecting needs no answer, so that ranks cannot wait in
  // a circle: first all ranks connect, then all accept, then all receive the replies.
  RendezvousResult run() {
    publish("endpoint", encode(endpoint_));
    for (int rank = 0; rank < size_; ++rank) {
      endpoints_.push_back(rank == rank_ ? endpoint_ : decode_endpoint(read(rank, "endpoint")));
    }
    for (int rank = 0; rank < rank_; ++rank) {
      connect_to_rank(rank);
    }
    publish("connected", connected_ranks());
    accept_higher_ranks();
    for (auto& [rank, connection] : connections_) {
      if (rank < rank_) {
        receive_reply(rank, *connection);
      }
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
      throw missing(rank, what, cause.what());
    }
  }

  Error missing(int rank, const std::string& what, const std::string& cause) const {
    return Error(
        ErrorKind::kTimeout,
        opening(rank_, "rendezvous") + "rank " + std::to_string(rank) + " did not publish its '" +
            what + "' within " + std::to_string(options_.timeout.count()) + " ms: " + cause +
            ". See the output of that rank: it may have died, or never started.",
        {rank});
  }

  void connect_to_rank(int rank) {
    const auto& endpoint = endpoints_[rank];
    if (endpoint.identity != endpoint_.identity) {
      return;
    }
    auto connection = connect_to(endpoint.socket_name);
    if (!connection || !connection->same_user()) {
      return;
    }
    // The peer's token proves that this process is a rank of the job.
    connection->send(endpoint.token + std::to_string(rank_), own_home_->fd());
    connections_.emplace(rank, std::make_shared<Connection>(std::move(*connection)));
  }

  std::string connected_ranks() const {
    std::string ranks;
    for (const auto& entry : connections_) {
      ranks += std::to_string(entry.first) + " ";
    }
    return ranks;
  }

  void accept_higher_ranks() {
    int num_expected = 0;
    for (int rank = rank_ + 1; rank < size_; ++rank) {
      std::istringstream connected(read(rank, "connected"));
      for (int target = 0; connected >> target;) {
        num_expected += target == rank_ ? 1 : 0;
      }
    }
    for (int num_accepted = 0; num_accepted < num_expected;) {
      auto connection = listener_.accept(deadline_);
      if (!connection) {
        const auto num_lost = num_expected - num_accepted;
        throw Error(
            ErrorKind::kTimeout,
            opening(rank_, "rendezvous") + count(num_lost, "local rank") +
                " connected, but sent no valid message in time. See the output of the other "
                "ranks.");
      }
      // Connections of other programs do not count.
      if (accept_rank(std::move(*connection))) {
        ++num_accepted;
      }
    }
  }

  // Returns false if the connection is not from a higher rank of this job.
  bool accept_rank(Connection connection) {
    auto hello = connection.receive(deadline_);
    if (!hello || !connection.same_user() || hello->bytes.rfind(endpoint_.token, 0) != 0) {
      return false;
    }
    const int rank = std::atoi(hello->bytes.c_str() + kTokenBytes);
    if (rank <= rank_ || rank >= size_) {
      return false;
    }
    open_home(rank, std::move(hello->fd));
    connection.send(endpoint_.token, own_home_->fd());
    connections_.emplace(rank, std::make_shared<Connection>(std::move(connection)));
    return true;
  }

  void receive_reply(int rank, const Connection& connection) {
    auto reply = connection.receive(deadline_);
    if (reply && reply->bytes == endpoints_[rank].token) {
      open_home(rank, std::move(reply->fd));
    }
  }

  // The token in the mapped segment proves that both ranks share the memory.
  void open_home(int rank, UniqueFd fd) {
    if (fd) {
      homes_[rank] = HomeSegment::open(std::move(fd), rank, options_.sizes, endpoints_[rank].token);
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
      auto& row = all.emplace_back(static_cast<std::size_t>(size_), false);
      for (std::size_t i = 0; i < std::min(row.size(), text.size()); ++i) {
        row[i] = text[i] == '1';
      }
    }
    RendezvousResult result{group_by_reachability(all), {}};
    for (const int rank : result.topology.local_ranks(rank_)) {
      result.local_peers.push_back(
          rank == rank_ ? LocalPeer{own_home_, nullptr}
                        : LocalPeer{homes_.at(rank), connections_.at(rank)});
    }
    return result;
  }

  Channel& channel_;
  int rank_;
  int size_;
  const RendezvousOptions& options_;
  Clock::time_point deadline_;
  Endpoint endpoint_;
  std::shared_ptr<HomeSegment> own_home_;
  Listener listener_;
  std::vector<Endpoint> endpoints_;  // by rank
  std::map<int, std::shared_ptr<Connection>> connections_;
  std::map<int, std::shared_ptr<HomeSegment>> homes_;
};

}  // namespace

RendezvousResult run_rendezvous(
    Channel& channel, int rank, int size, const RendezvousOptions& options) {
  return Rendezvous(channel, rank, size, options).run();
}

}  // namespace ddpx::shm
