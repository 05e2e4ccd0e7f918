// Emulated NPU: PyTorch's PrivateUse1 device, backed by host memory.
//
// One translation unit without pybind or the Python ABI: what Python needs is a custom operator of the `emu_npu`
// library, so the binary depends on the torch version alone and a plain g++ command builds it.
//
//   1 devices      how many, which is current
//   2 memory       host blocks labelled with a device and counted; storages with an Ascend format number
//   3 guard        devices, streams, events
//   4 generator    a random stream per device, apart from the CPU's
//   5 hooks        what torch asks of a PrivateUse1 device
//   6 bridge       npu tensors as CPU tensors on the same bytes, and back
//   7 fallback     every operator: through the bridge to the CPU kernel
//   8 kernels      the operators that the fallback cannot serve
//   9 autocast     casts by operator list
//  10 registration
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string_view>
#include <type_traits>

// Since torch 2.9 `torch.accelerator.memory_*` wants an allocator of this class; before, the class does not exist.
// Declaring it lets section 2 ask whether this torch defines it, so that no torch version number is needed.
namespace c10 {
struct DeviceAllocator;
}

namespace emu {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::StorageImpl;
constexpr auto kNPU = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 16;
constexpr int kDefaultDevices = 2;
constexpr int64_t kFormatND = 2;  // ACL_FORMAT_ND, the plain row-major format

// ---------------------------------------------------------------------------------------------------- 1 devices
static DeviceIndex device_count() {
  static const DeviceIndex count = [] {
    const char* text = std::getenv("ALIGNMENT_EMULATED_NPU_COUNT");
    const int wanted = text ? std::atoi(text) : kDefaultDevices;
    return static_cast<DeviceIndex>(std::min(std::max(wanted, 1), kMaxDevices));
  }();
  return count;
}
static thread_local DeviceIndex current_device = 0;
static DeviceIndex or_current(DeviceIndex i) { return i < 0 ? current_device : i; }
static DeviceIndex checked(int64_t i) {
  TORCH_CHECK(i < device_count(), "npu: invalid device index ", i, ": this process emulates ", int(device_count()),
              " devices (ALIGNMENT_EMULATED_NPU_COUNT)");
  return or_current(static_cast<DeviceIndex>(i));
}

// ---------------------------------------------------------------------------------------------------- 2 memory
static std::atomic<int64_t> bytes_now[kMaxDevices], bytes_peak[kMaxDevices];

// Owner of one block of device memory: a host DataPtr relabelled with the device. It either owns the bytes (`host`)
// or keeps alive the CPU storage that does (`shared`).
struct Block {
  c10::DataPtr host;
  c10::intrusive_ptr<StorageImpl> shared;
  size_t bytes;
  DeviceIndex device;
};
static void free_block(void* p) {
  auto* block = static_cast<Block*>(p);
  bytes_now[block->device] -= static_cast<int64_t>(block->bytes);
  delete block;
}
static c10::DataPtr relabel(c10::DataPtr host, size_t bytes, DeviceIndex device,
                            c10::intrusive_ptr<StorageImpl> shared = {}) {
  void* data = host.get();
  const auto now = bytes_now[device] += static_cast<int64_t>(bytes);
  auto peak = bytes_peak[device].load();
  while (now > peak && !bytes_peak[device].compare_exchange_weak(peak, now)) {
  }
  return {data, new Block{std::move(host), std::move(shared), bytes, device}, &free_block, Device(kNPU, device)};
}
static c10::DataPtr host_bytes(size_t n) {
  return n ? c10::GetAllocator(c10::kCPU)->allocate(n) : c10::DataPtr(nullptr, c10::kCPU);
}

template <class Base>
struct HostBackedAllocator : Base {
  c10::DataPtr allocate(size_t n) override { return relabel(host_bytes(n), n, current_device); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t n) const override { this->default_copy_data(to, from, n); }
};
template <class Base, class = void>
struct Allocator final : HostBackedAllocator<c10::Allocator> {};
// Not marked `override`: both signatures of emptyCache that torch has had are there, and one of them is its own.
template <class Base>
struct Allocator<Base, std::void_t<decltype(sizeof(Base))>> final : HostBackedAllocator<Base> {
  virtual bool initialized() { return true; }
  virtual void emptyCache() {}
  virtual void emptyCache(std::pair<unsigned long long, unsigned long long>) {}
  virtual void recordStream(const c10::DataPtr&, c10::Stream) {}
  virtual c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* array : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      auto& total = (*array)[0];  // the aggregate over the allocator's pools
      total.current = bytes_now[or_current(device)].load();
      total.peak = bytes_peak[or_current(device)].load();
    }
    return stats;
  }
  virtual void resetAccumulatedStats(DeviceIndex) {}
  virtual void resetPeakStats(DeviceIndex device) {
    bytes_peak[or_current(device)] = bytes_now[or_current(device)].load();
  }
};
static Allocator<c10::DeviceAllocator> allocator;
static const auto allocator_set = (c10::SetAllocator(kNPU, &allocator), 0);

