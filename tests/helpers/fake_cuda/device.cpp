// A CUDA device in host memory, for a CPU build of torch.
//
// A CPU build leaves the dispatch key CUDA empty. This file fills it: an allocator, a device guard with streams and events,
// generators, pinned memory, and a fallback that computes every operator on the CPU. Tensors, placement errors, autograd,
// autocast, the reducer of DDP and `torch.accelerator` are torch's own code then.
//
// Kernels run when they are launched, so that one stream never overtakes another. Only collectives (nccl.cpp) take time:
// a stream that waits for one blocks its next kernel, and not the host before that.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>
#include <torch/version.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <unordered_set>
#include <vector>

#define TORCH_AT_LEAST(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= (minor))

namespace fake_cuda {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using c10::StreamId;

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---- which devices there are

// The numbers of the visible devices. As for CUDA, what follows an unknown entry of CUDA_VISIBLE_DEVICES is not visible.
const std::vector<int>& visible_devices() {
  static const std::vector<int> devices = [] {
    const char* count = std::getenv("FAKE_CUDA_DEVICES");
    int all = std::min(count ? std::atoi(count) : 2, kMaxDevices);
    std::vector<int> found;
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) {
      for (int i = 0; i < all; i++) found.push_back(i);
      return found;
    }
    std::stringstream entries(visible);
    for (std::string entry; std::getline(entries, entry, ',');) {
      char* end = nullptr;
      long index = std::strtol(entry.c_str(), &end, 10);
      if (end == entry.c_str() || index < 0 || index >= all) break;
      found.push_back(static_cast<int>(index));
    }
    return found;
  }();
  return devices;
}

int num_devices() { return static_cast<int>(visible_devices().size()); }
int physical_index(DeviceIndex device) { return visible_devices().at(device); }

void check_index(int64_t index) {
  TORCH_CHECK(index >= 0 && index < num_devices(), "CUDA error: invalid device ordinal ", index);
}

thread_local DeviceIndex t_device = 0;
thread_local StreamId t_streams[kMaxDevices] = {};
std::atomic<bool> g_is_opened[kMaxDevices];  // Devices on which this process has a context.

// ---- what makes the host wait for the device

enum class Wait : int { kItem, kToHost, kToDevice, kDataDependent, kSynchronize };
void (*g_wait_hook)(int) = nullptr;
thread_local int t_is_inside = 0;  // An operator that runs on the CPU copies its tensors: no wait of the caller's.

void count_wait(Wait kind) {
  if (!t_is_inside && g_wait_hook) g_wait_hook(static_cast<int>(kind));
}

// ---- memory

// Memory protection keys make the access a right of each thread, at the price of one register. Where a processor has none,
// pages are protected while no thread needs them.
int g_key = -1;
bool g_is_protected = false;
std::mutex g_arena_mutex;
int g_num_accesses = 0;
struct Arena;
std::vector<Arena*>& arenas();

constexpr size_t kAlignment = 512;
constexpr size_t kArenaBytes = size_t(1) << 36;
constexpr size_t kHugePage = size_t(2) << 20;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

struct Arena {
  char* base = nullptr;
  size_t end = 0;                         // Behind the last byte that was ever used.
  std::map<size_t, size_t> free_blocks;   // Offset -> bytes.
  int64_t limit = int64_t(16) << 30;
  int64_t allocated = 0, peak = 0, num_allocations = 0, num_failures = 0;

  void open(int index) {
    const char* given = std::getenv("FAKE_CUDA_MEMORY");  // "BYTES" or "INDEX=BYTES", separated by commas.
    std::stringstream entries(given ? given : "");
    for (std::string entry; std::getline(entries, entry, ',');) {
      auto equals = entry.find('=');
      if (equals == std::string::npos) limit = std::stoll(entry);
      else if (std::stoi(entry.substr(0, equals)) == index) limit = std::stoll(entry.substr(equals + 1));
    }
    constexpr size_t num_bytes = kArenaBytes + kHugePage;
    void* found = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(found != MAP_FAILED, "no address space is left for a device of ", kArenaBytes, " bytes");
    base = reinterpret_cast<char*>(round_up(reinterpret_cast<size_t>(found), kHugePage));
    madvise(base, kArenaBytes, MADV_HUGEPAGE);  // mprotect takes time for each page, and runs twice an operator.
    if (g_is_protected && g_key >= 0) TORCH_CHECK(!pkey_mprotect(base, kArenaBytes, PROT_READ | PROT_WRITE, g_key));
  }

