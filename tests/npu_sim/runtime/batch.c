// Copies in batches. What is checked, in which order, and what is under way when a call fails follow the open source of
// CANN's runtime (8.5, and the second form of 9.1): it validates the arrays, then submits entry by entry, and stops at
// the first that is wrong. So the entries before that one are already being copied when the call returns its error.

#include "sim.h"

#define MAX_SYNCHRONOUS_ENTRIES 4096

typedef struct Batch {
    void **to, **from;
    size_t *rooms, *sizes, entries;
    aclrtMemcpyBatchAttr *attributes;
    size_t *begins;  // the entry from which on each attribute holds
    size_t attribute_count;
} Batch;

static int has_reserved_bits(const aclrtMemcpyBatchAttr *attribute) {
    for (size_t i = 0; i < sizeof attribute->rsv; i++)
        if (attribute->rsv[i])
            return 1;
    return 0;
}

static aclError check_arrays(const Batch *batch) {
    if (!batch->to || !batch->rooms || !batch->from || !batch->attributes || !batch->begins)
        return ACL_ERROR_INVALID_PARAM;
    for (size_t i = 0; i < batch->entries; i++)
        if (batch->rooms[i] < batch->sizes[i])
            return ACL_ERROR_INVALID_PARAM;
    for (size_t i = 0; i < batch->attribute_count; i++)
        if (has_reserved_bits(&batch->attributes[i]))
            return ACL_ERROR_INVALID_PARAM;
    if (!batch->attribute_count || batch->attribute_count > batch->entries || batch->begins[0])
        return ACL_ERROR_RT_PARAM_INVALID;
    for (size_t i = 1; i < batch->attribute_count; i++)
        if (batch->begins[i] <= batch->begins[i - 1] || batch->begins[i] >= batch->entries)
            return ACL_ERROR_RT_PARAM_INVALID;
    return ACL_SUCCESS;
}

// Whether an address is where its attribute says; a device's number counts, a host's does not.
static int is_at(const void *address, aclrtMemLocation location) {
    int device, is_device = place_of(address, &device) == DEVICE;
    if (location.type == ACL_MEM_LOCATION_TYPE_DEVICE)
        return is_device && device == (int)location.id;
    return !is_device &&
           (location.type == ACL_MEM_LOCATION_TYPE_HOST || location.type == ACL_MEM_LOCATION_TYPE_HOST_NUMA);
}

static aclError submit_entry(const Batch *batch, size_t i, const aclrtMemcpyBatchAttr *attribute, aclrtStream stream) {
    void *to = batch->to[i], *from = batch->from[i];
    if (!batch->sizes[i] || !to || !from || (long)i == setting("SIMACL_FAIL_AT", -1))
        return ACL_ERROR_RT_PARAM_INVALID;
    if (!is_at(to, attribute->dstLoc) || !is_at(from, attribute->srcLoc))
        return ACL_ERROR_RT_PARAM_INVALID;
    int device, to_device = place_of(to, &device) == DEVICE;
    if (to_device == (place_of(from, &device) == DEVICE))
        return ACL_ERROR_RT_PARAM_INVALID;
    aclrtMemcpyKind kind = to_device ? ACL_MEMCPY_HOST_TO_DEVICE : ACL_MEMCPY_DEVICE_TO_HOST;
    return aclrtMemcpyAsync(to, batch->rooms[i], from, batch->sizes[i], kind, stream);
}

static aclError submit_batch(const Batch *batch, size_t *failed, aclrtStream stream) {
    if (failed)
        *failed = (size_t)-1;
    if (!batch->sizes || !batch->entries)
        return ACL_ERROR_INVALID_PARAM;
    size_t bytes = 0;
    for (size_t i = 0; i < batch->entries; i++)
        bytes |= batch->sizes[i];
    if (!bytes)
        return ACL_SUCCESS;
    aclError error = check_arrays(batch);
    if (error)
        return error;
    if (setting("SIMACL_BATCH_UNSUPPORTED", 0))
        return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
    REQUIRE_DEVICE();
    for (size_t i = 0, attribute = 0; i < batch->entries; i++) {
        if (attribute + 1 < batch->attribute_count && i >= batch->begins[attribute + 1])
            attribute++;
        error = submit_entry(batch, i, &batch->attributes[attribute], stream);
        if (error) {
            if (failed)
                *failed = i;
            return error;
        }
    }
    count(BATCH_ENTRIES, batch->entries);
    return ACL_SUCCESS;
}

EXPORT aclError aclrtMemcpyBatchAsync(void **to, size_t *rooms, void **from, size_t *sizes, size_t entries,
                                      aclrtMemcpyBatchAttr *attributes, size_t *begins, size_t attribute_count,
                                      size_t *failed, aclrtStream stream) {
    count(BATCHES, 1);
    if (!failed)
        return ACL_ERROR_INVALID_PARAM;
    Batch batch = {to, from, rooms, sizes, entries, attributes, begins, attribute_count};
    return submit_batch(&batch, failed, stream);
}

#ifndef CANN_8_5  // which lacks the second form
EXPORT aclError aclrtMemcpyBatchAsyncV2(void **to, size_t *rooms, void **from, size_t *sizes, size_t entries,
                                        aclrtMemcpyBatchAttr *attributes, size_t *begins, size_t attribute_count,
                                        aclrtStream stream) {
    count(BATCHES_V2, 1);
    Batch batch = {to, from, rooms, sizes, entries, attributes, begins, attribute_count};
    return submit_batch(&batch, NULL, stream);
}
#endif

EXPORT aclError aclrtMemcpyBatch(void **to, size_t *rooms, void **from, size_t *sizes, size_t entries,
                                 aclrtMemcpyBatchAttr *attributes, size_t *begins, size_t attribute_count,
                                 size_t *failed) {
    if (entries > MAX_SYNCHRONOUS_ENTRIES)
        return ACL_ERROR_RT_PARAM_INVALID;
    Batch batch = {to, from, rooms, sizes, entries, attributes, begins, attribute_count};
    aclError error = submit_batch(&batch, failed, NULL);
    return error ? error : drain(stream_of(NULL));
}