// Pinned host memory is plain host memory that remembers being asked for as pinned.
static std::mutex pinned_mutex;
static std::map<uintptr_t, size_t> pinned_blocks;  // first byte -> length

struct PinnedAllocator final : c10::Allocator {
  struct Owner {
    c10::DataPtr host;
  };
  static void release(void* p) {
    auto* owner = static_cast<Owner*>(p);
    {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned_blocks.erase(reinterpret_cast<uintptr_t>(owner->host.get()));
    }
    delete owner;
  }
  c10::DataPtr allocate(size_t n) override {
    auto host = host_bytes(n);
    void* data = host.get();
    if (data) {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned_blocks[reinterpret_cast<uintptr_t>(data)] = n;
    }
    return {data, new Owner{std::move(host)}, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }
};
static PinnedAllocator pinned_allocator;
static bool is_pinned(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  const auto next = pinned_blocks.upper_bound(address);
  if (next == pinned_blocks.begin()) return false;
  const auto& [first, bytes] = *std::prev(next);
  return address < first + bytes;
}

// What an Ascend storage has and a plain one has not: a format number. The bytes stay row-major whatever it says.
struct NpuStorage final : StorageImpl {
  using StorageImpl::StorageImpl;
  int64_t format = kFormatND;
};
static c10::intrusive_ptr<StorageImpl> make_storage(StorageImpl::use_byte_size_t, c10::SymInt bytes, c10::DataPtr data,
                                                    c10::Allocator* from, bool resizable) {
  if (!data) data = from->allocate(bytes.expect_int());
  return c10::make_intrusive<NpuStorage>(StorageImpl::use_byte_size_t(), std::move(bytes), std::move(data), from,
                                         resizable);
}
static const auto storage_set = (c10::SetStorageImplCreate(kNPU, &make_storage), 0);

// ---------------------------------------------------------------------------------------------------- 3 guard
// Work is done when a call returns, so a stream is a number and an event is the time it was recorded.
static thread_local c10::StreamId current_stream[kMaxDevices] = {};

struct Event {
  std::chrono::steady_clock::time_point time;
};
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kNPU;
  c10::DeviceType type() const override { return kNPU; }
  Device exchangeDevice(Device d) const override {
    const auto old = current_device;
    setDevice(d);
    return {kNPU, old};
  }
  Device getDevice() const override { return {kNPU, current_device}; }
  void setDevice(Device d) const override { current_device = checked(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { current_device = or_current(d.index()); }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  void synchronizeDevice(const DeviceIndex) const override {}

  c10::Stream getStream(Device d) const override {
    const auto i = or_current(d.index());
    return c10::Stream(c10::Stream::UNSAFE, Device(kNPU, i), current_stream[i]);
  }
  c10::Stream getDefaultStream(Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, Device(kNPU, or_current(d.index())));
  }
  c10::Stream getNewStream(Device d, int = 0) const override {
    static std::atomic<c10::StreamId> next{1};
    return c10::Stream(c10::Stream::UNSAFE, Device(kNPU, or_current(d.index())), next++);
  }
  c10::Stream getStreamFromGlobalPool(Device d, bool = false) const override { return getNewStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const auto old = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return old;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->time = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    using Milliseconds = std::chrono::duration<double, std::milli>;
    return Milliseconds(static_cast<Event*>(to)->time - static_cast<Event*>(from)->time).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---------------------------------------------------------------------------------------------------- 4 generator
// CPU kernels accept a CPU generator only, so an npu generator carries one of its own.
struct NpuGenerator final : c10::GeneratorImpl {
  at::Generator cpu = at::detail::createCPUGenerator();
  explicit NpuGenerator(DeviceIndex i)
      : c10::GeneratorImpl(Device(kNPU, i), DispatchKeySet(DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "npu (emulated): a generator has no offset; use its state"); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  NpuGenerator* clone_impl() const override {
    auto* copy = new NpuGenerator(device_.index());
    copy->cpu = cpu.clone();
    return copy;
  }
};
static at::Generator make_generator(DeviceIndex i) { return at::make_generator<NpuGenerator>(checked(i)); }
static const at::Generator& default_generator(DeviceIndex i) {
  static const std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> all;
    for (DeviceIndex k = 0; k < device_count(); ++k) all.push_back(make_generator(k));
    return all;
  }();
  return generators.at(checked(i));
}
static at::Generator cpu_side(const at::Generator& g) {
  return g.device().type() == kNPU ? static_cast<NpuGenerator*>(g.unsafeGetGeneratorImpl())->cpu : g;
}

// ---------------------------------------------------------------------------------------------------- 5 hooks
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(DeviceIndex i) const override { current_device = checked(i); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex i) const override {
    const auto old = current_device;
    setCurrentDevice(i);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return i < 0 ? current_device : exchangeDevice(i); }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(DeviceIndex i) const override { return make_generator(i); }
  Device getDeviceFromPtr(void*) const override { return {kNPU, current_device}; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto data = relabel(host_bytes(bytes), bytes, storage.device().index());
    if (const auto kept = std::min(bytes, impl->nbytes())) std::memcpy(data.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
  }
};
static const auto hooks_set = (at::RegisterPrivateUse1HooksInterface(new Hooks), 0);

// ---------------------------------------------------------------------------------------------------- 6 bridge
static void drop_reference(void* p) { c10::raw::intrusive_ptr::decref(static_cast<StorageImpl*>(p)); }

// A tensor with the geometry and flags of `of` on `storage`, for the device of `keys`.
static Tensor same_geometry(const Tensor& of, c10::intrusive_ptr<StorageImpl> storage, DispatchKeySet keys) {
  auto* from = of.unsafeGetTensorImpl();
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), keys, from->dtype());
  auto* to = made.unsafeGetTensorImpl();
  to->set_sizes_and_strides(from->sizes(), from->strides(), from->storage_offset());
  if (from->is_wrapped_number()) to->set_wrapped_number(true);
  if (of.is_conj()) made._set_conj(true);
  if (of.is_neg()) made._set_neg(true);
  return made;
}

// The npu tensors of one call and their CPU twins. Each distinct npu storage gets one CPU storage on the same bytes,
// so aliasing among the arguments, and between arguments and results, is the same on both sides.
struct Bridge {
  struct StoragePair {
    StorageImpl* npu;  // kept alive by the CPU storage's context (to_cpu), or by the caller's result (to_npu)
    c10::intrusive_ptr<StorageImpl> cpu;
    void* data;
    size_t bytes;
  };
  struct TensorPair {
    Tensor npu, cpu;
  };
  c10::SmallVector<StoragePair, 8> storages;
  c10::SmallVector<TensorPair, 8> tensors;
  int device = -1;                 // of the first npu argument
  bool has_cpu_nonscalar = false;  // a CPU tensor with dimensions among the arguments

