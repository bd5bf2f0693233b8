// PyTorch as the kernels see it: tensors, operators and threads, by its stable C interface alone.
//
// What is compiled here runs under every PyTorch from 2.11 on and under every Python: it knows neither PyTorch's C++
// classes, which change with every version, nor Python. Names are those of PyTorch's own C++.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <exception>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels.h"
#include "pytorch_c.h"

namespace draftsmith {

// The version whose interface this is, as PyTorch counts: 2.11.
constexpr uint64_t kBuiltFor = uint64_t{2} << 56 | uint64_t{11} << 48;

// ---- what is wrong

template <class... Parts>
std::string joined(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// RuntimeError and IndexError in Python.
#define REQUIRE(ok, ...)                                                     \
  do {                                                                       \
    if (!(ok)) throw std::runtime_error(::draftsmith::joined(__VA_ARGS__)); \
  } while (false)
#define REQUIRE_INDEX(ok, ...)                                              \
  do {                                                                      \
    if (!(ok)) throw std::out_of_range(::draftsmith::joined(__VA_ARGS__)); \
  } while (false)

// PyTorch has then written to the standard error what went wrong.
inline void succeed(AOTITorchError error) { REQUIRE(error == 0, "draftsmith: a call of PyTorch failed"); }

// ---- tensors

// PyTorch's numbers for dtypes may change; these are the ones of the PyTorch that is loaded.
inline const int32_t kBFloat16 = aoti_torch_dtype_bfloat16(), kFloat = aoti_torch_dtype_float32(),
                     kDouble = aoti_torch_dtype_float64(), kChar = aoti_torch_dtype_int8(), kByte = aoti_torch_dtype_uint8(),
                     kInt = aoti_torch_dtype_int32(), kLong = aoti_torch_dtype_int64(), kBool = aoti_torch_dtype_bool();

inline const char* name_of(int32_t dtype) {
  const std::pair<int32_t, const char*> names[] = {{kBFloat16, "bfloat16"}, {kFloat, "float32"}, {kDouble, "float64"},
                                                   {kChar, "int8"},         {kInt, "int32"},     {kLong, "int64"},
                                                   {kBool, "bool"},         {kByte, "uint8"}};
  for (const auto& [number, name] : names)
    if (number == dtype) return name;
  return "another dtype";
}

// The dtype of the values that a pointer points to.
template <class T>
int32_t dtype_of() {
  static_assert(std::is_same_v<T, bf16> || std::is_same_v<T, float> || std::is_same_v<T, double> ||
                std::is_same_v<T, int8_t> || std::is_same_v<T, int32_t> || std::is_same_v<T, int64_t> ||
                std::is_same_v<T, uint8_t> || std::is_same_v<T, bool>);
  if (std::is_same_v<T, bf16>) return kBFloat16;
  if (std::is_same_v<T, float>) return kFloat;
  if (std::is_same_v<T, double>) return kDouble;
  if (std::is_same_v<T, int8_t>) return kChar;
  if (std::is_same_v<T, uint8_t>) return kByte;
  if (std::is_same_v<T, int32_t>) return kInt;
  return std::is_same_v<T, int64_t> ? kLong : kBool;
}

// Sizes or strides, which belong to another: a tensor, or whatever they were made from.
class Sizes {
 public:
  Sizes(const int64_t* data, int64_t count) : data_(data), count_(count) {}
  Sizes(std::initializer_list<int64_t> sizes) : Sizes(sizes.begin(), static_cast<int64_t>(sizes.size())) {}
  Sizes(const std::vector<int64_t>& sizes) : Sizes(sizes.data(), static_cast<int64_t>(sizes.size())) {}

  const int64_t* data() const { return data_; }
  const int64_t* begin() const { return data_; }
  const int64_t* end() const { return data_ + count_; }
  int64_t size() const { return count_; }
  std::vector<int64_t> vec() const { return {begin(), end()}; }
  int64_t product() const {
    int64_t product = 1;
    for (const int64_t size : *this) product *= size;
    return product;
  }
  std::vector<int64_t> contiguous_strides() const {
    std::vector<int64_t> strides(count_, 1);
    for (int64_t d = count_ - 1; d > 0; --d) strides[d - 1] = strides[d] * std::max<int64_t>(data_[d], 1);
    return strides;
  }

  friend bool operator==(const Sizes& a, const Sizes& b) {
    return a.count_ == b.count_ && std::equal(a.begin(), a.end(), b.begin());
  }
  friend std::ostream& operator<<(std::ostream& to, const Sizes& sizes) {
    to << '[';
    for (int64_t d = 0; d < sizes.count_; ++d) to << (d ? ", " : "") << sizes.data_[d];
    return to << ']';
  }

 private:
  const int64_t* data_;
  int64_t count_;
};

class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle owned) : handle_(owned) {}
  Tensor(const Tensor& other) {
    if (other.handle_ != nullptr) succeed(aoti_torch_new_tensor_handle(other.handle_, &handle_));
  }
  Tensor(Tensor&& other) noexcept : handle_(other.release()) {}
  Tensor& operator=(Tensor other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  AtenTensorHandle get() const { return handle_; }
  // Gives the handle away, to be deleted elsewhere.
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
  bool defined() const { return handle_ != nullptr; }

  int64_t dim() const {
    int64_t dim;
    succeed(aoti_torch_get_dim(handle_, &dim));
    return dim;
  }
  int64_t numel() const {
    int64_t numel;
    succeed(aoti_torch_get_numel(handle_, &numel));
    return numel;
  }
  Sizes sizes() const {
    int64_t* sizes;
    succeed(aoti_torch_get_sizes(handle_, &sizes));
    return {sizes, dim()};
  }
  Sizes strides() const {
    int64_t* strides;
    succeed(aoti_torch_get_strides(handle_, &strides));
    return {strides, dim()};
  }
  int64_t size(int64_t d) const { return at(sizes(), d); }
  int64_t stride(int64_t d) const { return at(strides(), d); }
  int32_t scalar_type() const {
    int32_t dtype;
    succeed(aoti_torch_get_dtype(handle_, &dtype));
    return dtype;
  }
  int64_t element_size() const { return static_cast<int64_t>(aoti_torch_dtype_element_size(scalar_type())); }
  bool is_cpu() const {
    static const int32_t cpu = aoti_torch_device_type_cpu();
    int32_t device;
    succeed(aoti_torch_get_device_type(handle_, &device));
    return device == cpu;
  }
  bool is_contiguous() const {
    bool contiguous;
    succeed(aoti_torch_is_contiguous(handle_, &contiguous));
    return contiguous;
  }

  template <class T>
  const T* const_data_ptr() const {
    check_dtype(dtype_of<T>());
    const void* data;
    succeed(torch_get_const_data_ptr(handle_, &data));
    return static_cast<const T*>(data);
  }
  template <class T>
  T* mutable_data_ptr() const {
    check_dtype(dtype_of<T>());
    return static_cast<T*>(mutable_data());
  }
  void* mutable_data() const {
    void* data;
    succeed(torch_get_mutable_data_ptr(handle_, &data));
    return data;
  }

  // The same memory from value `offset` on, in contiguous values of other sizes.
  Tensor piece(int64_t offset, const Sizes& sizes) const {
    AtenTensorHandle made;
    succeed(aoti_torch__reinterpret_tensor(handle_, sizes.size(), sizes.data(), sizes.contiguous_strides().data(),
                                           offset, &made));
    return Tensor(made);
  }
  // Entry `index` along the first dimension of a contiguous tensor.
  Tensor operator[](int64_t index) const {
    const Sizes sizes = this->sizes();
    const Sizes rest(sizes.data() + 1, sizes.size() - 1);
    REQUIRE_INDEX(index >= 0 && index < sizes.data()[0], "draftsmith: a tensor of ", sizes, " has no entry ", index);
    return piece(index * rest.product(), rest);
  }

  Tensor contiguous() const;
  Tensor to(int32_t dtype) const;

 private:
  static int64_t at(const Sizes& values, int64_t d) {
    const int64_t place = d < 0 ? d + values.size() : d;
    REQUIRE_INDEX(place >= 0 && place < values.size(), "draftsmith: a tensor of ", values.size(),
                  " dimensions has no dimension ", d);
    return values.data()[place];
  }
  void check_dtype(int32_t dtype) const {
    const int32_t own = scalar_type();
    REQUIRE(own == dtype, "draftsmith: a tensor has to be ", name_of(dtype), ", and is ", name_of(own));
  }

  AtenTensorHandle handle_ = nullptr;
};

using Tensors = std::vector<Tensor>;

inline Tensor empty(const Sizes& sizes, int32_t dtype) {
  static const int32_t cpu = aoti_torch_device_type_cpu();
  AtenTensorHandle made;
  succeed(
      aoti_torch_empty_strided(sizes.size(), sizes.data(), sizes.contiguous_strides().data(), dtype, cpu, 0, &made));
  return Tensor(made);
}

template <class T>
Tensor full(const Sizes& sizes, T value) {
  Tensor tensor = empty(sizes, dtype_of<T>());
  std::fill_n(tensor.mutable_data_ptr<T>(), tensor.numel(), value);
  return tensor;
}

// A tensor over memory of another, which has to outlive it.
inline Tensor over(std::vector<float>& values) {
  static const int32_t cpu = aoti_torch_device_type_cpu(), strided = aoti_torch_layout_strided();
  const int64_t size = static_cast<int64_t>(values.size()), stride = 1;
  AtenTensorHandle made;
  succeed(aoti_torch_create_tensor_from_blob_v2(values.data(), 1, &size, &stride, 0, kFloat, cpu, 0, &made, strided,
                                                nullptr, 0));
  return Tensor(made);
}

// ---- arguments and results of operators

// How a value crosses the interface. `take` makes what comes across the caller's own; `give` hands it over.
template <class T>
struct Value;

template <>
struct Value<int64_t> {
  static int64_t take(StableIValue value) { return static_cast<int64_t>(value); }
  static StableIValue give(int64_t value) { return static_cast<StableIValue>(value); }
};

template <>
struct Value<double> {
  static double take(StableIValue value) { return std::bit_cast<double>(value); }
  static StableIValue give(double value) { return std::bit_cast<StableIValue>(value); }
};

template <>
struct Value<bool> {
  static bool take(StableIValue value) { return value != 0; }
  static StableIValue give(bool value) { return value; }
};

template <class T>
StableIValue pointer_value(T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

template <class T>
T* value_pointer(StableIValue value) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(value));
}

