// A process group for tensors of the device that behaves as ProcessGroupNCCL does:
//
// - Tags are ignored. The operations of a communicator run in the order they were posted in, on a stream of its own:
//   one communicator for each pair of ranks, made by the first operation of the pair, or, if the group is bound to a
//   device from the start, one for all.
// - A send ends when the other rank's receive has taken the bytes, and never if that does not run.
// - A peer that is gone is not noticed.
// - An operation that runs out of time aborts its communicator, and the watchdog would end the process.
// - Its maps have no lock: what is posted beside the first operation of a pair is a race. It is counted.
// - Asking whether an operation has ended is the query of an event.
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <map>
#include <thread>

#include "backend.h"
#include "runtime.h"

namespace py = pybind11;

namespace phantom {

namespace {

using std::chrono::milliseconds;

constexpr unsigned char kAwaited = 0xAB;

[[noreturn]] void fail(const std::string& why) { C10_THROW_ERROR(DistBackendError, why); }

std::exception_ptr error_of(const std::string& why) {
  try {
    fail(why);
  } catch (...) {
    return std::current_exception();
  }
}

int64_t milliseconds_since(Clock::time_point then) {
  return std::chrono::duration_cast<milliseconds>(Clock::now() - then).count();
}

// ---------------------------------------------------------------------------------------------------------- sockets

class Socket {
 public:
  explicit Socket(int number) : number_(number) {}
  Socket(Socket&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  ~Socket() {
    if (number_ >= 0) ::close(number_);
  }
  int get() const { return number_; }

 private:
  int number_;
};

sockaddr_un address_of(const std::vector<uint8_t>& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, name.data(), std::min(name.size(), sizeof address.sun_path));
  return address;
}

// The lower rank listens and says where in the store; the higher one connects. Each blocks until the other comes.
Socket meet(c10d::Store& store, const std::string& key, bool listens, milliseconds limit) {
  auto late = [&] { fail("communicator " + key + " was not made within " + std::to_string(limit.count()) + " ms"); };
  Socket one(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (listens) {
    // An address without a name: the kernel chooses one that no file shows.
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    socklen_t size = sizeof(sa_family_t);
    TORCH_CHECK(bind(one.get(), reinterpret_cast<sockaddr*>(&address), size) == 0 && listen(one.get(), 1) == 0);
    size = sizeof address;
    getsockname(one.get(), reinterpret_cast<sockaddr*>(&address), &size);
    auto begin = reinterpret_cast<uint8_t*>(address.sun_path);
    store.set(key, std::vector<uint8_t>(begin, begin + size - sizeof(sa_family_t)));
    pollfd ready{one.get(), POLLIN, 0};
    if (poll(&ready, 1, static_cast<int>(limit.count())) <= 0) late();
    return Socket(accept4(one.get(), nullptr, nullptr, SOCK_CLOEXEC));
  }
  try {
    store.wait({key}, limit);
  } catch (const std::exception&) {
    late();
  }
  auto name = store.get(key);
  auto address = address_of(name);
  auto size = static_cast<socklen_t>(sizeof(sa_family_t) + name.size());
  if (connect(one.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) fail("communicator " + key + ": no peer");
  return one;
}

// ------------------------------------------------------------------------------------------------------- operations

struct Operation {
  bool sends;
  int peer;
  uint64_t number;
  char* at;
  size_t bytes;
  milliseconds limit;
  int device;
  Clock::time_point posted = Clock::now();
  // Reached when the operation has ended, well or not.
  MarkPtr end = std::make_shared<Mark>();

  void blame(std::exception_ptr why) {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(why);
  }
  void finish(std::exception_ptr why) {
    blame(std::move(why));
    let_go();
    end->reach();
  }
  std::exception_ptr error() const {
    std::lock_guard lock(mutex_);
    return error_;
  }
  void keep(const c10::Storage& storage) { memory_ = storage; }
  // The memory is kept until the caller has waited or the operation has ended.
  void let_go() {
    c10::Storage memory;
    std::lock_guard lock(mutex_);
    std::swap(memory, memory_);
  }
  std::string described() const {
    return "WorkPCCL(SeqNum=" + std::to_string(number) + ", OpType=" + (sends ? "SEND" : "RECV") +
        ", NumelIn=" + std::to_string(bytes) + ", Timeout(ms)=" + std::to_string(limit.count()) + ")";
  }

 private:
  mutable std::mutex mutex_;
  std::exception_ptr error_;
  c10::Storage memory_;
};

using OperationPtr = std::shared_ptr<Operation>;

// What the ranks say to each other: a receive is running, or bytes follow.
struct Header {
  enum Kind : uint64_t { kReady = 0x5244, kData = 0x4441 } kind;
  uint64_t bytes;
};

// Of a device.
using Memory = std::unique_ptr<void, decltype(&release)>;

class Communicator {
 public:
  Communicator(std::string key, StreamPtr stream, Memory memory)
      : stream(std::move(stream)), key_(std::move(key)), memory_(std::move(memory)) {}
  ~Communicator() {
    abort("its group is gone");
    stream->close();
    ::close(alarm_);
  }

  void abort(const std::string& why) {
    {
      std::lock_guard lock(mutex_);
      if (aborted_) return;
      why_ = why;
      aborted_ = true;
    }
    uint64_t one = 1;
    [[maybe_unused]] auto written = write(alarm_, &one, sizeof one);
  }
  bool aborted() const { return aborted_; }
  std::string why() const {
    std::lock_guard lock(mutex_);
    return "PCCL communicator " + key_ + " was aborted: " + why_;
  }

  // In the thread of the stream.
  void run(Operation& one, const std::atomic<bool>& frozen) {
    while (frozen && !aborted_) std::this_thread::sleep_for(milliseconds(5));
    if (one.sends ? !aborted_ && give(one) : !aborted_ && take(one))
      one.finish(nullptr);
    else
      one.finish(error_of(why()));
  }

  // Whether the watchdog would have found an operation that is overdue.
  bool overdue() {
    std::lock_guard lock(mutex_);
    std::erase_if(posted_, [](auto& weak) {
      auto one = weak.lock();
      return !one || one->end->reached();
    });
    for (auto& weak : posted_)
      if (auto one = weak.lock(); one && milliseconds_since(one->posted) > one->limit.count()) return true;
    return false;
  }
  void remember(const OperationPtr& one) {
    std::lock_guard lock(mutex_);
    posted_.push_back(one);
  }

  const StreamPtr stream;
  std::map<int, Socket> peers;
  // Held while an operation is posted: the order of posting is the order in the stream.
  std::mutex posting;

 private:
  // These return false when the communicator was aborted meanwhile.
  bool give(Operation& one) {
    auto& peer = peers.at(one.peer);
    Header ready{};
    if (!read_all(peer, &ready, sizeof ready)) return false;
    if (ready.kind != Header::kReady || ready.bytes != one.bytes) return hang();
    Header data{Header::kData, one.bytes};
    return write_all(peer, &data, sizeof data) && write_all(peer, one.at, one.bytes);
  }
  bool take(Operation& one) {
    auto& peer = peers.at(one.peer);
    if (one.bytes) std::memset(one.at, kAwaited, one.bytes);
    Header ready{Header::kReady, one.bytes}, data{};
    if (!write_all(peer, &ready, sizeof ready) || !read_all(peer, &data, sizeof data)) return false;
    if (data.kind != Header::kData || data.bytes != one.bytes) return hang();
    return read_all(peer, one.at, one.bytes);
  }
  bool read_all(const Socket& peer, void* at, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
      if (!ready_for(peer, POLLIN)) return false;
      auto count = recv(peer.get(), static_cast<char*>(at) + done, bytes - done, MSG_DONTWAIT);
      if (count > 0)
        done += static_cast<size_t>(count);
      else if (count == 0 || (errno != EAGAIN && errno != EINTR))
        return hang();
    }
    return true;
  }
  bool write_all(const Socket& peer, const void* at, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
      if (!ready_for(peer, POLLOUT)) return false;
      auto rest = static_cast<const char*>(at) + done;
      auto count = send(peer.get(), rest, bytes - done, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (count > 0)
        done += static_cast<size_t>(count);
      else if (errno != EAGAIN && errno != EINTR)
        return hang();
    }
    return true;
  }
  bool ready_for(const Socket& peer, short what) {
    pollfd both[2] = {{peer.get(), what, 0}, {alarm_, POLLIN, 0}};
    while (poll(both, 2, -1) < 0) {
    }
    return !aborted_;
  }
  // The other rank is gone or does something else: nobody tells.
  bool hang() {
    pollfd alarm{alarm_, POLLIN, 0};
    while (!aborted_) poll(&alarm, 1, -1);
    return false;
  }

  const std::string key_;
  const Memory memory_;
  const int alarm_ = eventfd(0, EFD_CLOEXEC);
  mutable std::mutex mutex_;
  std::atomic<bool> aborted_{false};
  std::string why_;
  std::vector<std::weak_ptr<Operation>> posted_;
};

using CommunicatorPtr = std::shared_ptr<Communicator>;

// What a wait does, apart from ordering the current stream after the operation.
enum class Waits { stream, host, nccl };

// What the group and its handles share.
struct Shared {
  std::atomic<Waits> waits{Waits::nccl};
  std::atomic<bool> process_would_end{false}, frozen{false};
};

class Handle final : public c10d::Work {
 public:
  Handle(int rank, OperationPtr one, CommunicatorPtr communicator, std::shared_ptr<Shared> shared)
      : Work(rank, one->sends ? c10d::OpType::SEND : c10d::OpType::RECV),
        one_(std::move(one)),
        communicator_(std::move(communicator)),
        shared_(std::move(shared)) {}

  bool isCompleted() override {
    not_in_capture("a query of an operation");
    ++counters().queries;
    return exception() || one_->end->reached();
  }
  bool isSuccess() const override { return one_->end->reached() && !exception(); }
  std::exception_ptr exception() const override { return one_->error(); }
  int sourceRank() const override { return one_->peer; }
  uint64_t getSequencenumber() const override { return one_->number; }

  void synchronize() override {
    current_stream(one_->device)->wait_for(one_->end);
    one_->let_go();
  }
  void blockCurrentStream() override { synchronize(); }

  bool wait(milliseconds timeout) override {
    synchronize();
    auto waits = shared_->waits.load();
    if (waits == Waits::stream || (waits == Waits::nccl && timeout == kNoTimeout)) return true;
    not_in_capture("a wait for an operation");
    // The time counts from posting.
    auto limit = timeout == kNoTimeout ? one_->limit : timeout;
    if (!wait_quietly(one_->end, one_->posted + limit)) {
      auto why = "[Rank " + std::to_string(rank_) + "] Watchdog caught collective operation timeout: " +
          one_->described() + " ran for " + std::to_string(milliseconds_since(one_->posted)) +
          " milliseconds before timing out.";
      shared_->process_would_end = true;
      one_->blame(error_of(why));
      communicator_->abort(why);
    }
    if (auto error = exception()) std::rethrow_exception(error);
    return true;
  }

 private:
  OperationPtr one_;
  CommunicatorPtr communicator_;
  std::shared_ptr<Shared> shared_;
};

// ------------------------------------------------------------------------------------------------------------- group

class Group final : public c10d::Backend {
 public:
  Group(
      c10::intrusive_ptr<c10d::Store> store, int rank, int size, milliseconds timeout, milliseconds init_timeout,
      const std::string& waits)
      : Backend(rank, size), store_(std::move(store)), timeout_(timeout), init_timeout_(init_timeout) {
    set_waits(waits);
  }
  ~Group() override { abort_all(); }

  const std::string getBackendName() const override { return "pccl"; }
  // Asked before a group is bound to a device.
  bool supportsSplitting() const override { return true; }
  void setTimeout(milliseconds timeout) override { timeout_ = timeout; }

  void eagerConnectSingleDevice(at::Device device) override {
    auto all = made("all", device);
    for (int peer = 0; peer < size_; ++peer)
      if (peer != rank_) all->peers.emplace(peer, met(peer));
    std::lock_guard lock(mutex_);
    for_all_ = all;
    bound_ = device;
  }

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer, int) override {
    return post(true, tensors, peer);
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer, int) override {
    return post(false, tensors, peer);
  }

  // It first blocks for as long as it was told to, or until it is told otherwise.
  void abort() override {
    auto began = Clock::now();
    {
      std::unique_lock lock(mutex_);
      while (Clock::now() < began + abort_lasts_) abort_changed_.wait_until(lock, began + abort_lasts_);
    }
    abort_all();
  }
  void shutdown() override { abort(); }

  void set_waits(const std::string& waits) {
    TORCH_CHECK_VALUE(waits == "stream" || waits == "host" || waits == "nccl", "waits: stream, host or nccl");
    shared_->waits = waits == "stream" ? Waits::stream : waits == "host" ? Waits::host : Waits::nccl;
  }
  bool process_would_end() {
    for (auto& one : communicators())
      if (one->overdue()) shared_->process_would_end = true;
    return shared_->process_would_end;
  }
  void freeze(bool value) { shared_->frozen = value; }
  void set_abort_lasts(milliseconds time) {
    std::lock_guard lock(mutex_);
    abort_lasts_ = time;
    abort_changed_.notify_all();
  }
  std::vector<CommunicatorPtr> communicators() {
    std::lock_guard lock(mutex_);
    std::vector<CommunicatorPtr> all;
    for (auto& [peer, one] : pairs_)
      if (one) all.push_back(one);
    if (for_all_) all.push_back(for_all_);
    return all;
  }

 private:
  // One more, for as long as this lives.
  struct OneMore {
    explicit OneMore(std::atomic<int>& number) : number(number) { ++number; }
    ~OneMore() { --number; }
    std::atomic<int>& number;
  };

  c10::intrusive_ptr<c10d::Work> post(bool sends, std::vector<at::Tensor>& tensors, int peer) {
    TORCH_CHECK(tensors.size() == 1, "Expected one tensor, got ", tensors.size());
    auto& tensor = tensors[0];
    TORCH_CHECK(tensor.is_privateuseone() && !tensor.is_sparse(), "Tensors must be phantom and dense");
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
    TORCH_CHECK(peer >= 0 && peer < size_ && peer != rank_, "Invalid destination rank: ", peer);
    OneMore posting(posting_);
    if (connecting_ > 0) ++counters().racing_posts;
    auto communicator = communicator_with(peer, tensor.device());
    if (communicator->aborted()) fail(communicator->why());
    auto one = std::make_shared<Operation>();
    one->sends = sends;
    one->peer = peer;
    one->at = static_cast<char*>(hidden(tensor.const_data_ptr()));
    one->bytes = tensor.nbytes();
    one->limit = timeout_;
    one->device = tensor.device().index();
    one->keep(tensor.storage());
    communicator->remember(one);
    {
      std::lock_guard lock(communicator->posting);
      one->number = ++posted_;
      communicator->stream->wait_for(current_stream(one->device)->mark(true));
      communicator->stream->put([communicator, one, shared = shared_] {
        communicator->run(*one, shared->frozen);
      });
    }
    return c10::make_intrusive<Handle>(rank_, one, communicator, shared_);
  }

  CommunicatorPtr communicator_with(int peer, at::Device device) {
    CommunicatorPtr one;
    std::mutex* first;
    {
      std::lock_guard lock(mutex_);
      first = &making_[peer];
      if (for_all_) {
        TORCH_CHECK(
            device == *bound_, "Tensor found on device ", device, " but backend constrained to ", *bound_);
        return for_all_;
      }
      one = pairs_[peer];
    }
    if (one) return one;
    OneMore connecting(connecting_);
    if (posting_ > 1) ++counters().racing_posts;
    // Blocks the caller until the peer comes to its first operation with this rank.
    std::lock_guard making(*first);
    {
      std::lock_guard lock(mutex_);
      if (pairs_[peer]) return pairs_[peer];
    }
    one = made(pair(peer), device);
    one->peers.emplace(peer, met(peer));
    std::lock_guard lock(mutex_);
    return pairs_[peer] = one;
  }

  CommunicatorPtr made(const std::string& key, at::Device device) {
    try {
      Memory memory(allocate(device.index(), communicator_bytes()), &release);
      return std::make_shared<Communicator>(key, own_stream(device.index()), std::move(memory));
    } catch (const OutOfMemory& error) {
      fail("communicator " + key + " was not made: " + error.what());
    }
  }
  void abort_all() {
    for (auto& one : communicators()) one->abort("the group was aborted");
  }
  Socket met(int peer) { return meet(*store_, "pccl/" + pair(peer), rank_ < peer, init_timeout_); }
  std::string pair(int peer) const {
    return std::to_string(std::min(rank_, peer)) + ":" + std::to_string(std::max(rank_, peer));
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::atomic<milliseconds> timeout_;
  const milliseconds init_timeout_;
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::atomic<uint64_t> posted_{0};
  std::atomic<int> posting_{0}, connecting_{0};
  std::mutex mutex_;
  std::map<int, CommunicatorPtr> pairs_;
  std::map<int, std::mutex> making_;
  CommunicatorPtr for_all_;
  std::optional<at::Device> bound_;
  milliseconds abort_lasts_{0};
  std::condition_variable abort_changed_;
};

milliseconds in_milliseconds(double seconds) { return milliseconds(static_cast<int64_t>(seconds * 1000)); }

}  // namespace

void bind_group(py::module_& module) {
  py::class_<Group, c10::intrusive_ptr<Group>, c10d::Backend>(module, "Group")
      .def(
          py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, double timeout,
                      double init_timeout, const std::string& waits) {
            return c10::make_intrusive<Group>(
                store, rank, size, in_milliseconds(timeout), in_milliseconds(init_timeout), waits);
          }),
          py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("init_timeout"),
          py::arg("waits"))
      .def("set_waits", &Group::set_waits)
      .def("freeze", [](Group& group) { group.freeze(true); })
      .def("thaw", [](Group& group) { group.freeze(false); })
      .def("set_abort_seconds", [](Group& group, double seconds) { group.set_abort_lasts(in_milliseconds(seconds)); })
      .def_property_readonly("communicators", [](Group& group) { return group.communicators().size(); })
      .def_property_readonly("process_would_end", &Group::process_would_end);
}

}  // namespace phantom
