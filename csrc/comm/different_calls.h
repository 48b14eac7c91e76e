// The transport reports that ranks made different collective calls.
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <utility>

namespace ddpx {

class DifferentCalls : public c10::DistBackendError {
 public:
  // `text` is the text of the error. `how` says what each rank called, in the same words on all
  // ranks.
  DifferentCalls(c10::SourceLocation where, const std::string& text, std::string how)
      : c10::DistBackendError(where, text), how_(std::move(how)) {}

  const std::string& how() const {
    return how_;
  }

 private:
  std::string how_;
};

}  // namespace ddpx
