// Stream waits that the device leaves out on purpose, to show that tests notice.
#pragma once

#include <string>

namespace late {

// From here on a stream wait, or a record of a block, is left out if one of the functions that it
// is called from has this text in its name. Empty: none is left out.
void ignore_waits_from(const std::string& function);

// Whether the wait that is just being made is to be left out.
bool is_ignored();

// How many were left out since the last ignore_waits_from().
int num_ignored();

}  // namespace late
