#include "interrupt.h"

#include <signal.h>
#include <unistd.h>

namespace palu::app {
namespace {

volatile sig_atomic_t interrupts = 0;

// Only async-signal-safe calls.
void OnInterrupt(int) {
  interrupts = interrupts + 1;
  if (interrupts < 2) return;
  (void)!write(STDERR_FILENO, "\n", 1);
  _exit(kInterruptedExit);
}

}  // namespace

void CatchInterrupt() {
  struct sigaction action = {};
  action.sa_handler = OnInterrupt;
  sigemptyset(&action.sa_mask);
  action.sa_flags = 0;  // no SA_RESTART: a read of the keyboard must return
  sigaction(SIGINT, &action, nullptr);
}

bool Interrupted() { return interrupts > 0; }

void ForgetInterrupt() { interrupts = 0; }

}  // namespace palu::app
