// Which table of kernels this processor runs.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "kernels.h"

namespace draftsmith {
namespace {

// Best first; null where the instructions are not here.
std::array<const Kernels*, 5> tables() {
  return {amx_kernels(), avx512bf16_kernels(), avx512_kernels(), avx2_kernels(), portable_kernels()};
}

const Kernels* best() {
  for (const Kernels* table : tables())
    if (table != nullptr) return table;
  return nullptr;  // the portable one is always there
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> table{best()};
  return table;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

bool use_kernels(const char* name) {
  for (const Kernels* table : tables())
    if (table != nullptr && std::strcmp(table->name, name) == 0) {
      chosen() = table;
      return true;
    }
  return false;
}

int64_t attention_room(int64_t queries, int64_t places, int64_t width, int64_t value_width) {
  int64_t room = 0;
  for (const Kernels* table : tables())
    if (table != nullptr) room = std::max(room, table->attention_room(queries, places, width, value_width));
  return room;
}

}  // namespace draftsmith
