#include "team.h"

#include <algorithm>

namespace nsm {
namespace {

constexpr int FIELD = 20;
constexpr uint64_t MASK = (uint64_t{1} << FIELD) - 1;
using std::chrono::microseconds;

constexpr microseconds PATIENCE{100};
// The shortest is well below the 20 ms after which a server's other threads come for a core: a pause grows only where they
// come more often.
constexpr microseconds SHORTEST_PAUSE{1000}, LONGEST_PAUSE{1000000};

uint64_t job_of(uint64_t ticket) { return ticket >> (2 * FIELD); }
uint64_t count_of(uint64_t ticket) { return ticket >> FIELD & MASK; }
uint64_t next_of(uint64_t ticket) { return ticket & MASK; }

}  // namespace

Team::Team(int num_threads) : pause_(SHORTEST_PAUSE) {
  for (int thread = 1; thread < num_threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

Team::~Team() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stops_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Team::share(int count, Call call, const void* context) {
  call_ = call;
  context_ = context;
  num_done_ = 0;
  const uint64_t job = job_of(ticket_.load()) + 1;
  ticket_ = job << (2 * FIELD) | static_cast<uint64_t>(count) << FIELD;
  if (num_asleep_ > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  const Clock::time_point began = Clock::now();
  int num_own = 0;
  while (take_one(0)) ++num_own;
  const Clock::time_point finished = Clock::now();
  if (num_done_ == count) return;
  for (int look = 0; look < LOOKS && num_done_ != count; ++look) relax();
  if (num_done_ != count) {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return num_done_ == count; });
  }
  note_wait(Clock::now() - finished, (finished - began) / (num_own + 1));
}

// A wait of more than a few tasks' time means that a thread has no core.
void Team::note_wait(Clock::duration waited, Clock::duration task_time) {
  const Clock::time_point now = Clock::now();
  if (waited > PATIENCE + 3 * task_time) {
    alone_until_ = now + pause_;
    pause_ = std::min<Clock::duration>(2 * pause_, LONGEST_PAUSE);
  } else if (now > alone_until_ + pause_) {  // help has come without a wait for as long as it was done without
    pause_ = std::max<Clock::duration>(pause_ / 2, SHORTEST_PAUSE);
    alone_until_ = now;
  }
}

// A ticket below the job's count is one of the job that runs: the caller does not leave before it is done.
bool Team::take_one(int thread) noexcept {
  uint64_t ticket = ticket_.load();
  if (next_of(ticket) >= count_of(ticket)) return false;
  ticket = ticket_.fetch_add(1);
  const uint64_t count = count_of(ticket), index = next_of(ticket);
  if (index >= count) return false;
  call_(context_, static_cast<int>(index), thread);
  if (static_cast<uint64_t>(num_done_.fetch_add(1)) + 1 == count) {
    std::lock_guard<std::mutex> lock(mutex_);  // the caller is either before its check or asleep
    done_.notify_one();
  }
  return true;
}

void Team::work(int thread) {
  uint64_t seen = 0;
  while (!stops_) {
    while (take_one(thread)) {
    }
    seen = job_of(ticket_);
    for (int look = 0; look < LOOKS && job_of(ticket_) == seen; ++look) relax();
    if (job_of(ticket_) != seen) continue;
    std::unique_lock<std::mutex> lock(mutex_);
    ++num_asleep_;
    wake_.wait(lock, [&] { return stops_ || job_of(ticket_) != seen; });
    --num_asleep_;
  }
}

}  // namespace nsm
