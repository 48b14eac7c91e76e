// What torch asks of a device.
#pragma once

namespace late {

// Makes torch's device "privateuseone" the late device; once.
void register_device();

// Whether streams say that they are being captured into a graph. Nothing is captured.
void set_capturing(bool value);

}  // namespace late
