#include "runtime.h"

#include <Python.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <vector>

namespace phantom {

namespace {

std::atomic<bool> touched{false}, bad_fork{false}, stopped{false};

// Everything that lives as long as the process is leaked, so that stuck threads never see it destroyed.
template <typename T>
T& leaked() {
  static T* one = new T();
  return *one;
}

struct Reported {
  std::mutex mutex;
  std::string error;
};

// A thread that waits for a stream must not hold the interpreter's lock: a task may need it.
class WithoutInterpreter {
 public:
  WithoutInterpreter() {
    if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~WithoutInterpreter() {
    if (state_) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_ = nullptr;
};

}  // namespace

// ----------------------------------------------------------------------------------------------------------- marks

void Mark::reach() {
  std::lock_guard lock(mutex_);
  reached_ = true;
  when_ = Clock::now();
  changed_.notify_all();
}

bool Mark::reached() const {
  std::lock_guard lock(mutex_);
  return reached_;
}

bool Mark::wait(Clock::time_point deadline) const {
  std::unique_lock lock(mutex_);
  if (deadline == Clock::time_point::max()) {
    changed_.wait(lock, [&] { return reached_; });
    return true;
  }
  return changed_.wait_until(lock, deadline, [&] { return reached_; });
}

Clock::time_point Mark::when() const {
  std::lock_guard lock(mutex_);
  return when_;
}

// --------------------------------------------------------------------------------------------------------- streams

StreamPtr Stream::make(int device, int64_t id) {
  StreamPtr stream(new Stream(device, id));
  std::thread([stream] { stream->work(); }).detach();
  return stream;
}

void Stream::put(std::function<void()> task, bool housekeeping) {
  std::lock_guard lock(mutex_);
  queue_.push_back(std::move(task));
  ++put_;
  if (!housekeeping) seen_ = put_;
  changed_.notify_all();
}

MarkPtr Stream::mark(bool housekeeping) {
  auto mark = std::make_shared<Mark>();
  put([mark] { mark->reach(); }, housekeeping);
  return mark;
}

void Stream::wait_for(MarkPtr mark) {
  // The task runs in the stream's own thread, which holds the stream.
  put([this, mark = std::move(mark)] {
    if (mark->reached()) return;
    auto began = Clock::now();
    mark->wait();
    stalled_nanoseconds += std::chrono::nanoseconds(Clock::now() - began).count();
    ++stalls;
  });
}

bool Stream::idle() const {
  std::lock_guard lock(mutex_);
  return done_ >= seen_;
}

MarkPtr Stream::all_so_far() {
  if (!idle()) return mark(true);
  auto mark = std::make_shared<Mark>();
  mark->reach();
  return mark;
}

void Stream::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

void Stream::work() {
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closed_ || !queue_.empty(); });
      if (queue_.empty()) return;
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    if (stopped) {
      for (;;) pause();
    }
    try {
      task();
    } catch (const std::exception& error) {
      report(error.what());
    }
    task = nullptr;
    std::lock_guard lock(mutex_);
    ++done_;
  }
}

namespace {

struct Streams {
  std::mutex mutex;
  std::array<std::map<int64_t, StreamPtr>, kMostDevices> known;
  std::array<std::vector<std::weak_ptr<Stream>>, kMostDevices> owned;
  std::array<int, kMostDevices> next{};
  int64_t last_owned = 1000;
};

std::atomic<int> devices{2};
thread_local int device_now = 0;
thread_local std::array<int64_t, kMostDevices> stream_now{};

void check_device(int device) {
  if (device < 0 || device >= device_count())
    throw std::runtime_error("phantom has no device " + std::to_string(device));
}

std::vector<StreamPtr> all_streams(int device) {
  auto& streams = leaked<Streams>();
  std::lock_guard lock(streams.mutex);
  std::vector<StreamPtr> all;
  for (auto& [id, stream] : streams.known[device]) all.push_back(stream);
  for (auto& weak : streams.owned[device])
    if (auto stream = weak.lock()) all.push_back(stream);
  return all;
}

}  // namespace