  void set_readable(bool is_readable) {
    if (base && end) mprotect(base, round_up(end, kHugePage), is_readable ? PROT_READ | PROT_WRITE : PROT_NONE);
  }

  size_t take(size_t bytes) {
    for (auto block = free_blocks.begin(); block != free_blocks.end(); ++block) {
      if (block->second < bytes) continue;
      auto [offset, size] = *block;
      free_blocks.erase(block);
      if (size > bytes) free_blocks[offset + bytes] = size - bytes;
      return offset;
    }
    TORCH_CHECK(end + bytes <= kArenaBytes, "a device has no more than ", kArenaBytes, " bytes of addresses");
    size_t offset = end;
    end += bytes;
    return offset;
  }

  void give_back(size_t offset, size_t bytes) {
    size_t first_page = round_up(offset, kHugePage), last_page = (offset + bytes) / kHugePage * kHugePage;
    if (bytes >= 16 * kHugePage) madvise(base + first_page, last_page - first_page, MADV_DONTNEED);
    auto [block, _] = free_blocks.emplace(offset, bytes);
    auto next = std::next(block);
    if (next != free_blocks.end() && block->first + block->second == next->first) {
      block->second += next->second;
      free_blocks.erase(next);
    }
    if (block == free_blocks.begin()) return;
    auto before = std::prev(block);
    if (before->first + before->second == block->first) {
      before->second += block->second;
      free_blocks.erase(block);
    }
  }
};

std::vector<Arena*>& arenas() {
  static std::vector<Arena*> all = [] {
    g_is_protected = !std::getenv("FAKE_CUDA_UNPROTECTED");
    if (g_is_protected) g_key = pkey_alloc(0, PKEY_DISABLE_ACCESS);
    std::vector<Arena*> made;
    for (int index : visible_devices()) {
      made.push_back(new Arena);
      made.back()->open(index);
    }
    return made;
  }();
  return all;
}

thread_local int t_num_accesses = 0;

Access::Access() {
  if (t_num_accesses++ || !g_is_protected) return;
  if (g_key >= 0) {
    pkey_set(g_key, 0);
    return;
  }
  std::lock_guard<std::mutex> lock(g_arena_mutex);
  if (g_num_accesses++ == 0)
    for (auto* arena : arenas()) arena->set_readable(true);
}

Access::~Access() {
  if (--t_num_accesses || !g_is_protected) return;
  if (g_key >= 0) {
    pkey_set(g_key, PKEY_DISABLE_ACCESS);
    return;
  }
  std::lock_guard<std::mutex> lock(g_arena_mutex);
  if (--g_num_accesses == 0)
    for (auto* arena : arenas()) arena->set_readable(false);
}

struct Block {
  DeviceIndex device;
  size_t offset, bytes;
};

std::string in_mib(int64_t bytes) {
  std::ostringstream text;
  text.precision(2);
  text << std::fixed << double(bytes) / (1 << 20) << " MiB";
  return text.str();
}

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  std::lock_guard<std::mutex> lock(g_arena_mutex);
  auto* arena = arenas()[block->device];
  arena->give_back(block->offset, block->bytes);
  arena->allocated -= static_cast<int64_t>(block->bytes);
  delete block;
}

#if TORCH_AT_LEAST(9)
#define DEVICE_ALLOCATOR c10::DeviceAllocator
#else
#define DEVICE_ALLOCATOR at::Allocator
#endif

