#include "crew.h"

#include <time.h>

#include <algorithm>
#include <chrono>

namespace draftsmith {
namespace {

constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kBetween = kMillisecond;     // teams are counted no oftener
constexpr int64_t kEnough = 6 * kMillisecond;  // of a team's time tell whether much is taken from it
constexpr double kMuch = 0.1;                  // of that time
constexpr int64_t kBad = 3;                    // times in a row it has to be much: a hiccup makes no team smaller
// A larger team is tried after a pause that doubles each time it fails.
constexpr int64_t kFirstPause = 100 * kMillisecond, kLongestPause = 4000 * kMillisecond;

}  // namespace

Crew& Crew::of_process() {
  static Crew crew;
  return crew;
}

Crew::Call Crew::begin(int64_t wanted) {
  if (wanted <= 1) return {wanted, wanted, false, false};
  const std::lock_guard<std::mutex> alone(busy_);
  const int64_t now = clock_();
  if (missing_ > 0 && !trying_ && now >= until_ns_) {
    trying_ = true;
    wall_ns_ = taken_ns_ = 0;
  }
  // Teams may have been larger when threads went missing: one that lacks all but one of its threads can lack no more,
  // and a trial always gives it one back.
  const int64_t missing = std::min(missing_, wanted - 1);
  const int64_t size = wanted - std::max<int64_t>(0, missing - trying_);
  const bool counted = size > 1 && (trying_ || now - counted_ns_ >= kBetween);
  if (counted) counted_ns_ = now;
  return {wanted, size, counted, trying_};
}

void Crew::end(const Call& call, int64_t wall_ns, int64_t taken_ns) {
  const std::lock_guard<std::mutex> alone(busy_);
  if (call.size < call.wanted) short_ns_ += wall_ns;
  if (!call.counted) return;
  if (call.trial != trying_) return;  // what another team has found out meanwhile is newer
  wall_ns_ += wall_ns * call.size;
  taken_ns_ += taken_ns;
  if (wall_ns_ < kEnough * call.size) return;
  const bool much = static_cast<double>(taken_ns_) > kMuch * static_cast<double>(wall_ns_);
  const int64_t now = clock_();
  wall_ns_ = taken_ns_ = 0;
  if (call.trial) {
    trying_ = false;
    if (much) {
      until_ns_ = now + pause_ns_;
      pause_ns_ = std::min(2 * pause_ns_, kLongestPause);
    } else {
      missing_ = call.wanted - call.size;
    }
    return;
  }
  bad_ = much ? bad_ + 1 : 0;
  if (bad_ < kBad) return;
  bad_ = 0;
  // Soon again after a larger team had seemed to do: it is tried less often.
  const bool again = now - until_ns_ < kLongestPause;
  pause_ns_ = again ? std::min(2 * pause_ns_, kLongestPause) : kFirstPause;
  until_ns_ = now + pause_ns_;
  missing_ = call.wanted - call.size + 1;
}

int64_t Crew::missing() const {
  const std::lock_guard<std::mutex> alone(busy_);
  return missing_;
}

double Crew::seconds_short() const {
  const std::lock_guard<std::mutex> alone(busy_);
  return 1e-9 * static_cast<double>(short_ns_);
}

int64_t Crew::now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int64_t Crew::own_ns() {
#ifdef CLOCK_THREAD_CPUTIME_ID
  timespec time{};
  if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) == 0) return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
#endif
  return -1;
}

}  // namespace draftsmith