  c10::intrusive_ptr<StorageImpl> cpu_storage(StorageImpl* npu) {
    for (auto& pair : storages)
      if (pair.npu == npu) return pair.cpu;
    c10::raw::intrusive_ptr::incref(npu);
    const auto bytes = npu->nbytes();
    auto cpu = c10::make_intrusive<StorageImpl>(
        StorageImpl::use_byte_size_t(), bytes, c10::DataPtr(npu->mutable_data(), npu, &drop_reference, c10::kCPU),
        c10::GetAllocator(c10::kCPU), /*resizable=*/true);
    storages.push_back({npu, cpu, npu->mutable_data(), bytes});
    return cpu;
  }
  Tensor to_cpu(const Tensor& t) {
    if (!t.defined()) return t;
    if (t.device().type() != kNPU) {
      has_cpu_nonscalar |= t.is_cpu() && t.dim() > 0;
      return t;
    }
    if (device < 0) device = t.device().index();
    for (auto& pair : tensors)
      if (pair.npu.is_same(t)) return pair.cpu;
    TORCH_CHECK(t.unsafeGetTensorImpl()->has_storage(), "npu (emulated): tensor without storage");
    auto* storage = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    auto cpu = same_geometry(t, cpu_storage(storage), DispatchKeySet(DispatchKey::CPU));
    tensors.push_back({t, cpu});
    return cpu;
  }
  c10::intrusive_ptr<StorageImpl> npu_storage(const c10::Storage& cpu) {
    auto* impl = cpu.unsafeGetStorageImpl();
    for (auto& pair : storages)
      if (pair.cpu.get() == impl) return c10::intrusive_ptr<StorageImpl>::reclaim_copy(pair.npu);
    const auto bytes = impl->nbytes();
    auto shared = c10::intrusive_ptr<StorageImpl>::reclaim_copy(impl);
    auto data = relabel(c10::DataPtr(impl->mutable_data(), c10::kCPU), bytes, device, shared);
    auto npu = make_storage(StorageImpl::use_byte_size_t(), bytes, std::move(data), &allocator, true);
    storages.push_back({npu.get(), std::move(shared), impl->mutable_data(), bytes});
    return npu;
  }
  // An argument comes back as that very npu tensor; a result on an argument's storage as a view on the npu storage;
  // a fresh result is wrapped without a copy.
  Tensor to_npu(const Tensor& cpu) {
    if (!cpu.defined() || !cpu.is_cpu()) return cpu;
    for (auto& pair : tensors)
      if (pair.cpu.is_same(cpu)) return pair.npu;
    return same_geometry(cpu, npu_storage(cpu.storage()), DispatchKeySet(DispatchKey::PrivateUse1));
  }
  // Carry to the npu side what a kernel changed in its arguments besides their elements: bytes moved by a resize,
  // and geometry (`t_`, `squeeze_`, `out=`).
  void carry_back() {
    for (auto& pair : storages) {
      if (pair.cpu->data() == pair.data && pair.cpu->nbytes() == pair.bytes) continue;
      const auto bytes = pair.cpu->nbytes();
      const auto index = pair.npu->device().index();
      if (pair.cpu->data() != pair.data)
        pair.npu->set_data_ptr_noswap(relabel(pair.cpu->set_data_ptr(c10::DataPtr(nullptr, c10::kCPU)), bytes, index));
      pair.npu->set_nbytes(bytes);
    }
    for (auto& pair : tensors) {
      auto *npu = pair.npu.unsafeGetTensorImpl(), *cpu = pair.cpu.unsafeGetTensorImpl();
      if (npu->sizes() != cpu->sizes() || npu->strides() != cpu->strides() ||
          npu->storage_offset() != cpu->storage_offset())
        npu->set_sizes_and_strides(cpu->sizes(), cpu->strides(), cpu->storage_offset());
    }
  }
};

// ---------------------------------------------------------------------------------------------------- 7 fallback
// Apply f to each tensor of an argument: a tensor, or a (nested, optional) list of tensors.
template <class F>
static void map_tensors(IValue& value, const F& f) {
  if (value.isTensor()) {
    value = IValue(f(value.toTensor()));
  } else if (value.isList()) {
    auto list = value.toList();
    const auto kind = list.elementType()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::OptionalType && kind != c10::TypeKind::ListType)
      return;
    c10::impl::GenericList mapped(list.elementType());
    mapped.reserve(list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      IValue item = list.get(i);
      map_tensors(item, f);
      mapped.push_back(std::move(item));
    }
    value = IValue(std::move(mapped));
  }
}