int device_count() { return devices; }
void set_device_count(int count) { devices = std::min(count, kMostDevices); }
int current_device() { return device_now; }

void set_current_device(int device) {
  check_device(device);
  device_now = device;
}

int64_t current_stream_id(int device) {
  check_device(device);
  return stream_now[device];
}

void set_current_stream_id(int device, int64_t id) {
  check_device(device);
  stream_now[device] = id;
}

StreamPtr stream(int device, int64_t id) {
  initialise();
  check_device(device);
  auto& streams = leaked<Streams>();
  std::lock_guard lock(streams.mutex);
  for (auto& weak : streams.owned[device])
    if (auto owned = weak.lock(); owned && owned->id == id) return owned;
  auto& known = streams.known[device][id];
  if (!known) known = Stream::make(device, id);
  return known;
}

StreamPtr current_stream(int device) { return stream(device, current_stream_id(device)); }

StreamPtr pooled_stream(int device) {
  initialise();
  check_device(device);
  auto& streams = leaked<Streams>();
  int next;
  {
    std::lock_guard lock(streams.mutex);
    next = streams.next[device]++;
    if (next >= kPooledStreams)
      for (int i = 0; i < kPooledStreams; ++i) {
        auto& one = streams.known[device][1 + (next + i) % kPooledStreams];
        if (one && one->idle()) return one;
      }
  }
  return stream(device, 1 + next % kPooledStreams);
}

StreamPtr own_stream(int device) {
  initialise();
  check_device(device);
  auto& streams = leaked<Streams>();
  std::lock_guard lock(streams.mutex);
  auto one = Stream::make(device, ++streams.last_owned);
  std::erase_if(streams.owned[device], [](auto& weak) { return weak.expired(); });
  streams.owned[device].push_back(one);
  return one;
}

void synchronise_device(int device) {
  initialise();
  check_device(device);
  not_in_capture("a synchronisation");
  std::vector<MarkPtr> marks;
  for (auto& one : all_streams(device)) marks.push_back(one->all_so_far());
  ++counters().host_syncs;
  for (auto& mark : marks) wait_quietly(mark);
  throw_reported();
}

bool device_idle_by(int device, Clock::time_point deadline) {
  for (auto& one : all_streams(device))
    if (!wait_quietly(one->mark(true), deadline)) return false;
  return true;
}

// --------------------------------------------------------------------------------------------------------- captures

namespace {

struct Capture {
  std::mutex mutex;
  std::vector<StreamPtr> streams;
};

}  // namespace

void begin_capture() {
  auto stream = current_stream(current_device());
  auto& capture = leaked<Capture>();
  std::lock_guard lock(capture.mutex);
  stream->capturing = true;
  capture.streams.push_back(stream);
}

void join_capture(const StreamPtr& stream) {
  auto& capture = leaked<Capture>();
  std::lock_guard lock(capture.mutex);
  if (capture.streams.empty() || stream->capturing.exchange(true)) return;
  capture.streams.push_back(stream);
}

void end_capture() {
  auto& capture = leaked<Capture>();
  std::lock_guard lock(capture.mutex);
  for (auto& stream : capture.streams) stream->capturing = false;
  capture.streams.clear();
}

void not_in_capture(const std::string& what) {
  auto& capture = leaked<Capture>();
  std::lock_guard lock(capture.mutex);
  if (capture.streams.empty()) return;
  ++counters().forbidden;
  throw std::runtime_error("phantom: operation not permitted when stream is capturing: " + what);
}

// ------------------------------------------------------------------------------------------------- the whole process

namespace {

void in_child_of_fork() {
  if (touched) bad_fork = true;
}

}  // namespace

