"""The key pairs of the control channel, derived from the secret that the engines of a deployment share.

With keys the channel uses ZeroMQ's CURVE mechanism: both ends prove that they hold the secret, all traffic is
encrypted, and recorded traffic cannot be replayed. The caller provides the secret.
"""

import hashlib
import hmac
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from transfer.control.failures import ControlStartError

#: Shorter secrets can be guessed, however they are stretched.
MIN_SECRET_BYTES = 16

_PURPOSE = b"pd-connector"  # at most 16 bytes: separates these keys from other uses of the same secret
_DOMAIN = "pd-connector"  # makes libzmq ask the ZAP handler


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in Z85, as ZeroMQ takes it. The secret key is never printed."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, repr=False)  # even a public key allows guessing secrets offline
class ControlKeys:
    """The keys that both ends hold: all servers share one key pair, all clients another."""

    server: KeyPair
    client: KeyPair

    @classmethod
    def derive(cls, secret: bytes) -> "ControlKeys":
        """Derive the keys from a secret, the same on every machine. Takes about 0.1 s.

        Raises:
            ControlStartError: the secret is shorter than ``MIN_SECRET_BYTES``, or ZeroMQ was built without CURVE.
        """
        if len(secret) < MIN_SECRET_BYTES:
            raise ControlStartError(
                f"the control secret has {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed: use a longer one"
            )
        if not zmq.has("curve"):
            raise ControlStartError(
                f"the control channel has a secret, but ZeroMQ {zmq.zmq_version()} was built without CURVE: install "
                "pyzmq from its wheels, or run without a secret on an isolated network"
            )
        # A recorded handshake allows guessing secrets offline, so each guess is made expensive.
        stretched = hashlib.scrypt(secret, salt=_PURPOSE, n=2**14, r=8, p=1, dklen=64)
        return cls(_pair(stretched, b"server"), _pair(stretched, b"client"))

    @property
    def fingerprint(self) -> str:
        """What tells secrets apart, for use inside one engine: it allows guessing the secret offline."""
        return hashlib.blake2b(self.client.public, digest_size=8).hexdigest()

    @property
    def of_objects(self) -> bytes:
        """The key that seals objects in a pool. 32 bytes."""
        return hashlib.blake2b(self.server.secret, digest_size=32, person=_PURPOSE).digest()

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make ``socket`` accept only connections with these keys. Call this before bind.

        A ZAP handler must call ``admits``; while the context has no handler, nobody is admitted.
        """
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.server.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.server.secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Make ``socket`` talk only to servers that hold these keys. Call this before connect."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.client.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.client.secret)

    def admits(self, client_key: bytes) -> bool:
        """Return whether ``client_key``, 32 bytes from a finished handshake, is the clients' public key."""
        return hmac.compare_digest(client_key, z85.decode(self.client.public))


def _pair(stretched: bytes, role: bytes) -> KeyPair:
    secret = z85.encode(hashlib.blake2b(role, key=stretched, digest_size=32, person=_PURPOSE).digest())
    return KeyPair(zmq.curve_public(secret), secret)
