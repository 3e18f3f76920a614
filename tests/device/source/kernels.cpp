// Operators on the device. Each is torch's own CPU kernel, run by a stream's thread on the hidden memory.
//
// Tasks hold addresses, never tensors of the device: as on a real device, queued work does not keep memory alive.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <string_view>
#include <thread>
#include <unordered_set>

#include "backend.h"
#include "kernels.h"
#include "runtime.h"

namespace phantom {

namespace {

constexpr auto kKey = c10::DispatchKey::PrivateUse1;

bool here(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// A CPU tensor over the hidden memory of a tensor of the device. It owns nothing.
at::Tensor unveiled(const at::Tensor& tensor) {
  // Tasks run outside inference mode, whatever the caller's mode is.
  c10::InferenceMode off(false);
  at::AutoDispatchBelowADInplaceOrView below;
  auto options = at::TensorOptions(tensor.scalar_type());
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(hidden(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

void enqueue(int device, std::function<void()> task) {
  ++counters().kernels;
  current_stream(device)->put([task = std::move(task)] {
    at::AutoDispatchBelowADInplaceOrView below;
    task();
  });
}

// -------------------------------------------------------------------------------------------------------- factories

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "phantom has dense tensors only");
  c10::DeviceGuard guard(c10::device_or_default(device));
  auto made = at::detail::empty_generic(
      size, device_memory(), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
  return at::Tensor(std::move(made));
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "phantom has dense tensors only");
  c10::DeviceGuard guard(c10::device_or_default(device));
  auto made = at::detail::empty_strided_generic(
      size, stride, device_memory(), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
  return at::Tensor(std::move(made));
}

// --------------------------------------------------------------------------------------------------------- metadata

void grow(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  size_t needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
  if (needed > tensor.storage().nbytes()) resize_storage(tensor.storage(), needed);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  grow(self);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  auto impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.data())
    impl->set_sizes_and_strides(size, stride);
  else
    impl->set_sizes_contiguous(size);
  grow(self);
  return self;
}

at::Tensor& set_empty(at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  auto nothing = c10::Storage(
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0, device_memory(), true));
  return set_storage(self, nothing, 0, {0}, {});
}

at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  use_on(self.storage().mutable_data(), from_torch(stream));
}

// ------------------------------------------------------------------------------------------------------------ copies

// Between two tensors of the device. On two devices, the copy is ordered with the current streams of both.
void copy_inside(const at::Tensor& from, const at::Tensor& to) {
  int source = from.device().index(), target = to.device().index();
  counters().inner_bytes += static_cast<int64_t>(to.nbytes());
  if (source != target) current_stream(source)->wait_for(current_stream(target)->mark());
  enqueue(source, [from = unveiled(from), to = unveiled(to)]() mutable { to.copy_(from); });
  if (source != target) current_stream(target)->wait_for(current_stream(source)->mark());
}

// Between the host and the device. The host tensor's memory stays until the copy is done: torch's allocator of pinned
// memory sees to that, too. A host tensor with gaps goes through pageable memory, as torch does it.
void copy_across(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  bool outward = here(from);
  const auto& host = outward ? to : from;
  int device = (outward ? from : to).device().index();
  bool pinned = host.is_non_overlapping_and_dense() && is_pinned(host.const_data_ptr(), host.nbytes());
  bool asynchronous = non_blocking && pinned;
  if (!asynchronous) not_in_capture("a copy that the host waits for");
  auto& all = counters();
  (outward ? all.bytes_to_host : all.bytes_to_device) += static_cast<int64_t>(to.nbytes());
  (pinned ? all.pinned_bytes : all.pageable_bytes) += static_cast<int64_t>(to.nbytes());
  auto source = outward ? unveiled(from) : from.detach();
  auto target = outward ? to.detach() : unveiled(to);
  double rate = copy_rate(), seconds = rate > 0 ? static_cast<double>(to.nbytes()) / rate : 0;
  enqueue(device, [source, target, seconds]() mutable {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    target.copy_(source);
  });
  if (asynchronous)
    ++all.async_copies;
  else
    synchronise(current_stream(device)->mark());
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  c10::InferenceMode off(false);
  auto whole = from.expand(to.sizes());
  if (here(from) && here(to))
    copy_inside(whole, to);
  else
    copy_across(whole, to, non_blocking);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) { return self.to(at::kCPU).item(); }

bool equal(const at::Tensor& self, const at::Tensor& other) {
  TORCH_CHECK(here(other) && self.device() == other.device(), "Expected all tensors to be on the same device");
  bool result = false;
  enqueue(self.device().index(), [&result, a = unveiled(self), b = unveiled(other)] { result = at::equal(a, b); });
  synchronise(current_stream(self.device().index())->mark());
  return result;
}

// ---------------------------------------------------------------------------------------------------- all the others

// These run in stream order and return at once. The rest waits for the stream, by torch's fallback to the CPU.
bool asynchronous(std::string_view name) {
  static const std::unordered_set<std::string_view> names = {
      "add", "sub", "rsub", "mul", "div", "addcmul", "addcdiv", "sqrt", "rsqrt", "neg", "abs", "exp", "log", "pow",
      "reciprocal", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "sign", "sgn", "sigmoid", "tanh", "relu",
      "threshold_backward", "sigmoid_backward", "tanh_backward", "lerp", "eq", "ne", "lt", "gt", "le", "ge", "where",
      "bitwise_xor", "bitwise_and", "bitwise_or", "bitwise_not", "logical_not", "logical_and", "logical_or", "isnan",
      "remainder", "fmod", "floor", "ceil", "round", "sum", "mean", "prod", "any", "all", "mm", "addmm", "bmm", "cat",
      "fill", "zero", "normal", "uniform", "random", "bernoulli", "exponential", "index_select", "gather", "flip",
      "roll", "arange", "tril", "triu", "masked_fill", "scatter_add", "index_add", "index_copy", "mse_loss", "mse_loss_backward",
      "native_layer_norm", "native_layer_norm_backward", "_softmax", "_log_softmax", "_softmax_backward_data",
      "_log_softmax_backward_data", "gelu", "gelu_backward", "silu", "silu_backward", "embedding_dense_backward"};
  name.remove_prefix(std::string_view("aten::").size());
  if (name.ends_with('_')) name.remove_suffix(1);
  return names.contains(name);
}

// Returns the value with each tensor in it replaced.
c10::IValue each_tensor(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> all;
    for (at::Tensor tensor : value.toTensorList()) all.push_back(change(tensor));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      all.push_back(tensor && tensor->defined() ? std::optional(change(*tensor)) : tensor);
    return all;
  }
  return value;
}

std::vector<c10::IValue> in_each(
    c10::ArrayRef<c10::IValue> values, const std::function<at::Tensor(const at::Tensor&)>& change) {
  std::vector<c10::IValue> all;
  for (auto& value : values) all.push_back(each_tensor(value, change));
  return all;
}

// As on other accelerators: one device for all, except for single numbers and for indices.
void check_devices(const std::string& name, c10::ArrayRef<c10::IValue> arguments, std::optional<at::Device>& device) {
  bool indices = name.find("index") != std::string::npos;
  auto check = [&](const at::Tensor& tensor) {
    if (here(tensor)) {
      TORCH_CHECK(
          !device || *device == tensor.device(),
          "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
          tensor.device(), "! (", name, ")");
      device = tensor.device();
    }
    return tensor;
  };
  in_each(arguments, check);
  in_each(arguments, [&](const at::Tensor& tensor) {
    TORCH_CHECK(
        !device || here(tensor) || !tensor.is_cpu() || tensor.dim() == 0 || indices,
        "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and cpu! (",
        name, ")");
    return tensor;
  });
}

// Random kernels draw from a CPU generator of their own, made from the state of the device's generator.
void draw(const c10::FunctionSchema& schema, torch::jit::Stack& stack, at::Device device) {
  size_t count = schema.arguments().size();
  for (size_t i = 0; i < count; ++i) {
    if (schema.arguments()[i].name() != "generator") continue;
    auto& slot = stack[stack.size() - count + i];
    auto given = slot.isNone() ? at::Generator() : slot.toGenerator();
    auto generator = given.defined() ? given : at::detail::getPrivateUse1Hooks().getDefaultGenerator(device.index());
    TORCH_CHECK(
        generator.device().type() == device.type(), "Expected a '", device.type(),
        "' device type for generator but found '", generator.device().type(), "'");
    std::lock_guard lock(generator.mutex());
    auto offset = generator.get_offset();
    generator.set_offset(offset + 1);
    slot = at::detail::createCPUGenerator(generator.current_seed() * 0x9E3779B97F4A7C15ull + offset);
  }
}

// The shapes of the results, by the operator's kernel for tensors without data. Wrong arguments raise here.
std::vector<at::Tensor> shapes_of_results(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  torch::jit::Stack stack = in_each(arguments, [](const at::Tensor& tensor) {
    return here(tensor)
        ? at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type()).device(at::kMeta))
        : tensor;
  });
  op.callBoxed(&stack);
  std::vector<at::Tensor> shapes;
  for (auto& value : stack) shapes.push_back(value.toTensor());
  return shapes;
}

