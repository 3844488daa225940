"""What an engine that was asked for a prefix has answered, checked."""

import msgspec

from pd_connector.params import ParamsError, RemotePrefill, check_groups
from transfer.control.messages import Found
from transfer.peers import Address


def offered_prefix(found: Found, peer: Address, unit_tokens: int, most_tokens: int) -> RemotePrefill:
    """Return what was found as it is pulled.

    Args:
        found: the answer of the engine at ``peer``.
        peer: its control channel.
        unit_tokens: of which what is pulled is a multiple here.
        most_tokens: that were asked for.

    Raises:
        ParamsError: the answer is not valid, or of more tokens than were asked for, or of tokens that do not end with a
            block here.
    """
    if found.tokens > most_tokens:
        raise ParamsError(f"it offers {found.tokens} tokens, where {most_tokens} were asked for")
    if found.tokens % unit_tokens:
        raise ParamsError(f"it offers {found.tokens} tokens, which is no multiple of {unit_tokens}")
    held = {
        "remote_engine_id": found.engine_id,
        "remote_host": peer.host,
        "remote_port": peer.port,
        "remote_block_ids": found.block_ids,
        "remote_num_tokens": found.tokens + 1,  # the last one is computed here
        "remote_block_sizes": found.block_sizes,
        "remote_layers": found.layers,
        "lease_id": found.lease_id,
        "lease_ttl_s": found.lease_ttl_s,
        "prompt_digest": "",
    }
    try:
        remote = msgspec.convert(held, RemotePrefill)
    except msgspec.ValidationError as error:
        raise ParamsError(f"its answer is invalid: {error}") from None
    check_groups(remote)
    return remote