// A rank that sees the devices of all ranks allocates on its own one alone: `torch.load` without `map_location` and "cuda:0"
// in a rank above 0 take memory of rank 0's card, and are an error here.
void check_is_own(DeviceIndex device) {
  static const int own = [] {
    const char *rank = std::getenv("LOCAL_RANK"), *ranks = std::getenv("LOCAL_WORLD_SIZE");
    bool is_one_of_many = rank && ranks && std::atoi(ranks) > 1 && std::atoi(ranks) <= num_devices();
    return is_one_of_many ? std::atoi(rank) : -1;
  }();
  TORCH_CHECK(own < 0 || device == own, "local rank ", own, " allocates on device ", int(device));
}

struct DeviceMemory final : DEVICE_ALLOCATOR {
  at::DataPtr allocate(size_t requested) override {
    DeviceIndex device = t_device;
    check_is_own(device);
    g_is_opened[device] = true;
    auto place = Device(DeviceType::CUDA, device);
    if (!requested) return {nullptr, nullptr, &c10::detail::deleteNothing, place};
    size_t bytes = (requested + kAlignment - 1) / kAlignment * kAlignment;
    std::lock_guard<std::mutex> lock(g_arena_mutex);
    auto* arena = arenas()[device];
    if (arena->allocated + static_cast<int64_t>(bytes) > arena->limit) {
      arena->num_failures++;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", in_mib(bytes), ". GPU ", int(device),
          " has a total capacity of ", in_mib(arena->limit), " of which ", in_mib(arena->limit - arena->allocated),
          " is free.");
    }
    auto* block = new Block{device, arena->take(bytes), bytes};
    if (g_is_protected && g_key < 0) arena->set_readable(g_num_accesses > 0);
    arena->allocated += static_cast<int64_t>(bytes);
    arena->peak = std::max(arena->peak, arena->allocated);
    arena->num_allocations++;
    return {arena->base + block->offset, block, &release, place};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    Access access;
    default_copy_data(to, from, bytes);
  }
#if TORCH_AT_LEAST(9)
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const at::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(g_arena_mutex);
    auto* arena = arenas().at(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*bytes)[0].current = arena->allocated;
      (*bytes)[0].peak = arena->peak;
    }
    stats.num_ooms = arena->num_failures;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(g_arena_mutex);
    arenas().at(device)->peak = arenas().at(device)->allocated;
  }
#if TORCH_AT_LEAST(10)
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(g_arena_mutex);
    return {arenas().at(device)->limit - arenas().at(device)->allocated, arenas().at(device)->limit};
  }
#endif
#endif
};
DeviceMemory g_memory;
REGISTER_ALLOCATOR(DeviceType::CUDA, &g_memory);

std::mutex g_pinned_mutex;
std::map<const char*, size_t> g_pinned;  // Begin -> bytes.

struct PinnedMemory final : at::Allocator {
  static void release(void* pointer) {
    {
      std::lock_guard<std::mutex> lock(g_pinned_mutex);
      g_pinned.erase(static_cast<char*>(pointer));
    }
    std::free(pointer);
  }
  at::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &c10::detail::deleteNothing, Device(DeviceType::CPU)};
    void* pointer = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    TORCH_CHECK(pointer, "no memory is left for ", bytes, " pinned bytes");
    std::lock_guard<std::mutex> lock(g_pinned_mutex);
    g_pinned[static_cast<char*>(pointer)] = bytes;
    return {pointer, pointer, &release, Device(DeviceType::CPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};
PinnedMemory g_pinned_memory;

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(g_pinned_mutex);
  auto after = g_pinned.upper_bound(static_cast<const char*>(pointer));
  if (after == g_pinned.begin()) return false;
  auto [begin, bytes] = *std::prev(after);
  return static_cast<const char*>(pointer) < begin + bytes;
}

// ---- streams and events

void Pending::finish() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    finished_s_ = now_s();
    is_over_ = true;
  }
  changed_.notify_all();
}

void Pending::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return is_over_.load(); });
}

std::mutex g_stream_mutex;
std::map<std::pair<DeviceIndex, StreamId>, std::vector<PendingPtr>> g_dependencies;
std::atomic<int> g_num_dependencies{0};  // So that a kernel costs no lock where nothing is pending.
std::atomic<StreamId> g_next_stream{2};