// Operators that take CPU tensors with dimensions beside device tensors, on hardware too: copies between devices, and
// indexing by CPU indices.
static bool takes_cpu_tensors(std::string_view name) {
  if (name.rfind("aten::", 0) != 0) return true;  // collectives, custom operators: theirs to judge
  name.remove_prefix(6);
  for (std::string_view allowed :
       {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put", "copy", "copy_",
        "_copy_from", "_copy_from_and_resize", "_to_copy", "_foreach_copy", "_foreach_copy_"})
    if (name == allowed) return true;
  return false;
}

static void check_devices(const Bridge& bridge, const std::string& name) {
  constexpr auto text = "Expected all tensors to be on the same device, but found at least two devices, npu:";
  for (const auto& pair : bridge.tensors)
    TORCH_CHECK(pair.npu.device().index() == bridge.device || pair.npu.dim() == 0, text, bridge.device, " and npu:",
                int(pair.npu.device().index()), "! (", name, ")");
  TORCH_CHECK(!bridge.has_cpu_nonscalar || bridge.tensors.empty() || takes_cpu_tensors(name), text, bridge.device,
              " and cpu! (", name, ")");
}

static std::atomic<int64_t> fallback_calls{0};

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++fallback_calls;
  const auto& schema = op.schema();
  const size_t n_args = schema.arguments().size(), first = stack->size() - n_args;
  Bridge bridge;
  size_t generator_slot = SIZE_MAX;
  for (size_t i = 0; i < n_args; ++i) {
    auto& value = (*stack)[first + i];
    if (value.isTensor() || value.isList()) {
      map_tensors(value, [&](const Tensor& t) { return bridge.to_cpu(t); });
    } else if (value.isDevice()) {
      if (value.toDevice().type() != kNPU) continue;
      if (bridge.device < 0) bridge.device = checked(value.toDevice().index());
      value = IValue(Device(c10::kCPU));
    } else if (value.isGenerator()) {
      value = IValue(cpu_side(value.toGenerator()));
    } else if (value.isNone() && schema.arguments()[i].name() == "generator") {
      generator_slot = i;
    }
  }
  if (bridge.device < 0) bridge.device = current_device;
  check_devices(bridge, schema.name());
  // Without this, random operators would draw from the CPU's default generator.
  if (generator_slot != SIZE_MAX) (*stack)[first + generator_slot] = IValue(cpu_side(default_generator(bridge.device)));

  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);

  bridge.carry_back();
  const size_t n_returns = schema.returns().size(), first_return = stack->size() - n_returns;
  for (size_t i = 0; i < n_returns; ++i) {
    auto& value = (*stack)[first_return + i];
    if (value.isTensor() || value.isList()) map_tensors(value, [&](const Tensor& t) { return bridge.to_npu(t); });
  }
}

