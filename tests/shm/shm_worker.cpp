// Runs operations on files for tests in Python. The ranks are threads.
//
//   shm_worker DIRECTORY RANKS < cases
//
// A case is a line "NAME KIND DTYPE OP ORDER PLACE COUNT". KIND, DTYPE, OP and ORDER are numbers of
// the enums in types.h, PLACE is "resident" or "private", and COUNT is Call::count. The worker
// reads DIRECTORY/NAME.in.RANK and writes DIRECTORY/NAME.out.RANK.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>

#include "ranks.h"

namespace {

using namespace ddpx::shm;

struct Case {
  std::string name;
  Kind kind;
  DType dtype;
  ReduceOp op;
  Order order;
  bool resident;
  std::size_t count;
};

std::vector<Case> read_cases(std::istream& input) {
  std::vector<Case> cases;
  std::string name, place;
  int kind = 0, dtype = 0, op = 0, order = 0;
  std::size_t count = 0;
  while (input >> name >> kind >> dtype >> op >> order >> place >> count) {
    cases.push_back(
        {name,
         static_cast<Kind>(kind),
         static_cast<DType>(dtype),
         static_cast<ReduceOp>(op),
         static_cast<Order>(order),
         place == "resident",
         count});
  }
  return cases;
}

std::string path_of(const std::string& directory, const Case& one, const char* which, int rank) {
  return directory + "/" + one.name + "." + which + "." + std::to_string(rank);
}

void carry_out(const Case& one, const std::string& directory, const Rank& rank) {
  std::ifstream file(path_of(directory, one, "in", rank.rank), std::ios::binary);
  const std::string input(std::istreambuf_iterator<char>(file), {});
  auto* buffer = static_cast<char*>(
      one.resident ? rank.arena->allocate(input.size()) : std::malloc(input.size() + 1));
  std::copy(input.begin(), input.end(), buffer);
  std::string output;
  const auto bytes = one.count * size_of(one.dtype);
  switch (one.kind) {
    case Kind::kAllReduce:
      rank.group.run(all_reduce_call(buffer, buffer, one.count, one.dtype, one.op));
      output.assign(buffer, bytes);
      break;
    case Kind::kReduceScatter:
      output.resize(bytes);
      rank.group.run(reduce_scatter_call(buffer, output.data(), one.count, one.dtype, one.op));
      break;
    default:
      throw std::runtime_error("shm_worker does not know this kind");
  }
  std::ofstream(path_of(directory, one, "out", rank.rank), std::ios::binary) << output;
  if (one.resident) {
    rank.arena->free(buffer);
  } else {
    std::free(buffer);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: shm_worker DIRECTORY RANKS < cases\n");
    return 2;
  }
  const std::string directory = argv[1];
  const int size = std::atoi(argv[2]);
  const auto cases = read_cases(std::cin);
  try {
    for (const auto order : {Order::kGloo, Order::kFixed}) {
      GroupOptions options;
      options.order = order;
      run_threads(
          size,
          [&](const Rank& rank) {
            for (const auto& one : cases) {
              if (one.order == order) {
                carry_out(one, directory, rank);
              }
            }
          },
          options);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
