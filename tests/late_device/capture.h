// A capture of a graph, with CUDA's rules. The device runs captured work nevertheless.
#pragma once

#include "queue.h"

namespace late {

// The current stream is captured from now on. So is each stream that waits for a captured stream.
// Throws on the default stream.
void begin_capture();

// Waits for the captured work: on CUDA, the capture has put no work in flight. Throws if an
// operation since begin_capture() was not permitted, as CUDA does
// (cudaErrorStreamCaptureInvalidated).
void end_capture();

bool is_captured(Queue& queue);

// To be called before `waiting` waits for work of `awaited`. Throws, and makes the capture invalid,
// where CUDA does: if a captured stream would wait for a stream that is not captured
// (cudaErrorStreamCaptureIsolation), or the default stream for a captured stream
// (cudaErrorStreamCaptureImplicit).
void check_wait(Queue& waiting, Queue& awaited);

// To be called before the host waits for `queue`, or asks how far `queue` is. Throws, and makes the
// capture invalid, if `queue` is captured, or if the calling thread captures: CUDA's capture mode
// "thread_local" (cudaErrorStreamCaptureUnsupported).
void check_host_wait(Queue& queue);

// The same for an event. `captured`: its stream was captured when the event was recorded.
void check_host_wait(bool captured);

// While it exists, check_host_wait() permits all waits of this thread. For operators that the
// device lacks, since CUDA has kernels for them.
class HostWaitsPermitted {
 public:
  HostWaitsPermitted();
  ~HostWaitsPermitted();
  HostWaitsPermitted(const HostWaitsPermitted&) = delete;
  HostWaitsPermitted& operator=(const HostWaitsPermitted&) = delete;
};

}  // namespace late
