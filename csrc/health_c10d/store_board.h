// The store of a process group, as the board on which ranks leave texts for each other.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>

#include "../health/board.h"

namespace ddpx {

// With a connection of its own, since another thread may wait on `store` for long.
std::unique_ptr<health::Board> make_board(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace ddpx
