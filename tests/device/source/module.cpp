// The Python module.
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/utils/pybind.h>

#include <thread>

#include "backend.h"
#include "kernels.h"
#include "runtime.h"

namespace py = pybind11;

namespace phantom {

void bind_group(py::module_& module);

namespace {

// A function of Python that lives until a stream has called it.
struct Callable {
  PyObject* function;

  ~Callable() {
    if (Py_IsInitialized() && !_Py_IsFinalizing()) {
      py::gil_scoped_acquire gil;
      Py_DECREF(function);
    }
  }

  void call() const {
    if (!Py_IsInitialized() || _Py_IsFinalizing()) return;
    py::gil_scoped_acquire gil;
    try {
      py::reinterpret_borrow<py::function>(function)();
    } catch (py::error_already_set& error) {
      report(error.what());
    }
  }
};

void launch(const c10::Stream& stream, const py::function& function) {
  auto callable = std::make_shared<Callable>(function.inc_ref().ptr());
  from_torch(stream)->put([callable] { callable->call(); });
}

void sleep(double seconds) {
  ++counters().kernels;
  current_stream(current_device())->put([seconds] {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  });
}

py::tuple stalled(const c10::Stream& stream) {
  auto one = from_torch(stream);
  return py::make_tuple(one->stalls.load(), static_cast<double>(one->stalled_nanoseconds) / 1e9);
}

py::tuple exported(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous(), "only memory without gaps can be exported");
  auto [file, offset] = export_memory(tensor.storage().mutable_data(), tensor.const_data_ptr());
  return py::make_tuple(file, offset, tensor.nbytes());
}

at::Tensor imported(int index, int file, size_t offset, size_t bytes) {
  c10::Device device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index));
  auto data = import_memory(index, file, offset, bytes);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, c10::DataPtr(data, data, &release, device), nullptr, false);
  auto tensor = at::empty({0}, at::TensorOptions(device).dtype(at::kByte));
  return tensor.set_(c10::Storage(std::move(storage)), 0, {static_cast<int64_t>(bytes)}, {1});
}

void* at_address(uintptr_t address) { return reinterpret_cast<void*>(address); }

py::bytes read_bytes(const at::Tensor& tensor, double timeout) {
  auto copy = read(tensor, timeout);
  return {static_cast<const char*>(copy.const_data_ptr()), copy.nbytes()};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  register_backend();
  m.def("device_count", &device_count);
  m.def("set_device_count", &set_device_count);
  m.def("available", &available);
  m.def("set_available", &set_available);
  m.def("initialise", &initialise);
  m.def("initialised", &initialised);
  m.def("in_bad_fork", &in_bad_fork);
  m.def("stop", &stop);
  m.def("current_device", &current_device);
  m.def("set_device", [](int device) {
    initialise();
    set_current_device(device);
  });
  m.def("counters", &counted);
  m.def("reset_counters", &reset_counters);
  m.def("stalled", &stalled);
  m.def("reset_settings", &reset_settings);
  m.def("set_copy_rate", &set_copy_rate);
  m.def("begin_capture", &begin_capture);
  m.def("end_capture", &end_capture);
  m.def("register_host", [](uintptr_t address, size_t bytes) { register_host(at_address(address), bytes); });
  m.def("unregister_host", [](uintptr_t address) { unregister_host(at_address(address)); });
  m.def("set_registration", &set_registration);
  m.def("set_communicator_bytes", &set_communicator_bytes);
  m.def("sleep", &sleep);
  m.def("slow_fill_", &slow_fill);
  m.def("launch", &launch);
  m.def("read", &read_bytes);
  m.def("allocated_bytes", &allocated_bytes);
  m.def("most_allocated_bytes", &most_allocated_bytes);
  m.def("reset_most_allocated_bytes", &reset_most_allocated_bytes);
  m.def("set_most_bytes", &set_most_bytes);
  m.def("export_memory", &exported);
  m.def("import_memory", &imported);
  m.def("default_generator", [](int device) { return at::detail::getPrivateUse1Hooks().getDefaultGenerator(device); });
  bind_group(m);
}

}  // namespace phantom
