"""The keys that recipes of vllm-ascend give its Mooncake connectors: understood, compared with what is found, unused.

So a recipe needs no other change than the connector's name. An engine's sizes are learnt from it, not from these keys.
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
    """The keys of ``kv_connector_extra_config`` that are understood and not used."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    use_ascend_direct: bool = True
    ascend_local_comm_res_path: str = ""
    prefill: EngineSizes = EngineSizes()
    decode: EngineSizes = EngineSizes()
