/* A CUDA driver without a device: it notes down what Triton's launcher would launch.

   Modules are not looked into, and all addresses are taken for addresses of a device. */
#include <stdint.h>
#include <string.h>

#define MOST_KERNELS 64
#define MOST_LAUNCHES 256
#define MOST_PARAMETERS 64

typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream, *attributes;
    unsigned num_attributes;
} Config;

typedef struct {
    int kernel;
    unsigned grid[3];
    uint64_t parameters[MOST_PARAMETERS]; /* of a tensor map the number, from 1 */
} Launch;

typedef struct {
    uint64_t address, shape[2], stride; /* in elements, and in bytes */
    unsigned type, box[2], swizzle;
} Map;

static char names[MOST_KERNELS][64];
static int sizes[MOST_KERNELS][MOST_PARAMETERS]; /* bytes of each parameter, 0 behind the last */
static int kernels;
static Launch launches[MOST_LAUNCHES];
static Map maps[MOST_LAUNCHES];
static int launched, pointers, mapped;

/* ------------------------------------------------------------------ for the test */

int stub_launched(void) { return launched; }
int stub_pointers(void) { return pointers; }
Launch *stub_launch(int i) { return &launches[i]; }
const char *stub_name(int kernel) { return names[kernel]; }
Map *stub_map(int i) { return &maps[i]; }
void stub_forget(void) { launched = pointers = mapped = 0; }
void stub_expect(const char *name, const int *each, int count) {
    for (int i = 0; i < kernels; i++)
        if (!strcmp(names[i], name)) memcpy(sizes[i], each, count * sizeof(int));
}

/* ------------------------------------------------------------------ for Triton */

int cuLaunchKernelEx(const Config *config, void *function, void **parameters, void **extra) {
    int kernel = (int)(uintptr_t)function - 1;
    Launch *launch = &launches[launched++ % MOST_LAUNCHES];
    memset(launch, 0, sizeof *launch);
    launch->kernel = kernel;
    memcpy(launch->grid, config->grid, sizeof launch->grid);
    for (int i = 0; i < MOST_PARAMETERS && sizes[kernel][i]; i++)
        memcpy(&launch->parameters[i], parameters[i], sizes[kernel][i]);
    return 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    strncpy(names[kernels], name, sizeof names[0] - 1);
    *function = (void *)(uintptr_t)++kernels;
    return 0;
}
int cuPointerGetAttribute(uint64_t *out, int what, uint64_t pointer) {
    pointers++;
    *out = pointer;
    return 0;
}
int cuDeviceGetAttribute(int *value, int what, int device) {
    switch (what) {
    case 16: *value = 132; break;        /* multiprocessors */
    case 81: case 8: *value = 49152; break; /* shared memory of a block */
    case 97: *value = 232448; break;     /* the same, where asked for */
    case 82: *value = 65536; break;      /* registers */
    default: *value = 32;
    }
    return 0;
}
int cuFuncGetAttribute(int *value, int what, void *function) {
    *value = what == 0 ? 1024 : 0; /* threads a block may have */
    return 0;
}
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetLimit(uint64_t *value, int what) { *value = 1 << 20; return 0; }
int cuCtxSetLimit(int what, uint64_t value) { return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuFuncSetAttribute(void *function, int what, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuGetErrorString(int error, const char **text) { *text = "none"; return 0; }
int cuModuleUnload(void *module) { return 0; }
int cuOccupancyMaxActiveClusters(int *count, void *function, void *config) { *count = 1; return 0; }
int cuPointerGetAttributes(void) { return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cuTensorMapEncodeTiled(
    uint64_t *out, unsigned type, unsigned rank, void *address, const uint64_t *shape,
    const uint64_t *strides, const unsigned *box, const unsigned *steps, unsigned interleave,
    unsigned swizzle, unsigned promotion, unsigned fill) {
    Map *map = &maps[mapped++ % MOST_LAUNCHES];
    if (rank != 2) return 1;
    map->address = (uint64_t)address;
    memcpy(map->shape, shape, sizeof map->shape);
    map->stride = strides[0];
    memcpy(map->box, box, sizeof map->box);
    map->type = type;
    map->swizzle = swizzle;
    *out = mapped;
    return 0;
}
int cuTensorMapEncodeIm2col(void) { return 0; }
