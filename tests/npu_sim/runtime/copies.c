// Copies and fills, one at a time: at once, or on a stream.

#include "sim.h"

EXPORT aclError aclrtMemset(void *to, size_t room, int32_t value, size_t size) {
    return size > room ? ACL_ERROR_RT_PARAM_INVALID : fill_now(to, value, size);
}

EXPORT aclError aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t size, aclrtStream stream) {
    REQUIRE_DEVICE();
    if (size > room)
        return ACL_ERROR_RT_PARAM_INVALID;
    submit_fill(stream_of(stream), to, value, size);
    return ACL_SUCCESS;
}

EXPORT aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size, UNUSED aclrtMemcpyKind kind) {
    REQUIRE_DEVICE();
    count(COPIES, 1);
    if (size > room || !to || !from)
        return ACL_ERROR_RT_PARAM_INVALID;
    return copy_now(to, from, size);
}

static int is_of_kind(int to_device, int from_device, aclrtMemcpyKind kind) {
    switch (kind) {
    case ACL_MEMCPY_HOST_TO_DEVICE:
        return to_device && !from_device;
    case ACL_MEMCPY_DEVICE_TO_HOST:
        return !to_device && from_device;
    case ACL_MEMCPY_DEVICE_TO_DEVICE:
        return to_device && from_device;
    default:
        return 1;
    }
}

EXPORT aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind,
                                 aclrtStream handle) {
    REQUIRE_DEVICE();
    count(ASYNC_COPIES, 1);
    if (!size || size > room || !to || !from)
        return ACL_ERROR_RT_PARAM_INVALID;
    if (kind == ACL_MEMCPY_HOST_TO_HOST)
        return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
    int device;
    enum Place target = place_of(to, &device), source = place_of(from, &device);
    if (!is_of_kind(target == DEVICE, source == DEVICE, kind))
        return ACL_ERROR_RT_PARAM_INVALID;
    Stream *stream = stream_of(handle);
    submit_copy(stream, to, from, size);
    if (target != PAGEABLE_HOST && source != PAGEABLE_HOST)
        return ACL_SUCCESS;
    // What is not pinned cannot be reached by the device's own engine: the runtime waits, and copies by itself.
    count(PAGEABLE_COPIES, 1);
    return drain(stream);
}

EXPORT aclError aclrtMemcpyAsyncWithCondition(void *to, size_t room, const void *from, size_t size,
                                              aclrtMemcpyKind kind, aclrtStream stream) {
    return aclrtMemcpyAsync(to, room, from, size, kind, stream);
}
