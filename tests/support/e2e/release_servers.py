"""Servers of other vLLM releases, together with those of the one that the tests run on."""

from dataclasses import replace

from tests.support.e2e.deployments import KV_BLOCK_BYTES, SHORT, WINDOWED_BLOCKS, Deployment, peer, with_host_memory
from tests.support.e2e.hybrid_deployments import granite_server, qwen3_next_server
from tests.support.e2e.models import ModelSpec


def release_pair(release: str) -> Deployment:
    """Servers of both roles: of another vLLM release, one of each policy, and of the one that the tests run on.

    All have host memory. The one with the policy to fail stores in it what it is about to evict.
    """
    from tests.support.releases import WITH_LAYOUTS, interpreter  # noqa: PLC0415  imports torch

    python = str(interpreter(release))
    recomputing = with_host_memory(peer(policy="recompute"))
    layout = recomputing.layout if release in WITH_LAYOUTS else None
    failing = with_host_memory(peer(layout=None), ("cpu_store", "lazy"))
    return Deployment(
        f"vLLM {release}",
        (
            ("other", replace(recomputing, python=python, layout=layout)),
            ("other fail", replace(failing, python=python)),
            ("installed", recomputing),
        ),
        slow=True,
    )


def release_windows(release: str) -> Deployment:
    """Servers as in ``release_pair``, without host memory, of a model with three KV cache groups.

    Of releases on which these are served as on the installed one, there is one server.
    """
    from tests.support.releases import WITH_LAYOUTS, interpreter  # noqa: PLC0415  imports torch

    model = ModelSpec(layers=6, architecture="gemma3")
    installed = replace(
        peer(model, None, policy="recompute"),
        kv_cache_bytes=WINDOWED_BLOCKS * KV_BLOCK_BYTES,
        arguments=SHORT,
        variables=(("VLLM_SERVER_DEV_MODE", "1"),),
    )
    other = replace(installed, python=str(interpreter(release)))
    failing = [] if release in WITH_LAYOUTS else [("other fail", replace(other, load_failure_policy="fail"))]
    servers = (("other", other), *failing, ("installed", installed))
    return Deployment(f"vLLM {release}, windows", servers, slow=True)


def release_hybrids(release: str) -> Deployment:
    """A server of another vLLM release and one of the installed one, of both roles, of a model with states."""
    from tests.support.releases import interpreter  # noqa: PLC0415  imports torch

    installed = granite_server("kv_both", 1)
    servers = ("other", replace(installed, python=str(interpreter(release)))), ("installed", installed)
    return Deployment(f"vLLM {release}, hybrid", servers, slow=True)


def release_borders(release: str) -> Deployment:
    """The same of a model whose states are kept at borders of blocks, also in host memory, with checksums."""
    from tests.support.releases import interpreter  # noqa: PLC0415  imports torch

    installed = qwen3_next_server("kv_both", ("verify", True))
    servers = ("other", replace(installed, python=str(interpreter(release)))), ("installed", installed)
    return Deployment(f"vLLM {release}, borders", servers, slow=True)