void initialise() {
  if (bad_fork)
    throw std::runtime_error(
        "Cannot re-initialize phantom in forked subprocess. To use phantom with multiprocessing, you must use the "
        "'spawn' start method");
  if (!touched.exchange(true)) pthread_atfork(nullptr, nullptr, in_child_of_fork);
}

bool initialised() { return touched && !bad_fork; }
bool in_bad_fork() { return bad_fork; }
void stop() { stopped = true; }

void report(const std::string& error) {
  std::fprintf(stderr, "phantom: a task failed: %s\n", error.c_str());
  auto& reported = leaked<Reported>();
  std::lock_guard lock(reported.mutex);
  if (reported.error.empty()) reported.error = error;
}

void throw_reported() {
  auto& reported = leaked<Reported>();
  std::string error;
  {
    std::lock_guard lock(reported.mutex);
    error.swap(reported.error);
  }
  if (!error.empty()) throw std::runtime_error("phantom: a task failed earlier: " + error);
}

Counters& counters() { return leaked<Counters>(); }

bool wait_quietly(const MarkPtr& mark, Clock::time_point deadline) {
  WithoutInterpreter without;
  return mark->wait(deadline);
}

void synchronise(const MarkPtr& mark) {
  not_in_capture("a synchronisation");
  ++counters().host_syncs;
  wait_quietly(mark);
  throw_reported();
}

// ---------------------------------------------------------------------------------------------------------- memory

namespace {

constexpr size_t kArena = size_t{64} << 30;
constexpr size_t kPage = 4096, kSmall = 512, kLarge = size_t{2} << 20;
// Beyond this, freed memory goes back to the system instead of being poisoned.
constexpr size_t kMostPooled = size_t{256} << 20;
constexpr size_t kMostFreshPoison = size_t{64} << 20;

size_t rounded_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

struct Block {
  size_t bytes;
  StreamPtr owner;
  std::set<StreamPtr> users;
  // It is another process's.
  bool foreign = false;
};

struct Waiting {
  char* shown;
  Block block;
  std::vector<MarkPtr> marks;
};

// The memory of one device.
struct Arena {
  std::mutex mutex;
  // What both mappings show. It stays open for other processes.
  int file = -1;
  char* shown = nullptr;
  char* hidden = nullptr;
  size_t used = 0, live_bytes = 0, most_live_bytes = 0, pooled_bytes = 0;
  size_t limit = kArena;
  std::unordered_map<char*, Block> live;
  std::vector<Waiting> waiting;
  // Freed blocks are reused only by the stream they were allocated for, so reuse is in order.
  std::map<std::pair<int64_t, size_t>, std::vector<char*>> pool;

  void map_pages() {
    file = memfd_create("phantom", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, kArena) != 0) throw std::runtime_error("phantom: no memory file");
    void* outside = mmap(nullptr, kArena, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    void* inside = mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (outside == MAP_FAILED || inside == MAP_FAILED) throw std::runtime_error("phantom: cannot map its memory");
    hidden = static_cast<char*>(inside);
    shown = static_cast<char*>(outside);
  }

  // All pages that hold these bytes of a file become hidden memory. Both offsets are equally far into a page.
  void map_file(int from, size_t offset, size_t place, size_t bytes) {
    size_t skipped = offset % kPage, length = rounded_up(skipped + bytes, kPage);
    auto protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_FIXED | MAP_NORESERVE;
    auto pages = mmap(hidden + place - skipped, length, protection, flags, from, static_cast<off_t>(offset - skipped));
    if (pages == MAP_FAILED) throw std::runtime_error("phantom: cannot map memory of another process");
  }

  void poison(const StreamPtr& owner, char* at, size_t bytes) {
    owner->put([where = hidden + (at - shown), bytes] { std::memset(where, kFreed, bytes); }, true);
  }

