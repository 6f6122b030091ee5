// File: expect_failure.h - what a program that refuses has to print.
#ifndef PALU_TESTS_APP_EXPECT_FAILURE_H_
#define PALU_TESTS_APP_EXPECT_FAILURE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "program.h"

namespace palu::app {

// One line "palu: error: ..." with `part` in it, and nothing on standard output.
inline void ExpectFailure(const Outcome& outcome, int code, const std::string& part) {
  EXPECT_EQ(outcome.code, code) << outcome.err;
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(outcome.err.rfind("palu: error: ", 0), 0u) << outcome.err;
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  EXPECT_NE(outcome.err.find(part), std::string::npos) << "no '" << part << "' in " << outcome.err;
}

}  // namespace palu::app

#endif  // PALU_TESTS_APP_EXPECT_FAILURE_H_