template <>
struct Value<Tensor> {
  static Tensor take(StableIValue value) { return Tensor(value_pointer<AtenTensorOpaque>(value)); }
  static StableIValue give(Tensor tensor) { return pointer_value(tensor.release()); }
};

template <class T>
struct Value<std::optional<T>> {
  static std::optional<T> take(StableIValue value) {
    const std::unique_ptr<StableIValue> held(value_pointer<StableIValue>(value));
    return held == nullptr ? std::optional<T>() : Value<T>::take(*held);
  }
  static StableIValue give(std::optional<T> value) {
    return value.has_value() ? pointer_value(new StableIValue(Value<T>::give(std::move(*value)))) : 0;
  }
};

template <class T>
struct Value<std::vector<T>> {
  static std::vector<T> take(StableIValue value) {
    const std::unique_ptr<StableListOpaque, AOTITorchError (*)(StableListHandle)> list(
        value_pointer<StableListOpaque>(value), torch_delete_list);
    size_t size;
    succeed(torch_list_size(list.get(), &size));
    std::vector<T> values;
    values.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue element;
      succeed(torch_list_get_item(list.get(), i, &element));
      values.push_back(Value<T>::take(element));
    }
    return values;
  }
  static StableIValue give(std::vector<T> values) {
    StableListHandle list;
    succeed(torch_new_list_reserve_size(values.size(), &list));
    for (T& value : values) succeed(torch_list_push_back(list, Value<T>::give(std::move(value))));
    return pointer_value(list);
  }
};

