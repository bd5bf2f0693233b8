// Which table of kernels this processor runs.
#include <atomic>
#include <cstring>
#include <initializer_list>

#include "kernels.h"

namespace draftsmith {
namespace {

const Kernels* best() {
  for (const Kernels* table : {amx_kernels(), avx512bf16_kernels(), avx512_kernels(), avx2_kernels()})
    if (table != nullptr) return table;
  return portable_kernels();
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> table{best()};
  return table;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

bool use_kernels(const char* name) {
  for (const Kernels* table :
       {amx_kernels(), avx512bf16_kernels(), avx512_kernels(), avx2_kernels(), portable_kernels()})
    if (table != nullptr && std::strcmp(table->name, name) == 0) {
      chosen() = table;
      return true;
    }
  return false;
}

}  // namespace draftsmith
