// How many threads a team has while other programs want the processor too.
#pragma once
#include <cstdint>
#include <mutex>

namespace draftsmith {

// A thread that loses its processor to another program keeps its whole team waiting at the next meeting, so that two
// threads beside one busy program may do a tenth of what one does alone. The crew counts the time that is taken from
// teams, makes them a thread smaller while it is much, and tries a larger one now and then. Results do not depend on
// the size of a team.
class Crew {
 public:
  // A team that begins: its size, and whether the time taken from it is counted, at a system call or two a thread.
  struct Call {
    int64_t wanted, size;
    bool counted, trial;

    // Whether `end` wants to hear of it.
    bool told() const { return counted || size < wanted; }
  };

  using Clock = int64_t (*)();  // nanoseconds

  explicit Crew(Clock clock = now_ns) : clock_(clock) {}

  // The one of this process: all its teams have the same neighbours.
  static Crew& of_process();

  Call begin(int64_t wanted);

  // What was taken from the threads of a team, in all, while it worked for `wall_ns`. A team that is neither counted
  // nor short of threads need not tell.
  void end(const Call& call, int64_t wall_ns, int64_t taken_ns);

  // Threads that teams are short of now, and the seconds for which teams worked that were short of some.
  int64_t missing() const;
  double seconds_short() const;

  static int64_t now_ns();
  // Processor time of the calling thread; -1 where the system does not tell.
  static int64_t own_ns();

 private:
  const Clock clock_;
  mutable std::mutex busy_;
  int64_t counted_ns_ = 0;             // when a team was counted last
  int64_t wall_ns_ = 0, taken_ns_ = 0;  // of all threads counted since the last judgement
  int64_t missing_ = 0, bad_ = 0;
  int64_t until_ns_ = 0, pause_ns_ = 0;  // a larger team is tried then, and the pause before the next one
  int64_t short_ns_ = 0;
  bool trying_ = false;
};

}  // namespace draftsmith