// ---------------------------------------------------------------------------------------------------- 8 kernels
// Creation
static Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> dtype_opt,
                                  std::optional<at::Layout> layout, std::optional<Device> device,
                                  std::optional<bool>, std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "npu (emulated): only strided layout, got ", *layout);
  c10::DeviceGuard guard(Device(kNPU, checked(device.has_value() ? device->index() : -1)));
  const auto dtype = c10::dtype_or_default(dtype_opt);
  int64_t elements = 1;
  for (const auto extent : size) {
    TORCH_CHECK(extent >= 0, "Trying to create tensor with negative dimension ", extent, ": ", size);
    elements *= extent;
  }
  const size_t bytes = elements * c10::elementSize(dtype);
  auto storage = make_storage(StorageImpl::use_byte_size_t(), bytes, allocator.allocate(bytes), &allocator, true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), DispatchKeySet(DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(dtype));
  auto* impl = made.unsafeGetTensorImpl();
  if (size.size() != 1 || size[0] != 0) impl->generic_set_sizes_contiguous(size);
  const auto format = memory_format.value_or(at::MemoryFormat::Contiguous);
  if (format != at::MemoryFormat::Contiguous && format != at::MemoryFormat::Preserve)
    impl->empty_tensor_restride(format);
  return made;
}
static Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout> layout, std::optional<Device> device, std::optional<bool> pin) {
  int64_t extent = 1;
  for (size_t k = 0; k < size.size(); ++k) {
    if (size[k] == 0) {
      extent = 0;
      break;
    }
    extent += (size[k] - 1) * stride[k];
  }
  auto made = empty_memory_format({extent}, dtype, layout, device, pin, std::nullopt);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return made;
}
// The stock kernel hands out null memory, which backward formulas then read.
static Tensor efficientzerotensor(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                                  std::optional<at::Layout> layout, std::optional<Device> device,
                                  std::optional<bool> pin) {
  return empty_memory_format(size, dtype, layout, device, pin, std::nullopt).zero_();
}

