// File: device.h - palu as a device of ggml: buffers that are our cache, a backend that runs the
// nodes that touch it.
#ifndef PALU_ADAPTERS_GGML_DEVICE_H_
#define PALU_ADAPTERS_GGML_DEVICE_H_

#include <memory>

#include "ggml/abi.h"

namespace palu::ggml {

// shares_threads: abi_threads.h.
std::unique_ptr<Device> MakeDevice(const Host& host, bool shares_threads);

}  // namespace palu::ggml

#endif  // PALU_ADAPTERS_GGML_DEVICE_H_
