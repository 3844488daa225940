// Memory. A device's is mapped twice: where the program sees it nothing may be read or written, so that host code that
// follows a device pointer faults at once, as it may on hardware; the simulated device uses the other mapping.

#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim.h"

#define PAGE 4096UL
#define HUGE_PAGE (2UL << 20)  // what a device's memory is handed out in
#define DEVICE_BYTES (8UL << 30)

typedef struct Range {
    char *address;  // as the program sees it
    char *alias;    // where the simulation may touch it; the same for host memory
    size_t size;
    enum Place place;
    int device;
    int registered;  // host memory that the program allocated itself
    struct Range *next;
} Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;  // of all below
static Range *ranges;
static size_t used[MAX_DEVICES];

static Range *find(const void *address) {
    for (Range *range = ranges; range; range = range->next)
        if ((const char *)address >= range->address && (const char *)address < range->address + range->size)
            return range;
    return NULL;
}

static void add(Range values) {
    Range *range = malloc(sizeof *range);
    *range = values;
    pthread_mutex_lock(&lock);
    range->next = ranges;
    ranges = range;
    if (range->place == DEVICE)
        used[range->device] += range->size;
    pthread_mutex_unlock(&lock);
}

// Memory that was freed is never given out again: a copy that is still under way faults instead of going unnoticed.
static void retire(char *address, size_t size) {
    mmap(address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

static aclError release(void *address, enum Place place, int registered) {
    pthread_mutex_lock(&lock);
    Range **link = &ranges;
    while (*link && !((*link)->address == address && (*link)->place == place && (*link)->registered == registered))
        link = &(*link)->next;
    Range *range = *link;
    if (range) {
        *link = range->next;
        if (place == DEVICE)
            used[range->device] -= range->size;
    }
    pthread_mutex_unlock(&lock);
    if (!range)
        return ACL_ERROR_RT_PARAM_INVALID;
    if (place == DEVICE)
        munmap(range->alias, range->size);
    if (!registered)
        retire(range->address, range->size);
    free(range);
    return ACL_SUCCESS;
}

enum Place place_of(const void *address, int *device) {
    pthread_mutex_lock(&lock);
    Range *range = find(address);
    enum Place place = range ? range->place : PAGEABLE_HOST;
    *device = range ? range->device : 0;
    pthread_mutex_unlock(&lock);
    return place;
}

// Where the simulation reaches `size` bytes at `address`; NULL if they leave the allocation that they begin in.
static char *reach(const void *address, size_t size) {
    pthread_mutex_lock(&lock);
    Range *range = find(address);
    char *there = (char *)address;
    if (range) {
        size_t offset = (const char *)address - range->address;
        there = size <= range->size - offset ? range->alias + offset : NULL;
    }
    pthread_mutex_unlock(&lock);
    return there;
}

aclError copy_now(void *to, const void *from, size_t size) {
    char *target = reach(to, size), *source = reach(from, size);
    if (!target || !source)
        return ACL_ERROR_RT_PARAM_INVALID;
    memcpy(target, source, size);
    return ACL_SUCCESS;
}

aclError fill_now(void *to, int value, size_t size) {
    char *target = reach(to, size);
    if (!target)
        return ACL_ERROR_RT_PARAM_INVALID;
    memset(target, value, size);
    return ACL_SUCCESS;
}

// Where host code that plays the device's kernels reaches `size` bytes at a device address; NULL if they leave the
// allocation. Not part of ACL.
EXPORT void *simacl_reach(const void *address, size_t size) { return reach(address, size); }

// ---- device memory

// What the program itself may do with device memory: nothing, unless a network engine of its process plays a NIC.
static int rights_of_the_process(void) { return setting("SIMACL_NIC", 0) ? PROT_READ | PROT_WRITE : PROT_NONE; }

static aclError allocate(void **address, size_t size) {
    REQUIRE_DEVICE();
    if (!size)
        return ACL_ERROR_RT_PARAM_INVALID;
    size = (size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    int file = memfd_create("simulated-npu", 0);
    if (file < 0 || ftruncate(file, size))
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    char *alias = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    char *seen = mmap(NULL, size, rights_of_the_process(), MAP_SHARED, file, 0);
    close(file);
    if (alias == MAP_FAILED || seen == MAP_FAILED)
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    add((Range){.address = seen, .alias = alias, .size = size, .place = DEVICE, .device = current_device});
    *address = seen;
    return ACL_SUCCESS;
}

EXPORT aclError aclrtMalloc(void **address, size_t size, UNUSED aclrtMemMallocPolicy policy) {
    return allocate(address, size);
}

EXPORT aclError aclrtMallocAlign32(void **address, size_t size, UNUSED aclrtMemMallocPolicy policy) {
    return allocate(address, size);
}

EXPORT aclError aclrtFree(void *address) { return release(address, DEVICE, 0); }

// ---- virtual memory: torch_npu's expandable segments reserve addresses, and map physical memory as it is needed

typedef struct Physical {
    int file;
    size_t size;
    int device;
} Physical;

EXPORT aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size,
                                    UNUSED const aclrtPhysicalMemProp *properties, UNUSED uint64_t flags) {
    REQUIRE_DEVICE();
    int file = memfd_create("simulated-npu", 0);
    if (file < 0 || ftruncate(file, size))
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    Physical *physical = malloc(sizeof *physical);
    *physical = (Physical){file, size, current_device};
    *handle = physical;
    return ACL_SUCCESS;
}

EXPORT aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    close(((Physical *)handle)->file);
    free(handle);
    return ACL_SUCCESS;
}

// A reservation is one range: its alias is as large, so that what lies in two neighbouring mappings is in one piece.
EXPORT aclError aclrtReserveMemAddress(void **address, size_t size, UNUSED size_t alignment, UNUSED void *expected,
                                       UNUSED uint64_t flags) {
    int device = current_device < 0 ? 0 : current_device;  // torch_npu tries it before it has a context
    int none = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *seen = mmap(NULL, size, PROT_NONE, none, -1, 0), *alias = mmap(NULL, size, PROT_NONE, none, -1, 0);
    if (seen == MAP_FAILED || alias == MAP_FAILED)
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    add((Range){.address = seen, .alias = alias, .size = size, .place = DEVICE, .device = device});
    pthread_mutex_lock(&lock);
    used[device] -= size;  // what is mapped counts
    pthread_mutex_unlock(&lock);
    *address = seen;
    return ACL_SUCCESS;
}

EXPORT aclError aclrtMapMem(void *address, size_t size, size_t offset, aclrtDrvMemHandle handle,
                            UNUSED uint64_t flags) {
    Physical *physical = handle;
    char *alias = reach(address, size);
    if (!alias)
        return ACL_ERROR_RT_PARAM_INVALID;
    mmap(alias, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical->file, offset);
    mmap(address, size, rights_of_the_process(), MAP_SHARED | MAP_FIXED, physical->file, offset);
    pthread_mutex_lock(&lock);
    used[physical->device] += size;
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

EXPORT aclError aclrtUnmapMem(UNUSED void *address) { return ACL_SUCCESS; }

EXPORT aclError aclrtReleaseMemAddress(UNUSED void *address) { return ACL_SUCCESS; }

EXPORT aclError aclrtGetMemInfo(UNUSED aclrtMemAttr kind, size_t *available, size_t *total) {
    REQUIRE_DEVICE();
    pthread_mutex_lock(&lock);
    *total = DEVICE_BYTES;
    *available = DEVICE_BYTES - used[current_device];
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

// ---- pinned host memory

EXPORT aclError aclrtMallocHost(void **address, size_t size) {
    REQUIRE_DEVICE();
    if (!size)
        return ACL_ERROR_RT_PARAM_INVALID;
    *address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*address == MAP_FAILED)
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    add((Range){.address = *address, .alias = *address, .size = size, .place = PINNED_HOST});
    return ACL_SUCCESS;
}

EXPORT aclError aclrtMallocHostWithCfg(void **address, uint64_t size, UNUSED aclrtMallocConfig *config) {
    return aclrtMallocHost(address, size);
}

EXPORT aclError aclrtFreeHost(void *address) { return release(address, PINNED_HOST, 0); }

EXPORT aclError aclrtHostRegisterV2(void *address, uint64_t size, UNUSED uint32_t flags) {
    int device;
    if ((uintptr_t)address % PAGE || place_of(address, &device) != PAGEABLE_HOST)
        return ACL_ERROR_RT_PARAM_INVALID;
    add((Range){.address = address, .alias = address, .size = size, .place = PINNED_HOST, .registered = 1});
    return ACL_SUCCESS;
}

EXPORT aclError aclrtHostUnregister(void *address) { return release(address, PINNED_HOST, 1); }

EXPORT aclError aclrtPointerGetAttributes(const void *address, aclrtPtrAttributes *attributes) {
    static const aclrtMemLocationType types[] = {
        [PAGEABLE_HOST] = ACL_MEM_LOCATION_TYPE_UNREGISTERED,
        [PINNED_HOST] = ACL_MEM_LOCATION_TYPE_HOST,
        [DEVICE] = ACL_MEM_LOCATION_TYPE_DEVICE,
    };
    int device;
    memset(attributes, 0, sizeof *attributes);
    attributes->location.type = types[place_of(address, &device)];
    attributes->location.id = device;
    attributes->pageSize = PAGE;
    return ACL_SUCCESS;
}
