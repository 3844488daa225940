// Streams and events. A stream is a thread that does its work in order, later than it was submitted, so that a missing
// wait, an early free and a wrong order show. Streams and events outlive their destruction: late callers may hold them.

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include "sim.h"

typedef struct Event {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    unsigned long recorded;   // records submitted
    unsigned long completed;  // records that their streams have reached
    struct timespec when;     // the last was reached
} Event;

typedef struct Task {
    enum { COPY, FILL, RECORD, WAIT, CALL } kind;
    void *to;  // of a call: its argument
    const void *from;
    size_t size;
    int value;
    Event *event;
    unsigned long record;  // which record of the event is made, or waited for
    void (*function)(void *);
    struct Task *next;
} Task;

struct Stream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t submitted, idle;
    Task *first, *last;
    int working, stopped;
    aclError error;
    Stream *older;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Stream *newest;                       // all streams ever made
static Stream *default_streams[MAX_DEVICES];  // made when first used

static void pause_us(long us) {
    struct timespec time = {us / 1000000, us % 1000000 * 1000};
    if (us > 0)
        nanosleep(&time, NULL);
}

static void reach_record(Event *event, unsigned long record) {
    pthread_mutex_lock(&event->lock);
    if (record > event->completed)
        event->completed = record;
    clock_gettime(CLOCK_MONOTONIC, &event->when);
    pthread_cond_broadcast(&event->changed);
    pthread_mutex_unlock(&event->lock);
}

static void await_record(Event *event, unsigned long record) {
    pthread_mutex_lock(&event->lock);
    while (event->completed < record)
        pthread_cond_wait(&event->changed, &event->lock);
    pthread_mutex_unlock(&event->lock);
}

static aclError carry_out(Task *task) {
    switch (task->kind) {
    case COPY:
        pause_us(setting("SIMACL_COPY_US", 0));
        return copy_now(task->to, task->from, task->size);
    case FILL:
        return fill_now(task->to, task->value, task->size);
    case RECORD:
        reach_record(task->event, task->record);
        break;
    case WAIT:
        await_record(task->event, task->record);
        break;
    case CALL:
        task->function(task->to);
        break;
    }
    return ACL_SUCCESS;
}

static Task *next_task(Stream *stream) {
    pthread_mutex_lock(&stream->lock);
    while (!stream->first && !stream->stopped)
        pthread_cond_wait(&stream->submitted, &stream->lock);
    Task *task = stream->first;
    if (task) {
        stream->first = task->next;
        if (!stream->first)
            stream->last = NULL;
        stream->working = 1;
    }
    pthread_mutex_unlock(&stream->lock);
    return task;
}

static void *run(void *argument) {
    Stream *stream = argument;
    for (Task *task; (task = next_task(stream));) {
        aclError error = carry_out(task);
        free(task);
        pthread_mutex_lock(&stream->lock);
        stream->working = 0;
        if (error && !stream->error)
            stream->error = error;
        if (!stream->first)
            pthread_cond_broadcast(&stream->idle);
        pthread_mutex_unlock(&stream->lock);
    }
    return NULL;
}

static Stream *make_stream(void) {  // `lock` is held
    Stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->submitted, NULL);
    pthread_cond_init(&stream->idle, NULL);
    stream->older = newest;
    newest = stream;
    pthread_create(&stream->thread, NULL, run, stream);
    return stream;
}

Stream *stream_of(aclrtStream handle) {
    if (handle)
        return handle;
    pthread_mutex_lock(&lock);
    Stream **stream = &default_streams[current_device < 0 ? 0 : current_device];
    if (!*stream)
        *stream = make_stream();
    pthread_mutex_unlock(&lock);
    return *stream;
}

static void submit(Stream *stream, Task values) {
    Task *task = malloc(sizeof *task);
    *task = values;
    task->next = NULL;
    pthread_mutex_lock(&stream->lock);
    *(stream->last ? &stream->last->next : &stream->first) = task;
    stream->last = task;
    pthread_cond_signal(&stream->submitted);
    pthread_mutex_unlock(&stream->lock);
}

void submit_copy(Stream *stream, void *to, const void *from, size_t size) {
    submit(stream, (Task){.kind = COPY, .to = to, .from = from, .size = size});
}

void submit_fill(Stream *stream, void *to, int value, size_t size) {
    submit(stream, (Task){.kind = FILL, .to = to, .value = value, .size = size});
}

aclError drain(Stream *stream) {
    pthread_mutex_lock(&stream->lock);
    while (stream->first || stream->working)
        pthread_cond_wait(&stream->idle, &stream->lock);
    aclError error = stream->error;
    stream->error = ACL_SUCCESS;
    pthread_mutex_unlock(&stream->lock);
    return error;
}

// ---- streams as ACL shows them

