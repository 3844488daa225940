"""What Mooncake's transport for Ascend, and CANN's HIXL below it, read from the environment. Read off their sources."""

import json
import logging
import math
from collections.abc import Mapping, MutableMapping

from transfer.engine.interface import EngineStartError

logger = logging.getLogger(__name__)

#: Bounds a read (ms), and the making of a link, which HIXL does within the first read of a peer. By HCCL's
#: communicators, one link at a time.
TRANSFER_TIMEOUT = "ASCEND_TRANSFER_TIMEOUT"
_RESOURCES, _QOS = "ASCEND_GLOBAL_RESOURCE_CONFIG", "comm_resource_config.qos"


def ascend_settings(environment: Mapping[str, str], connect_timeout_s: float) -> dict[str, str]:
    """Return the variables to set, unless the user has.

    Raises:
        EngineStartError: a variable that one of them is derived from is not a number.
    """
    return {
        "ASCEND_CONNECT_TIMEOUT": str(math.ceil(1000 * connect_timeout_s)),  # for ending a link
        TRANSFER_TIMEOUT: str(_retransmission_ms(environment) + 3000),
        # The most. A job to a peer that has died holds a thread for two tries, each as long as the timeout above.
        "ASCEND_THREAD_POOL_SIZE": "16",
    }


def link_s(environment: Mapping[str, str], least_s: float) -> float:
    """Return for how long to wait for HIXL to make a link: as long as it may try, and ``least_s`` at least.

    By HCCL's communicators, links are made one at a time, so the time of one is too short for several that begin
    together. In client-server mode, each takes several steps that are bounded so.
    """
    set_to = environment.get(TRANSFER_TIMEOUT, "")
    return max(int(set_to) / 1000 if set_to.isdecimal() else 0.0, least_s)


def set_qos(environment: MutableMapping[str, str], qos: int) -> None:
    """Set the class of traffic in CANN's resources, as vllm-ascend's connectors do.

    Raises:
        EngineStartError: the user's resources are not a JSON object.
    """
    text = environment.get(_RESOURCES, "")
    try:
        resources = json.loads(text or "{}")
    except ValueError:
        resources = None
    if not isinstance(resources, dict):
        raise EngineStartError(f"{_RESOURCES} is {text!r}, which must be a JSON object: qos_priority is added to it")
    if (before := resources.get(_QOS, qos)) != qos:
        logger.warning("%s has %r for %s, and qos_priority is %d, which counts", _RESOURCES, before, _QOS, qos)
    environment[_RESOURCES] = json.dumps(resources | {_QOS: qos})


def _retransmission_ms(environment: Mapping[str, str]) -> int:
    """Return for how long a NIC repeats a lost packet, with the defaults of vllm-ascend's connectors.

    A timeout below that gives up what the NIC would still deliver.
    """
    exponent, tries = (
        _number(environment, name, default) for name, default in (("HCCL_RDMA_TIMEOUT", 20), ("HCCL_RDMA_RETRY_CNT", 7))
    )
    return int(4.096e-3 * 2**exponent * tries)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise EngineStartError(f"{name} is {text!r}, which must be a whole number")
    return int(text)