void run_in_stream_order(const c10::OperatorHandle& op, torch::jit::Stack* stack, at::Device device) {
  const auto& schema = op.schema();
  size_t count = schema.arguments().size();
  std::vector<c10::IValue> arguments(stack->end() - count, stack->end());
  std::vector<c10::IValue> results;
  for (size_t i = 0; i < count; ++i)
    if (auto info = schema.arguments()[i].alias_info(); info && info->isWrite()) results.push_back(arguments[i]);
  bool in_place = !results.empty();
  auto shapes = shapes_of_results(op, arguments);
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < shapes.size(); ++i)
    if (in_place) {
      if (auto given = results[i].toTensor(); given.sizes() != shapes[i].sizes()) resize_(given, shapes[i].sizes(), {});
    } else {
      auto& shape = shapes[i];
      auto made = empty_strided(shape.sizes(), shape.strides(), shape.scalar_type(), {}, device, {});
      outputs.push_back(unveiled(made));
      results.emplace_back(made);
    }
  auto inputs = in_each(arguments, [](const at::Tensor& tensor) {
    if (here(tensor)) return unveiled(tensor);
    return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
  });
  enqueue(device.index(), [op, inputs, outputs]() mutable {
    op.callBoxed(&inputs);
    for (size_t i = 0; i < outputs.size(); ++i) outputs[i].copy_(inputs[i].toTensor());
  });
  torch::jit::drop(*stack, count);
  results.resize(schema.returns().size());
  stack->insert(stack->end(), results.begin(), results.end());
}

