// File: plugin_events.h - what the plug-in libggml-palu.so writes into the file that PALU_REPORT
// names, read back. The writer is adapters/ggml/report.h.
#ifndef PALU_APPS_CHECK_PLUGIN_EVENTS_H_
#define PALU_APPS_CHECK_PLUGIN_EVENTS_H_

#include <string>
#include <string_view>
#include <vector>

namespace palu::app {

struct PluginEvents {
  bool loaded = false, used = false;
  std::string version, cache, kernel;  // of `loaded`; "" where it does not say
  std::string refusal;                 // "" = none
  std::vector<int> reserved;           // layers of each cache that it was given
  std::vector<std::string> bits;       // per element, of each cache that was put to use

  // Layers that have their cache in the plug-in.
  int Layers() const;
};

// Lines "event text"; events that it does not know are skipped, and so is a line that is not whole.
PluginEvents ParsePluginEvents(std::string_view text);

}  // namespace palu::app

#endif  // PALU_APPS_CHECK_PLUGIN_EVENTS_H_
