"""The kernel that reshapes, as Triton's interpreter runs it on the CPU. A module that imports this needs Triton."""

from typing import Any

import pytest

triton: Any = pytest.importorskip("triton")
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(triton.knobs.runtime, "interpret", True)  # read when a kernel is defined
    from transfer.copies.reshape import run_kernel  # noqa: F401  defines it

#: Triton 3.6's interpreter reads scalars in a way that numpy warns of.
interpreted = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