template <>
struct Value<std::string> {
  static std::string take(StableIValue value) {
    const std::unique_ptr<StringOpaque, AOTITorchError (*)(StringHandle)> string(value_pointer<StringOpaque>(value),
                                                                                torch_delete_string);
    size_t length;
    const char* data;
    succeed(torch_string_length(string.get(), &length)), succeed(torch_string_c_str(string.get(), &data));
    return {data, length};
  }
  static StableIValue give(const std::string& text) {
    StringHandle string;
    succeed(torch_new_string_handle(text.data(), text.size(), &string));
    return pointer_value(string);
  }
};

// Results lie where arguments lay.
template <class T>
void give_all(StableIValue* stack, T result) {
  *stack = Value<T>::give(std::move(result));
}
template <class... Ts>
void give_all(StableIValue* stack, std::tuple<Ts...> results) {
  std::apply([&](Ts&... each) { ((*stack++ = Value<Ts>::give(std::move(each))), ...); }, results);
}

// A function as PyTorch calls it: arguments are on the stack in order, and are the function's own.
template <auto function>
struct Boxed;

template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct Boxed<function> {
  static void call(StableIValue* stack, uint64_t arguments, uint64_t results) {
    constexpr uint64_t kResults = count_results(static_cast<std::type_identity<Result>*>(nullptr));
    REQUIRE(arguments == sizeof...(Arguments) && results == kResults,
            "draftsmith: the schema of an operator does not fit its function");
    std::tuple<std::decay_t<Arguments>...> own = take_all(stack, std::index_sequence_for<Arguments...>());
    if constexpr (std::is_void_v<Result>)
      std::apply(function, std::move(own));
    else
      give_all(stack, std::apply(function, std::move(own)));
  }

 private:
  template <size_t... places>
  static std::tuple<std::decay_t<Arguments>...> take_all(const StableIValue* stack, std::index_sequence<places...>) {
    return {Value<std::decay_t<Arguments>>::take(stack[places])...};
  }
  static constexpr uint64_t count_results(std::type_identity<void>*) { return 0; }
  template <class T>
  static constexpr uint64_t count_results(std::type_identity<T>*) {
    return 1;
  }
  template <class... Ts>
  static constexpr uint64_t count_results(std::type_identity<std::tuple<Ts...>>*) {
    return sizeof...(Ts);
  }
};

