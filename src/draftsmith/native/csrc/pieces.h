// Work that the threads of a team take piece by piece.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "team.h"

namespace draftsmith {

// Every thread has a stretch of each job, and takes pieces from its beginning; one that has done all of its own takes them
// from the ends of the others'. So nobody waits long for a thread that is slower: because its core is, because another
// program uses a part of it, or because it lost it for a moment. Who does a piece makes no difference to what comes out.
class Pieces {
 public:
  using Range = std::pair<int64_t, int64_t>;

  // Before a team starts: room for so many jobs and threads.
  void reserve(int64_t jobs, int64_t threads) {
    const size_t lines = (jobs + kALine - 1) / kALine;
    if (lines * threads > lines_.size()) lines_ = std::vector<Line>(lines * threads);
    lines_each_ = lines, dealt_ = 0;
  }

  // Before a team starts: stretches for so many threads, however many it will have.
  void deal_all(int64_t job, int64_t count, int64_t threads) {
    for (int64_t t = 0; t < threads; ++t) deal({t, threads, nullptr}, job, count);
    dealt_ = threads;
  }

  // Every thread for itself, before a meeting of all and after nobody is busy with what was dealt before.
  void deal(const Team& team, int64_t job, int64_t count) {
    const auto [first, last] = team.share(count);
    left(team.index, job).store(held(first, last), std::memory_order_relaxed);
  }

  // The next piece of a job for this thread, of at most `most`; an empty one when all are taken.
  Range take(const Team& team, int64_t job, int64_t most) {
    std::atomic<uint64_t>& own = left(team.index, job);
    for (uint64_t now = own.load(std::memory_order_relaxed); first(now) < last(now);) {
      const int64_t some = size(now, most);
      if (own.compare_exchange_weak(now, held(first(now) + some, last(now)), std::memory_order_relaxed))
        return {first(now), first(now) + some};
    }
    const int64_t stretches = std::max(team.size, dealt_);
    for (int64_t beside = 1; beside < stretches; ++beside) {
      std::atomic<uint64_t>& other = left((team.index + beside) % stretches, job);
      for (uint64_t now = other.load(std::memory_order_relaxed); first(now) < last(now);) {
        const int64_t some = std::min(size(now, most), kFew);
        if (other.compare_exchange_weak(now, held(first(now), last(now) - some), std::memory_order_relaxed))
          return {last(now) - some, last(now)};
      }
    }
    return {0, 0};
  }

 private:
  static constexpr int64_t kALine = 8, kFew = 4;
  struct alignas(64) Line {
    std::atomic<uint64_t> left[kALine] = {};
  };

  static uint64_t held(int64_t first, int64_t last) { return static_cast<uint64_t>(first) << 32 | static_cast<uint64_t>(last); }
  static int64_t first(uint64_t held) { return static_cast<int64_t>(held >> 32); }
  static int64_t last(uint64_t held) { return static_cast<int64_t>(held & 0xffffffffu); }
  // Towards the end, pieces are smaller, so that all threads are done at about the same time.
  static int64_t size(uint64_t held, int64_t most) {
    const int64_t rest = last(held) - first(held);
    return rest >= 2 * most ? most : std::min({rest, most, std::max(most / 2, kFew)});
  }
  std::atomic<uint64_t>& left(int64_t thread, int64_t job) { return lines_[thread * lines_each_ + job / kALine].left[job % kALine]; }

  std::vector<Line> lines_;
  int64_t lines_each_ = 0, dealt_ = 0;
};

}  // namespace draftsmith
