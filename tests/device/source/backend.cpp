// What torch asks of a device: a guard, hooks, an allocator, and a random generator.
#include <ATen/core/Generator.h>
#include <ATen/core/TensorBase.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <random>
#include <vector>

#include "backend.h"
#include "runtime.h"

namespace phantom {

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

c10::Device device_at(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }

c10::Stream to_torch(const StreamPtr& stream) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(stream->device), stream->id);
}

// ------------------------------------------------------------------------------------------------------------ guard

// An event is the mark that it was last recorded as, in a capture or not.
struct Event {
  MarkPtr mark;
  bool captured = false;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

  c10::DeviceType type() const override { return kType; }

  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    if (index(device) != before.index()) setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device device) const override {
    initialise();
    set_current_device(index(device));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) set_current_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  c10::Stream getStream(c10::Device device) const override {
    initialise();
    return c10::Stream(c10::Stream::UNSAFE, device_at(index(device)), current_stream_id(index(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    initialise();
    return c10::Stream(c10::Stream::UNSAFE, device_at(index(device)), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return to_torch(pooled_stream(index(device)));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return to_torch(pooled_stream(index(device))); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    set_current_stream_id(stream.device_index(), stream.id());
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream one) const override { return from_torch(one).get(); }
  bool queryStream(const c10::Stream& one) const override {
    not_in_capture("a query of a stream");
    ++counters().queries;
    return from_torch(one)->idle();
  }
  bool isStreamCapturing(const c10::Stream& one) const override { return from_torch(one)->capturing; }
  void synchronizeStream(const c10::Stream& one) const override { synchronise(from_torch(one)->all_so_far()); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronise_device(device < 0 ? current_device() : device);
  }

  void record(void** event, const c10::Stream& one, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    auto stream = from_torch(one);
    *static_cast<Event*>(*event) = {stream->mark(), stream->capturing};
  }
  // A stream that waits for a capture becomes part of it; a capture waits for nothing outside of it.
  void block(void* event, const c10::Stream& one) const override {
    if (!event) return;
    auto [mark, captured] = *static_cast<Event*>(event);
    auto stream = from_torch(one);
    if (captured)
      join_capture(stream);
    else if (stream->capturing)
      not_in_capture("a dependency on work that is not captured");
    stream->wait_for(mark);
  }
  bool queryEvent(void* event) const override {
    not_in_capture("a query of an event");
    ++counters().queries;
    return !event || static_cast<Event*>(event)->mark->reached();
  }
  void synchronizeEvent(void* event) const override {
    if (event) synchronise(static_cast<Event*>(event)->mark);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto from = static_cast<Event*>(first)->mark, to = static_cast<Event*>(second)->mark;
    TORCH_CHECK(from->reached() && to->reached(), "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(to->when() - from->when()).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& one) const override {
    use_on(data.get(), from_torch(one));
  }
};

// -------------------------------------------------------------------------------------------------------- allocators

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    int device = current_device();
    try {
      void* data = phantom::allocate(device, bytes);
      return {data, data, &phantom::release, device_at(device)};
    } catch (const OutOfMemory& error) {
      C10_THROW_ERROR(OutOfMemoryError, error.what());
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return &phantom::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    counters().inner_bytes += static_cast<int64_t>(bytes);
    current_stream(device_of(to))->put([to = hidden(to), from = hidden(from), bytes] { std::memcpy(to, from, bytes); });
  }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = allocate_pinned(bytes);
    return {data, data, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

// --------------------------------------------------------------------------------------------------------- generator

// A seed, and how many random kernels have drawn from it. Each kernel makes a CPU generator from the two.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device) : GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  static c10::DeviceType device_type() { return kType; }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed((uint64_t{std::random_device()()} << 32) | std::random_device()());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == sizeof(uint64_t) * 2, "RNG state is wrong size");
    uint64_t both[2];
    std::memcpy(both, state.data(), sizeof both);
    seed_ = both[0];
    offset_ = both[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({sizeof(uint64_t) * 2}, c10::kByte);
    uint64_t both[2] = {seed_, offset_};
    std::memcpy(state.data_ptr(), both, sizeof both);
    return state.getIntrusivePtr();
  }

 private:
  Generator* clone_impl() const override {
    auto other = new Generator(device().index());
    other->seed_ = seed_;
    other->offset_ = offset_;
    return other;
  }
  uint64_t seed_ = c10::detail::getNonDeterministicRandom();
  uint64_t offset_ = 0;
};

// ------------------------------------------------------------------------------------------------------------- hooks

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return available(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return initialised(); }
  void init() const override { initialise(); }

  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    initialise();
    set_current_device(device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    if (device != before) setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    if (device >= 0) set_current_device(device);
    return before;
  }

  at::Device getDeviceFromPtr(void* data) const override {
    int device = device_of(data);
    TORCH_CHECK(device >= 0, "the pointer is not memory of a phantom device");
    return device_at(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static auto* all = [] {
      auto* made = new std::vector<at::Generator>();
      for (int i = 0; i < kMostDevices; ++i) made->emplace_back(c10::make_intrusive<Generator>(i));
      return made;
    }();
    return all->at(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::Generator(c10::make_intrusive<Generator>(device < 0 ? current_device() : device));
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

std::atomic<bool> is_available{true};

}  // namespace

bool available() { return is_available; }
void set_available(bool value) { is_available = value; }

StreamPtr from_torch(const c10::Stream& one) { return stream(one.device_index(), one.id()); }

c10::Allocator* device_memory() {
  static auto* one = new DeviceMemory();
  return one;
}

c10::Allocator* pinned_memory() {
  static auto* one = new PinnedMemory();
  return one;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
  int device = impl->device().index();
  int before = current_device();
  set_current_device(device);
  auto data = device_memory()->allocate(bytes);
  set_current_device(before);
  if (size_t kept = std::min(bytes, impl->nbytes())) device_memory()->copy_data(data.get(), impl->data(), kept);
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}

void register_backend() {
  static Hooks* hooks = new Hooks();
  static c10::impl::DeviceGuardImplRegistrar guard(kType, new Guard());
  at::RegisterPrivateUse1HooksInterface(hooks);
  c10::SetAllocator(kType, device_memory());
}

}  // namespace phantom
