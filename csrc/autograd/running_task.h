// The graph task (one run of the autograd engine) that runs on the calling thread.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <vector>

#include "grad_hook.h"

namespace ddpx::running_task {

// Whether the calling thread runs a backward.
bool in_backward();

// The id of the task; -1 outside a backward.
int id();

// The number of graph tasks that wait for the task.
int depth();

// The flag that becomes true when a node of the task raises, before the caller gets the exception.
// The pointer is valid during the lifetime of the task. nullptr outside a backward.
const std::atomic_bool* has_raised();

// The future that gets the error of the task, before the task is destroyed. Weak, because
// torch.distributed.autograd allows no other owner. Empty outside a backward.
c10::weak_intrusive_ptr<c10::ivalue::Future> result();

// Whether another graph task waits for the task. Also right on a thread that ends the task.
bool is_nested();

// Whether torch.distributed.autograd runs the task. Its gradients go into the map of a context.
bool is_distributed();

// Whether the task brings the gradients of all leaves, as backward() does. False for
// autograd.grad() and backward(inputs=...).
bool runs_whole_graph();

// Whether the task returns gradients to its caller, as autograd.grad() does.
bool returns_grads();

// Whether the task returns the gradient that arrives at `node` to its caller, as autograd.grad()
// does for the tensors that it is asked for.
bool returns_grad_of(const torch::autograd::Node* node);

// Per hook, whether the task neither runs the accumulator of the hook nor has run it. Costs one
// lookup per hook and no walk over the graph: the engine lists the nodes of a task before it runs
// the first node.
std::vector<bool> unreached(const std::vector<GradHook>& hooks);

}  // namespace ddpx::running_task
