// The queue of a stream: work that the simulated device does later than it was given, in order.

#pragma once

#include <Python.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

extern "C" int aclrtSynchronizeStream(void *);
extern "C" int aclrtLaunchHostFunc(void *, void (*)(void *), void *);

// Whoever waits for a stream must not hold the GIL: kernels that are written in Python need it.
class WithoutGil {
 public:
  WithoutGil() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_)
      PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState *state_;
};

// The stream that is current in this thread; all that torch_npu's own queue holds has been handed to it.
inline void *current_stream() {
  WithoutGil released;
  return c10_npu::getCurrentNPUStream().stream();
}

inline void await_stream() {
  void *stream = current_stream();
  WithoutGil released;
  aclrtSynchronizeStream(stream);
}

struct Task {
  std::string name;
  std::function<void()> work;
};

// Tasks that are done. What they hold is let go of by threads that launch work: the device's allocator wants a thread
// that has chosen a device, and a stream's has none.
struct DoneTasks {
  std::mutex lock;
  std::vector<std::unique_ptr<Task>> tasks;

  static DoneTasks &all() {
    static auto *done = new DoneTasks;
    return *done;
  }

  void add(std::unique_ptr<Task> task) {
    std::lock_guard<std::mutex> guard(lock);
    tasks.push_back(std::move(task));
  }

  void forget() {
    std::vector<std::unique_ptr<Task>> taken;
    std::lock_guard<std::mutex> guard(lock);
    taken.swap(tasks);
  }
};

// Nobody could be told of an error by then, and what comes after it would be wrong.
inline void run_task(void *argument) {
  std::unique_ptr<Task> task(static_cast<Task *>(argument));
  try {
    task->work();
  } catch (const std::exception &error) {
    fprintf(stderr, "host kernels: %s failed on its stream: %s\n", task->name.c_str(), error.what());
    abort();
  }
  DoneTasks::all().add(std::move(task));
}

// How long what this thread launches takes at least, in seconds.
inline thread_local double kernel_seconds = 0.0;

inline std::function<void()> lasting(double seconds, std::function<void()> work) {
  return [seconds, work = std::move(work)]() {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    work();
  };
}

// Do `work` on the current stream, after what it has been given before. Returns at once.
inline void launch(const std::string &name, std::function<void()> work) {
  DoneTasks::all().forget();
  auto *task = new Task{name, kernel_seconds > 0 ? lasting(kernel_seconds, std::move(work)) : std::move(work)};
  aclrtLaunchHostFunc(current_stream(), run_task, task);
}