// Copies across devices. A tensor on the host stays as it is; an npu tensor is read and written through an alias.
static Tensor host_alias(const Tensor& t) {
  TORCH_CHECK(t.device().type() == kNPU, "host_alias: expected an npu tensor, got one on ", t.device());
  return Bridge().to_cpu(t);
}
static Tensor from_host(const Tensor& t, int64_t device) {
  TORCH_CHECK(t.is_cpu(), "from_host: expected a cpu tensor, got one on ", t.device());
  Bridge bridge;
  bridge.device = checked(device);
  return bridge.to_npu(t);
}
static Tensor on_host(const Tensor& t) { return t.device().type() == kNPU ? host_alias(t) : t; }
static Tensor copy_from(const Tensor& self, const Tensor& dst, bool) {
  on_host(dst).copy_(on_host(self));
  return dst;
}
static Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  on_host(dst).copy_(on_host(self));
  return dst;
}

// set_: storages are exchanged on the npu side, which no CPU kernel can do.
static Tensor& set_storage_offset(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                                  at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  std::vector<int64_t> strides(stride.begin(), stride.end());
  if (stride.data() == nullptr || (stride.empty() && !size.empty())) {
    strides.assign(size.size(), 1);
    for (int64_t k = int64_t(size.size()) - 2; k >= 0; --k)
      strides[k] = strides[k + 1] * std::max<int64_t>(size[k + 1], 1);
  }
  impl->set_sizes_and_strides(size, strides, offset);
  return self;
}
static Tensor& set_storage(Tensor& self, at::Storage storage) {
  const int64_t elements = storage.nbytes() / self.dtype().itemsize();
  return set_storage_offset(self, std::move(storage), 0, {elements}, {1});
}
static Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
static Tensor& set_empty(Tensor& self) {
  auto empty = empty_memory_format({0}, self.scalar_type(), {}, self.device(), {}, {});
  return set_storage_offset(self, empty.storage(), 0, {0}, {1});
}

// Its CPU kernel has no generator argument and would draw from the CPU's.
static std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  auto mask = at::empty_like(x, x.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {x.mul(mask).mul_(p == 1 ? 0. : 1. / (1. - p)), mask};
}

// 0 is the math path: plain operators, each of which is emulated.
static int64_t fused_sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                                std::optional<double>, bool) {
  return 0;
}

// Convolution picks its backend by device before any kernel is called; PrivateUse1 gets these two.
static Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                          at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                          at::IntArrayRef output_padding, int64_t groups) {
  Bridge bridge;
  const auto x = bridge.to_cpu(input), w = bridge.to_cpu(weight);
  const auto b = bias.has_value() ? bridge.to_cpu(*bias) : Tensor();
  check_devices(bridge, "aten::convolution");
  return bridge.to_npu(at::convolution(x, w, b, stride, padding, dilation, transposed, output_padding, groups));
}
static std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  Bridge bridge;
  const auto g = bridge.to_cpu(grad_output), x = bridge.to_cpu(input), w = bridge.to_cpu(weight);
  auto [grad_input, grad_weight, grad_bias] =
      at::convolution_backward(g, x, w, at::IntArrayRef({grad_output.size(1)}), stride, padding, dilation, transposed,
                               output_padding, groups, mask);
  return {bridge.to_npu(grad_input), bridge.to_npu(grad_weight), bridge.to_npu(grad_bias)};
}

// LSTM and GRU choose a fused cell for a device that is not the CPU, and the CPU has none. Gates are packed in torch's
// order: input, forget, cell, output for the LSTM; reset, update, new for the GRU.
static Tensor biased(const Tensor& gates, const std::optional<Tensor>& bias) {
  return bias.has_value() && bias->defined() ? gates + *bias : gates;
}
static std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                                    const Tensor& cx, const std::optional<Tensor>& input_bias,
                                                    const std::optional<Tensor>& hidden_bias) {
  const auto gates = biased(input_gates, input_bias) + biased(hidden_gates, hidden_bias);
  const auto part = gates.unsafe_chunk(4, 1);
  const auto i = part[0].sigmoid(), f = part[1].sigmoid(), g = part[2].tanh(), o = part[3].sigmoid();
  const auto cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}