  // With the lock held.
  void recycle(char* at, const Block& block) {
    if (block.foreign) {
      block.owner->put([this, at, bytes = block.bytes] { map_file(file, at - shown, at - shown, bytes); }, true);
      return;
    }
    if (block.bytes >= kLarge && pooled_bytes + block.bytes > kMostPooled) {
      auto where = hidden + (at - shown);
      block.owner->put([where, bytes = block.bytes] { madvise(where, bytes, MADV_REMOVE); }, true);
    } else {
      poison(block.owner, at, block.bytes);
    }
    pooled_bytes += block.bytes;
    pool[{block.owner->id, block.bytes}].push_back(at);
  }

  // With the lock held: blocks whose other users are done.
  void collect() {
    std::erase_if(waiting, [&](Waiting& one) {
      for (auto& mark : one.marks)
        if (!mark->reached()) return false;
      recycle(one.shown, one.block);
      return true;
    });
  }
};

std::array<Arena, kMostDevices>& arenas() { return leaked<std::array<Arena, kMostDevices>>(); }

struct PinnedRange {
  size_t bytes;
  bool registered;
};

struct Pinned {
  std::mutex mutex;
  std::map<const char*, PinnedRange> ranges;
  size_t allocated_bytes = 0, most_bytes = 0;
  bool registration = true;

  // With the lock held: the last range that begins before this address.
  const std::pair<const char* const, PinnedRange>* before(const char* address) const {
    auto after = ranges.lower_bound(address);
    return after == ranges.begin() ? nullptr : &*--after;
  }
};

}  // namespace

void* allocate(int device, size_t bytes) {
  initialise();
  check_device(device);
  if (bytes == 0) return nullptr;
  size_t rounded = rounded_up(bytes, bytes < kLarge ? kSmall : kLarge);
  auto owner = current_stream(device);
  auto& arena = arenas()[device];
  std::lock_guard lock(arena.mutex);
  if (!arena.shown) arena.map_pages();
  arena.collect();
  if (arena.live_bytes + rounded > arena.limit)
    throw OutOfMemory(
        "phantom out of memory. Tried to allocate " + std::to_string(bytes) + " bytes on device " +
        std::to_string(device) + ", where " + std::to_string(arena.live_bytes) + " of " +
        std::to_string(arena.limit) + " are in use.");
  char* at;
  auto& pool = arena.pool[{owner->id, rounded}];
  if (!pool.empty()) {
    at = pool.back();
    pool.pop_back();
    arena.pooled_bytes -= rounded;
  } else {
    if (arena.used + rounded > kArena) throw OutOfMemory("phantom: no addresses are left");
    at = arena.shown + arena.used;
    arena.used += rounded;
    if (rounded <= kMostFreshPoison) arena.poison(owner, at, rounded);
  }
  arena.live.emplace(at, Block{rounded, owner, {}});
  arena.live_bytes += rounded;
  arena.most_live_bytes = std::max(arena.most_live_bytes, arena.live_bytes);
  return at;
}

void release(void* shown) noexcept {
  int device = device_of(shown);
  if (device < 0 || in_bad_fork()) return;
  auto& arena = arenas()[device];
  std::lock_guard lock(arena.mutex);
  auto found = arena.live.find(static_cast<char*>(shown));
  if (found == arena.live.end()) return;
  auto [at, block] = *found;
  arena.live.erase(found);
  if (!block.foreign) arena.live_bytes -= block.bytes;
  std::vector<MarkPtr> marks;
  for (auto& user : block.users) marks.push_back(user->mark(true));
  if (marks.empty())
    arena.recycle(at, block);
  else
    arena.waiting.push_back({at, block, marks});
  arena.collect();
}

void use_on(void* shown, const StreamPtr& stream) {
  int device = device_of(shown);
  if (device < 0) return;
  auto& arena = arenas()[device];
  std::lock_guard lock(arena.mutex);
  auto found = arena.live.find(static_cast<char*>(shown));
  if (found != arena.live.end() && found->second.owner != stream) found->second.users.insert(stream);
}

