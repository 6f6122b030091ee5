// File: errors.h - what the library throws.
//
// Every error message says what was given and what is allowed. When a call throws, the object it
// was called on is as it was before the call. The library never prints, exits or aborts.
#ifndef PALU_ERRORS_H_
#define PALU_ERRORS_H_

#include <stdexcept>
#include <string>

namespace palu {

// Base of all of them, so that a host can catch one type.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An option or a combination of options is not allowed, or a text form does not parse.
class ConfigError : public Error {
 public:
  using Error::Error;
};

// A tensor has the wrong shape, dtype or stride, or holds NaN, Inf or a value beyond fp16.
class InputError : public Error {
 public:
  using Error::Error;
};

// The call does not fit the state of the cache: trim of more than there is, positions that do not
// continue, tokens that a sliding-window layer has already dropped.
class StateError : public Error {
 public:
  using Error::Error;
};

// The memory limit of the cache would be exceeded, or the system has no memory left.
class MemoryError : public Error {
 public:
  using Error::Error;
};

// A file is missing, truncated, foreign or of an unsupported kind.
class FormatError : public Error {
 public:
  using Error::Error;
};

}  // namespace palu

#endif  // PALU_ERRORS_H_
