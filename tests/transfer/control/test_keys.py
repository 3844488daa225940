"""The keys of a secret: the same everywhere, different for every secret, never shown."""

import pytest
import zmq
from zmq.utils import z85

from transfer.control.failures import ControlStartError
from transfer.control.keys import MIN_SECRET_BYTES, ControlKeys, KeyPair

SECRET = b"correct horse battery staple"


def test_the_same_secret_gives_the_same_keys_on_every_machine() -> None:
    keys = ControlKeys.derive(SECRET)
    assert keys == ControlKeys.derive(SECRET)
    # Engines of different versions meet: whoever changes this breaks them apart.
    assert keys.server.public == b":>uH:rN(kv@uB&7c+X6T-!E}juh1v:J@%wAdxlG9"
    assert keys.client.public == b"+BQ%qh.5HV.zOupBAar<DMG942r(}rI{Ihz8!M<d"


def test_other_secrets_and_other_roles_have_other_keys() -> None:
    pairs = [
        pair for secret in (SECRET, SECRET + b"!") for keys in [ControlKeys.derive(secret)] for pair in _both(keys)
    ]
    assert len({pair.public for pair in pairs}) == len({pair.secret for pair in pairs}) == 4


def test_keys_are_not_printed() -> None:
    keys = ControlKeys.derive(SECRET)
    for shown in (repr(keys), str(keys), f"{keys}", repr(keys.server), repr(keys.client)):
        assert not any(pair.secret.decode() in shown for pair in _both(keys))
    assert not any(pair.public.decode() in repr(keys) for pair in _both(keys))


def test_only_the_clients_key_is_admitted() -> None:
    keys = ControlKeys.derive(SECRET)
    assert keys.admits(z85.decode(keys.client.public))
    assert not keys.admits(z85.decode(keys.server.public))
    assert not keys.admits(z85.decode(ControlKeys.derive(SECRET + b"!").client.public))


def test_a_server_without_its_zap_handler_admits_nobody() -> None:
    keys = ControlKeys.derive(SECRET)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    keys.secure_server(server)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    ControlKeys(keys.server, KeyPair(*zmq.curve_keypair())).secure_client(client)
    client.connect(f"tcp://127.0.0.1:{port}")
    client.send(b"let me in")
    assert not server.poll(300)
    context.destroy(linger=0)


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ControlStartError, match=f"15 bytes; at least {MIN_SECRET_BYTES}"):
        ControlKeys.derive(b"x" * 15)


def test_a_build_without_curve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    with pytest.raises(ControlStartError, match=r"built without CURVE: install pyzmq from its wheels"):
        ControlKeys.derive(SECRET)


def _both(keys: ControlKeys) -> tuple[KeyPair, KeyPair]:
    return keys.server, keys.client


def test_a_fingerprint_tells_secrets_apart() -> None:
    keys = ControlKeys.derive(SECRET)
    assert keys.fingerprint == ControlKeys.derive(SECRET).fingerprint
    assert keys.fingerprint != ControlKeys.derive(SECRET + b"!").fingerprint
    assert keys.fingerprint not in repr(keys)
