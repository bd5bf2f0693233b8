// Work that the threads of a team take piece by piece.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "team.h"

namespace draftsmith {

// Every thread has a stretch of each job, and takes pieces from its beginning; one that has done all of its own takes them
// from the ends of the others'. So nobody waits long for a thread that is slower: because its core is, because another
// program uses a part of it, or because it lost it for a moment. Who does a piece makes no difference to what comes out.
//
// Stretches only say who does what. Whatever is read and written is passed on where a team begins, meets and ends, and so
// are the stretches when they are dealt; hence the relaxed order.
class Pieces {
 public:
  struct Piece {
    int64_t first, last;
    bool goes_on;  // whether the thread will most likely take what follows

    bool is_none() const { return first == last; }
  };

  // Before a team starts: room for so many jobs and threads.
  void reserve(int64_t jobs, int64_t threads) {
    const size_t lines = (jobs + kALine - 1) / kALine;
    if (lines * threads > lines_.size()) lines_ = std::vector<Line>(lines * threads);
    lines_each_ = lines, dealt_ = 0;
  }

  // Before a team starts, and for all of its jobs: stretches for so many threads, of which it may have fewer.
  void deal_ahead(int64_t job, int64_t count, int64_t threads) {
    for (int64_t t = 0; t < threads; ++t) deal({t, threads, nullptr}, job, count);
    dealt_ = threads;
  }

  // Or every thread for itself, before a meeting of all and after nobody is busy with what was dealt before.
  void deal(const Team& team, int64_t job, int64_t count) {
    const auto [first, last] = team.share(count);
    left(team.index, job).store(held(first, last), std::memory_order_relaxed);
  }

  // The next piece of a job for this thread, of at most `most` parts; an empty one when all are taken.
  Piece take(const Team& team, int64_t job, int64_t most) {
    Piece piece = from_beginning(left(team.index, job), most);
    for (int64_t t = team.size; t < dealt_ && piece.is_none(); ++t) piece = from_beginning(left(t, job), most);
    for (int64_t beside = 1; beside < team.size && piece.is_none(); ++beside)
      piece = from_end(left((team.index + beside) % team.size, job), most);
    return piece;
  }

 private:
  static constexpr int64_t kALine = 8;  // jobs of a line of the cache, which one thread alone uses until it has done its own
  static constexpr int64_t kFew = 4;    // parts of the pieces that are taken from others, and at the end
  struct alignas(64) Line {
    std::atomic<uint64_t> left[kALine] = {};
  };

  // A stretch is one number, so that it changes all at once.
  static uint64_t held(int64_t first, int64_t last) {
    return static_cast<uint64_t>(first) << 32 | static_cast<uint64_t>(last);
  }
  static int64_t first(uint64_t held) { return static_cast<int64_t>(held >> 32); }
  static int64_t last(uint64_t held) { return static_cast<int64_t>(held & 0xffffffffu); }

  // Towards the end, pieces are smaller, so that all threads are done at about the same time.
  static int64_t size(uint64_t held, int64_t most) {
    const int64_t rest = last(held) - first(held);
    return rest >= 2 * most ? most : std::min({rest, most, std::max(most / 2, kFew)});
  }

  static Piece from_beginning(std::atomic<uint64_t>& stretch, int64_t most) {
    for (uint64_t now = stretch.load(std::memory_order_relaxed); first(now) < last(now);) {
      const int64_t end = first(now) + size(now, most);
      if (stretch.compare_exchange_weak(now, held(end, last(now)), std::memory_order_relaxed))
        return {first(now), end, end < last(now)};
    }
    return {};
  }

  static Piece from_end(std::atomic<uint64_t>& stretch, int64_t most) {
    for (uint64_t now = stretch.load(std::memory_order_relaxed); first(now) < last(now);) {
      const int64_t begin = last(now) - std::min(size(now, most), kFew);
      if (stretch.compare_exchange_weak(now, held(first(now), begin), std::memory_order_relaxed))
        return {begin, last(now), false};
    }
    return {};
  }

  // What is left of a thread's stretch of a job.
  std::atomic<uint64_t>& left(int64_t thread, int64_t job) {
    return lines_[thread * lines_each_ + job / kALine].left[job % kALine];
  }

  std::vector<Line> lines_;
  int64_t lines_each_ = 0, dealt_ = 0;
};

}  // namespace draftsmith