// Calls an operator of PyTorch that returns one tensor.
template <class... Arguments>
Tensor call(const char* name, const char* overload, Arguments... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{Value<Arguments>::give(std::move(arguments))...};
  succeed(torch_call_dispatcher(name, overload, stack.data(), kBuiltFor));
  return Value<Tensor>::take(stack[0]);
}

inline Tensor Tensor::contiguous() const {
  if (is_contiguous()) return *this;
  static const int64_t format = aoti_torch_memory_format_contiguous_format();
  return call("aten::contiguous", "", *this, format);
}

inline Tensor Tensor::to(int32_t dtype) const {
  if (scalar_type() == dtype) return *this;
  return call("aten::to", "dtype", *this, static_cast<int64_t>(dtype), false, false,
              std::optional<int64_t>());  // neither without waiting nor always a copy; the memory format stays
}

// Where operators are registered; what is registered stays as long as the process.
class Library {
 public:
  Library() {
    succeed(aoti_torch_library_init_def("draftsmith", __FILE__, __LINE__, &definitions_));
    succeed(aoti_torch_library_init_impl("draftsmith", "CPU", __FILE__, __LINE__, &on_cpus_));
    succeed(aoti_torch_library_init_impl("draftsmith", "CompositeExplicitAutograd", __FILE__, __LINE__, &anywhere_));
  }

  // An operator over tensors.
  template <auto function>
  void def(const std::string& schema) {
    def(on_cpus_, schema, Boxed<function>::call);
  }
  // One that is given no tensor.
  template <auto function>
  void def_without_tensors(const std::string& schema) {
    def(anywhere_, schema, Boxed<function>::call);
  }

 private:
  void def(TorchLibraryHandle where, const std::string& schema, void (*call)(StableIValue*, uint64_t, uint64_t)) {
    succeed(aoti_torch_library_def(definitions_, schema.c_str()));
    succeed(torch_library_impl(where, schema.substr(0, schema.find('(')).c_str(), call, kBuiltFor));
  }

  TorchLibraryHandle definitions_, on_cpus_, anywhere_;
};

// ---- threads

inline int64_t get_num_threads() {
  uint32_t threads;
  succeed(torch_get_num_threads(&threads));
  return threads;
}

// work(begin, end) over stretches of `grain` or more, on PyTorch's threads. What one of them throws is thrown here.
template <class Work>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Work& work) {
  struct Shared {
    const Work& work;
    std::mutex one;
    std::exception_ptr thrown;
  } shared{work, {}, nullptr};
  const auto run = [](int64_t first, int64_t last, void* context) {
    Shared& shared = *static_cast<Shared*>(context);
    try {
      shared.work(first, last);
    } catch (...) {
      const std::lock_guard<std::mutex> alone(shared.one);
      if (shared.thrown == nullptr) shared.thrown = std::current_exception();
    }
  };
  succeed(torch_parallel_for(begin, end, grain, run, &shared));
  if (shared.thrown != nullptr) std::rethrow_exception(shared.thrown);
}

}  // namespace draftsmith
