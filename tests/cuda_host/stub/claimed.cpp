// Says that a device of type KIND (CUDA, XPU, MPS) is there, to a torch that was built without it. Tensors of
// tests/cuda_host/claimed.py are on it.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using namespace c10;

const Device device(DeviceType::KIND, 0);
const Stream stream(Stream::DEFAULT, device);

struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::KIND> {
  Device exchangeDevice(Device) const override { return device; }
  Device getDevice() const override { return device; }
  Stream getStream(Device) const noexcept override { return stream; }
  Stream getDefaultStream(Device) const override { return stream; }
  Stream exchangeStream(Stream) const noexcept override { return stream; }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override {
    *event = const_cast<Stream*>(&stream);  // any address: events are ready at once
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(KIND, Guard)
}

#define CLAIM                                                     \
  void init() const override {}                                   \
  bool isBuilt() const override { return true; }                  \
  bool isAvailable() const override { return true; }              \
  bool hasPrimaryContext(DeviceIndex) const override { return true; } \
  DeviceIndex deviceCount() const override { return 1; }          \
  DeviceIndex getCurrentDevice() const override { return 0; }

namespace at {
#if defined(CLAIMS_CUDA)
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  CLAIM
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return 1; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
#elif defined(CLAIMS_XPU)
struct XPUHooks : XPUHooksInterface {
  CLAIM
  bool hasXPU() const override { return true; }
  DeviceIndex getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
};
REGISTER_XPU_HOOKS(XPUHooks)
#else
struct MPSHooks : MPSHooksInterface {
  CLAIM
  bool hasMPS() const override { return true; }
};
REGISTER_MPS_HOOKS(MPSHooks)
#endif
}  // namespace at
