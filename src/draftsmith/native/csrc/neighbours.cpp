// What users may know of how teams fare beside other programs.
#include <torch/library.h>

#include "crew.h"

namespace draftsmith {
namespace {

int64_t threads_missing() { return Crew::of_process().missing(); }
double seconds_short() { return Crew::of_process().seconds_short(); }

}  // namespace
}  // namespace draftsmith

TORCH_LIBRARY_FRAGMENT(draftsmith, library) {
  library.def("threads_missing() -> int", draftsmith::threads_missing);
  library.def("seconds_short() -> float", draftsmith::seconds_short);
}
