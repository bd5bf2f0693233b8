// Registers the operators `torch.ops.draftsmith.*`.
#include "operators.h"

#include "objects.h"

// Returns what went wrong, or null. Called once, by native/library.py.
extern "C" __attribute__((visibility("default"))) const char* draftsmith_register() {
  using namespace draftsmith;
  static std::string wrong;
  try {
    Library library;
    define_layers(library);
    define_int4(library);
    define_experts(library);
    define_decoder(library);
    define_features(library);
    define_heads(library);
    define_speculator(library);
    define_steps(library);
    define_ngrams(library);
    define_sampling(library);
    define_refusals(library);
    define_block(library);
    define_drawing(library);
    define_neighbours(library);
    library.def_without_tensors<forget>("forget(int number) -> ()");
  } catch (const std::exception& error) {
    wrong = error.what();
    return wrong.c_str();
  }
  return nullptr;
}
