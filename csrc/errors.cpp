#include "errors.h"

#include <algorithm>
#include <sstream>

namespace ddpx {

InternalError::InternalError(const std::string& what)
    : std::logic_error("ddpx internal error (a bug of ddpx; please report it): " + what) {}

namespace errors {
namespace {

std::string opening(const Where& where) {
  std::ostringstream out;
  out << "[ddpx rank " << where.rank << ", phase " << to_string(where.phase) << "] ";
  return out.str();
}

std::string count_params(std::size_t count) {
  return std::to_string(count) + (count == 1 ? " parameter" : " parameters");
}

}  // namespace

std::string join_names(const std::vector<std::string>& names, std::size_t most) {
  std::ostringstream out;
  const auto shown = std::min(names.size(), most);
  for (std::size_t i = 0; i < shown; ++i) {
    out << (i == 0 ? "'" : ", '") << names[i] << "'";
  }
  if (names.size() > shown) {
    out << " and " << names.size() - shown << " more";
  }
  return out.str();
}

UserError params_without_gradient(const Where& where, const std::vector<std::string>& names) {
  return UserError(
      opening(where) + count_params(names.size()) +
      " got no gradient in this backward: " + join_names(names) +
      ". Every other gradient is averaged, with zeros from this rank for those named. If a step "
      "may leave parameters unused, pass find_unused_parameters=True; if it is always the same "
      "ones, static_graph=True is faster; otherwise let each output of forward take part in the "
      "loss, or freeze these parameters before wrapping.");
}

UserError static_graph_changed(
    const Where& where,
    const std::vector<std::string>& names,
    const std::vector<std::size_t>& param_indices) {
  std::ostringstream out;
  // The first sentences are torch's: scripts and tests look for them.
  out << opening(where)
      << "Expected to have finished reduction in the prior iteration before starting a new one. "
         "This "
         "error indicates that your training graph has changed in this iteration, e.g., one "
         "parameter is used in first iteration, but then got unused in the second iteration. this "
         "is not compatible with static_graph set to True.\n"
         "Parameter indices which did not receive grad for rank "
      << where.rank << ":";
  for (const auto param_index : param_indices) {
    out << ' ' << param_index;
  }
  out << ". Fewer gradients than in the first synchronised backward of static_graph=True arrived "
         "for "
      << join_names(names)
      << ". Drop static_graph=True, or pass find_unused_parameters=True instead.";
  return UserError(out.str());
}

UserError param_arrived_again(
    const Where& where, const std::string& name, bool static_graph, bool as_view) {
  const std::string remedy =
      static_graph ? "Your training graph has changed in this iteration: with static_graph=True, "
                     "the first synchronised backward produced fewer gradients for it. "
                     "Drop static_graph=True, or keep the graph the same in every step."
                   : "This happens when one layer lies in several reentrant checkpoints: use "
                     "checkpoint(..., use_reentrant=False), or pass static_graph=True. It also "
                     "happens when several threads run backwards through one wrapper at once: let "
                     "them take turns.";
  const std::string consequence =
      as_view
          ? " With gradient_as_bucket_view=True it was added to a bucket that may have been on "
            "its way: ranks may have received different averages, so that all have to go on from a "
            "checkpoint."
          : "";
  return UserError(
      opening(where) + "parameter '" + name +
      "' got another gradient after its gradient had been packed for all-reduce. " + remedy +
      consequence);
}

UserError param_unforeseen(const Where& where, const std::string& name) {
  return UserError(
      opening(where) + "parameter '" + name +
      "' got a gradient, but the graph of this backward did not lead to it, so that its average "
      "was taken without this rank. A backward within this backward brought the gradient. Use "
      "checkpoint(..., use_reentrant=False), or let the first backward use this parameter, and go "
      "on from a checkpoint.");
}

UserError under_capture(const Where& where, const std::string& option) {
  return UserError(
      opening(where) + "a backward is captured into a CUDA graph, but " + option +
      " reads results on the host in every step, which a graph cannot repeat. Switch " + option +
      " off for the captured steps.");
}

UserError under_compiled_autograd() {
  return UserError(
      "[ddpx] compiled autograd cannot trace a backward through ReducerDDP: the reducer's hooks "
      "run "
      "in C++, while gradients arrive. Run this backward without compiled autograd: set "
      "torch._dynamo.config.compiled_autograd = False. torch.compile() of the model works without "
      "it.");
}

UserError gradients_not_finite(
    const Where& where, int64_t step, const std::vector<std::pair<int, std::string>>& findings) {
  std::ostringstream out;
  out << opening(where) << "step " << step << " had gradients with NaN or infinity:";
  for (const auto& [rank, name] : findings) {
    out << " on rank " << rank << " first '" << name << "';";
  }
  out << " their averages are not finite on any rank. Look at that rank's inputs and loss; "
         "torch.autograd.set_detect_anomaly(True) names the operation. With a gradient scaler, "
         "which "
         "skips such steps, do not check.";
  return UserError(out.str());
}

std::string finite_agreement() {
  return "the all-reduce that tells whether all gradients are finite";
}

UserError gradient_mismatch(
    const Where& where,
    const std::string& name,
    const std::string& gradient,
    const std::string& expected) {
  return UserError(
      opening(where) + "the gradient of parameter '" + name + "' is " + gradient +
      " but its bucket was made for " + expected +
      ". Cast, move or replace parameters before wrapping, or wrap again.");
}

UserError communication_failed(
    const Where& where, const std::string& what, const std::string& cause) {
  return UserError(
      opening(where) + what + " failed: " + cause +
      "\nDo not use the gradients of this step. A peer may have died or raised: look at the "
      "other ranks' output first.");
}

std::string bucket_all_reduce(std::size_t bucket_index, const std::vector<std::string>& names) {
  return "the all-reduce of bucket " + std::to_string(bucket_index) + " (" + join_names(names) +
         ")";
}

std::string used_map_agreement() {
  return "the agreement on which parameters were used";
}

std::string order_broadcast() {
  return "the broadcast of the order in which gradients arrived";
}

UserError autograd_grad_of_params(const Where& where, const std::vector<std::string>& names) {
  return UserError(
      opening(where) + "torch.autograd.grad() was asked for the gradients of wrapped parameters (" +
      join_names(names) +
      "), which it returns as they are on this rank, not averaged. Use "
      "model.synchronized_grads(loss, tensors) for averaged ones, or call it inside "
      "model.no_sync() if local ones are what you want.");
}

UserError grads_taken_away(const Where& where, const std::vector<std::string>& names) {
  return UserError(
      opening(where) +
      "prepare_for_backward() has announced a backward whose gradients are averaged, but "
      "torch.autograd.grad() computes gradients of " +
      count_params(names.size()) + " (" + join_names(names) +
      "), so that they would stay local. Zero-bubble pipeline schedules do so "
      "(ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV). Use "
      "ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B, whose backward is a plain one.");
}

UserError joined_step_is_local(const Where& where) {
  return UserError(
      opening(where) +
      "in a join() context, forward ran outside no_sync() and announced to the other ranks that "
      "this step averages gradients, but backward runs inside no_sync(). Put the forward inside "
      "no_sync() as well to keep gradients local.");
}

UserError joined_step_averages(const Where& where) {
  return UserError(
      opening(where) +
      "in a join() context, forward ran inside no_sync() and announced to the other ranks that "
      "this step leaves gradients local, but this backward averages gradients. Put the backward "
      "inside no_sync() as well to keep gradients local, or the forward outside to average them.");
}

UserError prepared_in_join(const Where& where) {
  return UserError(
      opening(where) +
      "prepare_for_backward() was called in a join() context, without a forward outside "
      "no_sync() before it. Ranks without inputs learn at forward whether a step averages "
      "gradients. Run the last forward of the step outside no_sync().");
}

UserError params_changed(const Where& where, const std::vector<std::string>& names) {
  return UserError(
      opening(where) + count_params(names.size()) +
      " changed dtype, device or shape after wrapping: " + join_names(names) +
      ". Cast and move the module before wrapping, or wrap it again: "
      "model = ReducerDDP(model.module, ...).");
}

UserError params_unfrozen(const Where& where, const std::vector<std::string>& names) {
  return UserError(
      opening(where) + count_params(names.size()) +
      " did not require a gradient when the module was wrapped, and now does: " +
      join_names(names) +
      ". Its gradient would not be averaged. Wrap the module again after unfreezing: "
      "model = ReducerDDP(model.module, ...).");
}

UserError second_comm_hook(const Where& where) {
  return UserError(
      opening(where) +
      "register_comm_hook or register_builtin_comm_hook can only be called once. Combine the "
      "hooks into one function, or wrap the module again.");
}

UserError static_graph_too_late(const Where& where) {
  return UserError(
      opening(where) +
      "_set_static_graph() should be called before training loop starts: the first synchronised "
      "backward is over. Pass static_graph=True when wrapping.");
}

UserError inside_backward(const Where& where, const std::string& call) {
  return UserError(
      opening(where) + call + " was called while a backward runs. Call it between steps.");
}

UserError hooks_in_use(const Where& where) {
  return UserError(
      opening(where) + "hooks cannot be removed while a backward runs. Remove them between steps.");
}

UserError not_a_trainable_leaf(const std::string& name) {
  return UserError(
      "parameter '" + name +
      "' cannot be averaged: it must be a leaf of autograd's that requires a gradient, such as a "
      "torch.nn.Parameter.");
}

UserError no_such_param(std::size_t param_index, std::size_t num_params) {
  return UserError(
      "there is no parameter " + std::to_string(param_index) + ": the reducer has " +
      std::to_string(num_params) + ", counted from 0.");
}

UserError not_positive(const std::string& what, int64_t value) {
  return UserError(what + " must be 1 or more, but is " + std::to_string(value) + ".");
}

UserError bad_sparse_rows(const std::string& name, const std::string& rows) {
  return UserError(
      "the rows of parameter '" + name +
      "' must be int64, in one dimension and on its device, but are " + rows + ".");
}

UserError no_such_row(const std::string& name, int64_t row) {
  return UserError(
      "row " + std::to_string(row) + " is no row of parameter '" + name +
      "', or does not come after the row before it. Pass each row that exists once, in order.");
}

UserError bad_patience(double seconds) {
  return UserError(
      std::to_string(seconds) + " seconds is no time to wait: pass more than 0, up to 1e9.");
}

UserError too_many_events(std::size_t capacity, std::size_t most) {
  return UserError(
      "a recording holds at most " + std::to_string(most) + " events, but " +
      std::to_string(capacity) + " were asked for.");
}

UserError backward_incomplete(const Where& where, const std::vector<std::string>& names) {
  return UserError(
      opening(where) + "the last backward ended without gradients for " + join_names(names) +
      ", and its other gradients were not averaged. This can happen when the wrapped module is "
      "called directly under reentrant checkpoints: call the wrapper, or use "
      "checkpoint(..., use_reentrant=False).");
}

}  // namespace errors
}  // namespace ddpx
