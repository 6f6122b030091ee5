// File: plugin_file.h - the plug-in as a file: where ours is, and what is wrong with another.
#ifndef PALU_APPS_CHECK_PLUGIN_FILE_H_
#define PALU_APPS_CHECK_PLUGIN_FILE_H_

#include <string>

namespace palu::app {

// Path of the libggml-palu.so that was built or installed with this program. Errors: StateError
// (there is none; says where it should be).
std::string OwnPlugin();

// Why a program that gets this value of GGML_BACKEND_PATH will not load palu: one line, "" if
// nothing is wrong. Null: the variable is not set. Loads the file for a moment, which runs its
// initialisers.
std::string PluginFileFault(const char* path);

}  // namespace palu::app

#endif  // PALU_APPS_CHECK_PLUGIN_FILE_H_
