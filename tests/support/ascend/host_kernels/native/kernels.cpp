// Kernels of the simulated NPU, executed on the host. Every operator that torch_npu registers for the device becomes
// PyTorch's CPU operator over CPU tensors that alias device memory; what it returns becomes a device tensor again.
//
// Kernels are queued on the stream that they are launched on, like those of a device, and run on the stream's thread:
// whoever reads their results without waiting reads what was there before. Only what no one can know in advance waits
// for its stream and runs at once: results that are no tensors, shapes that depend on data, tensors of the host that
// are written. SIMACL_QUEUED=0 lets every kernel wait and run at once. Copies between host and device stay torch_npu's.
//
//     install(names)    replace the kernels of these operators ("aten::add.Tensor", "npu::npu_rms_norm", ...)
//     returns_arguments(name, aliases)   return values of an operator that are arguments, where its schema does not say
//     alias(tensor)     a CPU tensor over a device tensor's memory, once the current stream has done its work
//     view(tensor)      the same, without waiting: for use in what is launched
//     launch(function)  call a Python function on the current stream
//     slow_down(seconds)   how long each kernel takes at least that this thread launches from now on
//     handle(stream, device, type)   the runtime's handle of a stream, once all given to streams has been handed to it
//     reach(address, size)   the address at which the host reaches device memory
//
// SIMACL_TRACE=1 prints the name of each operator when it first runs, and whether it was queued.

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>

#include "outputs.h"
#include "queue.h"

namespace {

bool is_set(const char *name, bool otherwise) {
  const char *value = getenv(name);
  return value && *value ? strcmp(value, "0") != 0 : otherwise;
}

const bool trace = is_set("SIMACL_TRACE", false);
const bool queued = is_set("SIMACL_QUEUED", true);

// torch_npu's own kernels, where they are still called.
std::unordered_map<std::string, c10::SafeKernelFunction> originals;

std::string full_name(const c10::FunctionSchema &schema) {
  return schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
}

void say(const c10::FunctionSchema &schema, const char *how) {
  static std::mutex lock;
  static std::unordered_set<std::string> said;
  std::lock_guard<std::mutex> guard(lock);
  auto line = full_name(schema) + how;
  if (said.insert(line).second)
    fprintf(stderr, "host kernels: %s\n", line.c_str());
}

void run_at_once(const c10::OperatorHandle &op, Call &call, std::vector<IValue> arguments, torch::jit::Stack *stack) {
  await_stream();
  for (auto &value : arguments)
    stack->push_back(std::move(value));
  op.callBoxed(stack);
  auto results = torch::jit::pop(*stack, op.schema().returns().size());
  for (auto &[tensor, host] : call.empty)
    if (host.numel()) {  // an empty out= tensor that the operator has resized
      tensor.resize_(host.sizes());
      copy_to_device(tensor, host.contiguous());
    }
  for (auto &value : results)
    stack->push_back(call.result(value));
}

// Whether a tensor of the host is written. Its owner may look at it at once.
bool writes_host(const c10::FunctionSchema &schema, const std::vector<IValue> &arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto *alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite() && arguments[i].isTensor() && arguments[i].toTensor().is_cpu())
      return true;
  }
  return false;
}

// An argument for later: the host's tensors with the bytes that they have now, because their owner may change them at
// once. Numbers, which PyTorch wraps in tensors that promote types otherwise, have no owner.
IValue kept(const IValue &value, const IValue &given, Call &call) {
  if (!given.isTensor() && !given.isTensorList() && !given.isList())
    return value;
  return with_tensors(given, [&call](const at::Tensor &tensor) {
    if (!tensor.defined() || !tensor.is_cpu())
      return call.to_host(tensor);
    return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
  });
}

void put(const at::Tensor &result, const at::Tensor &place) {
  if (result.is_same(place))
    return;
  if (result.sizes() != place.sizes() || result.scalar_type() != place.scalar_type())
    throw std::runtime_error(c10::str("it gives ", result.sizes(), " of ", result.scalar_type(), ", and its meta kernel ",
                                      "told ", place.sizes(), " of ", place.scalar_type()));
  place.copy_(result);
}

// True if the operator was queued, and its results are on the stack.
bool run_later(const c10::OperatorHandle &op, Call &call, const std::vector<IValue> &given,
               const std::vector<IValue> &arguments, torch::jit::Stack *stack) {
  const auto &schema = op.schema();
  if (!queued || !call.on_device || call.asks_for_cpu || !call.empty.empty() || !returns_only_tensors(schema) ||
      writes_host(schema, given))
    return false;
  auto outputs = expected_outputs(op, call.device, given);
  if (!outputs)
    return false;
  std::vector<at::Tensor> places;
  for (auto &output : *outputs)
    places.push_back(call.to_host(output));
  torch::jit::Stack inputs;
  for (size_t i = 0; i < arguments.size(); ++i)
    inputs.push_back(kept(arguments[i], given[i], call));
  launch(full_name(schema), [op, inputs, places]() {
    c10::InferenceMode guard;
    torch::jit::Stack values = inputs;
    op.callBoxed(values);
    for (size_t i = 0; i < places.size(); ++i)
      if (places[i].numel())
        put(values.at(i).toTensor(), places[i]);
  });
  for (auto &output : *outputs)
    stack->push_back(output);
  return true;
}

