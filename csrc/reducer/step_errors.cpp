#include "step_errors.h"

#include <sstream>

namespace ddpx::errors {
namespace {

// The words of DDP's error: scripts and trainers look for them.
std::string unfinished_in_ddps_words(
    const Where& where, const std::vector<std::size_t>& param_indices) {
  std::ostringstream out;
  out << " In DDP's words: Expected to have finished reduction in the prior iteration before "
         "starting a new one. This error indicates that your module has parameters that were not "
         "used in producing loss. Parameter indices which did not receive grad for rank "
      << where.rank << ":";
  for (const auto param_index : param_indices) {
    out << ' ' << param_index;
  }
  return out.str();
}

UserError not_capturable(const Where& where, const std::string& reason, const std::string& remedy) {
  return UserError(
      opening(where) + "a step is captured into a CUDA graph, but " + reason + " " + remedy);
}

}  // namespace

UserError params_without_gradient(
    const Where& where,
    const std::vector<std::string>& names,
    const std::vector<std::size_t>& param_indices) {
  const auto count = names.size();
  return UserError(
      opening(where) + count_params(count) +
      " got no gradient in this backward: " + join_names(names) + ". This rank contributed zeros " +
      by_number(count, "for this parameter", "for these parameters") +
      ". All other gradients were averaged. If a step may leave parameters unused, pass "
      "find_unused_parameters=True. If the same parameters are unused in every step, "
      "static_graph=True is faster. Otherwise use every output of forward in the loss, or freeze " +
      by_number(count, "this parameter", "these parameters") + " before wrapping." +
      unfinished_in_ddps_words(where, param_indices));
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
  out << ". " << count_params(names.size())
      << " got fewer gradients than in the first synchronized backward with static_graph=True: "
      << join_names(names)
      << ". Remove static_graph=True, or pass find_unused_parameters=True instead.";
  return UserError(out.str());
}

UserError grad_changed(const Where& where, const std::string& name) {
  return UserError(
      opening(where) + "the gradient of parameter '" + name +
      "' was changed in place after it had arrived and before it was copied into its bucket, for "
      "example by a hook of another parameter. The average has the changed gradient. Change a "
      "gradient in a hook of its own parameter, or after backward(). On a device, "
      "DDPX_SMALL_GRAD_BYTES=0 copies each gradient when it arrives, but for the first step.");
}

UserError param_arrived_again(
    const Where& where,
    const std::string& name,
    std::size_t param_index,
    bool static_graph,
    bool as_view) {
  const std::string remedy =
      static_graph ? "Your training graph has changed in this iteration: this parameter got fewer "
                     "gradients in the first synchronized backward with static_graph=True. "
                     "Remove static_graph=True, or keep the graph the same in every step."
                   : "This happens when one layer is used in several reentrant checkpoints. Use "
                     "checkpoint(..., use_reentrant=False), or pass static_graph=True. This also "
                     "happens when several threads run backwards through one wrapper at the same "
                     "time. Run one backward at a time.";
  const std::string consequence =
      as_view
          ? " With gradient_as_bucket_view=True, this gradient was added to a bucket whose "
            "all-reduce may have been running. Ranks may have received different averages. Restart "
            "all ranks from a checkpoint."
          : "";
  return UserError(
      opening(where) + "parameter '" + name +
      "' got another gradient after its gradient had been packed for all-reduce. " + remedy +
      consequence +
      " In DDP's words: Expected to mark a variable ready only once. Parameter at index " +
      std::to_string(param_index) + " with name " + name + " has been marked as ready twice.");
}

UserError param_unforeseen(const Where& where, const std::string& name) {
  return UserError(
      opening(where) + "parameter '" + name +
      "' got a gradient, but was not in the graph of this backward. The gradient was averaged "
      "without the contribution of this rank. A backward inside this backward produced the "
      "gradient. Use checkpoint(..., use_reentrant=False), or use this parameter in the first "
      "backward. Restart from a checkpoint.");
}

UserError host_read_under_capture(const Where& where, const std::string& option) {
  return not_capturable(
      where,
      option + " reads results on the host. A CUDA graph cannot repeat reads on the host.",
      "Turn off " + option + " for the captured steps.");
}

UserError sparse_under_capture(const Where& where, const std::string& name) {
  return not_capturable(
      where,
      "the gradient of parameter '" + name +
          "' is sparse. The host reads the size of a sparse gradient, and a CUDA graph cannot "
          "repeat reads on the host.",
      "Make the gradient dense: torch.nn.Embedding(..., sparse=False).");
}

UserError capture_in_join(const Where& where) {
  return not_capturable(
      where,
      "in a join() context, ranks exchange in each forward whether they have inputs. A CUDA graph "
      "cannot repeat the decisions that follow.",
      "Capture outside join(). After join(divide_by_initial_world_size=False), wrap the module "
      "again before a capture.");
}

UserError capture_while_recording(const Where& where) {
  return not_capturable(
      where,
      "a recording runs. With torch before 2.12, a recording asks the device for times during the "
      "capture.",
      "End the recording before the capture.");
}

UserError capture_too_early(const Where& where) {
  return not_capturable(
      where,
      "the first steps of this wrapper have not ended. The buckets change after these steps, and a "
      "CUDA graph would write into the old buckets.",
      "Run at least 3 training steps on the capturing stream before the capture.");
}

UserError gradients_not_finite(
    const Where& where, const std::vector<std::pair<int, std::string>>& findings) {
  std::ostringstream params;
  std::ostringstream ranks;
  for (std::size_t i = 0; i < findings.size(); ++i) {
    const auto& [rank, name] = findings[i];
    params << (i == 0 ? "'" : ", '") << name << "' on rank " << rank;
    ranks << (i == 0 ? "" : ", ") << rank;
  }
  const auto count = findings.size();
  return UserError(
      opening(where) + "gradients contain NaN or infinity, first in " + params.str() +
      ". The averages of these gradients are not finite on any rank. Check the inputs and the loss "
      "of " +
      by_number(count, "rank ", "ranks ") + ranks.str() +
      ". torch.autograd.set_detect_anomaly(True) names the operation at fault. A gradient scaler "
      "skips such steps: if the script uses a gradient scaler, turn off this check with "
      "set_check_finite(False).");
}

std::string finite_check() {
  return "the all-reduce that checks whether all gradients are finite";
}

UserError gradient_mismatch(
    const Where& where,
    const std::string& name,
    const std::string& gradient,
    const std::string& expected) {
  const std::string sparse = "a sparse ";
  const bool is_sparse = gradient.compare(0, sparse.size(), sparse) == 0;
  const bool expects_sparse = expected.compare(0, sparse.size(), sparse) == 0;
  const std::string remedy =
      is_sparse == expects_sparse
          ? "Cast, move or replace parameters before wrapping, or wrap the module again."
          : "Sparse gradients are expected for the weights of nn.Embedding(sparse=True) and "
            "nn.EmbeddingBag(sparse=True), and for no other use of these weights. Pass "
            "sparse=False.";
  return UserError(
      opening(where) + "the gradient of parameter '" + name + "' is " + gradient +
      ", but the bucket of this parameter was made for " + expected + ". " + remedy +
      (expects_sparse && !is_sparse ? " In DDP's words: Expected variable to have sparse gradient."
                                    : ""));
}

UserError communication_failed(
    const Where& where, const std::string& what, const std::string& cause) {
  return UserError(
      opening(where) + what + " failed: " + cause +
      "\nDo not use the gradients of this step. Another rank may have died or raised an error: "
      "read the output of the other ranks first.");
}

std::string bucket_all_reduce(std::size_t bucket_index, const std::vector<std::string>& names) {
  return "the all-reduce of bucket " + std::to_string(bucket_index) + " (" + join_names(names) +
         ")";
}

std::string used_map_exchange() {
  return "the all-reduce of the map of used parameters";
}

std::string order_broadcast() {
  return "the broadcast of the order in which gradients arrived";
}

UserError local_grads_applied(const Where& where, const std::vector<std::string>& names) {
  const auto count = names.size();
  return UserError(
      opening(where) + count_params(count) +
      " changed in place after torch.autograd.grad() had returned " +
      by_number(count, "the local gradient", "local gradients") + " of this rank (" +
      join_names(names) + "). No backward has averaged " +
      by_number(count, "a gradient of this parameter", "gradients of these parameters") +
      " in between, so ranks may now have different parameters. For averaged gradients, call "
      "model.synchronized_grads(loss, tensors). If ranks may differ for a while, or if the script "
      "averages the gradients itself, call torch.autograd.grad() inside model.no_sync().");
}

UserError grads_taken_away(const Where& where, const std::vector<std::string>& names) {
  const auto count = names.size();
  return UserError(
      opening(where) +
      "prepare_for_backward() announced a backward whose gradients are averaged, but "
      "torch.autograd.grad() computes " +
      by_number(count, "the gradient of ", "the gradients of ") + count_params(count) + " (" +
      join_names(names) + "). " +
      by_number(count, "This gradient would stay local. ", "These gradients would stay local. ") +
      "Zero-bubble pipeline schedules call torch.autograd.grad() in this way "
      "(ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV). Use "
      "ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B instead.");
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
      ". Cast and move the module before wrapping, or wrap the module again: "
      "model = ReducerDDP(model.module, ...).");
}

