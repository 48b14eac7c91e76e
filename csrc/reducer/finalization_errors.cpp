#include "step_errors.h"

namespace ddpx::errors {

// The first sentences of the following errors have torch's words: scripts and tests look for them.
UserError finalization_not_manual(const Where& where) {
  return UserError(
      opening(where) +
      "finalize_backward() called but manual backward finalization is not required. The end of "
      "backward finalizes each step. Set require_manual_backward_finalization to true first, "
      "before forward, or leave the call out.");
}

UserError nothing_to_finalize(const Where& where) {
  return UserError(
      opening(where) +
      "finalize_backward() called but no gradient reduction requires finalization. No "
      "synchronized backward has run since the last finalization: a backward in no_sync() leaves "
      "gradients local, and a backward that raised an error ends its step. Call "
      "finalize_backward() once for each synchronized backward.");
}

UserError finalized_twice(const Where& where) {
  return UserError(
      opening(where) +
      "finalize_backward() called but no gradient reduction requires finalization. "
      "finalize_backward() was already called for this backward pass. Call finalize_backward() "
      "once for each synchronized backward.");
}

UserError buckets_not_ready(
    const Where& where, const std::vector<std::string>& names, bool at_end) {
  const std::string remedy =
      at_end ? "This step launches its buckets at the end of backward: "
               "should_finalize_after_backward is True. Call finalize_backward() after backward "
               "has returned."
             : "Nothing is lost. Call finalize_backward() again, in a later hook or after backward "
               "has returned.";
  return UserError(
      opening(where) + "finalize_backward() called before all DDP buckets were ready. " +
      count_params(names.size()) + by_number(names.size(), " has", " have") +
      " no final gradient yet" + (names.empty() ? "" : ": " + join_names(names)) + ". " + remedy);
}

UserError finalization_pending(const Where& where, const std::string& call) {
  return UserError(
      opening(where) +
      "Expected to have finalized the prior backward pass before starting a new one. The gradients "
      "of that backward pass are not averaged yet, and " +
      call +
      " would change them. Call finalize_backward() after backward() when "
      "require_manual_backward_finalization is true. To drop the gradients of that backward pass, "
      "call model.reset().");
}

UserError finalization_in_use(const Where& where) {
  return UserError(
      opening(where) +
      "require_manual_backward_finalization cannot be changed after forward while a backward pass "
      "is expected or in progress. Set it before forward or after backward finalization. If the "
      "last forward has no backward, call model.reset() first.");
}

UserError grad_after_finalization(const Where& where, const std::string& name) {
  return UserError(
      opening(where) + "parameter '" + name +
      "' got another gradient after finalize_backward() had averaged its gradient in the same "
      "backward. param.grad contains a local gradient of this rank. Call finalize_backward() after "
      "backward has returned, and restart from a checkpoint.");
}

}  // namespace ddpx::errors