void any_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  std::optional<at::Device> device;
  size_t count = schema.arguments().size();
  check_devices(schema.name(), torch::jit::last(*stack, count), device);
  if (device) draw(schema, *stack, *device);
  c10::OptionalDeviceGuard guard(device);
  if (device && asynchronous(schema.name())) {
    run_in_stream_order(op, stack, *device);
  } else {
    ++counters().fallbacks;
    at::native::cpu_fallback(op, stack);
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_", TORCH_FN(set_empty));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("is_set_to", TORCH_FN(at::native::is_set_to));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("equal", TORCH_FN(equal));
}

}  // namespace

void slow_fill(const at::Tensor& tensor, double value, double seconds) {
  TORCH_CHECK(here(tensor), "slow_fill_ fills tensors of phantom");
  enqueue(tensor.device().index(), [to = unveiled(tensor), value, seconds]() mutable {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    to.fill_(value);
  });
}

at::Tensor read(const at::Tensor& tensor, double timeout) {
  TORCH_CHECK(here(tensor), "read reads tensors of phantom");
  auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout));
  for (int device = 0; device < device_count(); ++device)
    TORCH_CHECK(device_idle_by(device, deadline), "phantom:", device, " is still busy after ", timeout, " s");
  c10::InferenceMode off(false);
  return unveiled(tensor.detach()).clone(at::MemoryFormat::Contiguous);
}

}  // namespace phantom