UserError params_unfrozen(const Where& where, const std::vector<std::string>& names) {
  const auto count = names.size();
  return UserError(
      opening(where) + count_params(count) +
      " did not require a gradient when the module was wrapped, and now " +
      by_number(count, "does: ", "do: ") + join_names(names) +
      by_number(count, ". Its gradient would", ". Their gradients would") +
      " not be averaged. Wrap the module again after unfreezing: "
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
      "_set_static_graph() should be called before training loop starts. The first synchronized "
      "backward of this wrapper has ended already. Pass static_graph=True when wrapping.");
}

UserError inside_backward(const Where& where, const std::string& call) {
  return UserError(
      opening(where) + call + " was called while a backward runs. Call " + call +
      " between steps.");
}

UserError hooks_in_use(const Where& where) {
  return UserError(
      opening(where) +
      "hooks cannot be removed while a backward runs. Remove the hooks between steps.");
}

UserError params_in_use(const Where& where) {
  return UserError(
      opening(where) +
      "another wrapper cannot start to average the parameters of this wrapper while a backward "
      "runs. Wrap modules, and run forwards of other wrappers of the same parameters, between "
      "steps.");
}

UserError owner_is_gone(const Where& where) {
  return UserError(
      opening(where) +
      "the wrapper that averaged these parameters last no longer exists. Python may delete it at "
      "different times on different ranks, so this older wrapper averages only after its own "
      "forward. Call this wrapper instead of its module.");
}