Stream current_stream(DeviceIndex device) {
  return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, device), t_streams[device]);
}
Stream communication_stream(DeviceIndex device) {
  return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, device), 1);
}

void add_dependency(const Stream& stream, const PendingPtr& work) {
  if (work->is_over()) return;
  std::lock_guard<std::mutex> lock(g_stream_mutex);
  g_dependencies[{stream.device_index(), stream.id()}].push_back(work);
  g_num_dependencies++;
}

std::vector<PendingPtr> dependencies_of(const Stream& stream) {
  if (!g_num_dependencies) return {};
  std::lock_guard<std::mutex> lock(g_stream_mutex);
  auto found = g_dependencies.find({stream.device_index(), stream.id()});
  return found == g_dependencies.end() ? std::vector<PendingPtr>{} : found->second;
}

void wait_for_stream(const Stream& stream) {
  auto all = dependencies_of(stream);
  if (all.empty()) return;
  for (auto& work : all) work->wait();
  std::lock_guard<std::mutex> lock(g_stream_mutex);
  auto& left = g_dependencies[{stream.device_index(), stream.id()}];
  auto before = left.size();
  left.erase(std::remove_if(left.begin(), left.end(), [](auto& work) { return work->is_over(); }), left.end());
  g_num_dependencies -= static_cast<int>(before - left.size());
}

// A kernel is launched on the current stream of a device. It runs now, so what the stream waits for has to be over.
void launch(DeviceIndex device) {
  g_is_opened[device] = true;
  if (g_num_dependencies) wait_for_stream(current_stream(device));
}

void synchronize_device(DeviceIndex device) {
  std::vector<StreamId> streams;
  {
    std::lock_guard<std::mutex> lock(g_stream_mutex);
    for (auto& [key, _] : g_dependencies)
      if (key.first == device) streams.push_back(key.second);
  }
  for (auto id : streams) wait_for_stream(Stream(Stream::UNSAFE, Device(DeviceType::CUDA, device), id));
}

