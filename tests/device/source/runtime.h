// A make-believe accelerator: streams that are threads, marks in them, and memory that the host cannot touch.
// Nothing here knows torch.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
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
  // The waits that found their mark unreached and have ended, and how long they took.
  std::atomic<int64_t> stalls{0}, stalled_nanoseconds{0};
  // Whether it is part of a capture.
  std::atomic<bool> capturing{false};

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
  // What is copied between host and device, by the host's memory, and what is copied inside a device or between two.
  std::atomic<int64_t> pinned_bytes{0}, pageable_bytes{0}, inner_bytes{0};
  std::atomic<int64_t> queries{0}, pinned_allocations{0}, registrations{0};
  // What was tried during a capture and must not be.
  std::atomic<int64_t> forbidden{0};
  // Operations of a group that were posted beside the first one of a pair.
  std::atomic<int64_t> racing_posts{0};
};
Counters& counters();
// All of them by name, and the most pinned memory that was allocated at a time.
std::map<std::string, int64_t> counted();
// The stalls of streams, too.
void reset_counters();

// What tests change: all as at the start of the process.
void reset_settings();
// Copies between host and device run at this rate, unless it is 0. It is read when a copy is queued.
void set_copy_rate(double bytes_per_second);
double copy_rate();
// The memory of a device that each communicator takes.
void set_communicator_bytes(size_t bytes);
size_t communicator_bytes();

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
// A capture of the global mode: the calling thread's current stream is in it, and so is each stream that waits for one
// in it. Meanwhile no thread may do what would break it.
void begin_capture();
void end_capture();
// Nothing, if the capture has ended.
void join_capture(const StreamPtr& stream);
// Throws during a capture, and counts.
void not_in_capture(const std::string& what);
// All marks that are pending on a device.
void synchronise_device(int device);
bool device_idle_by(int device, Clock::time_point deadline);

// ---------------------------------------------------------------------------------------------------------- memory

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What tensors show is inaccessible; kernels use the hidden mapping of the same pages.
void* allocate(int device, size_t bytes);
void release(void* shown) noexcept;
void use_on(void* shown, const StreamPtr& stream);
// Where a kernel finds what is shown at this address; null if it belongs to no device.
void* hidden(const void* shown);
int device_of(const void* shown);
size_t allocated_bytes(int device);
// Since the last reset.
size_t most_allocated_bytes(int device);
void reset_most_allocated_bytes(int device);
// A device with less memory. What is freed counts no more, as if the allocator gave all that it pools back in time.
void set_most_bytes(int device, size_t bytes);

// Where another process finds what is shown at this address of a block: in a file, at an offset.
std::pair<int, size_t> export_memory(void* block, const void* shown);
// Memory of another process in its place, until it is released: it counts as no allocation. As on CUDA, it must not be
// this process's own, and it cannot be exported again.
void* import_memory(int device, int file, size_t offset, size_t bytes);

void* allocate_pinned(size_t bytes);
void release_pinned(void* address) noexcept;
// Memory of the program becomes pinned where it is. Refused if a part of it is pinned already, and if tests want that.
void register_host(void* address, size_t bytes);
void unregister_host(void* address);
void set_registration(bool possible);
// All of it, by one allocation or registration.
bool is_pinned(const void* address, size_t bytes = 1);

}  // namespace phantom
