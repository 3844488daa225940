// What the files of the simulated ACL runtime share.
//
// The simulation is for finding wrong programs, not for speed, so it is stricter than convenient wherever the real
// runtime is strict or silent: the host cannot touch device memory, streams run late and in parallel, a thread that has
// chosen no device has none. The prototypes are those of torch_npu's own headers, so that the compiler checks them.

#pragma once

#include <stddef.h>

#include "acl/acl_rt.h"
#include "acl/error_codes/rt_error_codes.h"

#define EXPORT __attribute__((visibility("default")))
#define UNUSED __attribute__((unused))

// ---- settings.c: how a test steers the simulation and looks into it

// An integer environment variable, read anew each time so that a test can change it while the process runs.
long setting(const char *name, long otherwise);

enum Counter { COPIES, ASYNC_COPIES, PAGEABLE_COPIES, BATCHES, BATCHES_V2, BATCH_ENTRIES, EVENT_RECORDS, EVENT_QUERIES,
               STREAM_SYNCS, COUNTERS };
void count(enum Counter counter, unsigned long times);

// ---- device.c

#define MAX_DEVICES 16

extern __thread int current_device;  // -1 until the thread chooses one

// The first line of every call that needs a context: ACL keeps it for each thread.
#define REQUIRE_DEVICE() do { if (current_device < 0) return ACL_ERROR_RT_CONTEXT_NULL; } while (0)

// ---- memory.c

enum Place { PAGEABLE_HOST, PINNED_HOST, DEVICE };

// Where an address lies; `device` gets its device, or 0.
enum Place place_of(const void *address, int *device);

// Copy or fill now, as the device would: its memory is reached behind the back of the protection.
aclError copy_now(void *to, const void *from, size_t size);
aclError fill_now(void *to, int value, size_t size);

// ---- streams.c

typedef struct Stream Stream;

// The stream of a handle; of no handle, the default stream of the thread's device.
Stream *stream_of(aclrtStream handle);

void submit_copy(Stream *stream, void *to, const void *from, size_t size);
void submit_fill(Stream *stream, void *to, int value, size_t size);

// Wait until a stream is idle; the first error of its work since the last wait.
aclError drain(Stream *stream);
