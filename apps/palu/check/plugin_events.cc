#include "check/plugin_events.h"

#include <charconv>
#include <numeric>

namespace palu::app {
namespace {

// What stands between `before` and the next `after`, or "".
std::string Between(std::string_view text, std::string_view before, std::string_view after) {
  const size_t start = text.find(before);
  if (start == std::string_view::npos) return "";
  const size_t first = start + before.size(), end = text.find(after, first);
  return end == std::string_view::npos ? "" : std::string(text.substr(first, end - first));
}

void Add(PluginEvents& events, std::string_view event, std::string_view text) {
  if (event == "loaded") {
    events.loaded = true;
    events.version = text.substr(0, text.find(','));
    // A cache's own text has commas.
    events.cache = Between(text, "PALU_CACHE=", ", kernel ");
    events.kernel = Between(text, ", kernel ", ",");
  } else if (event == "refused") {
    events.refusal = text;
  } else if (event == "reserved") {
    int layers = 0;
    std::from_chars(text.data(), text.data() + text.size(), layers);
    events.reserved.push_back(layers);
  } else if (event == "cache") {
    events.bits.push_back(Between(text, "cells: ", " bits per element"));
  } else if (event == "used") {
    events.used = true;
  }
}

}  // namespace

int PluginEvents::Layers() const { return std::accumulate(reserved.begin(), reserved.end(), 0); }

PluginEvents ParsePluginEvents(std::string_view text) {
  PluginEvents events;
  for (size_t end; (end = text.find('\n')) != std::string_view::npos; text.remove_prefix(end + 1)) {
    const std::string_view line = text.substr(0, end);
    const size_t space = line.find(' ');
    if (space != std::string_view::npos) Add(events, line.substr(0, space), line.substr(space + 1));
  }
  return events;
}

}  // namespace palu::app
