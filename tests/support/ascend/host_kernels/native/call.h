// One call of an operator of the device, with CPU tensors over the same memory in the place of its device tensors.

#pragma once

#include <torch/extension.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>

#include <utility>
#include <vector>

using c10::IValue;

extern "C" void *simacl_reach(const void *, size_t);  // of the simulated runtime

inline void copy_to_device(const at::Tensor &to, const at::Tensor &from) {
  size_t bytes = from.numel() * from.element_size();
  if (bytes)
    memcpy(simacl_reach(to.mutable_data_ptr(), bytes), from.const_data_ptr(), bytes);
}

// A value with every tensor in it replaced.
template <typename Replace>
IValue with_tensors(const IValue &value, const Replace &replace) {
  if (value.isTensor())
    return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor &tensor : value.toTensorVector())
      out.push_back(replace(tensor));
    return out;
  }
  if (!value.isList())
    return value;
  auto list = value.toList();
  auto type = list.elementType();
  if (type->kind() != c10::TypeKind::OptionalType || type->containedType(0)->kind() != c10::TypeKind::TensorType)
    return value;
  c10::List<std::optional<at::Tensor>> out;
  for (size_t i = 0; i < list.size(); ++i) {
    IValue item = list.get(i);
    out.push_back(item.isTensor() ? std::optional<at::Tensor>(replace(item.toTensor())) : std::nullopt);
  }
  return out;
}

struct Call {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // device tensor, CPU tensor over its memory
  std::vector<std::pair<at::Tensor, at::Tensor>> empty;  // those of them that have no memory
  c10::Device device{c10::DeviceType::CPU};
  bool on_device = false;
  bool asks_for_cpu = false;

  at::Tensor to_host(const at::Tensor &tensor) {
    if (!tensor.defined() || !tensor.is_privateuseone())
      return tensor;
    for (auto &pair : pairs)
      if (pair.first.is_same(tensor))
        return pair.second;
    on_device = true;
    device = tensor.device();
    auto storage = tensor.storage();
    size_t bytes = storage.nbytes();
    void *data = bytes ? simacl_reach(storage.mutable_data(), bytes) : nullptr;
    auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
    at::Tensor out;
    if (!data) {
      out = at::empty(tensor.sizes(), options);
      empty.emplace_back(tensor, out);
    } else {
      auto *keep = new c10::Storage(storage);
      auto drop = [](void *kept) { delete static_cast<c10::Storage *>(kept); };
      c10::DataPtr pointer(data, keep, drop, c10::Device(c10::kCPU));
      c10::Storage host(c10::Storage::use_byte_size_t(), bytes, std::move(pointer), nullptr, false);
      out = at::empty({0}, options).set_(host, tensor.storage_offset(), tensor.sizes(), tensor.strides());
    }
    pairs.emplace_back(tensor, out);
    return out;
  }

  IValue argument(const IValue &value) {
    if (value.isDevice())
      return device_argument(value.toDevice());
    if (value.isGenerator() && value.toGenerator().device().is_privateuseone())
      return IValue();
    return with_tensors(value, [this](const at::Tensor &tensor) { return to_host(tensor); });
  }

  IValue result(const IValue &value) {
    if (!value.isTensor() && !value.isTensorList())
      return value;
    return with_tensors(value, [this](const at::Tensor &tensor) { return to_device(tensor); });
  }

 private:
  c10::Device device_argument(c10::Device asked) {
    asks_for_cpu |= asked.is_cpu();
    if (!asked.is_privateuseone())
      return asked;
    on_device = true;
    auto current = c10_npu::getCurrentNPUStream().device_index();
    device = asked.has_index() ? asked : c10::Device(c10::DeviceType::PrivateUse1, current);
    return c10::Device(c10::kCPU);
  }

  at::Tensor to_device(const at::Tensor &result) {
    if (!result.defined() || !result.device().is_cpu())
      return result;
    for (auto &pair : pairs)
      if (pair.second.is_same(result))
        return pair.first;
    if (!on_device || asks_for_cpu)
      return result;
    for (auto &[tensor, host] : pairs) {  // a view of an argument
      auto *data = host.storage().data();
      bool same_memory = data && result.has_storage() && result.storage().data() == data;
      if (same_memory && tensor.scalar_type() == result.scalar_type())
        return at::as_strided(tensor, result.sizes(), result.strides(), result.storage_offset());
    }
    auto options = result.options().device(device).pinned_memory(false);
    at::Tensor dense = result.is_non_overlapping_and_dense() ? result : result.contiguous();
    at::Tensor out = at::empty_strided(dense.sizes(), dense.strides(), options);
    copy_to_device(out, dense);
    return out;
  }
};
