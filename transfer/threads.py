"""Whether the system has threads left: C libraries that get none end the process."""

import threading


def check_threads(what: str, number: int) -> None:
    """Start as many threads as ``what`` needs, which end at once: no process can read the limit of its container's pod.

    Takes less than a millisecond.

    Raises:
        RuntimeError: the system has fewer left; the message names the limits that there may be.
    """
    end, started = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(number):
            thread = threading.Thread(target=end.wait, name="pd-trial", daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise RuntimeError(no_threads(error, what, number)) from error
    finally:
        end.set()
        for thread in started:
            thread.join()


def no_threads(error: RuntimeError, what: str, number: int) -> str:
    """Return what to tell a user of ``what``, which got no thread."""
    return (
        f"the system has no thread left ({error}), and {what} needs {number}. Raise the limit of threads "
        "(podPidsLimit in Kubernetes; docker run --pids-limit; ulimit -u; TasksMax= for systemd)"
    )
