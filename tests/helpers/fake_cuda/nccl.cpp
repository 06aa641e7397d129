// The c10d backend "nccl" for the device of device.cpp, over gloo, with what NCCL does and gloo hides:
//
// It takes CUDA tensors only, and each rank has a card of its own. A collective runs in a stream of its own: `wait()` lets
// the current stream wait and returns at once, so that only the next kernel, copy, `.item()` or `synchronize()` waits.
// `abort()` ends collectives with whatever is in their tensors, without an error. A peer that has gone is no error either:
// the collective does not end, until the group's timeout ends the process (SIGABRT), if TORCH_NCCL_ASYNC_ERROR_HANDLING says so.
#include "device.h"

#include <ATen/native/Resize.h>
#include <c10/core/StreamGuard.h>
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <deque>
#include <functional>
#include <iostream>
#include <thread>

namespace py = pybind11;
using at::Tensor;
using c10d::OpType;
using c10d::Work;
using fake_cuda::Pending;
using fake_cuda::PendingPtr;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;

namespace {

constexpr auto kPoll = std::chrono::microseconds(50);

// One collective, from the call until its result is in the tensors.
struct Collective {
  const char* name;
  uint64_t number;
  std::function<WorkPtr()> start;   // Calls gloo, with copies in the host's memory.
  std::function<void()> take;       // Copies the result to the device.
  PendingPtr pending = std::make_shared<Pending>();
  bool is_started = false;
};
using CollectivePtr = std::shared_ptr<Collective>;

class NcclWork final : public Work {
 public:
  NcclWork(int rank, OpType type, CollectivePtr collective, Tensors outputs, bool blocks_host)
      : Work(rank, type, collective->name),
        collective_(std::move(collective)),
        outputs_(std::move(outputs)),
        device_(outputs_.at(0).device()),
        blocks_host_(blocks_host) {
    // As for NCCL: the future is complete, and holds an event of the stream in which the collective runs.
    auto stream = fake_cuda::communication_stream(device_.index());
    fake_cuda::add_dependency(stream, collective_->pending);
    c10::StreamGuard guard(stream);
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device_});
    future_->markCompleted(at::IValue(outputs_));
  }
  bool isCompleted() override { return collective_->pending->is_over(); }
  bool isSuccess() const override { return collective_->pending->is_over(); }
  void synchronize() override {
    auto stream = fake_cuda::current_stream(device_.index());
    fake_cuda::add_dependency(stream, collective_->pending);
    if (blocks_host_) fake_cuda::wait_for_stream(stream);
  }
  bool wait(std::chrono::milliseconds = std::chrono::milliseconds(0)) override {
    synchronize();
    return true;
  }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return collective_->number; }

 private:
  CollectivePtr collective_;
  Tensors outputs_;
  c10::Device device_;
  bool blocks_host_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Copies for gloo. Bytes are what most collectives move; reductions need the type.
Tensor copied(const Tensor& tensor) {
  fake_cuda::Access access;
  return fake_cuda::host_view(tensor).clone(at::MemoryFormat::Contiguous);
}
Tensor as_bytes(const Tensor& tensor) { return tensor.numel() ? tensor.view({-1}).view(at::kByte) : tensor; }
Tensors copied(const Tensors& tensors) {
  Tensors copies;
  for (auto& tensor : tensors) copies.push_back(copied(tensor));
  return copies;
}
Tensors as_bytes(const Tensors& tensors) {
  Tensors all;
  for (auto& tensor : tensors) all.push_back(as_bytes(tensor));
  return all;
}
void write(const Tensors& to, const Tensors& from) {
  fake_cuda::Access access;
  for (size_t i = 0; i < to.size(); i++) fake_cuda::host_view(to[i]).copy_(from[i].view(to[i].sizes()));
}

