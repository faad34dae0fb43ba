// A CUDA runtime without a device: allocations are reserved host pages, kernels and products are counted and not run.
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>
extern "C" {
static std::recursive_mutex mu;
static std::unordered_map<const void*, std::string>* names;
static std::map<std::string, long>* counts;
static std::map<uintptr_t, size_t>* dev;   // device ranges
static std::map<uintptr_t, size_t>* host;  // registered
static size_t used = 0, peak = 0, TOTAL = (size_t)80 << 30;
static long mallocs = 0, frees = 0;
static long ops = 0, done = 0;
static long LAG = 0;
static long syncs = 0, launches = 0, d2h = 0, h2d = 0, queries_not_ready = 0;
static FILE* trace = nullptr;
struct Init {
  Init() {
    names = new std::unordered_map<const void*, std::string>();
    counts = new std::map<std::string, long>();
    dev = new std::map<uintptr_t, size_t>();
    host = new std::map<uintptr_t, size_t>();
    if (getenv("STUB_LAG")) LAG = atol(getenv("STUB_LAG"));
    if (getenv("STUB_GIB")) TOTAL = (size_t)(atof(getenv("STUB_GIB")) * (1 << 30));
  }
};
static void init() { static Init i; }
static void count(const std::string& n) {
  std::lock_guard<std::recursive_mutex> g(mu);
  init();
  (*counts)[n]++;
  ops++;
}
static void allsync(const char* why) {
  std::lock_guard<std::recursive_mutex> g(mu);
  init();
  syncs++;
  done = ops;
  (*counts)[std::string("SYNC ") + why]++;
}
// control
void stub_reset() {
  std::lock_guard<std::recursive_mutex> g(mu);
  init();
  counts->clear();
  launches = syncs = d2h = h2d = 0;
  mallocs = frees = 0;
  peak = used;
}
void stub_dump(const char* path) {
  std::lock_guard<std::recursive_mutex> g(mu);
  init();
  FILE* f = fopen(path, "w");
  for (auto& p : *counts) fprintf(f, "%ld\t%s\n", p.second, p.first.c_str());
  fclose(f);
}
long stub_get(int i) {
  long v[] = {launches, syncs, d2h, h2d, mallocs, frees, (long)used, (long)peak, ops, queries_not_ready};
  return v[i];
}
void stub_lag(long n) { LAG = n; }
static bool in(std::map<uintptr_t, size_t>* m, const void* p) {
  auto it = m->upper_bound((uintptr_t)p);
  if (it == m->begin()) return false;
  --it;
  return (uintptr_t)p < it->first + it->second;
}
// registration
void** __cudaRegisterFatBinary(void*) {
  init();
  static void* h[1];
  return h;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* f, char*, const char* name, int, void*, void*, void*, void*, int*) {
  init();
  std::lock_guard<std::recursive_mutex> g(mu);
  (*names)[f] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) {
  *k = (cudaKernel_t)f;
  return cudaSuccess;
}
struct Conf {
  dim3 g, b;
  size_t s;
  void* st;
};
static thread_local std::vector<Conf> confs;
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t s, void* st) {
  confs.push_back({g, b, s, st});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* s, void* st) {
  Conf c = confs.back();
  confs.pop_back();
  *g = c.g;
  *b = c.b;
  *s = c.s;
  *(void**)st = c.st;
  return cudaSuccess;
}
static cudaError_t launch(const void* f, dim3 g, dim3 b) {
  std::lock_guard<std::recursive_mutex> l(mu);
  init();
  launches++;
  if (g.x == 0 || g.y == 0 || g.z == 0 || b.x * b.y * b.z > 1024) {
    (*counts)["BAD LAUNCH"]++;
    return cudaErrorInvalidConfiguration;
  }
  auto it = names->find(f);
  count(it == names->end() ? "?" : it->second);
  return cudaSuccess;
}
void stub_launched(const char* name) {  // by the driver, as compiled kernels are
  std::lock_guard<std::recursive_mutex> l(mu);
  init();
  launches++;
  count(name);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 g, dim3 b, void**, size_t, cudaStream_t) {
  return launch((const void*)f, g, b);
}
cudaError_t cudaLaunchKernel(const void* f, dim3 g, dim3 b, void**, size_t, cudaStream_t) { return launch(f, g, b); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void**) {
  return launch(f, c->gridDim, c->blockDim);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t f, void* d) {
  f(d);
  return cudaSuccess;
}
// device
cudaError_t cudaGetDeviceProperties(cudaDeviceProp*, int);
cudaError_t cudaGetDeviceCount(int* n) {
  *n = 1;
  return cudaSuccess;
}
static thread_local int cur = 0;
cudaError_t cudaGetDevice(int* d) {
  *d = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int d) { return d == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaDeviceSynchronize() {
  allsync("device");
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* c, int, int) {
  *c = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* l, int* g) {
  *l = 0;
  *g = -5;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Stub H100");
  p->totalGlobalMem = TOTAL;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = getenv("STUB_CC") ? atoi(getenv("STUB_CC")) / 10 : 9;
  p->minor = getenv("STUB_CC") ? atoi(getenv("STUB_CC")) % 10 : 0;
  p->multiProcessorCount = 132;
  p->textureAlignment = 512;
  p->concurrentKernels = 1;
  p->unifiedAddressing = 1;
  p->managedMemory = 1;
  p->canMapHostMemory = 1;
  p->asyncEngineCount = 3;
  p->l2CacheSize = 50 << 20;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlockOptin = p->major == 9 || p->major == 10  ? 232448
                              : p->major == 8 && p->minor == 0 ? 166912
                              : p->major == 7                  ? 65536
                                                               : 101376;
  p->maxBlocksPerMultiProcessor = 32;
  p->memoryBusWidth = 5120;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  switch (a) {
    case cudaDevAttrMultiProcessorCount:
      *v = 132;
      break;
    case cudaDevAttrComputeCapabilityMajor: {
      cudaDeviceProp p;
      cudaGetDeviceProperties(&p, 0);
      *v = p.major;
      break;
    }
    case cudaDevAttrComputeCapabilityMinor: {
      cudaDeviceProp p;
      cudaGetDeviceProperties(&p, 0);
      *v = p.minor;
      break;
    }
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: {
      cudaDeviceProp p;
      cudaGetDeviceProperties(&p, 0);
      *v = (int)p.sharedMemPerBlockOptin;
      break;
    }
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *v = 49152;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *v = 1024;
      break;
    case cudaDevAttrMaxGridDimX:
      *v = 2147483647;
      break;
    case cudaDevAttrMaxGridDimY:
      *v = 65535;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *v = 2048;
      break;
    case cudaDevAttrWarpSize:
      *v = 32;
      break;
    default:
      *v = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int) {
  strncpy(s, "0000:00:00.0", n);
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = 90;
  a->ptxVersion = 90;
  a->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  *n = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
  *n = 2;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t e) {
  return e == cudaErrorMemoryAllocation ? "out of memory" : "stub error";
}
const char* cudaGetErrorName(cudaError_t) { return "stub"; }
// memory
cudaError_t cudaMalloc(void** p, size_t n) {
  std::lock_guard<std::recursive_mutex> g(mu);
  init();
  if (used + n > TOTAL) return cudaErrorMemoryAllocation;
  *p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*p == MAP_FAILED) return cudaErrorMemoryAllocation;
  (*dev)[(uintptr_t)*p] = n;
  used += n;
  if (used > peak) peak = used;
  mallocs++;
  (*counts)["cudaMalloc"]++;
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  std::lock_guard<std::recursive_mutex> g(mu);
  init();
  if (!p) return cudaSuccess;
  auto it = dev->find((uintptr_t)p);
  if (it == dev->end()) return cudaErrorInvalidValue;
  munmap(p, it->second);
  used -= it->second;
  dev->erase(it);
  frees++;
  allsync("cudaFree");
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* f, size_t* t) {
  *f = TOTAL - used;
  *t = TOTAL;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  init();
  *p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  std::lock_guard<std::recursive_mutex> g(mu);
  (*host)[(uintptr_t)*p] = n;
  (*counts)["cudaHostAlloc"]++;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* p) {
  std::lock_guard<std::recursive_mutex> g(mu);
  auto it = host->find((uintptr_t)p);
  if (it != host->end()) {
    munmap(p, it->second);
    host->erase(it);
  }
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
  std::lock_guard<std::recursive_mutex> g(mu);
  init();
  (*host)[(uintptr_t)p] = n;
  (*counts)["cudaHostRegister"]++;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* p) {
  std::lock_guard<std::recursive_mutex> g(mu);
  init();
  (*counts)["cudaHostUnregister"]++;
  return host->erase((uintptr_t)p) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  std::lock_guard<std::recursive_mutex> g(mu);
  init();
  memset(a, 0, sizeof *a);
  a->type = in(dev, p) ? cudaMemoryTypeDevice : in(host, p) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->devicePointer = (void*)p;
  return cudaSuccess;
}
static void copy(void* d, const void* s, size_t n, const char* async) {
  std::lock_guard<std::recursive_mutex> g(mu);
  init();
  bool dd = in(dev, d), sd = in(dev, s);
  char b[128];
  const char* kind = dd && sd ? "d2d" : dd ? "h2d" : sd ? "d2h" : "h2h";
  const void* h = dd ? s : d;
  bool pinned = (dd && sd) || in(host, h);
  snprintf(b, sizeof b, "memcpy %s %s %s", kind, async, pinned ? "" : "UNPINNED");
  count(b);
  if (!dd) d2h++;
  if (!sd) h2d++;
  if (n <= (1 << 20)) memmove(d, s, n);
}
cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind, cudaStream_t st) {
  copy(d, s, n, st ? "async side" : "async main");
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) {
  copy(d, s, n, "sync");
  allsync("memcpy");
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t) {
  copy(d, s, n, "peer");
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void*, size_t, const void*, size_t, size_t, size_t, cudaMemcpyKind, cudaStream_t) {
  count("memcpy2d");
  return cudaSuccess;
}
cudaError_t cudaMemset(void*, int, size_t) {
  count("memset");
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t) {
  count("memset async");
  if (n <= (1 << 16)) memset(p, v, n);
  return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void** p, const void* s) {
  *p = (void*)s;
  return cudaSuccess;
}
// streams and events
static long nstream = 1;
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) {
  *s = (cudaStream_t)(0x1000 + 16 * nstream++);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned f) { return cudaStreamCreateWithPriority(s, f, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* p) {
  *p = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) {
  *s = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* s, unsigned long long* id, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *s = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  allsync("stream");
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  count("wait event");
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* d, unsigned) {
  f(s, cudaSuccess, d);
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
struct Ev {
  long at;
};
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
  *e = (cudaEvent_t) new Ev{0};
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) {
  delete (Ev*)e;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t) {
  std::lock_guard<std::recursive_mutex> g(mu);
  ((Ev*)e)->at = ++ops;
  count("record event");
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
cudaError_t cudaEventQuery(cudaEvent_t e) {
  std::lock_guard<std::recursive_mutex> g(mu);
  long d = ops - LAG;
  if (d < done) d = done;
  bool ok = ((Ev*)e)->at <= d;
  if (!ok) queries_not_ready++;
  return ok ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  std::lock_guard<std::recursive_mutex> g(mu);
  init();
  if (((Ev*)e)->at > done) {
    done = ((Ev*)e)->at;
  }
  syncs++;
  (*counts)["SYNC event"]++;
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* t, cudaEvent_t, cudaEvent_t) {
  *t = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** p, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* r) {
  *p = nullptr;
  if (r) *r = cudaDriverEntryPointSymbolNotFound;
  return cudaErrorSymbolNotFound;
}
// cuBLAS
#define OK CUBLAS_STATUS_SUCCESS
cublasStatus_t cublasCreate_v2(cublasHandle_t* h) {
  *h = (cublasHandle_t)1;
  return OK;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t) { return OK; }
cublasStatus_t cublasSetStream_v2(cublasHandle_t, cudaStream_t) { return OK; }
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) { return OK; }
static cublasMath_t mm = CUBLAS_DEFAULT_MATH;
static cublasPointerMode_t pm = CUBLAS_POINTER_MODE_HOST;
cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t m) {
  mm = m;
  return OK;
}
cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t* m) {
  *m = mm;
  return OK;
}
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t, cublasPointerMode_t* m) {
  *m = pm;
  return OK;
}
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t, cublasPointerMode_t m) {
  pm = m;
  return OK;
}
cublasStatus_t cublasSetSmCountTarget(cublasHandle_t, int) { return OK; }
static void gemm(const char* n, long m, long k, long l, int at, int ct) {
  char b[128];
  snprintf(b, sizeof b, "GEMM %s types %d->%d", n, at, ct);
  launches++;
  count(b);
}
cublasStatus_t cublasGemmEx(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k, const void*,
                            const void*, cudaDataType at, int, const void*, cudaDataType, int, const void*, void*,
                            cudaDataType ct, int, cublasComputeType_t, cublasGemmAlgo_t) {
  gemm("Ex", m, n, k, at, ct);
  return OK;
}
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                          const void*, const void*, cudaDataType at, int, long long, const void*,
                                          cudaDataType, int, long long, const void*, void*, cudaDataType ct, int,
                                          long long, int, cublasComputeType_t, cublasGemmAlgo_t) {
  gemm("batched", m, n, k, at, ct);
  return OK;
}
cublasStatus_t cublasSgemm_v2(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k, const float*,
                              const float*, int, const float*, int, const float*, float*, int) {
  gemm("S", m, n, k, 0, 0);
  return OK;
}
cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                         const float*, const float*, int, long long, const float*, int, long long,
                                         const float*, float*, int, long long, int) {
  gemm("S batched", m, n, k, 0, 0);
  return OK;
}
cublasStatus_t cublasSgemv_v2(cublasHandle_t, cublasOperation_t, int, int, const float*, const float*, int,
                              const float*, int, const float*, float*, int) {
  gemm("Sgemv", 0, 0, 0, 0, 0);
  return OK;
}
cublasStatus_t cublasDgemm_v2(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k, const double*,
                              const double*, int, const double*, int, const double*, double*, int) {
  gemm("D", m, n, k, 1, 1);
  return OK;
}
cublasStatus_t cublasDgemmStridedBatched(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k,
                                         const double*, const double*, int, long long, const double*, int, long long,
                                         const double*, double*, int, long long, int) {
  gemm("D batched", m, n, k, 1, 1);
  return OK;
}
cublasStatus_t cublasDotEx(cublasHandle_t, int, const void*, cudaDataType, int, const void*, cudaDataType, int, void*,
                           cudaDataType, cudaDataType) {
  gemm("dot", 0, 0, 0, 0, 0);
  return OK;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t, cudaDataType_t) {
  *d = (cublasLtMatmulDesc_t)calloc(1, 512);
  return OK;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
  free(d);
  return OK;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void*,
                                              size_t) {
  return OK;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* d) {
  *d = (cublasLtMatmulPreference_t)calloc(1, 512);
  return OK;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t d) {
  free(d);
  return OK;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
                                                    const void*, size_t) {
  return OK;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* d, cudaDataType, uint64_t, uint64_t, int64_t) {
  *d = (cublasLtMatrixLayout_t)calloc(1, 512);
  return OK;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t d) {
  free(d);
  return OK;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t, const void*,
                                                size_t) {
  return OK;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t r[],
                                              int* n) {
  memset(r, 0, sizeof *r);
  r->state = OK;
  *n = 1;
  return OK;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*, cublasLtMatrixLayout_t,
                              const void*, cublasLtMatrixLayout_t, const void*, const void*, cublasLtMatrixLayout_t,
                              void*, cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t) {
  gemm("Lt", 0, 0, 0, -1, -1);
  return OK;
}
}
