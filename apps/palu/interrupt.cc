#include "interrupt.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

namespace palu::app {
namespace {

volatile sig_atomic_t interrupts = 0;
std::atomic<const char*> reply = nullptr;
static_assert(std::atomic<const char*>::is_always_lock_free);  // a handler reads it

// Only async-signal-safe calls.
void OnInterrupt(int) {
  interrupts = interrupts + 1;
  const char* text = interrupts > 1 ? "\n" : reply.load();
  if (text != nullptr) (void)!write(STDERR_FILENO, text, std::strlen(text));
  if (interrupts > 1) _exit(kInterruptedExit);
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

InterruptReply::InterruptReply(const char* text) { reply = text; }

InterruptReply::~InterruptReply() { reply = nullptr; }

}  // namespace palu::app
