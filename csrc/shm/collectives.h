// The operations' algorithms. Each runs after the first step of its operation: all ranks have
// called the same, and the inputs of small ones have been handed over.
#pragma once

#include "team.h"

namespace ddpx::shm {

// Whether the inputs go along with the first step: one wait, at the price of a copy.
bool fits_one_shot(const Team& team, const Call& call);

// Copies this rank's input to where the others will read it.
void hand_over_input(const Team& team, const Call& call, std::byte* one_shot);

void all_reduce(Team& team, const Call& call);
void broadcast(Team& team, const Call& call);
void all_gather(Team& team, const Call& call);
void reduce_scatter(Team& team, const Call& call);

}  // namespace ddpx::shm
