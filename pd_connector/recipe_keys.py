"""The keys that recipes of vllm-ascend give its Mooncake connectors: understood, and compared with what is found.

So a recipe needs no other change than the connector's name. An engine's sizes are learnt from it, not from these keys.
Of all keys, only ``qos_priority`` is used.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Size = Annotated[int, Field(ge=1)]


class EngineSizes(BaseModel):
    """What a recipe says of its prefill or its decode engines."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dp_size: Size | None = None
    tp_size: Size | None = None
    pp_size: Size | None = None
    pp_layer_partition: str | None = None

    def contradictions(self, found: Mapping[str, object]) -> str:
        """Return in words what differs from ``found``; "" if nothing does. A value that is None there is not known."""
        stated = self.model_dump(exclude_none=True)
        return ", ".join(
            f"{name} {value} (found: {found[name]})"
            for name, value in stated.items()
            if found.get(name) is not None and str(value).replace(" ", "") != str(found[name]).replace(" ", "")
        )


class RecipeKeys(BaseModel):
    """The keys of ``kv_connector_extra_config`` that are understood beside this connector's settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    use_ascend_direct: bool = True
    ascend_local_comm_res_path: str = ""
    prefill: EngineSizes = EngineSizes()
    decode: EngineSizes = EngineSizes()
    #: The class of P/D traffic in the NPUs' network. Where it is left out, vllm-ascend's connectors have 1; here it is
    #: CANN's own, because not all releases of CANN take the option (9.1.0-beta.1 does not).
    qos_priority: Annotated[int, Field(ge=0, le=4, strict=True)] | None = None
