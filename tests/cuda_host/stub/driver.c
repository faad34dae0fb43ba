int cuCtxGetCurrent(void** c) {
  *c = (void*)1;
  return 0;
}
int cuCtxSetCurrent(void* c) { return 0; }
int cuDeviceGet(int* d, int i) {
  *d = i;
  return 0;
}
int cuDeviceGetAttribute(int* v, int a, int d) {
  *v = 0;
  return 0;
}
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
  *p = 0;
  return 0;
}
int cuFuncSetAttribute(void* f, int a, int v) { return 0; }
int cuFuncSetCacheConfig(void* f, int c) { return 0; }
int cuGetErrorString(int e, const char** s) {
  *s = "stub";
  return 0;
}
int cuLaunchCooperativeKernel() { return 1; }
int cuLaunchKernel() { return 0; }
int cuLinkAddData_v2() { return 1; }
int cuLinkComplete() { return 1; }
int cuLinkCreate_v2() { return 1; }
int cuModuleGetFunction() { return 1; }
int cuModuleLoad() { return 1; }
int cuModuleLoadData() { return 1; }
int cuModuleLoadDataEx() { return 1; }
int cuModuleUnload() { return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n) {
  *n = 2;
  return 0;
}
int cuPointerGetAttribute() { return 1; }
int cuTensorMapEncodeTiled() { return 1; }
int cuInit(unsigned f) { return 100; }
int cuDriverGetVersion(int* v) {
  *v = 13000;
  return 0;
}
