#include "objects.h"

#include <map>
#include <mutex>

namespace draftsmith {
namespace {

struct Objects {
  std::mutex one;
  int64_t given = 0;
  std::map<int64_t, std::shared_ptr<Object>> by_number;
};

// Never taken down: PyTorch, which the objects' tensors belong to, may be gone by then.
Objects& objects() {
  static Objects* all = new Objects;
  return *all;
}

}  // namespace

int64_t keep(std::shared_ptr<Object> object) {
  const std::lock_guard<std::mutex> alone(objects().one);
  objects().by_number.emplace(++objects().given, std::move(object));
  return objects().given;
}

std::shared_ptr<Object> kept_object(int64_t number) {
  const std::lock_guard<std::mutex> alone(objects().one);
  const auto found = objects().by_number.find(number);
  REQUIRE(found != objects().by_number.end(), "draftsmith: there is no object ", number);
  return found->second;
}

void forget(int64_t number) {
  std::shared_ptr<Object> object;  // its memory is given back when the others may go on
  const std::lock_guard<std::mutex> alone(objects().one);
  const auto found = objects().by_number.find(number);
  if (found == objects().by_number.end()) return;
  object = std::move(found->second);
  objects().by_number.erase(found);
}

}  // namespace draftsmith
