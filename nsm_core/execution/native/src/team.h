// Threads that share the tasks of one caller.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "sharing.h"

namespace nsm {

constexpr int LOOKS = 2000;  // of a thread, before it sleeps: some tens of microseconds

// Between two of them.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// `run` hands out tasks from one counter, to the caller too. Nobody waits for a thread that has not come: what it would have
// done is done by the others. A thread that lost its core in the middle of a task must be waited for, though: after that the
// caller works alone for a while, longer each time it happens, so that a machine with other work to do costs the others'
// help and not much more. Whole steps are shared only while that makes them faster (see `step`). Threads look for the next job for some
// microseconds before they sleep.
class Team {
 public:
  explicit Team(int num_threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls work(), whose tasks the caller does alone where that is faster: see Sharing. A step within a step is a part of it.
  template <typename Work>
  void step(int tokens, const Work& work) {
    if (workers_.empty() || is_in_step_) return work();
    const Step step(*this, std::max(1, tokens));
    work();
  }

  // Whether the tasks of this step, or those after the last one, are the caller's alone.
  bool is_alone() const { return workers_.empty() || is_alone_; }

  // Calls task(index, thread) for each index in [0, count), count < 2^20; returns when all are done.
  template <typename Task>
  void run(int count, const Task& task) {
    if (!is_alone() && count > 1 && Clock::now() >= alone_until_) return run_long(count, task);
    for (int index = 0; index < count; ++index) task(index, 0);
  }

  // The same of tasks of milliseconds, which are shared whatever the last ones waited for: a thread that loses its core meanwhile
  // costs less than all of its task.
  template <typename Task>
  void run_long(int count, const Task& task) {
    if (is_alone() || count == 1) {
      for (int index = 0; index < count; ++index) task(index, 0);
      return;
    }
    share(count, [](const void* context, int index, int thread) { (*static_cast<const Task*>(context))(index, thread); }, &task);
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Call = void (*)(const void*, int, int);

  class Step {
   public:
    Step(Team& team, int tokens) : team_(team), tokens_(tokens) {
      team.is_in_step_ = true;
      team.is_alone_ = !team.sharing_.is_next_shared(tokens);
      began_ = Clock::now();
    }
    ~Step() {
      team_.is_in_step_ = false;
      team_.sharing_.record(tokens_, std::chrono::duration<double>(Clock::now() - began_).count());
    }

   private:
    Team& team_;
    const int tokens_;
    Clock::time_point began_;
  };

  void share(int count, Call call, const void* context);
  void work(int thread);
  // An error of a shared task ends the process: the caller must not leave while other threads use what it lent them.
  bool take_one(int thread) noexcept;
  void note_wait(Clock::duration waited, Clock::duration task_time);

  // Job number (24 bits), its tasks (20) and the next one of them (20) in one word: whoever draws a task knows whose it is.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int> num_done_{0};
  std::atomic<int> num_asleep_{0};
  std::atomic<bool> stops_{false};
  Clock::time_point alone_until_{};  // the caller's, like the pause: how long it is alone when next it had to wait
  Clock::duration pause_;
  Sharing sharing_;
  bool is_in_step_ = false, is_alone_ = false;
  Call call_ = nullptr;
  const void* context_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
};

}  // namespace nsm
