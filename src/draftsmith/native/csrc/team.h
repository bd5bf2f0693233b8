// The threads that share one piece of work: as many as torch.get_num_threads() says, fewer beside busy neighbours.
#pragma once
#include <atomic>
#include <cstdint>
#include <utility>

#include "crew.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace draftsmith {

// Where all threads of a team wait for each other. A forward has four or more such places a layer, and OpenMP's own
// barrier costs about a microsecond; these threads spin, and sleep only when one of them seems to have lost its
// processor.
class Meeting {
 public:
  void wait(int64_t size) {
    const int64_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      ended_ns_.store(Crew::now_ns(), std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      round_.notify_all();
      return;
    }
    for (int64_t spins = 0; spins < kPatience; ++spins) {
      if (round_.load(std::memory_order_acquire) != round) return;
      pause();
    }
    const int64_t begun = Crew::now_ns();
    while (round_.load(std::memory_order_acquire) == round) round_.wait(round, std::memory_order_acquire);
    // What passes between the end of the meeting and this line is another program's.
    const int64_t slept = ended_ns_.load(std::memory_order_relaxed) - begun;
    if (slept > 0) slept_ns_.fetch_add(slept, std::memory_order_relaxed);
  }

  // What threads slept here for want of others, in all.
  int64_t slept_ns() const { return slept_ns_.load(std::memory_order_relaxed); }

 private:
  static constexpr int64_t kPatience = 20000;  // pauses, some tens of microseconds

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
  }

  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<int64_t> round_{0};
  std::atomic<int64_t> ended_ns_{0};
  alignas(64) std::atomic<int64_t> slept_ns_{0};
};

struct Team {
  int64_t index, size;
  Meeting* meeting;

  // The part of 0 … count - 1 that is this thread's.
  std::pair<int64_t, int64_t> share(int64_t count) const {
    return {count * index / size, count * (index + 1) / size};
  }

  void barrier() const {
    if (size > 1) meeting->wait(size);
  }
};

// Runs work(team) on so many threads, at most; the work must not throw.
template <class Work>
void run_team(int64_t threads, const Work& work) {
#ifdef _OPENMP
  Crew& crew = Crew::of_process();
  const Crew::Call call = crew.begin(threads);
  const int64_t begun = call.told() ? Crew::now_ns() : 0;
  if (call.size > 1) {
    Meeting meeting;
    std::atomic<int64_t> away_ns{0};
#pragma omp parallel num_threads(static_cast<int>(call.size))
    {
      const int64_t from = call.counted ? Crew::now_ns() : 0, own = call.counted ? Crew::own_ns() : -1;
      work(Team{omp_get_thread_num(), omp_get_num_threads(), &meeting});
      if (own >= 0) away_ns += Crew::now_ns() - from - (Crew::own_ns() - own);
    }
    if (call.told()) crew.end(call, Crew::now_ns() - begun, away_ns - meeting.slept_ns());
    return;
  }
  work(Team{0, 1, nullptr});
  if (call.told()) crew.end(call, Crew::now_ns() - begun, 0);
#else
  (void)threads;
  work(Team{0, 1, nullptr});
#endif
}

}  // namespace draftsmith
