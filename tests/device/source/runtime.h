// A make-believe accelerator: streams that are threads, marks in them, and memory that the host cannot touch.
// Nothing here knows torch.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace phantom {

constexpr int kMostDevices = 16;
constexpr int kPooledStreams = 64;
constexpr unsigned char kFreed = 0xCD;

using Clock = std::chrono::steady_clock;

// A point in the work of a stream, reached once.
class Mark {
 public:
  void reach();
  bool reached() const;
  // Blocks the calling thread; false if the deadline came first.
  bool wait(Clock::time_point deadline = Clock::time_point::max()) const;
  Clock::time_point when() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool reached_ = false;
  Clock::time_point when_;
};

using MarkPtr = std::shared_ptr<Mark>;

// A queue of tasks and the thread that does them, in order. It is never joined: a stuck stream must not keep the
// process from ending.
class Stream : public std::enable_shared_from_this<Stream> {
 public:
  static std::shared_ptr<Stream> make(int device, int64_t id);

  // Housekeeping is no work that a query or a synchronisation would see.
  void put(std::function<void()> task, bool housekeeping = false);
  MarkPtr mark(bool housekeeping = false);
  void wait_for(MarkPtr mark);
  bool idle() const;
  // The mark of all work that has been put so far.
  MarkPtr all_so_far();
  // The thread ends when it has done what is queued.
  void close();

  const int device;
  const int64_t id;

 private:
  Stream(int device, int64_t id) : device(device), id(id) {}
  void work();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t put_ = 0, seen_ = 0, done_ = 0;
  bool closed_ = false;
};

using StreamPtr = std::shared_ptr<Stream>;

// ------------------------------------------------------------------------------------------------- the whole process

// Every use of a stream, a device's memory or a device begins with this. It throws in a fork of a process that has
// used them.
void initialise();
bool initialised();
bool in_bad_fork();
// At the end of the process: no stream begins another task.
void stop();

// Errors of tasks are thrown by the next synchronisation, once.
void report(const std::string& error);
void throw_reported();

struct Counters {
  std::atomic<int64_t> host_syncs{0}, async_copies{0}, bytes_to_host{0}, bytes_to_device{0}, kernels{0}, fallbacks{0};
};
Counters& counters();

// The host waits, and this counts. The interpreter's lock is let go meanwhile.
void synchronise(const MarkPtr& mark);
// The same, uncounted; false if the deadline came first.
bool wait_quietly(const MarkPtr& mark, Clock::time_point deadline = Clock::time_point::max());

// --------------------------------------------------------------------------------------------------------- streams

// Two, unless ranks that are threads need more.
int device_count();
void set_device_count(int count);
int current_device();
void set_current_device(int device);
int64_t current_stream_id(int device);
void set_current_stream_id(int device, int64_t id);
StreamPtr stream(int device, int64_t id);
StreamPtr current_stream(int device);
// From a pool: the first 64 are distinct, then idle ones are given out again.
StreamPtr pooled_stream(int device);
// Outside the pool, for communicators.
StreamPtr own_stream(int device);
// All marks that are pending on a device.
void synchronise_device(int device);
bool device_idle_by(int device, Clock::time_point deadline);

// ---------------------------------------------------------------------------------------------------------- memory

// What tensors show is inaccessible; kernels use the hidden mapping of the same pages.
void* allocate(int device, size_t bytes);
void release(void* shown) noexcept;
void use_on(void* shown, const StreamPtr& stream);
// Where a kernel finds what is shown at this address; null if it belongs to no device.
void* hidden(const void* shown);
int device_of(const void* shown);
size_t allocated_bytes(int device);

void* allocate_pinned(size_t bytes);
void release_pinned(void* address) noexcept;
bool is_pinned(const void* address);

}  // namespace phantom
