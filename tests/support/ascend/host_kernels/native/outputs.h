// What an operator will return, before it has run: the tensors that it writes in place, and new ones whose shapes its
// meta kernel tells.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "call.h"

// Operators whose meta kernel is missing, or needs data: they run at once.
class WithoutShapes {
 public:
  bool has(const c10::OperatorName &name) {
    std::lock_guard<std::mutex> guard(lock_);
    return names_.count(name) > 0;
  }
  void add(const c10::OperatorName &name) {
    std::lock_guard<std::mutex> guard(lock_);
    names_.insert(name);
  }

 private:
  std::mutex lock_;
  std::unordered_set<c10::OperatorName> names_;
};

// Return values that are arguments, though their operator's schema does not say so: by its name, return value to
// argument. Filled before any operator runs.
inline std::unordered_map<std::string, std::unordered_map<size_t, size_t>> &undeclared_aliases() {
  static auto *aliases = new std::unordered_map<std::string, std::unordered_map<size_t, size_t>>;
  return *aliases;
}

// The argument that return value `index` is, if the operator writes it in place.
inline std::optional<size_t> written_argument(const c10::FunctionSchema &schema, size_t index) {
  auto undeclared = undeclared_aliases().find(schema.name());
  if (undeclared != undeclared_aliases().end() && undeclared->second.count(index))
    return undeclared->second.at(index);
  auto *alias = schema.returns()[index].alias_info();
  if (!alias || !alias->isWrite())
    return std::nullopt;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto *other = schema.arguments()[i].alias_info();
    if (other && other->beforeSet() == alias->beforeSet())
      return i;
  }
  return std::nullopt;
}

inline at::Tensor on_meta(const at::Tensor &tensor) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0))  // a number takes part in type promotion as it is
    return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
}

inline std::vector<IValue> results_on_meta(const c10::OperatorHandle &op, const std::vector<IValue> &arguments) {
  torch::jit::Stack stack;
  for (const IValue &value : arguments) {
    if (value.isDevice())
      stack.emplace_back(c10::Device(at::kMeta));
    else if (value.isGenerator())
      stack.emplace_back();
    else
      stack.push_back(with_tensors(value, on_meta));
  }
  op.callBoxed(stack);
  return stack;
}

// Whether all that the operator returns can be named in advance: tensors, and none of them a view of an argument.
inline bool returns_only_tensors(const c10::FunctionSchema &schema) {
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (schema.returns()[i].type()->kind() != c10::TypeKind::TensorType)
      return false;
    if (schema.returns()[i].alias_info() && !written_argument(schema, i))
      return false;
  }
  return true;
}

// Device tensors for everything that `op` returns; nothing if only running it can tell.
inline std::optional<std::vector<at::Tensor>> expected_outputs(const c10::OperatorHandle &op, c10::Device device,
                                                               const std::vector<IValue> &arguments) {
  static auto *without_shapes = new WithoutShapes;
  const auto &schema = op.schema();
  std::vector<at::Tensor> outputs;
  std::vector<IValue> shapes;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (auto written = written_argument(schema, i)) {
      outputs.push_back(arguments[*written].toTensor());
      continue;
    }
    if (shapes.empty()) {
      if (without_shapes->has(op.operator_name()))
        return std::nullopt;
      try {
        shapes = results_on_meta(op, arguments);
      } catch (const std::exception &) {
        without_shapes->add(op.operator_name());
        return std::nullopt;
      }
    }
    const at::Tensor &shape = shapes.at(i).toTensor();
    if (!shape.defined() || !shape.is_meta())
      return std::nullopt;
    outputs.push_back(at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device)));
  }
  return outputs;
}