struct Event {
  double recorded_s = 0;
  std::vector<PendingPtr> works;  // What the stream had to do when the event was recorded.
  DeviceIndex device = 0;
  bool is_over() const {
    return std::all_of(works.begin(), works.end(), [](auto& work) { return work->is_over(); });
  }
  double passed_s() const {
    double last = recorded_s;
    for (auto& work : works) last = std::max(last, work->finished_s());
    return last;
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, t_device); }
  void setDevice(Device device) const override {
    if (!device.has_index()) return;
    check_index(device.index());
    t_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) t_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(num_devices()); }

  DeviceIndex index_of(Device device) const { return device.has_index() ? device.index() : t_device; }
  Stream getStream(Device device) const noexcept override { return current_stream(index_of(device)); }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, index_of(device)));
  }
  Stream getNewStream(Device device, int = 0) const override {
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index_of(device)), g_next_stream++);
  }
  Stream getStreamFromGlobalPool(Device device, bool = false) const override { return getNewStream(device); }
  Stream exchangeStream(Stream stream) const noexcept override {
    Stream before = current_stream(stream.device_index());
    t_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    auto all = dependencies_of(stream);
    return std::all_of(all.begin(), all.end(), [](auto& work) { return work->is_over(); });
  }
  void synchronizeStream(const Stream& stream) const override {
    count_wait(Wait::kSynchronize);
    wait_for_stream(stream);
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    count_wait(Wait::kSynchronize);
    synchronize_device(device);
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = Event{now_s(), dependencies_of(stream), stream.device_index()};
  }
  void block(void* event, const Stream& stream) const override {
    if (event)
      for (auto& work : static_cast<Event*>(event)->works) add_dependency(stream, work);
  }
  bool queryEvent(void* event) const override { return !event || static_cast<Event*>(event)->is_over(); }
  void synchronizeEvent(void* event) const override {
    count_wait(Wait::kSynchronize);
    if (event)
      for (auto& work : static_cast<Event*>(event)->works) work->wait();
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    auto begin = static_cast<Event*>(first), end = static_cast<Event*>(second);
    // As cudaEventElapsedTime: "if the two input events are associated to different devices".
    TORCH_CHECK(begin->device == end->device, "CUDA error: invalid resource handle");
    return (end->passed_s() - begin->passed_s()) * 1e3;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// ---- random numbers

// A seed and an offset, 16 bytes, as Philox has on a card: each operator that draws moves the offset.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(DeviceIndex device)
      : GeneratorImpl(Device(DeviceType::CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == at::kByte, "RNG state must be a torch.ByteTensor of 16 bytes");
    auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    // Past the dispatcher, as CUDA's generator does: under FakeTensorMode `at::empty` would have no memory.
    auto state = at::detail::empty_cpu({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* words = static_cast<uint64_t*>(state.data_ptr());
    words[0] = seed_, words[1] = offset_;
    return state.getIntrusivePtr();
  }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  // The seed of the CPU's generator for the next operator.
  uint64_t next() {
    uint64_t mixed = seed_ * 0x9E3779B97F4A7C15ull + offset_ * 0xBF58476D1CE4E5B9ull + 0x94D049BB133111EBull;
    offset_ += 4;
    mixed ^= mixed >> 31;
    mixed *= 0xD6E8FEB86659FD93ull;
    return mixed ^ (mixed >> 32);
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

const at::Generator& default_generator(DeviceIndex device) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < num_devices(); i++) made.push_back(at::make_generator<DeviceGenerator>(static_cast<DeviceIndex>(i)));
    return made;
  }();
  return all.at(device < 0 ? t_device : device);
}

// While one lives, the CPU's generator draws what the device's would.
class Draws {
 public:
  Draws(at::Generator drawn) : cpu_(at::detail::getDefaultCPUGenerator()) {
    std::lock_guard<std::mutex> lock(cpu_.mutex());
    before_ = cpu_.get_state();
    cpu_.set_current_seed(static_cast<DeviceGenerator*>(drawn.unsafeGetGeneratorImpl())->next());
  }
  ~Draws() {
    std::lock_guard<std::mutex> lock(cpu_.mutex());
    cpu_.set_state(before_);
  }

 private:
  at::Generator cpu_;
  at::Tensor before_;
};

// ---- what torch asks about CUDA

struct CUDAHooks final : at::CUDAHooksInterface {  // torch looks for this name.
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return num_devices() > 0; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const { return true; }
  bool isAvailable() const { return num_devices() > 0; }
  bool hasPrimaryContext(DeviceIndex device) const override { return g_is_opened[device]; }
  DeviceIndex deviceCount() const { return static_cast<DeviceIndex>(num_devices()); }
  int getNumGPUs() const override { return num_devices(); }
  DeviceIndex current_device() const { return t_device; }
  DeviceIndex getCurrentDevice() const { return t_device; }
  void setCurrentDevice(DeviceIndex device) const {
    check_index(device);
    t_device = device;
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const {
    auto before = t_device;
    setCurrentDevice(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const { return device < 0 ? t_device : exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_memory; }
  at::Allocator* getCUDADeviceAllocator() const override { return &g_memory; }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, t_device); }
  const at::Generator& getDefaultGenerator(DeviceIndex device = -1) const { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device = -1) const {
    return at::make_generator<DeviceGenerator>(device < 0 ? t_device : device);
  }
  void deviceSynchronize(DeviceIndex device) const override {
    count_wait(Wait::kSynchronize);
    synchronize_device(device);
  }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// ---- operators

at::Tensor host_view(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (!tensor.is_cuda()) return tensor;
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

DeviceIndex index_for_new(std::optional<Device> device) {
  auto index = device && device->has_index() ? device->index() : t_device;
  check_index(index);
  return index;
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(Device(DeviceType::CUDA, index_for_new(device)));
  return at::detail::empty_generic(
      size, &g_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(Device(DeviceType::CUDA, index_for_new(device)));
  return at::detail::empty_strided_generic(
      size, stride, &g_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      dtype.value_or(at::get_default_dtype_as_scalartype()));
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (to.numel()) {
    for (auto& tensor : {to, from})
      if (tensor.is_cuda()) launch(tensor.get_device());
    bool is_pinned_host = (to.is_cpu() && is_pinned(to.data_ptr())) || (from.is_cpu() && is_pinned(from.data_ptr()));
    if (to.is_cuda() != from.is_cuda() && !(non_blocking && (is_pinned_host || to.is_cuda())))
      count_wait(to.is_cuda() ? Wait::kToDevice : Wait::kToHost);
  }
  Access access;
  auto target = host_view(to);
  target.copy_(host_view(from));
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto target = to;
  return copy_(target, from, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  auto target = to;
  if (to.sizes() != from.sizes()) target.resize_(from.sizes());
  return copy_(target, from, false);
}

at::Scalar read_scalar(const at::Tensor& tensor) {
  launch(tensor.get_device());
  count_wait(Wait::kItem);
  Access access;
  return host_view(tensor).item();
}

const at::Tensor& resize_(const at::Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(tensor.device());
  Access access;
  at::native::resize_impl_cpu_(tensor.unsafeGetTensorImpl(), size, std::nullopt);
  if (format) tensor.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return tensor;
}
at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  int64_t count = static_cast<int64_t>(storage.nbytes() / tensor.dtype().itemsize());
  return set_storage(tensor, std::move(storage), 0, {count}, {1});
}
at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor view(const at::Tensor& tensor, at::IntArrayRef size) { return at::native::view(tensor, size); }
at::Tensor as_strided(const at::Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}
void record_stream(at::Tensor&, Stream) {}

// On a card, too, these take tensors of the host beside those of the device.
const std::unordered_set<std::string> kTakesHostTensors = {
    "aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"};
// Their result has a size, or is a value, that the host has to read first.
const std::unordered_set<std::string> kReadByHost = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::equal", "aten::repeat_interleave.Tensor", "aten::bincount", "aten::_assert_async"};

struct Seen {
  std::optional<Device> device;
  bool has_host_tensor = false, has_mask = false;
  std::string host_argument;

  void look(const at::Tensor& tensor, const std::string& argument, const std::string& op) {
    if (!tensor.defined()) return;
    if (tensor.is_cuda()) {
      if (!device) device = tensor.device();
      has_mask |= tensor.scalar_type() == at::kBool;
      TORCH_CHECK(
          *device == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
          *device, " and ", tensor.device(), "! (when checking argument ", argument, " of ", op, ")");
    } else if (tensor.is_cpu() && tensor.dim() > 0 && tensor.numel() > 0) {
      has_host_tensor = true;
      host_argument = argument;
    }
  }
};

Seen look_at(const c10::OperatorHandle& op, const torch::jit::Stack& stack, const std::string& name) {
  Seen seen;
  const auto& declared = op.schema().arguments();
  auto given = torch::jit::last(stack, declared.size());
  for (size_t i = 0; i < given.size(); i++) {
    const auto& argument = declared[i].name();
    if (given[i].isTensor()) seen.look(given[i].toTensor(), argument, name);
    else if (given[i].isTensorList())
      for (const at::Tensor& tensor : given[i].toTensorList()) seen.look(tensor, argument, name);
    else if (given[i].isOptionalTensorList())
      for (const std::optional<at::Tensor>& tensor : given[i].toOptionalTensorList())
        if (tensor) seen.look(*tensor, argument, name);
    else if (given[i].isDevice() && !seen.device && given[i].toDevice().is_cuda())
      seen.device = Device(DeviceType::CUDA, index_for_new(given[i].toDevice()));
  }
  TORCH_CHECK(
      !seen.device || !seen.has_host_tensor || kTakesHostTensors.count(name),
      "Expected all tensors to be on the same device, but found at least two devices, ",
      seen.device ? seen.device->str() : "", " and cpu! (when checking argument ", seen.host_argument, " of ", name, ")");
  return seen;
}

// Takes the device's generator out of the arguments; the CPU's draws for it.
std::optional<at::Generator> take_generator(const c10::OperatorHandle& op, torch::jit::Stack& stack, DeviceIndex device) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return std::nullopt;
  auto count = op.schema().arguments().size();
  for (size_t i = stack.size() - count; i < stack.size(); i++) {
    if (!stack[i].isGenerator()) continue;
    auto given = stack[i].toGenerator();
    TORCH_CHECK(given.device().is_cuda(), "Expected a 'cuda' device type for generator but found '", given.device().type(), "'");
    stack[i] = c10::IValue();
    return given;
  }
  return default_generator(device);
}

void compute_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& full = op.operator_name();
  auto name = full.overload_name.empty() ? full.name : full.name + "." + full.overload_name;
  auto seen = look_at(op, *stack, name);
  auto device = seen.device ? seen.device->index() : t_device;
  c10::DeviceGuard guard(Device(DeviceType::CUDA, device));
  launch(device);
  if (kReadByHost.count(name) || (kTakesHostTensors.count(name) && seen.has_mask)) count_wait(Wait::kDataDependent);
  std::optional<Draws> draws;
  if (auto drawn = take_generator(op, *stack, device)) draws.emplace(*drawn);
  struct Inside {
    Inside() { t_is_inside++; }
    ~Inside() { t_is_inside--; }
  } inside;
  at::native::cpu_fallback(op, stack, false);
}

// DDP measures its buckets by one of these for each kind of device.
class Timer : public c10d::Timer {
 public:
  explicit Timer(Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimeRef(start), to = getTimeRef(end);
    if (from == -1 || to == -1 || to < from) return std::nullopt;
    return to - from;
  }
};

}  // namespace fake_cuda

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fake_cuda::compute_on_cpu>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &fake_cuda::empty);
  m.impl("empty_strided", &fake_cuda::empty_strided);
  m.impl("copy_", &fake_cuda::copy_);
  m.impl("_copy_from", &fake_cuda::copy_from);
  m.impl("_copy_from_and_resize", &fake_cuda::copy_from_and_resize);
  m.impl("_local_scalar_dense", &fake_cuda::read_scalar);
  m.impl("resize_", &fake_cuda::resize_);
  m.impl("set_.source_Storage_storage_offset", &fake_cuda::set_storage);
  m.impl("set_.source_Storage", &fake_cuda::set_whole_storage);
  m.impl("set_.source_Tensor", &fake_cuda::set_tensor);
  m.impl("view", &fake_cuda::view);
  m.impl("as_strided", &fake_cuda::as_strided);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("record_stream", &fake_cuda::record_stream);
}

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, fake_cuda::Timer)
}