static std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const std::optional<Tensor>& grad_hy,
                                                             const std::optional<Tensor>& grad_cy, const Tensor& cx,
                                                             const Tensor& cy, const Tensor& activated, bool has_bias) {
  const auto part = activated.unsafe_chunk(4, 1);
  const auto &i = part[0], &f = part[1], &g = part[2], &o = part[3];
  const auto tanh_cy = cy.tanh();
  const bool has_hy = grad_hy.has_value() && grad_hy->defined(), has_cy = grad_cy.has_value() && grad_cy->defined();
  const auto dh = has_hy ? *grad_hy : at::zeros_like(cy);
  const auto dc = dh * o * (1 - tanh_cy * tanh_cy) + (has_cy ? *grad_cy : at::zeros_like(cy));
  const auto grad_gates = at::cat({dc * g * i * (1 - i), dc * cx * f * (1 - f), dc * i * (1 - g * g),
                                   dh * tanh_cy * o * (1 - o)}, 1);
  return {grad_gates, dc * f, has_bias ? grad_gates.sum(0) : Tensor()};
}
static std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                                           const std::optional<Tensor>& input_bias,
                                           const std::optional<Tensor>& hidden_bias) {
  const auto from_input = biased(input_gates, input_bias).unsafe_chunk(3, 1);
  const auto from_hidden = biased(hidden_gates, hidden_bias).unsafe_chunk(3, 1);
  const auto r = (from_input[0] + from_hidden[0]).sigmoid(), z = (from_input[1] + from_hidden[1]).sigmoid();
  const auto n = (from_input[2] + r * from_hidden[2]).tanh();
  return {(hx - n) * z + n, at::cat({r, z, n, hx, from_hidden[2]}, 1)};
}
static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy,
                                                                            const Tensor& workspace, bool has_bias) {
  const auto part = workspace.unsafe_chunk(5, 1);
  const auto &r = part[0], &z = part[1], &n = part[2], &hx = part[3], &hidden_n = part[4];
  const auto dn = grad_hy * (1 - z) * (1 - n * n);
  const auto dz = grad_hy * (hx - n) * z * (1 - z);
  const auto dr = dn * hidden_n * r * (1 - r);
  const auto grad_input = at::cat({dr, dz, dn}, 1), grad_hidden = at::cat({dr, dz, dn * r}, 1);
  return {grad_input, grad_hidden, grad_hy * z, has_bias ? grad_input.sum(0) : Tensor(),
          has_bias ? grad_hidden.sum(0) : Tensor()};
}

static void record_stream(Tensor&, c10::Stream) {}

// ---------------------------------------------------------------------------------------------------- 9 autocast
static bool castable(const Tensor& t, at::ScalarType to) {
  return t.defined() && t.device().type() == kNPU && t.is_floating_point() && t.scalar_type() != at::kDouble &&
         t.scalar_type() != to;
}
template <class F>
static void map_arguments(const c10::OperatorHandle& op, torch::jit::Stack* stack, const F& f) {
  const size_t n = op.schema().arguments().size(), first = stack->size() - n;
  for (size_t i = 0; i < n; ++i) {
    auto& value = (*stack)[first + i];
    if (value.isTensor() || value.isList()) map_tensors(value, f);
  }
}
static void call_cast(const c10::OperatorHandle& op, torch::jit::Stack* stack, at::ScalarType to) {
  c10::impl::ExcludeDispatchKeyGuard guard(DispatchKey::AutocastPrivateUse1);
  map_arguments(op, stack,
                [&](const Tensor& t) { return castable(t, to) ? at::autocast::cached_cast(to, t, kNPU) : t; });
  op.callBoxed(stack);
}
static void autocast_low(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  call_cast(op, stack, at::autocast::get_autocast_dtype(kNPU));
}
static void autocast_fp32(const c10::OperatorHandle& op, torch::jit::Stack* stack) { call_cast(op, stack, at::kFloat); }
static void autocast_widest(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  bool any_fp32 = false;
  map_arguments(op, stack, [&](const Tensor& t) {
    any_fp32 |= t.defined() && t.scalar_type() == at::kFloat;
    return t;
  });
  call_cast(op, stack, any_fp32 ? at::kFloat : at::autocast::get_autocast_dtype(kNPU));
}