void host_kernel(const c10::OperatorHandle &op, c10::DispatchKeySet, torch::jit::Stack *stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  Call call;
  auto given = torch::jit::pop(*stack, op.schema().arguments().size());
  std::vector<IValue> arguments;
  for (const auto &value : given)
    arguments.push_back(call.argument(value));
  bool later = run_later(op, call, given, arguments, stack);
  if (trace)
    say(op.schema(), later ? ": queued" : ": at once");
  if (!later)
    run_at_once(op, call, std::move(arguments), stack);
}

// Contiguous copies between host and device stay torch_npu's own: aclrtMemcpyAsync on the simulated stream.
void copy_kernel(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
  auto &self = (*stack)[stack->size() - 3].toTensor();
  auto &source = (*stack)[stack->size() - 2].toTensor();
  bool plain = self.scalar_type() == source.scalar_type() && self.sizes() == source.sizes() &&
               self.is_contiguous() && source.is_contiguous();
  auto own = originals.find(op.schema().name());
  if (plain && self.numel() && own != originals.end())
    own->second.callBoxed(op, keys, stack);
  else
    host_kernel(op, keys, stack);
}

at::Tensor to_copy(const at::Tensor &self, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                   std::optional<at::Device> device, std::optional<bool> pin, bool non_blocking,
                   std::optional<at::MemoryFormat> format) {
  // As PyTorch's own: into other memory of the host, the copy would not return before it is done.
  bool to_host_later = non_blocking && self.is_privateuseone() && device && device->is_cpu();
  auto options = at::TensorOptions()
                     .dtype(dtype.value_or(self.scalar_type()))
                     .device(device.value_or(self.device()))
                     .pinned_memory(pin.value_or(to_host_later));
  at::Tensor source = self;
  if (options.dtype() != self.dtype() && !self.is_privateuseone())
    source = self.to(dtype.value());
  bool keep_strides = source.is_non_overlapping_and_dense() &&
                      format.value_or(at::MemoryFormat::Preserve) == at::MemoryFormat::Preserve;
  at::Tensor out = keep_strides ? at::empty_strided(source.sizes(), source.strides(), options)
                                : at::empty(source.sizes(), options);
  out.copy_(source, non_blocking);
  return out;
}

torch::Library &library(const std::string &space) {
  static std::unordered_map<std::string, std::unique_ptr<torch::Library>> made;
  auto &found = made[space];
  if (!found)
    found = std::make_unique<torch::Library>(torch::Library::IMPL, space, c10::DispatchKey::PrivateUse1, __FILE__,
                                             __LINE__);
  return *found;
}

void install(const std::vector<std::string> &names) {
  for (auto &full : names) {
    auto colons = full.find("::");
    auto space = full.substr(0, colons), name = full.substr(colons + 2);
    if (full == "aten::copy_") {
      auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
      originals.emplace(full, op.getComputedKernelForDispatchKey(c10::DispatchKey::PrivateUse1));
      library(space).impl("copy_", torch::CppFunction::makeFromBoxedFunction<&copy_kernel>());
    } else if (full == "aten::_to_copy") {
      library(space).impl("_to_copy", TORCH_FN(to_copy));
    } else {
      library(space).impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&host_kernel>());
    }
  }
}

void returns_arguments(const std::string &name, const std::unordered_map<size_t, size_t> &aliases) {
  undeclared_aliases()[name] = aliases;
}

at::Tensor view(const at::Tensor &tensor) { return Call().to_host(tensor); }

at::Tensor alias(const at::Tensor &tensor) {
  await_stream();
  return view(tensor);
}

void launch_python(const py::function &function) {
  if (!queued) {
    await_stream();
    function();
    return;
  }
  std::shared_ptr<py::function> held(new py::function(function), [](py::function *last) {
    py::gil_scoped_acquire gil;
    delete last;
  });
  launch("a Python function", [held]() {
    py::gil_scoped_acquire gil;
    c10::InferenceMode guard;
    (*held)();
  });
}

uintptr_t reach(uintptr_t address, size_t size) {
  return reinterpret_cast<uintptr_t>(simacl_reach(reinterpret_cast<void *>(address), size));
}

uintptr_t handle(int64_t stream, int64_t device, int64_t type) {
  WithoutGil released;
  auto unpacked = c10_npu::NPUStream::unpack3(stream, device, static_cast<c10::DeviceType>(type));
  return reinterpret_cast<uintptr_t>(unpacked.stream());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("install", &install);
  module.def("returns_arguments", &returns_arguments);
  module.def("alias", &alias);
  module.def("view", &view);
  module.def("launch", &launch_python);
  module.def("slow_down", [](double seconds) { kernel_seconds = seconds; });
  module.def("reach", &reach);
  module.def("handle", &handle);
}
