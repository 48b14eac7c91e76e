#include "rendezvous.h"

#include <sys/random.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <map>
#include <numeric>
#include <sstream>
#include <vector>

#include "error.h"

namespace ddpx::shm {
namespace {

// The data that a rank publishes so that peers can connect to it.
struct Endpoint {
  std::string socket_name;
  std::string token;
};

constexpr const char* kArrived = "shm/arrived";
constexpr const char* kHosts = "shm/hosts";

// The first character of an answer that is the failure of a rank.
constexpr char kFailed = '!';

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

Error invalid(const std::string& what, int culprit = -1) {
  return Error(
      ErrorKind::kSystem,
      "[ddpx shm] the store has an invalid " + what +
          ". All ranks must use the same version of ddpx, and no other program may use this part "
          "of the store.",
      culprit);
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
        machine_(abstract_socket_domain() + " " + options.host_identity) {
    names_.in_job = options_.in_job;
  }

  RendezvousResult run() {
    try {
      return take_part();
    } catch (const Error& error) {
      tell(error.culprit() < 0 ? rank_ : error.culprit(), error.what());
      throw;
    } catch (const std::exception& error) {
      tell(rank_, error.what());
      throw;
    }
  }

 private:
  using Texts = std::map<int, std::string>;  // by rank

  // Other ranks need not wait for this one.
  void tell(int culprit, const std::string& error) {
    const auto own = culprit == rank_ ? names_.name({rank_}) + " failed: " : std::string();
    const auto failure = kFailed + std::to_string(culprit) + " " + own + without_opening(error);
    try {
      for (const auto& key : keys_to_meet_at_) {
        channel_.set(answer_key(key), failure);
      }
    } catch (const std::exception&) {
      // The store is gone, so other ranks fail, too.
    }
  }

  RendezvousResult take_part() {
    const Endpoint own{"ddpx-" + random_token(), random_token()};
    Listener listener(own.socket_name, size_);
    append(endpoints_key(), own.socket_name + " " + own.token);
    std::vector<int> all_ranks(static_cast<std::size_t>(size_));
    std::iota(all_ranks.begin(), all_ranks.end(), 0);
    meet(kArrived, all_ranks, "", [] { return "yes"; });
    read_endpoints();
    connect_to_lower_ranks();
    std::vector<int> machine_ranks;
    for (const auto& [rank, endpoint] : endpoints_) {
      machine_ranks.push_back(rank);
    }
    meet(connected_key(), machine_ranks, "", [] { return "yes"; });
    // All connections of higher ranks, and their first messages, have arrived.
    identify_higher_ranks(listener.stop());
    exchange_homes();
    return result_of(meet(kHosts, all_ranks, group_id(), [this] { return host_numbers(); }));
  }

  std::string endpoints_key() const {
    return "shm/endpoints/" + machine_;
  }

  std::string connected_key() const {
    return "shm/connected/" + machine_;
  }

  static std::string answer_key(const std::string& key) {
    return key + "/answer";
  }

  // ---- texts of several ranks under one key ------------------------------------------------

  void append(const std::string& key, const std::string& text) {
    channel_.append(key, std::to_string(rank_) + " " + text + "\n");
  }

  std::string get(const std::string& key) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now());
    return channel_.get(key, std::max(left, std::chrono::milliseconds(1)));
  }

