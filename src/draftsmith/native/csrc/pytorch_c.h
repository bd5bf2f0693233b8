// The part of PyTorch's stable C interface that the kernels use, declared here so that they are built without PyTorch.
//
// PyTorch declares the same in torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h, and promises to
// keep it from version to version. All of it is in PyTorch 2.11. tests/native/test_library.py compares the declarations.
#pragma once
#include <cstddef>
#include <cstdint>

struct AtenTensorOpaque;
struct StableListOpaque;
struct StringOpaque;
class TorchLibraryOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
using StableListHandle = StableListOpaque*;
using StringHandle = StringOpaque*;
using TorchLibraryHandle = TorchLibraryOpaque*;
using StableIValue = uint64_t;   // an argument or a result of an operator: itself, or a pointer to it
using AOTITorchError = int32_t;  // 0 for success

extern "C" {

int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_bool();
size_t aoti_torch_dtype_element_size(int32_t dtype);
int32_t aoti_torch_layout_strided();
int32_t aoti_torch_memory_format_contiguous_format();

// ---- tensors; a handle that a function returns is the caller's to delete

AOTITorchError aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, AtenTensorHandle* made);
AOTITorchError aoti_torch_create_tensor_from_blob_v2(void* data, int64_t ndim, const int64_t* sizes,
                                                     const int64_t* strides, int64_t storage_offset, int32_t dtype,
                                                     int32_t device_type, int32_t device_index, AtenTensorHandle* made,
                                                     int32_t layout, const uint8_t* opaque_metadata,
                                                     int64_t opaque_metadata_size);
AOTITorchError aoti_torch__reinterpret_tensor(AtenTensorHandle self, int64_t ndim, const int64_t* sizes,
                                              const int64_t* strides, int64_t storage_offset, AtenTensorHandle* made);
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle self, AtenTensorHandle* made);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* dim);
AOTITorchError aoti_torch_get_numel(AtenTensorHandle tensor, int64_t* numel);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** sizes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** strides);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* device_type);
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle tensor, bool* contiguous);
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle tensor, const void** data);
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** data);

// ---- lists and strings among arguments and results

AOTITorchError torch_new_list_reserve_size(size_t size, StableListHandle* made);
AOTITorchError torch_list_size(StableListHandle list, size_t* size);
AOTITorchError torch_list_get_item(StableListHandle list, size_t index, StableIValue* element);
AOTITorchError torch_list_push_back(StableListHandle list, StableIValue element);
AOTITorchError torch_delete_list(StableListHandle list);
AOTITorchError torch_new_string_handle(const char* data, size_t length, StringHandle* made);
AOTITorchError torch_string_length(StringHandle string, size_t* length);
AOTITorchError torch_string_c_str(StringHandle string, const char** data);
AOTITorchError torch_delete_string(StringHandle string);

// ---- operators

AOTITorchError aoti_torch_library_init_def(const char* ns, const char* file, uint32_t line, TorchLibraryHandle* made);
AOTITorchError aoti_torch_library_init_impl(const char* ns, const char* key, const char* file, uint32_t line,
                                            TorchLibraryHandle* made);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle library, const char* schema);
AOTITorchError torch_library_impl(TorchLibraryHandle library, const char* name,
                                  void (*call)(StableIValue*, uint64_t, uint64_t), uint64_t built_for);
AOTITorchError torch_call_dispatcher(const char* name, const char* overload, StableIValue* stack, uint64_t built_for);

// ---- threads

AOTITorchError torch_get_num_threads(uint32_t* threads);
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size,
                                  void (*work)(int64_t begin, int64_t end, void* context), void* context);

}  // extern "C"
