"""What is good for one pull, a lease or a transfer's name: which requests use it, and which has been used.

Plain books: no threads, no sockets, no blocks.
"""

from pd_connector.params import ParamsError, PromptIdentity, RemotePrefill, RemoteTransfer

#: How many spent ones are remembered: more than there are requests on the way to this engine.
_MAX_SPENT = 8192

#: ("lease", its id), or ("transfer", host, port, its name).
Key = tuple[str, ...]


def key_of(asked: RemotePrefill | RemoteTransfer) -> Key:
    """Return what is used of what a decode leg asks for."""
    if isinstance(asked, RemotePrefill):
        return ("lease", asked.lease_id)
    return ("transfer", asked.remote_host, str(asked.remote_port), asked.transfer_id)


class SingleUse:
    """Owns who uses what. Belongs to one thread."""

    def __init__(self) -> None:
        self._keys: dict[str, Key] = {}  # by request
        self._in_use: dict[Key, PromptIdentity | None] = {}  # whose prompts they are
        self._spent: dict[Key, PromptIdentity | None] = {}  # no longer in use, oldest first

    def is_known(self, key: Key) -> bool:
        """Return whether a request uses it, or has used it."""
        return key in self._in_use or key in self._spent

    def is_in_use(self, key: Key) -> bool:
        """Return whether a request uses it."""
        return key in self._in_use

    def spent_by(self, asked: RemotePrefill | RemoteTransfer) -> PromptIdentity | None:
        """Return the prompt that has used what a decode leg asks for; None if none has, or it is not known."""
        return self._spent.get(key_of(asked))

    def check_prompt(self, asked: RemotePrefill | RemoteTransfer, prompt: PromptIdentity | None) -> None:
        """Check that a transfer's name is, or was, of the ``prompt`` that it is given with, as far as both are known.

        Raises:
            ParamsError: it is of another one.
        """
        key = key_of(asked)
        of = self._in_use.get(key) or self._spent.get(key)
        if isinstance(asked, RemoteTransfer) and prompt is not None and of is not None and prompt != of:
            raise ParamsError(
                f"{asked.label} is that of another request, whose prompt has {of.tokens} tokens (digest "
                f"{of.digest or 'unknown'}), and this one has {prompt.tokens} ({prompt.digest or 'unknown'}): each "
                "request needs a transfer_id of its own"
            )

    def take(self, request_id: str, key: Key, prompt: PromptIdentity | None) -> None:
        """Let a request use what nobody has used."""
        self._keys[request_id] = key
        self._in_use[key] = prompt

    def pass_on(self, request_id: str, successor: str) -> None:
        """Let another name use what a request has used."""
        self._keys[successor] = self._keys.pop(request_id)

    def let_go(self, request_id: str) -> None:
        """End a request's use, if it uses anything. Whoever comes with the same from now on is too late."""
        if (key := self._keys.pop(request_id, None)) is not None:
            self._spent[key] = self._in_use.pop(key)
            if len(self._spent) > _MAX_SPENT:
                del self._spent[next(iter(self._spent))]

    @property
    def request_ids(self) -> frozenset[str]:
        """The requests that use something."""
        return frozenset(self._keys)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert set(self._keys.values()) == self._in_use.keys(), "what is in use is not what the requests hold"
        assert len(self._keys) == len(self._in_use), "two requests use the same lease or transfer"
        assert not self._in_use.keys() & self._spent.keys(), "a lease or transfer is in use and spent at once"
        assert len(self._spent) <= _MAX_SPENT, "what is spent is never forgotten"