// ---------------------------------------------------------------------------------------------------- 10 registration
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &efficientzerotensor);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
  m.impl("native_dropout", &native_dropout);
  m.impl("_fused_sdp_choice", &fused_sdp_choice);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  m.impl("record_stream", &record_stream);
  // These have a CPU kernel and a composite one that computes differently; a device gets the composite unless told.
  for (const char* name : {"native_layer_norm", "native_group_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
// A copy of a conjugate or negative view is resolved by copy_; resolving it again inside _copy_from never ends.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// Collectives: the same fallback, so that gloo's CPU backend works in place on the device's bytes. torch registers
// PrivateUse1 kernels of its own for them; replacing those on purpose is not worth a warning to the user.
struct SilentWarnings final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};
static const auto collectives_set = [] {
  SilentWarnings silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  static torch::Library m(torch::Library::IMPL, "c10d", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const char* name :
       {"allreduce_", "allreduce_coalesced_", "broadcast_", "allgather_", "_allgather_base_", "allgather_coalesced_",
        "allgather_into_tensor_coalesced_", "reduce_", "gather_", "scatter_", "reduce_scatter_",
        "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "alltoall_", "alltoall_base_", "send", "recv_",
        "recv_any_source_", "barrier", "monitored_barrier_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  return 0;
}();

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name :
       {"mm", "bmm", "matmul", "linear", "addmm", "addmv", "addr", "addbmm", "baddbmm", "mv", "chain_matmul", "conv1d",
        "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution",
        "linalg_vecdot", "linalg_multi_dot", "prelu", "scaled_dot_product_attention", "einsum"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast_low>());
  for (const char* name :
       {"acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
        "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm",
        "native_layer_norm", "group_norm", "nuclear_norm", "cosine_similarity", "cosine_embedding_loss", "nll_loss",
        "nll_loss2d", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
        "poisson_nll_loss", "soft_margin_loss", "triplet_margin_loss", "binary_cross_entropy_with_logits", "dist",
        "pdist", "cdist", "renorm", "logsumexp", "cross_entropy_loss", "softmax.int", "log_softmax.int", "cumprod",
        "cumsum", "sum", "sum.dim_IntList", "prod", "prod.dim_int", "rms_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast_fp32>());
  for (const char* name : {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put",
                           "tensordot", "scatter_add", "stack", "cat"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocast_widest>());
}

// What Python needs of the device.
TORCH_LIBRARY(emu_npu, m) {
  m.def("host_alias(Tensor(a) t) -> Tensor(a)");
  m.def("from_host(Tensor t, int device=-1) -> Tensor");
  m.def("get_format(Tensor t) -> int");
  m.def("set_format(Tensor t, int format) -> ()");
  // The schema type of a generator is `Generator?`; the inferred one does not parse.
  m.def("default_generator(int device=-1) -> Generator?",
        [](int64_t i) { return default_generator(static_cast<DeviceIndex>(i)); });
  m.def("memory(int device, bool peak) -> int",
        [](int64_t i, bool peak) { return (peak ? bytes_peak : bytes_now)[checked(i)].load(); });
  m.def("reset_peak(int device) -> ()", [](int64_t i) { bytes_peak[checked(i)] = bytes_now[checked(i)].load(); });
  m.def("set_device(int device) -> ()", [](int64_t i) { current_device = checked(i); });
  m.def("current_device() -> int", [] { return static_cast<int64_t>(current_device); });
  m.def("device_count() -> int", [] { return static_cast<int64_t>(device_count()); });
  m.def("fallback_calls() -> int", [] { return fallback_calls.load(); });
}
TORCH_LIBRARY_IMPL(emu_npu, CompositeExplicitAutograd, m) {
  m.impl("host_alias", &host_alias);
  m.impl("from_host", &from_host);
  m.impl("get_format", [](const Tensor& t) {
    auto* storage = dynamic_cast<NpuStorage*>(t.storage().unsafeGetStorageImpl());
    return storage ? storage->format : kFormatND;
  });
  m.impl("set_format", [](const Tensor& t, int64_t format) {
    auto* storage = dynamic_cast<NpuStorage*>(t.storage().unsafeGetStorageImpl());
    TORCH_CHECK(storage, "set_format: expected an npu tensor, got one on ", t.device());
    storage->format = format;
  });
}
}  // namespace emu