int device_of(const void* shown) {
  for (int device = 0; device < kMostDevices; ++device) {
    auto base = arenas()[device].shown;
    if (base && shown >= base && shown < base + kArena) return device;
  }
  return -1;
}

void* hidden(const void* shown) {
  int device = device_of(shown);
  if (device < 0) return nullptr;
  auto& arena = arenas()[device];
  return arena.hidden + (static_cast<const char*>(shown) - arena.shown);
}

size_t allocated_bytes(int device) {
  auto& arena = arenas()[device];
  std::lock_guard lock(arena.mutex);
  return arena.live_bytes;
}

size_t most_allocated_bytes(int device) {
  auto& arena = arenas()[device];
  std::lock_guard lock(arena.mutex);
  return arena.most_live_bytes;
}

void reset_most_allocated_bytes(int device) {
  auto& arena = arenas()[device];
  std::lock_guard lock(arena.mutex);
  arena.most_live_bytes = arena.live_bytes;
}

void set_most_bytes(int device, size_t bytes) {
  auto& arena = arenas()[device];
  std::lock_guard lock(arena.mutex);
  arena.limit = bytes;
}

std::pair<int, size_t> export_memory(void* block, const void* shown) {
  int device = device_of(block);
  if (device < 0) throw std::runtime_error("phantom: this is not memory of a device");
  auto& arena = arenas()[device];
  std::lock_guard lock(arena.mutex);
  auto found = arena.live.find(static_cast<char*>(block));
  if (found == arena.live.end() || found->second.foreign)
    throw std::runtime_error("phantom: only the process that allocated memory can export it");
  return {arena.file, static_cast<const char*>(shown) - arena.shown};
}

void* import_memory(int device, int file, size_t offset, size_t bytes) {
  initialise();
  check_device(device);
  struct stat theirs {}, ours {};
  if (fstat(file, &theirs) != 0 || theirs.st_size != kArena || bytes == 0 || offset > kArena || bytes > kArena - offset)
    throw std::runtime_error("phantom: this is not memory of a device");
  for (auto& arena : arenas())
    if (arena.shown && fstat(arena.file, &ours) == 0 && ours.st_dev == theirs.st_dev && ours.st_ino == theirs.st_ino)
      throw std::runtime_error("phantom: a process cannot import its own memory");
  auto owner = current_stream(device);
  auto& arena = arenas()[device];
  std::lock_guard lock(arena.mutex);
  if (!arena.shown) arena.map_pages();
  size_t place = rounded_up(arena.used, kPage) + offset % kPage, end = rounded_up(place + bytes, kPage);
  if (end > kArena) throw OutOfMemory("phantom: no addresses are left");
  arena.map_file(file, offset, place, bytes);
  arena.used = end;
  char* at = arena.shown + place;
  arena.live.emplace(at, Block{bytes, owner, {}, true});
  return at;
}

void* allocate_pinned(size_t bytes) {
  initialise();
  not_in_capture("an allocation of pinned memory");
  void* address = nullptr;
  if (bytes == 0) return nullptr;
  if (posix_memalign(&address, 4096, bytes) != 0) throw std::runtime_error("phantom: no pinned memory");
  auto& pinned = leaked<Pinned>();
  std::lock_guard lock(pinned.mutex);
  pinned.ranges[static_cast<char*>(address)] = {bytes, false};
  pinned.allocated_bytes += bytes;
  pinned.most_bytes = std::max(pinned.most_bytes, pinned.allocated_bytes);
  ++counters().pinned_allocations;
  return address;
}

void release_pinned(void* address) noexcept {
  if (!address) return;
  auto& pinned = leaked<Pinned>();
  {
    std::lock_guard lock(pinned.mutex);
    auto found = pinned.ranges.find(static_cast<char*>(address));
    if (found != pinned.ranges.end()) {
      pinned.allocated_bytes -= found->second.bytes;
      pinned.ranges.erase(found);
    }
  }
  std::free(address);
}

