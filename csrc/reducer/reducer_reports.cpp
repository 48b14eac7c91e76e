// What is wrong with a step, found while it runs and said at its end, when peers have theirs.
#include <iterator>
#include <utility>

#include "reducer.h"

namespace ddpx {

void Reducer::report_later(UserError error) {
  notes_.spoil_results();
  if (!to_report_) {
    to_report_ = std::move(error);
  }
}

void Reducer::report_not_finite() {
  if (!finite_check_) {
    return;
  }
  const auto findings = communicate(
      [&] { return finite_check_->agree(*collective_, params_.front().device()); },
      errors::finite_agreement);
  std::vector<std::pair<int, std::string>> named;
  for (const auto& finding : findings) {
    named.emplace_back(finding.rank, names_[finding.param_index]);
  }
  if (!named.empty()) {
    report_later(errors::gradients_not_finite(where(), named));
  }
}

void Reducer::raise(const UserError& error) {
  last_error_ = error.what();
  throw UserError(error);
}

void Reducer::report_end(const errors::Where& where, const Indices& missing, bool output_reached) {
  if (const auto error = std::exchange(to_report_, std::nullopt)) {
    raise(*error);
  }
  if (missing.empty() || options_.mode == GraphMode::kFindUnused) {
    return;
  }
  if (options_.mode == GraphMode::kStatic) {
    raise(errors::static_graph_changed(where, names_of(missing), missing));
  }
  // Another output of the same forward may have brought them, or may still bring them.
  const auto nodes_to_come = outputs_.nodes_to_come();
  Indices unused;
  owed_.clear();
  for (const auto param_index : missing) {
    if (output_reached && seen_[param_index]) {
      continue;
    }
    const bool to_come = nodes_to_come.count(hooks_[param_index].accumulator()) != 0;
    (to_come ? owed_ : unused).push_back(param_index);
  }
  if (!unused.empty()) {
    raise(errors::params_without_gradient(where, names_of(unused)));
  }
}

}  // namespace ddpx
