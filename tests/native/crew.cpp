// How many threads teams get is a function of what is told and of the clock: with a clock of its own, step by step.
#include "crew.h"

#include <cstdio>
#include <cstdlib>

using draftsmith::Crew;

namespace {

constexpr int64_t kMillisecond = 1'000'000;
int64_t now = 1'000'000 * kMillisecond;
int64_t read_clock() { return now; }

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("not so: %s\n", what);
  std::exit(1);
}

// Teams at work for 10 ms each, of which a share is taken from all their threads.
void work(Crew& crew, int times, double share, int64_t wanted = 2, int64_t size = 2) {
  for (int i = 0; i < times; ++i) {
    now += 2 * kMillisecond;
    const Crew::Call call = crew.begin(wanted);
    require(call.size == size && call.counted, "a team of several threads is counted after a millisecond");
    now += 10 * kMillisecond;
    crew.end(call, 10 * kMillisecond, static_cast<int64_t>(share * 10 * kMillisecond * size));
  }
}

// Threads are asked for in a smaller number than before, while more are missing than a team of so many has.
void lower_the_threads() {
  Crew crew(read_clock);
  for (int64_t size = 4; size > 1; --size) work(crew, 3, 0.5, 4, size);
  require(crew.missing() == 3 && crew.begin(4).size == 1, "of four threads three are missing");
  require(crew.begin(2).size == 1, "a team has a thread, however many are missing");
  // 30 ms of three threads of four, and 30 ms of two.
  require(crew.seconds_short() > 0.0599 && crew.seconds_short() < 0.0601, "larger teams were short for so long");

  now += 500 * kMillisecond;
  Crew::Call trial = crew.begin(2);
  require(trial.trial && trial.size == 2 && trial.counted, "a trial of a smaller team is larger than that team was");
  crew.end(trial, 10 * kMillisecond, 10 * kMillisecond);
  require(crew.begin(2).size == 1 && crew.begin(4).size == 1, "a trial that fails leaves all as it was");
  now += 4000 * kMillisecond;
  trial = crew.begin(2);
  require(trial.trial && trial.size == 2, "it is tried again");
  crew.end(trial, 10 * kMillisecond, 0);
  require(crew.missing() == 0 && crew.begin(2).size == 2, "one that does not fail has all threads that it wanted");
  require(crew.begin(4).size == 4, "and what a larger team lacks is found out anew");
}

}  // namespace

int main() {
  Crew crew(read_clock);
  require(crew.begin(1).size == 1 && !crew.begin(1).counted, "one thread alone has nobody to wait for");
  work(crew, 20, 0.05);
  require(crew.begin(2).counted && !crew.begin(2).counted, "teams that follow at once are not counted");
  work(crew, 2, 0.5);
  work(crew, 1, 0.0);
  work(crew, 2, 0.5);
  require(crew.missing() == 0, "a hiccup makes no team smaller");
  work(crew, 1, 0.5);
  require(crew.missing() == 1 && crew.begin(2).size == 1 && crew.begin(4).size == 3, "three times in a row do");
  const Crew::Call alone = crew.begin(2);
  require(!alone.counted && alone.told(), "what is taken from one thread is not counted, but that it was short is");
  crew.end(alone, 30 * kMillisecond, 0);

  now += 101 * kMillisecond;
  Crew::Call trial = crew.begin(2);
  require(trial.trial && trial.size == 2 && trial.counted, "a larger team is tried after a pause");
  crew.end(trial, 10 * kMillisecond, 10 * kMillisecond);
  require(crew.missing() == 1 && crew.begin(2).size == 1, "a larger team that fails is not kept");
  now += 150 * kMillisecond;
  trial = crew.begin(2);
  require(trial.trial, "the first pause comes twice");
  crew.end(trial, 10 * kMillisecond, 10 * kMillisecond);
  now += 150 * kMillisecond;
  require(crew.begin(2).size == 1, "then it doubles");
  now += 51 * kMillisecond;
  trial = crew.begin(2);
  require(trial.trial, "up to a larger team");
  crew.end(trial, 1 * kMillisecond, 0);
  require(crew.missing() == 1, "a millisecond tells nothing");
  crew.end(trial, 9 * kMillisecond, 0);
  require(crew.missing() == 0 && crew.begin(2).size == 2, "a larger team that does is kept");
  const double seconds = crew.seconds_short();
  require(seconds > 0.0299 && seconds < 0.0301, "the time that teams worked with fewer threads counts, and no pause");
  crew.end(trial, 100 * kMillisecond, 100 * kMillisecond);
  require(crew.missing() == 0, "what a trial tells after its end counts nowhere");

  work(crew, 3, 0.5);
  require(crew.missing() == 1, "neighbours come again");
  now += 101 * kMillisecond;
  require(crew.begin(2).size == 1, "soon after the last time the pause is no short one");
  lower_the_threads();
  std::printf("the crew does as it should\n");
}