// What cuda.py calls.
extern "C" {
int fake_cuda_device_count() { return fake_cuda::num_devices(); }
int fake_cuda_physical_index(int device) { return fake_cuda::physical_index(device); }
int fake_cuda_device() { return fake_cuda::t_device; }
void fake_cuda_set_device(int device) { fake_cuda::t_device = device; }
int64_t fake_cuda_stream(int device) { return fake_cuda::t_streams[device]; }
void fake_cuda_set_stream(int device, int64_t stream) { fake_cuda::t_streams[device] = stream; }
void fake_cuda_synchronize(int device) {
  fake_cuda::count_wait(fake_cuda::Wait::kSynchronize);
  fake_cuda::synchronize_device(device);
}
int fake_cuda_is_opened(int device) { return fake_cuda::g_is_opened[device]; }
int64_t fake_cuda_memory(int device, int what) {
  std::lock_guard<std::mutex> lock(fake_cuda::g_arena_mutex);
  auto* arena = fake_cuda::arenas()[device];
  int64_t values[] = {arena->allocated, arena->peak, arena->limit, arena->num_allocations, arena->num_failures};
  return values[what];
}
void fake_cuda_reset_peak(int device) {
  std::lock_guard<std::mutex> lock(fake_cuda::g_arena_mutex);
  fake_cuda::arenas()[device]->peak = fake_cuda::arenas()[device]->allocated;
}
void fake_cuda_on_wait(void (*hook)(int)) { fake_cuda::g_wait_hook = hook; }
}
