"""What follows from the type of vLLM's devices."""

from types import SimpleNamespace

import pytest
import vllm.platforms

from pd_connector.vllm import devices


@pytest.mark.parametrize(
    ("device", "protocol", "on_host"),
    [("cpu", "tcp", True), ("cuda", "rdma", False), ("npu", "ascend", False), ("xpu", "tcp", False)],
)
def test_transport_and_memory_follow_from_the_devices(
    monkeypatch: pytest.MonkeyPatch, device: str, protocol: str, on_host: bool
) -> None:
    monkeypatch.setattr(vllm.platforms, "current_platform", SimpleNamespace(device_type=device))
    assert devices.device_type() == device
    assert devices.default_protocol() == protocol
    assert devices.caches_are_host_memory() == on_host
