// The Python module.
#include <ATen/detail/PrivateUse1HooksInterface.h>
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

py::dict counted() {
  auto& all = counters();
  py::dict result;
  result["host_syncs"] = all.host_syncs.load();
  result["async_copies"] = all.async_copies.load();
  result["bytes_to_host"] = all.bytes_to_host.load();
  result["bytes_to_device"] = all.bytes_to_device.load();
  result["kernels"] = all.kernels.load();
  result["fallbacks"] = all.fallbacks.load();
  return result;
}

void reset_counters() {
  auto& all = counters();
  for (auto one : {&all.host_syncs, &all.async_copies, &all.bytes_to_host, &all.bytes_to_device, &all.kernels,
                   &all.fallbacks})
    *one = 0;
}

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
  m.def("sleep", &sleep);
  m.def("slow_fill_", &slow_fill);
  m.def("launch", &launch);
  m.def("read", &read_bytes);
  m.def("allocated_bytes", &allocated_bytes);
  m.def("default_generator", [](int device) { return at::detail::getPrivateUse1Hooks().getDefaultGenerator(device); });
  bind_group(m);
}

}  // namespace phantom