UserError params_averaged_elsewhere(const Where& where, const std::vector<std::string>& names) {
  return UserError(
      opening(where) +
      "since this forward, another wrapper has begun to average some of the parameters of this "
      "wrapper, by its construction or a forward. " +
      by_number(names.size(), "The gradient of ", "The gradients of ") + join_names(names) +
      " would not be averaged. Run the backward of each wrapper before the forward of the other "
      "wrapper, or wrap one module that holds all parameters.");
}

UserError no_such_param(std::size_t param_index, std::size_t num_params) {
  return UserError(
      "parameter index " + std::to_string(param_index) + " is out of range: the reducer has " +
      count_params(num_params) + ", and indices start at 0.");
}

UserError not_positive(const std::string& what, int64_t value) {
  return UserError(what + " must be 1 or more, but is " + std::to_string(value) + ".");
}

UserError backward_incomplete(
    const Where& where,
    const std::vector<std::string>& names,
    const std::vector<std::size_t>& param_indices) {
  return UserError(
      opening(where) + "the last backward ended without " +
      by_number(names.size(), "a gradient for ", "gradients for ") + count_params(names.size()) +
      ": " + join_names(names) +
      ". The other gradients of that backward were not averaged. This can happen when the wrapped "
      "module is called directly under reentrant checkpoints. Call the wrapper instead, or use "
      "checkpoint(..., use_reentrant=False)." +
      unfinished_in_ddps_words(where, param_indices));
}

}  // namespace ddpx::errors
