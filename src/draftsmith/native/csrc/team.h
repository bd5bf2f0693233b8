// The threads that share one piece of work; as many as torch.get_num_threads() says.
#pragma once
#include <cstdint>
#include <utility>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace draftsmith {

struct Team {
  int64_t index, size;

  // The part of 0 … count - 1 that is this thread's.
  std::pair<int64_t, int64_t> share(int64_t count) const {
    return {count * index / size, count * (index + 1) / size};
  }

  void barrier() const {
#ifdef _OPENMP
    if (size > 1) {
#pragma omp barrier
    }
#endif
  }
};

// Runs work(team) on every thread, or on this one alone; the work must not throw.
template <class Work>
void run_team(bool alone, const Work& work) {
#ifdef _OPENMP
  if (!alone) {
    // PyTorch sets the number of threads of its OpenMP, which is this one's too: both are one library in a process.
#pragma omp parallel
    work(Team{omp_get_thread_num(), omp_get_num_threads()});
    return;
  }
#else
  (void)alone;
#endif
  work(Team{0, 1});
}

}  // namespace draftsmith
