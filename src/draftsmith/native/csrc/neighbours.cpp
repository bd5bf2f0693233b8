// What users may know of how teams fare beside other programs.
#include "crew.h"
#include "operators.h"

namespace draftsmith {
namespace {

int64_t threads_missing() { return Crew::of_process().missing(); }
double seconds_short() { return Crew::of_process().seconds_short(); }

}  // namespace

void define_neighbours(Library& library) {
  library.def_without_tensors<threads_missing>("threads_missing() -> int");
  library.def_without_tensors<seconds_short>("seconds_short() -> float");
}

}  // namespace draftsmith