void register_host(void* address, size_t bytes) {
  initialise();
  not_in_capture("a registration of host memory");
  auto& pinned = leaked<Pinned>();
  std::lock_guard lock(pinned.mutex);
  if (!pinned.registration) throw std::runtime_error("phantom: host memory cannot be registered here");
  if (!address || bytes == 0) throw std::runtime_error("phantom: there is nothing to register");
  auto begin = static_cast<const char*>(address);
  // Ranges are apart: if any overlaps with this one, then the last that begins before its end.
  if (auto other = pinned.before(begin + bytes); other && other->first + other->second.bytes > begin)
    throw std::runtime_error("phantom: part or all of the requested memory range is already mapped");
  pinned.ranges[begin] = {bytes, true};
  ++counters().registrations;
}

void unregister_host(void* address) {
  not_in_capture("the end of a registration of host memory");
  auto& pinned = leaked<Pinned>();
  std::lock_guard lock(pinned.mutex);
  auto found = pinned.ranges.find(static_cast<char*>(address));
  if (found == pinned.ranges.end() || !found->second.registered)
    throw std::runtime_error("phantom: pointer does not correspond to a registered memory region");
  pinned.ranges.erase(found);
}

void set_registration(bool possible) {
  auto& pinned = leaked<Pinned>();
  std::lock_guard lock(pinned.mutex);
  pinned.registration = possible;
}

bool is_pinned(const void* address, size_t bytes) {
  auto& pinned = leaked<Pinned>();
  std::lock_guard lock(pinned.mutex);
  auto begin = static_cast<const char*>(address);
  auto range = pinned.before(begin + 1);
  return range && begin + bytes <= range->first + range->second.bytes;
}

// ------------------------------------------------------------------------------------------ what tests see and change

namespace {

std::atomic<double> copied_per_second{0};
std::atomic<size_t> bytes_of_communicators{0};

std::map<std::string, std::atomic<int64_t>*> named() {
  auto& all = counters();
  return {
      {"host_syncs", &all.host_syncs},
      {"async_copies", &all.async_copies},
      {"bytes_to_host", &all.bytes_to_host},
      {"bytes_to_device", &all.bytes_to_device},
      {"kernels", &all.kernels},
      {"fallbacks", &all.fallbacks},
      {"pinned_bytes", &all.pinned_bytes},
      {"pageable_bytes", &all.pageable_bytes},
      {"inner_bytes", &all.inner_bytes},
      {"queries", &all.queries},
      {"pinned_allocations", &all.pinned_allocations},
      {"registrations", &all.registrations},
      {"forbidden", &all.forbidden},
      {"racing_posts", &all.racing_posts},
  };
}

}  // namespace

std::map<std::string, int64_t> counted() {
  std::map<std::string, int64_t> all;
  for (auto& [name, one] : named()) all[name] = *one;
  auto& pinned = leaked<Pinned>();
  std::lock_guard lock(pinned.mutex);
  all["pinned_most_bytes"] = static_cast<int64_t>(pinned.most_bytes);
  return all;
}

void reset_counters() {
  for (auto& [name, one] : named()) *one = 0;
  for (int device = 0; device < kMostDevices; ++device)
    for (auto& stream : all_streams(device)) stream->stalls = stream->stalled_nanoseconds = 0;
  auto& pinned = leaked<Pinned>();
  std::lock_guard lock(pinned.mutex);
  pinned.most_bytes = pinned.allocated_bytes;
}

void reset_settings() {
  end_capture();
  set_copy_rate(0);
  set_registration(true);
  set_communicator_bytes(0);
  for (int device = 0; device < kMostDevices; ++device) set_most_bytes(device, kArena);
}

void set_copy_rate(double bytes_per_second) { copied_per_second = bytes_per_second; }
double copy_rate() { return copied_per_second; }
void set_communicator_bytes(size_t bytes) { bytes_of_communicators = bytes; }
size_t communicator_bytes() { return bytes_of_communicators; }

}  // namespace phantom
