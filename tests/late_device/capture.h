// A capture of a graph, with CUDA's rules for streams. The device runs captured work nevertheless.
#pragma once

#include "queue.h"

namespace late {

// The current stream is captured from now on. So is each stream that waits for a captured stream.
void begin_capture();
void end_capture();
bool is_captured(const Queue& queue);

// To be called before `waiting` waits for work of `awaited`. Throws if a captured stream would wait
// for a stream that is not captured, as CUDA does (cudaErrorStreamCaptureIsolation).
void check_wait(const Queue& waiting, const Queue& awaited);

}  // namespace late
