// Threads that take pieces of jobs take each of them once, whoever is slow.
#include "pieces.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

using draftsmith::Meeting;
using draftsmith::Pieces;
using draftsmith::Team;

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("not so: %s\n", what);
  std::exit(1);
}

struct Job {
  int64_t count, most;
};

// Returns how many parts each thread took of every job, in the order of the jobs.
std::vector<std::vector<int64_t>> work(int64_t threads, const std::vector<Job>& jobs, int64_t slow = -1) {
  Pieces pieces;
  pieces.reserve(static_cast<int64_t>(jobs.size()), threads);
  Meeting meeting;
  std::vector<std::vector<int64_t>> taken(threads, std::vector<int64_t>(jobs.size()));
  std::vector<std::vector<std::atomic<int>>> times;
  for (const Job& job : jobs) times.emplace_back(job.count);
  std::vector<std::thread> team;
  for (int64_t t = 0; t < threads; ++t)
    team.emplace_back([&, t] {
      const Team mine{t, threads, &meeting};
      for (int round = 0; round < 3; ++round) {  // what was dealt before is dealt anew
        for (size_t j = 0; j < jobs.size(); ++j) pieces.deal(mine, static_cast<int64_t>(j), jobs[j].count);
        mine.barrier();
        for (size_t j = 0; j < jobs.size(); ++j)
          for (;;) {
            const auto [first, last, goes_on] = pieces.take(mine, static_cast<int64_t>(j), jobs[j].most);
            if (first == last) break;
            require(0 <= first && first < last && last <= jobs[j].count && last - first <= jobs[j].most,
                    "a piece is a part of its job, and no larger than was asked for");
            require(!goes_on || last < jobs[j].count, "nothing goes on behind the end");
            for (int64_t i = first; i < last; ++i) ++times[j][i];
            taken[t][j] += last - first;
            if (t == slow) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
        mine.barrier();
      }
    });
  for (std::thread& thread : team) thread.join();
  for (const auto& job : times)
    for (const auto& part : job) require(part == 3, "every part is taken once a round");
  return taken;
}

// A team that is smaller than the one that was dealt to.
void leave_nothing() {
  Pieces pieces;
  pieces.reserve(1, 3);
  pieces.deal_ahead(0, 30, 3);
  std::vector<int> times(30);
  for (const Team alone{0, 1, nullptr};;) {
    const Pieces::Piece piece = pieces.take(alone, 0, 8);
    if (piece.is_none()) break;
    require(piece.goes_on == (piece.last % 10 != 0), "stretches are taken in order");
    for (int64_t i = piece.first; i < piece.last; ++i) ++times[i];
  }
  require(times == std::vector<int>(30, 1), "a thread that is alone takes the stretches of the others too");
}

}  // namespace

int main() {
  const auto alone = work(1, {{24, 8}, {7, 8}, {0, 8}, {1, 1}});
  require(alone[0] == std::vector<int64_t>{72, 21, 0, 3}, "one thread takes all");
  for (int64_t threads = 2; threads <= 4; ++threads)
    work(threads, {{24, 8}, {1, 8}, {0, 8}, {6, 1}, {2000, 8}, {999, 3}});
  // More jobs than a line of the cache has room for, with fewer parts than threads.
  work(3, std::vector<Job>(50, {2, 8}));
  const auto uneven = work(2, {{512, 8}}, 1);
  require(uneven[0][0] > uneven[1][0], "who is slow takes less");
  leave_nothing();
  std::printf("pieces are taken once\n");
}
