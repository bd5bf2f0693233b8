// What lives from one call of an operator to the next: Python holds such objects by number.
#pragma once
#include <cstdint>
#include <memory>

#include "pytorch.h"

namespace draftsmith {

class Object {
 public:
  virtual ~Object() = default;
};

// Returns the number of the object, which no other ever has.
int64_t keep(std::shared_ptr<Object> object);
// Raises where there is no such object.
std::shared_ptr<Object> kept_object(int64_t number);
// Lets the object go as soon as nobody works with it any more.
void forget(int64_t number);

template <class T>
std::shared_ptr<T> kept(int64_t number) {
  std::shared_ptr<T> object = std::dynamic_pointer_cast<T>(kept_object(number));
  REQUIRE(object != nullptr, "draftsmith: object ", number, " is of another kind");
  return object;
}

}  // namespace draftsmith