EXPORT aclError aclrtCreateStream(aclrtStream *handle) {
    REQUIRE_DEVICE();
    pthread_mutex_lock(&lock);
    *handle = make_stream();
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

EXPORT aclError aclrtCreateStreamWithConfig(aclrtStream *handle, UNUSED uint32_t priority, UNUSED uint32_t flag) {
    return aclrtCreateStream(handle);
}

EXPORT aclError aclrtDestroyStream(aclrtStream handle) {
    Stream *stream = handle;
    drain(stream);
    pthread_mutex_lock(&stream->lock);
    int first = !stream->stopped;
    stream->stopped = 1;
    pthread_cond_signal(&stream->submitted);
    pthread_mutex_unlock(&stream->lock);
    if (first)
        pthread_join(stream->thread, NULL);
    return ACL_SUCCESS;
}

EXPORT aclError aclrtDestroyStreamForce(aclrtStream handle) { return aclrtDestroyStream(handle); }

EXPORT aclError aclrtSynchronizeStream(aclrtStream handle) {
    REQUIRE_DEVICE();
    count(STREAM_SYNCS, 1);
    return drain(stream_of(handle));
}

EXPORT aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, UNUSED int32_t timeout_ms) {
    return aclrtSynchronizeStream(handle);
}

EXPORT aclError aclrtSynchronizeDevice(void) {
    pthread_mutex_lock(&lock);
    Stream *stream = newest;
    pthread_mutex_unlock(&lock);
    aclError error = ACL_SUCCESS;
    for (; stream; stream = stream->older) {
        aclError found = drain(stream);
        error = error ? error : found;
    }
    return error;
}

EXPORT aclError aclrtSynchronizeDeviceWithTimeout(UNUSED int32_t timeout_ms) { return aclrtSynchronizeDevice(); }

EXPORT aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus *status) {
    Stream *stream = stream_of(handle);
    pthread_mutex_lock(&stream->lock);
    int busy = stream->first || stream->working;
    *status = busy ? ACL_STREAM_STATUS_NOT_READY : ACL_STREAM_STATUS_COMPLETE;
    pthread_mutex_unlock(&stream->lock);
    return ACL_SUCCESS;
}

EXPORT aclError aclrtStreamGetId(aclrtStream handle, int32_t *id) {
    *id = (int32_t)((uintptr_t)handle >> 4);
    return ACL_SUCCESS;
}

EXPORT aclError aclrtLaunchHostFunc(aclrtStream handle, aclrtHostFunc function, void *argument) {
    submit(stream_of(handle), (Task){.kind = CALL, .function = (void (*)(void *))function, .to = argument});
    return ACL_SUCCESS;
}

// ---- events as ACL shows them

EXPORT aclError aclrtCreateEventWithFlag(aclrtEvent *handle, UNUSED uint32_t flag) {
    Event *event = calloc(1, sizeof *event);
    pthread_mutex_init(&event->lock, NULL);
    pthread_cond_init(&event->changed, NULL);
    *handle = event;
    return ACL_SUCCESS;
}

EXPORT aclError aclrtCreateEvent(aclrtEvent *handle) { return aclrtCreateEventWithFlag(handle, 0); }

EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent *handle, uint32_t flag) {
    return aclrtCreateEventWithFlag(handle, flag);
}

EXPORT aclError aclrtDestroyEvent(UNUSED aclrtEvent handle) { return ACL_SUCCESS; }

EXPORT aclError aclrtResetEvent(UNUSED aclrtEvent handle, UNUSED aclrtStream stream) { return ACL_SUCCESS; }

static unsigned long records_of(Event *event) {
    pthread_mutex_lock(&event->lock);
    unsigned long recorded = event->recorded;
    pthread_mutex_unlock(&event->lock);
    return recorded;
}

EXPORT aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream) {
    REQUIRE_DEVICE();
    count(EVENT_RECORDS, 1);
    Event *event = handle;
    pthread_mutex_lock(&event->lock);
    unsigned long record = ++event->recorded;
    pthread_mutex_unlock(&event->lock);
    submit(stream_of(stream), (Task){.kind = RECORD, .event = event, .record = record});
    return ACL_SUCCESS;
}

EXPORT aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
    REQUIRE_DEVICE();
    submit(stream_of(stream), (Task){.kind = WAIT, .event = handle, .record = records_of(handle)});
    return ACL_SUCCESS;
}

EXPORT aclError aclrtSynchronizeEvent(aclrtEvent handle) {
    await_record(handle, records_of(handle));
    return ACL_SUCCESS;
}

EXPORT aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus *status) {
    count(EVENT_QUERIES, 1);
    Event *event = handle;
    pthread_mutex_lock(&event->lock);
    int done = event->completed >= event->recorded;
    *status = done ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    pthread_mutex_unlock(&event->lock);
    return ACL_SUCCESS;
}

EXPORT aclError aclrtQueryEventWaitStatus(UNUSED aclrtEvent handle, aclrtEventWaitStatus *status) {
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

EXPORT aclError aclrtEventElapsedTime(float *ms, aclrtEvent start, aclrtEvent end) {
    struct timespec from = ((Event *)start)->when, to = ((Event *)end)->when;
    *ms = (to.tv_sec - from.tv_sec) * 1e3f + (to.tv_nsec - from.tv_nsec) / 1e6f;
    return ACL_SUCCESS;
}
