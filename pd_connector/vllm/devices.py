"""Which devices vLLM's platform has. Must stay cheap to import: no torch or vllm at module level."""


def device_type() -> str:
    """Return the type of vLLM's devices as torch names it: "cpu", "cuda", "npu"."""
    from vllm.platforms import current_platform  # noqa: PLC0415  resolves the platform on first use

    return str(current_platform.device_type)


def default_protocol() -> str:
    """Return the transfer engine's default transport on this platform."""
    return {"cuda": "rdma", "npu": "ascend"}.get(device_type(), "tcp")


def caches_are_host_memory() -> bool:
    """Return whether the CPU can read and write the KV caches."""
    return device_type() == "cpu"