// What the thread of a group works on. It outlives the group if a collective never ends.
struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<CollectivePtr> waiting;  // The first is the one that runs.
  bool is_closing = false, is_aborted = false;
  std::chrono::milliseconds timeout{0};
  int rank = 0;

  bool has_aborted() {
    std::lock_guard<std::mutex> lock(mutex);
    return is_aborted;
  }

  static bool ends_process() {
    const char* handling = std::getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING");
    return !handling || std::string(handling) != "0";
  }

  // True once gloo has done it. False: the group was aborted, or a peer has gone.
  bool finish(const CollectivePtr& collective, std::chrono::steady_clock::time_point begin) {
    WorkPtr work;
    try {
      work = collective->start();
    } catch (const std::exception&) {
    }
    while (true) {
      if (work && work->isCompleted()) {
        if (!work->exception()) return true;
        work = nullptr;
      }
      if (has_aborted()) return false;
      if (ends_process() && std::chrono::steady_clock::now() - begin > timeout) {
        std::cerr << "[rank" << rank << "]:[E ProcessGroupNCCL] Watchdog caught collective operation timeout: "
                  << "WorkNCCL(SeqNum=" << collective->number << ", OpType=" << collective->name << ", Timeout(ms)="
                  << timeout.count() << "). To avoid data inconsistency, we are taking the entire process down."
                  << std::endl;
        std::abort();
      }
      std::this_thread::sleep_for(kPoll);
    }
  }

  void run() {
    while (true) {
      CollectivePtr next;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return !waiting.empty() || is_closing; });
        if (waiting.empty()) return;
        next = waiting.front();
        next->is_started = true;
      }
      if (finish(next, std::chrono::steady_clock::now())) next->take();
      std::lock_guard<std::mutex> lock(mutex);
      next->start = nullptr;
      kept_.push_back(std::move(next->take));
      next->take = nullptr;
      if (!waiting.empty() && waiting.front() == next) waiting.pop_front();
      next->pending->finish();
    }
  }

  void free_finished() {
    std::vector<std::function<void()>> done;
    {
      std::lock_guard<std::mutex> lock(mutex);
      done.swap(kept_);
    }
  }

 private:
  std::vector<std::function<void()>> kept_;
};

