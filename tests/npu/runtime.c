/* The part of the Ascend runtime that a process without an NPU needs: one device whose memory is host memory.
 *
 * stubs.py appends a function that returns 0 for every other name that torch_npu links to or looks up.
 * Status 0 is success. SIM_SOC and SIM_CANN name the simulated chip and the version of CANN.
 */
#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 512, OUT_OF_MEMORY = 207001 };

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}

/* Memory. The device reads a few bytes past the end of a tensor, so blocks are longer than what was asked for. */
static int allocate(void **block, size_t size) {
    *block = aligned_alloc(ALIGNMENT, (size / ALIGNMENT + 2) * ALIGNMENT);
    return *block ? 0 : OUT_OF_MEMORY;
}
int aclrtMalloc(void **block, size_t size, int policy) { return allocate(block, size); }
int aclrtMallocAlign32(void **block, size_t size, int policy) { return allocate(block, size); }
int aclrtMallocHost(void **block, size_t size) { return allocate(block, size); }
int aclrtFree(void *block) { free(block); return 0; }
int aclrtFreeHost(void *block) { free(block); return 0; }
int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
    memmove(to, from, size);
    return 0;
}
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
    memmove(to, from, size);
    return 0;
}
int aclrtMemset(void *block, size_t room, int value, size_t size) { memset(block, value, size); return 0; }
int aclrtMemsetAsync(void *block, size_t room, int value, size_t size, void *stream) {
    memset(block, value, size);
    return 0;
}
int aclrtGetMemInfo(int kind, size_t *available, size_t *total) {
    *available = (size_t)8 << 30;
    *total = (size_t)16 << 30;
    return 0;
}

/* The device, its streams and contexts. */
static int stream_of_all, context_of_all;
int aclrtGetDeviceCount(unsigned *count) { *count = 1; return 0; }
int aclrtGetDevice(int *device) { *device = 0; return 0; }
int aclrtCreateStream(void **stream) { *stream = malloc(1); return 0; }
int aclrtCreateStreamWithConfig(void **stream, unsigned priority, unsigned flags) {
    return aclrtCreateStream(stream);
}
int aclrtGetCurrentContext(void **context) { *context = &context_of_all; return 0; }
const char *aclrtGetSocName(void) { return setting("SIM_SOC", "Ascend910B2"); }

/* Capture of a graph. Nothing is captured here: tests/npu/simulator.py notes the ops and does them again. */
enum { CAPTURES_NOTHING, CAPTURES };
static int capture_status = CAPTURES_NOTHING, model_of_all;
static size_t task_groups;
int aclmdlRICaptureBegin(void *stream, int mode) { capture_status = CAPTURES; return 0; }
int aclmdlRICaptureGetInfo(void *stream, int *status, void **model) {
    *status = capture_status;
    *model = &model_of_all;
    return 0;
}
int aclmdlRICaptureEnd(void *stream, void **model) {
    capture_status = CAPTURES_NOTHING;
    *model = &model_of_all;
    return 0;
}
int aclmdlRICaptureTaskGrpEnd(void *stream, void **group) { *group = (void *)++task_groups; return 0; }

/* Versions and options. */
int aclsysGetCANNVersion(int package, char *version) {
    strcpy(version, setting("SIM_CANN", "9.1.0"));
    return 0;
}
int aclsysGetVersionStr(char *package, char *version) { return aclsysGetCANNVersion(0, version); }
const char *aclGetRecentErrMsg(void) { return ""; }
size_t aclGetCompileoptSize(int option) { return 64; }
int aclGetCompileopt(int option, char *value, size_t room) {
    if (room) strncpy(value, "disable", room);
    return 0;
}
