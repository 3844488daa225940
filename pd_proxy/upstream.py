"""What the requests of one API need of the servers behind the proxy."""

from dataclasses import dataclass

from starlette.datastructures import Headers

from pd_proxy import headers as passed
from pd_proxy.apis import Api
from pd_proxy.control import CircuitBreaker, ControlAddresses
from pd_proxy.detour import Detour
from pd_proxy.headers import HeaderList
from pd_proxy.servers import Servers
from pd_proxy.settings import Settings


@dataclass(frozen=True, slots=True)
class Upstream:
    """The servers of both legs, and how they are asked. All but the API is shared by all requests."""

    api: Api
    prefill: Servers
    decode: Servers
    control: ControlAddresses
    breaker: CircuitBreaker
    detour: Detour
    settings: Settings

    def headers(self, of_client: Headers, identity: str, *, relayed: bool) -> HeaderList:
        """Return a client's headers as they are sent to a server; see ``headers.to_server``."""
        return passed.to_server(of_client, identity, self.settings.api_key, relayed=relayed)
