#include <string.h>

// Of runtime.cpp, which is loaded before.
extern int cudaDeviceGetAttribute(int*, int, int);
extern void stub_launched(const char*);

int cuCtxGetCurrent(void** c) {
  *c = (void*)1;
  return 0;
}
int cuCtxSetCurrent(void* c) { return 0; }
int cuDeviceGet(int* d, int i) {
  *d = i;
  return 0;
}
int cuCtxGetLimit(unsigned long* v, int limit) {
  *v = 1024;
  return 0;
}
int cuCtxSetLimit(int limit, unsigned long v) { return 0; }
int cuDeviceGetAttribute(int* v, int a, int d) { return cudaDeviceGetAttribute(v, a, d); }  // the same numbers
int cuDevicePrimaryCtxGetState(int d, unsigned* f, int* a) {
  *f = 0;
  *a = 1;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** c, int d) {
  *c = (void*)1;
  return 0;
}
int cuFuncGetAttribute(int* p, int a, void* f) {
  *p = a == 0 ? 1024 : a == 4 ? 128 : 0;  // threads of a block, registers
  return 0;
}
int cuFuncSetAttribute(void* f, int a, int v) { return 0; }
int cuFuncSetCacheConfig(void* f, int c) { return 0; }
int cuGetErrorString(int e, const char** s) {
  *s = "stub";
  return 0;
}
int cuLaunchCooperativeKernel() { return 1; }
int cuLaunchKernel(void* f) {
  stub_launched(f);
  return 0;
}
int cuLaunchKernelEx(void* config, void* f) {
  stub_launched(f);
  return 0;
}
int cuLinkAddData_v2() { return 1; }
int cuLinkComplete() { return 1; }
int cuLinkCreate_v2() { return 1; }
int cuModuleGetFunction(void** f, void* module, const char* name) {
  *f = strdup(name);
  return 0;
}
int cuModuleLoad(void** module, const char* path) {
  *module = (void*)1;
  return 0;
}
int cuModuleLoadData(void** module, const void* image) {
  *module = (void*)1;
  return 0;
}
int cuModuleLoadDataEx(void** module, const void* image) {
  *module = (void*)1;
  return 0;
}
int cuModuleUnload() { return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n) {
  *n = 2;
  return 0;
}
int cuPointerGetAttribute(void* v, int attribute, unsigned long long p) {
  *(unsigned long long*)v = p;
  return attribute == 3 ? 0 : 1;  // the pointer on the device
}
int cuTensorMapEncodeTiled() { return 1; }
int cuInit(unsigned f) { return 100; }
int cuDriverGetVersion(int* v) {
  *v = 13000;
  return 0;
}
