// What the device and its collectives share. See device.cpp.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace fake_cuda {

constexpr int kMaxDevices = 16;

// Seconds of a clock that never goes back.
double now_s();

// Something that a stream may have to wait for: a collective.
class Pending {
 public:
  void finish();
  bool is_over() const { return is_over_; }
  double finished_s() const { return finished_s_; }
  void wait();

 private:
  std::atomic<bool> is_over_{false};
  double finished_s_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
};
using PendingPtr = std::shared_ptr<Pending>;

// While one lives, this thread may touch device memory. Elsewhere a read or a write ends the process with SIGSEGV, as the
// host's access to a card's memory does.
class Access {
 public:
  Access();
  ~Access();
};

// The host's view of a device tensor: the same bytes. Needs an Access while it is used.
at::Tensor host_view(const at::Tensor& tensor);

// Kernels of `stream` that are launched from now on come after `work`.
void add_dependency(const c10::Stream& stream, const PendingPtr& work);
// The host waits for all that `stream` has to do.
void wait_for_stream(const c10::Stream& stream);
c10::Stream current_stream(c10::DeviceIndex device);
// The stream of the collectives of a device.
c10::Stream communication_stream(c10::DeviceIndex device);
// The number of a visible device among all of the machine.
int physical_index(c10::DeviceIndex device);
const at::Generator& default_generator(c10::DeviceIndex device);

}  // namespace fake_cuda
