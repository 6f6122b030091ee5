// File: interrupt.h - Ctrl-C as a request to stop.
#ifndef PALU_APPS_INTERRUPT_H_
#define PALU_APPS_INTERRUPT_H_

namespace palu::app {

inline constexpr int kInterruptedExit = 130;  // 128 + SIGINT, as shells report it

// From now on Ctrl-C is counted; a second one before ForgetInterrupt ends the process at once.
// Blocking reads return with EINTR.
void CatchInterrupt();
// Whether Ctrl-C came since the last ForgetInterrupt.
bool Interrupted();
void ForgetInterrupt();

// While one lives, the first Ctrl-C answers with this line on stderr: for work that stops only
// after a while. The text must outlive it.
class InterruptReply {
 public:
  explicit InterruptReply(const char* text);
  ~InterruptReply();
  InterruptReply(const InterruptReply&) = delete;
  InterruptReply& operator=(const InterruptReply&) = delete;
};

}  // namespace palu::app

#endif  // PALU_APPS_INTERRUPT_H_