class ProcessGroupNccl final : public c10d::Backend {
 public:
  ProcessGroupNccl(c10::intrusive_ptr<c10d::Backend> gloo, std::chrono::milliseconds timeout)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), queue_(std::make_shared<Queue>()) {
    queue_->timeout = timeout;
    queue_->rank = getRank();
    thread_ = std::thread([queue = queue_] { queue->run(); });
  }
  ~ProcessGroupNccl() override { close(); }

  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return number_; }
  void setTimeout(std::chrono::milliseconds timeout) { queue_->timeout = timeout; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = copied(tensors);
    return enqueue(OpType::BROADCAST, "nccl:broadcast", tensors, tensors,
                   [=, this, bytes = as_bytes(host)]() mutable { return gloo_->broadcast(bytes, options); }, host);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = copied(tensors);
    auto sums = host;
    for (auto& sum : sums)
      if (sum.scalar_type() == at::kBool) sum = sum.view(at::kByte);
    auto given = options;
    bool is_mean = options.reduceOp == c10d::ReduceOp::AVG;
    if (is_mean) given.reduceOp = c10d::ReduceOp::SUM;
    auto divide = [=, this] {
      if (is_mean)
        for (auto& tensor : host) tensor.div_(getSize());
    };
    return enqueue(OpType::ALLREDUCE, "nccl:all_reduce", tensors, tensors,
                   [=, this]() mutable { return gloo_->allreduce(sums, given); }, host, divide);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    c10d::AllreduceOptions each;
    each.reduceOp = options.reduceOp;
    WorkPtr last;
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      last = allreduce(one, each);
    }
    return last;
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto host = copied(tensors);
    auto changed = options.rootRank == getRank() ? tensors : Tensors{};
    return enqueue(OpType::REDUCE, "nccl:reduce", tensors, changed,
                   [=, this]() mutable { return gloo_->reduce(host, options); }, host);
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto host = copied(outputs.at(0));
    std::vector<Tensors> all{as_bytes(host)};
    auto mine = as_bytes(copied(inputs));
    check(inputs);
    return enqueue(OpType::ALLGATHER, "nccl:all_gather", outputs[0], outputs[0],
                   [=, this]() mutable { return gloo_->allgather(all, mine, options); }, host);
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    check({input});
    auto host = copied(output);
    std::vector<Tensors> all{as_bytes(Tensors(host.view({getSize(), -1}).unbind()))};
    Tensors mine{as_bytes(copied(input))};
    return enqueue(OpType::_ALLGATHER_BASE, "nccl:_all_gather_base", {output}, {output},
                   [=, this]() mutable { return gloo_->allgather(all, mine, options); }, {host});
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    WorkPtr last;
    for (size_t i = 0; i < outputs.size(); i++) last = _allgather_base(outputs[i], inputs[i], options);
    return last;
  }

  // By a sum of everything, of which a rank takes its part: not every gloo has a reduce_scatter.
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    check({input});
    Tensors host{copied(input)};
    c10d::AllreduceOptions given;
    bool is_mean = options.reduceOp == c10d::ReduceOp::AVG;
    given.reduceOp = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : options.reduceOp;
    Tensor part = host[0].view({getSize(), -1})[getRank()];
    auto divide = [=, this]() mutable {
      if (is_mean) part.div_(getSize());
    };
    return enqueue(OpType::_REDUCE_SCATTER_BASE, "nccl:_reduce_scatter_base", {output}, {output},
                   [=, this]() mutable { return gloo_->allreduce(host, given); }, {part}, divide);
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    Tensors flat;
    for (auto& tensor : inputs.at(0)) flat.push_back(tensor.reshape({-1}));
    auto joined = at::cat(flat);
    return _reduce_scatter_base(outputs.at(0), joined, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    WorkPtr last;
    for (size_t i = 0; i < outputs.size(); i++) last = _reduce_scatter_base(outputs[i], inputs[i], options);
    return last;
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    bool is_root = options.rootRank == getRank();
    auto host = is_root ? copied(outputs.at(0)) : Tensors{};
    std::vector<Tensors> all;
    if (is_root) all.push_back(as_bytes(host));
    auto mine = as_bytes(copied(inputs));
    return enqueue(OpType::GATHER, "nccl:gather", inputs, is_root ? outputs[0] : Tensors{},
                   [=, this]() mutable { return gloo_->gather(all, mine, options); }, host);
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto host = copied(outputs);
    std::vector<Tensors> all;
    if (options.rootRank == getRank()) all.push_back(as_bytes(copied(inputs.at(0))));
    auto mine = as_bytes(host);
    return enqueue(OpType::SCATTER, "nccl:scatter", outputs, outputs,
                   [=, this]() mutable { return gloo_->scatter(mine, all, options); }, host);
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    check({input});
    auto host = copied(output), mine = copied(input);
    return enqueue(OpType::ALLTOALL_BASE, "nccl:all_to_all", {output}, {output},
                   [=, this]() mutable { return gloo_->alltoall_base(host, mine, output_splits, input_splits, options); },
                   {host});
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto host = as_bytes(copied(tensors));
    return enqueue(OpType::SEND, "nccl:send", tensors, {}, [=, this]() mutable { return gloo_->send(host, to, tag); }, {});
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto host = copied(tensors);
    return enqueue(OpType::RECV, "nccl:recv", tensors, tensors,
                   [=, this, bytes = as_bytes(host)]() mutable { return gloo_->recv(bytes, from, tag); }, host);
  }

  // The only one that the host waits for.
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    int index = options.device_ids.empty() ? device_.load() : static_cast<int>(options.device_ids[0]);
    auto device = index < 0 ? at::Device(at::kCUDA) : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
    Tensors one{at::zeros({1}, at::TensorOptions().device(device))};
    auto host = copied(one);
    return enqueue(OpType::BARRIER, "nccl:barrier", one, {},
                   [=, this]() mutable { return gloo_->allreduce(host, c10d::AllreduceOptions()); }, {}, [] {}, true);
  }

  void startCoalescing() override {}
  WorkPtr endCoalescing() override { return last_; }

  // No virtual of torch 2.6 has this name, nor that of `shutdown`.
  void abort() {
    std::lock_guard<std::mutex> lock(queue_->mutex);
    queue_->is_aborted = true;
    // Those behind the one that runs never begin.
    while (queue_->waiting.size() > 1 || (queue_->waiting.size() == 1 && !queue_->waiting.front()->is_started)) {
      queue_->waiting.back()->pending->finish();
      queue_->waiting.pop_back();
    }
  }

  void shutdown() { close(); }

 private:
  void check(const Tensors& tensors) {
    for (auto& tensor : tensors) {
      TORCH_CHECK(tensor.is_cuda() && !tensor.is_sparse(), "Tensors must be CUDA and dense");
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
      if (device_ < 0) meet(tensor.get_device());
      TORCH_CHECK(
          device_ == tensor.get_device(), "rank ", getRank(), " used cuda:", device_.load(), " before and now cuda:",
          int(tensor.get_device()), ": NCCL would open a second communicator, and other ranks may hang");
    }
  }

  // The first collective opens the communicator: ranks learn each other's cards.
  void meet(int device) {
    device_ = device;
    const char* may_share = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    auto mine = at::full({1}, fake_cuda::physical_index(static_cast<c10::DeviceIndex>(device)), at::kLong);
    Tensors all;
    for (int i = 0; i < getSize(); i++) all.push_back(at::empty({1}, at::kLong));
    std::vector<Tensors> out{all};
    Tensors in{mine};
    gloo_->allgather(out, in, c10d::AllgatherOptions())->wait();
    if (may_share && std::string(may_share) == "1") return;
    for (int rank = 0; rank < getSize(); rank++)
      if (rank != getRank() && all[rank].item<int64_t>() == mine.item<int64_t>())
        C10_THROW_ERROR(
            DistBackendError,
            c10::str("NCCL error in: nccl.cpp, invalid usage (run with NCCL_DEBUG=WARN for details)\nLast error:\n",
                     "Duplicate GPU detected : rank ", getRank(), " and rank ", rank, " both on CUDA device ",
                     mine.item<int64_t>()));
  }

  WorkPtr enqueue(OpType type, const char* name, const Tensors& given, const Tensors& changed,
                  std::function<WorkPtr()> start, const Tensors& host, std::function<void()> finish = [] {},
                  bool blocks_host = false) {
    check(given);
    queue_->free_finished();
    auto collective = std::make_shared<Collective>();
    collective->name = name;
    collective->number = ++number_;
    // The input is read now, when all earlier kernels have run.
    collective->start = std::move(start);
    collective->take = [=] {
      finish();
      write(changed, host);
    };
    auto work = c10::make_intrusive<NcclWork>(getRank(), type, collective, given, blocks_host);
    {
      std::lock_guard<std::mutex> lock(queue_->mutex);
      if (queue_->is_aborted || queue_->is_closing)
        C10_THROW_ERROR(DistBackendError, "NCCL communicator was aborted on rank " + std::to_string(getRank()));
      queue_->waiting.push_back(collective);
    }
    queue_->changed.notify_all();
    last_ = work;
    return work;
  }

  void close() {
    if (!thread_.joinable()) return;
    bool is_stuck;
    {
      std::lock_guard<std::mutex> lock(queue_->mutex);
      queue_->is_closing = true;
      is_stuck = queue_->is_aborted;
      if (!queue_->waiting.empty() && !is_stuck) is_stuck = queue_->is_aborted = true;
    }
    queue_->changed.notify_all();
    thread_.join();
    last_.reset();
    queue_->free_finished();
    // gloo's end would wait for what never comes.
    if (is_stuck) gloo_.release();
    else gloo_.reset();
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::shared_ptr<Queue> queue_;
  std::thread thread_;
  WorkPtr last_;
  std::atomic<int> device_{-1};
  uint64_t number_ = 0;
};

}  // namespace

PYBIND11_MODULE(fake_nccl, m) {
  auto backend = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<ProcessGroupNccl, c10::intrusive_ptr<ProcessGroupNccl>>(m, "ProcessGroupNccl", backend)
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> gloo, std::chrono::milliseconds timeout) {
        return c10::make_intrusive<ProcessGroupNccl>(std::move(gloo), timeout);
      }))
      .def("_set_default_timeout", &ProcessGroupNccl::setTimeout)
      .def("abort", &ProcessGroupNccl::abort, py::call_guard<py::gil_scoped_release>())
      .def("shutdown", &ProcessGroupNccl::shutdown, py::call_guard<py::gil_scoped_release>());
  m.def("default_generator", &fake_cuda::default_generator);
  m.def("resize_storage", [](const Tensor& tensor, size_t bytes) {
    fake_cuda::Access access;
    c10::DeviceGuard guard(tensor.device());
    at::native::resize_bytes_cpu(tensor.storage().unsafeGetStorageImpl(), bytes);
  });
}
