// The algorithms of the operations. Each runs after the first step of its operation: all ranks have
// made the same call, and the inputs of small operations are in the one-shot buffers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "team.h"

namespace ddpx::shm {

// Whether ranks copy their inputs into the one-shot buffers before the first step. The operation
// then needs one step, at the price of a copy.
bool fits_one_shot(const Team& team, const Call& call);

// Copies the input of this rank into its one-shot buffer, where peers read it.
void copy_to_one_shot(const Team& team, const Call& call, std::byte* one_shot);

// Copies `size` elements or bytes through the staging buffers, piece by piece. Between two steps, a
// rank copies piece k of other ranks out, then its own piece k+1 in. Both functions take the begin
// and the length of the piece, and the half of the staging buffer.
template <class CopyIn, class CopyOut>
void copy_staged(
    Team& team,
    std::size_t size,
    std::size_t piece,
    const CopyIn& copy_in,
    const CopyOut& copy_out) {
  const auto length_at = [&](std::size_t begin) { return std::min(piece, size - begin); };
  int half = team.next_half();
  copy_in(0, length_at(0), half);
  for (std::size_t begin = 0; begin < size; begin += piece) {
    team.step();
    copy_out(begin, length_at(begin), half);
    if (const auto next = begin + piece; next < size) {
      half = team.next_half();
      copy_in(next, length_at(next), half);
    }
  }
}

// The sources of a reduction, by local rank: `own`, and `of_peer(index)` of the other ranks.
template <class OfPeer>
std::vector<const std::byte*> sources_by_rank(
    const Team& team, const std::byte* own, const OfPeer& of_peer) {
  std::vector<const std::byte*> sources;
  for (int index = 0; index < team.size(); ++index) {
    sources.push_back(index == team.own_index() ? own : of_peer(index));
  }
  return sources;
}

void all_reduce(Team& team, const Call& call);
void broadcast(Team& team, const Call& call);
void all_gather(Team& team, const Call& call);
void reduce_scatter(Team& team, const Call& call);

}  // namespace ddpx::shm
