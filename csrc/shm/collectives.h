// The algorithms of the operations. Each runs after the first step of its operation: all ranks have
// made the same call, and the inputs of small operations are in the one-shot buffers.
#pragma once

#include "team.h"

namespace ddpx::shm {

// Whether ranks copy their inputs into the one-shot buffers before the first step. The operation
// then needs one step, at the price of a copy.
bool fits_one_shot(const Team& team, const Call& call);

// Copies the input of this rank into its one-shot buffer, where peers read it.
void copy_to_one_shot(const Team& team, const Call& call, std::byte* one_shot);

void all_reduce(Team& team, const Call& call);
void broadcast(Team& team, const Call& call);
void all_gather(Team& team, const Call& call);
void reduce_scatter(Team& team, const Call& call);

}  // namespace ddpx::shm
