"""The key pairs of the control channel, derived from the secret that the engines of a deployment share.

With keys the channel runs under ZeroMQ's CURVE mechanism: both ends prove that they hold the secret, everything is
encrypted, and what was recorded cannot be played again. Where the secret comes from is the caller's business.
"""

import hashlib
import hmac
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from transfer.control.errors import ControlStartError

#: Short secrets can be guessed whatever is done with them.
MIN_SECRET_BYTES = 16

_PURPOSE = b"pd-connector"  # at most 16 bytes: tells these keys from those of another use of the same secret
_DOMAIN = "pd-connector"  # makes libzmq ask the ZAP handler


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, Z85-encoded as ZeroMQ takes it. The secret half is never printed."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, repr=False)  # also a public half lets secrets be tried at home
class ControlKeys:
    """What both ends hold: all servers share one key pair, all clients another."""

    server: KeyPair
    client: KeyPair

    @classmethod
    def derive(cls, secret: bytes) -> "ControlKeys":
        """The keys of a secret of at least ``MIN_SECRET_BYTES``; the same on every machine. Takes about 0.1 s.

        Raises:
            ControlStartError: the secret is too short, or this build of ZeroMQ has no CURVE.
        """
        if len(secret) < MIN_SECRET_BYTES:
            raise ControlStartError(f"a control secret of {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed")
        if not zmq.has("curve"):
            raise ControlStartError(
                f"the control channel has a secret, but ZeroMQ {zmq.zmq_version()} was built without CURVE: install "
                "pyzmq from its wheels, or run without a secret on an isolated network"
            )
        # Whoever records a handshake can try secrets against it at home: each try shall cost something.
        stretched = hashlib.scrypt(secret, salt=_PURPOSE, n=2**14, r=8, p=1, dklen=64)
        return cls(_pair(stretched, b"server"), _pair(stretched, b"client"))

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Let ``socket`` accept only connections under these keys. Before bind.

        A ZAP handler must ask ``admits``; while the context has none, nobody is admitted.
        """
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.server.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.server.secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Let ``socket`` talk only to servers that hold these keys. Before connect."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.client.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.client.secret)

    def admits(self, client_key: bytes) -> bool:
        """Whether ``client_key``, 32 bytes from a finished handshake, is the clients' key."""
        return hmac.compare_digest(client_key, z85.decode(self.client.public))


def _pair(stretched: bytes, role: bytes) -> KeyPair:
    secret = z85.encode(hashlib.blake2b(role, key=stretched, digest_size=32, person=_PURPOSE).digest())
    return KeyPair(zmq.curve_public(secret), secret)