  Texts texts(const std::string& key) {
    Texts found;
    std::istringstream lines(get(key));
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      int rank = -1;
      words >> rank;
      if (!words || words.get() != ' ' || rank < 0 || rank >= size_ || found.count(rank) > 0) {
        throw invalid("line: " + line);
      }
      std::getline(words, found[rank]);
    }
    return found;
  }

  // Appends this rank's text, and waits until all `members` have come. The last one to come
  // publishes the answer, which is returned.
  std::string meet(
      const std::string& key,
      const std::vector<int>& members,
      const std::string& text,
      const std::function<std::string()>& make_answer) {
    append(key, text);
    if (channel_.count_up(key + "/count") == static_cast<int64_t>(members.size())) {
      channel_.set(answer_key(key), make_answer());
    }
    std::string answer;
    try {
      answer = get(answer_key(key));
    } catch (const std::exception& cause) {
      throw late(missing(key, members), "did not come to the rendezvous", cause.what());
    }
    if (answer.empty() || answer[0] != kFailed) {
      std::erase(keys_to_meet_at_, key);
      return answer;
    }
    char* end = nullptr;
    const auto culprit = static_cast<int>(std::strtol(answer.c_str() + 1, &end, 10));
    throw Error(
        ErrorKind::kPeerLost, opening(names_.name({rank_}), "rendezvous") + (end + 1), culprit);
  }

  // Empty if the store is gone.
  std::vector<int> missing(const std::string& key, const std::vector<int>& members) {
    std::vector<int> missing;
    try {
      const auto present = texts(key);
      std::copy_if(members.begin(), members.end(), std::back_inserter(missing), [&](int member) {
        return present.count(member) == 0;
      });
    } catch (const std::exception&) {
    }
    return missing;
  }

  Error late(const std::vector<int>& ranks, const std::string& fault, const std::string& cause = "")
      const {
    return Error(
        ErrorKind::kTimeout,
        opening(names_.name({rank_}), "rendezvous") +
            (ranks.empty() ? "a rank" : names_.name(ranks)) + " " + fault + " within " +
            std::to_string(options_.timeout.count()) + " ms" + (cause.empty() ? "" : ": " + cause) +
            ". See the output of " + (ranks.size() == 1 ? "that rank" : "those ranks") +
            ": it may have died, or never started.",
        ranks.empty() ? -1 : ranks.front());
  }

  // ---- connections -------------------------------------------------------------------------

  void read_endpoints() {
    for (const auto& [rank, text] : texts(endpoints_key())) {
      std::istringstream words(text);
      Endpoint endpoint;
      words >> endpoint.socket_name >> endpoint.token;
      if (endpoint.token.size() != kTokenBytes) {
        throw invalid("endpoint of " + names_.name({rank}), rank);
      }
      endpoints_.emplace(rank, std::move(endpoint));
    }
    if (endpoints_.count(rank_) == 0) {
      throw invalid("list of endpoints: " + std::to_string(endpoints_.size()) + " of other ranks");
    }
  }

  // The token proves that the sender is a rank of the job.
  static std::string hello(const Endpoint& receiver, long sender) {
    return receiver.token + std::to_string(sender);
  }

  void connect_to_lower_ranks() {
    for (auto entry = endpoints_.begin(); entry->first < rank_; ++entry) {
      const auto& [rank, endpoint] = *entry;
      auto connection = connect_to(endpoint.socket_name, deadline_);
      if (!connection && Clock::now() >= deadline_) {
        throw late({rank}, "did not accept a connection");
      }
      if (connection && connection->same_user() && connection->send(hello(endpoint, rank_))) {
        connections_.emplace(rank, std::move(*connection));
      }
    }
  }

  // Connections without a valid first message are those of other programs.
  void identify_higher_ranks(std::vector<Connection> accepted) {
    const auto& own = endpoints_.at(rank_);
    for (auto& connection : accepted) {
      const auto message = connection.receive(Clock::now());
      if (!message || message->bytes.size() <= kTokenBytes) {
        continue;
      }
      const auto rank = std::strtol(message->bytes.c_str() + kTokenBytes, nullptr, 10);
      if (rank > rank_ && rank < size_ && message->bytes == hello(own, rank)) {
        connections_.emplace(static_cast<int>(rank), std::move(connection));
      }
    }
  }

  // A rank that cannot send, since too many memory files are on their way, receives meanwhile. All
  // ranks come here without waiting for a home, and receive from all ranks until the end, so all
  // memory files arrive.
  void exchange_homes() {
    own_home_ = std::make_shared<HomeSegment>(HomeSegment::create(
        rank_, options_.sizes, endpoints_.at(rank_).token, connections_.size() + 1));
    for (const auto& [rank, connection] : connections_) {
      connection.send("home", own_home_->fd(), [this, peer = rank] {
        receive_homes(std::chrono::milliseconds(0));
        if (Clock::now() >= deadline_) {
          throw late({peer}, "could not be sent a memory file, since too many are on their way,");
        }
      });
    }
    while (homes_.size() < connections_.size()) {
      receive_homes(std::chrono::milliseconds(20));
    }
  }

  // The token in the mapped segment proves that both ranks share the memory. The home of a rank
  // that is gone is null. Waits for each rank for `slice` at most.
  void receive_homes(std::chrono::milliseconds slice) {
    for (const auto& [rank, connection] : connections_) {
      if (homes_.count(rank) > 0) {
        continue;
      }
      if (auto message = connection.receive(Clock::now() + slice)) {
        homes_[rank] =
            HomeSegment::open(message->take_fd(), options_.sizes, endpoints_.at(rank).token);
      } else if (connection.hung_up()) {
        homes_[rank] = nullptr;
      } else if (Clock::now() >= deadline_) {
        throw late({rank}, "did not pass its memory file");
      }
    }
  }

  // ---- hosts -------------------------------------------------------------------------------

  // Equal on ranks that have reached the same ranks. Each of them has then reached all others. The
  // tokens are random, so different sets have different sums.
  std::string group_id() const {
    auto sum = number_of(endpoints_.at(rank_));
    for (const auto& [rank, home] : homes_) {
      sum += home ? number_of(endpoints_.at(rank)) : 0;
    }
    return std::to_string(sum);
  }

  static uint64_t number_of(const Endpoint& endpoint) {
    return std::strtoull(endpoint.token.substr(0, 16).c_str(), nullptr, 16);
  }

  // The number of each rank's host, in the order of ranks.
  std::string host_numbers() {
    std::vector<std::string> ids;
    for (auto& [rank, id] : texts(kHosts)) {
      ids.push_back(std::move(id));
    }
    std::string numbers;
    for (const int host : group_by_id(ids).host_of) {
      numbers += std::to_string(host) + " ";
    }
    return numbers;
  }

  RendezvousResult result_of(const std::string& host_numbers) {
    std::istringstream words(host_numbers);
    const std::vector<std::string> hosts{std::istream_iterator<std::string>(words), {}};
    if (hosts.size() != static_cast<std::size_t>(size_)) {
      throw invalid("list of hosts: " + host_numbers);
    }
    RendezvousResult result{group_by_id(hosts), {}};
    result.topology.in_job = options_.in_job;
    for (const int rank : result.topology.local_ranks(rank_)) {
      if (rank == rank_) {
        result.local_peers.push_back({own_home_, nullptr});
      } else if (const auto home = homes_.find(rank); home != homes_.end() && home->second) {
        result.local_peers.push_back(
            {home->second, std::make_shared<Connection>(std::move(connections_.at(rank)))});
      } else {
        throw invalid("list of hosts: " + host_numbers);
      }
    }
    return result;
  }

  Channel& channel_;
  int rank_;
  int size_;
  const RendezvousOptions& options_;
  Topology names_;  // of ranks, for texts
  Clock::time_point deadline_;
  std::string machine_;  // ranks of other machines cannot be connected to
  std::vector<std::string> keys_to_meet_at_{
      kArrived, connected_key(), kHosts};  // the next meetings
  std::map<int, Endpoint> endpoints_;      // of the ranks of this machine, by rank
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
