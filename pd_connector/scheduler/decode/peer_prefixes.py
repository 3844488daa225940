"""Prefixes that other engines hold: found and pulled before a prompt is computed here.

A request that computes its prompt here passes through these states, each at most once:

    asked about --- enough is missing ---> asking --- a peer holds more ---> pulling --- all ranks have ---> found here
        |                                    |--- nobody does                   '--- a rank has failed ---> computed
        |                                    |--- that peer is untried ----> computed, as its canary (see ``canaries``)
        '--- the same is being pulled -------'--- it takes longer than computing would

The pull goes to blocks that no request has. When they are complete they can be found by their contents, and are in
nobody's use: a request then has a prefix hit as any other. So a pull that fails, comes late or is for a request that
has left costs nothing but the wait, and no failure policy is involved.

Everything runs on the scheduler's thread, but the control client's.
"""

import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from layout.geometry import layers_by_group
from pd_connector.orders import Orders, PullOrder, RankEnds, Report, WorkerHandshake
from pd_connector.params import ParamsError, RemotePrefill, is_decode_leg, prefixes_at
from pd_connector.scheduler.compute_rate import ComputeRate
from pd_connector.scheduler.decode.canaries import Canaries, Standing
from pd_connector.scheduler.decode.needed_blocks import NeededBlocks
from pd_connector.scheduler.decode.prefix_offers import offered_prefix
from pd_connector.scheduler.decode.renewals import Renewals
from pd_connector.scheduler.prefix_search import OnItsWay, PrefixSearch, Question
from pd_connector.scheduler.readers import Readers
from pd_connector.scheduler.scheduler_role import ended
from pd_connector.vllm.block_hashes import BlockHashes
from pd_connector.vllm.cache_specs import Retention, blocks_for
from pd_connector.vllm.device_blocks import DeviceBlocks, HeldBlocks
from pd_connector.vllm.requests import computes_whole_prompt, is_told_by_tokens
from transfer.control.client import ControlClient
from transfer.control.limits import LastFew, ThrottledWarnings
from transfer.control.messages import Cancel, Find, Found
from transfer.errors import TransferError, printable
from transfer.peers import Address

if TYPE_CHECKING:
    from pd_connector.vllm.types import Request

logger = logging.getLogger(__name__)

MESSAGE_S = 2.0
#: Requests that are asked for, or wait for a pull, at a time; others wait until one of them goes on.
_MAX_UNDER_WAY = 16
#: For which a peer is not asked after it has not answered.
_SILENCE_S = 10.0
#: Peers of which something is known; requests may name any number.
_MOST_KNOWN = 1024
_LOG_INTERVAL_S = 60.0


@dataclass(eq=False, slots=True)
class _Asking(Question):
    held: int  # tokens that the device and host memory hold
    least: int  # what a peer must hold at least, in tokens from the beginning
    asked: dict[Address, Future[Found]]
    hash_tokens: dict[Address, int] = field(default_factory=dict)  # of the hashes that each was sent
    again: set[Address] = field(default_factory=set)  # those that were asked once more, with other hashes
    hashes: dict[int, tuple[bytes, ...]] = field(default_factory=dict)  # of the prompt, by tokens of each


@dataclass(eq=False, slots=True)
class _Pulling(OnItsWay):
    pull_id: str
    remote: RemotePrefill
    end: int
    blocks: "Mapping[int, tuple[int, HeldBlocks]]"  # by cache group: the first entry of the table, and what is there
    before: HeldBlocks  # that hold what it extends
    beside: int  # blocks that its request needs besides, if it is computed meanwhile
    ends: RankEnds

    @property
    def peer(self) -> Address:
        return Address(self.remote.remote_host, self.remote.remote_port)


class PeerPrefixes(PrefixSearch[_Asking, _Pulling]):
    """Owns the questions for prefixes, and the blocks to which prefixes are being pulled."""

    def __init__(
        self,
        peers: Sequence[Address],
        client: ControlClient,
        renewals: Renewals,
        blocks: DeviceBlocks,
        groups: Sequence[Retention],
        hashes: BlockHashes,
        canaries: Canaries,
        rate: ComputeRate,
        held_in_host: "Callable[[Request, int], int]" = lambda request, computed_tokens: 0,
        clock: Callable[[], float] = time.monotonic,
        readers: Readers | None = None,
    ) -> None:
        """Start with nothing asked.

        Args:
            peers: asked for every prompt.
            client: sends the messages.
            renewals: keep the leases of what is pulled alive, and of nothing else; closed with this, as is the client.
            blocks: of the device.
            groups: what vLLM keeps of a request in every cache group.
            hashes: name the blocks.
            canaries: prove peers.
            rate: at which prompts are computed here.
            held_in_host: returns how many tokens behind those on the device host memory holds.
            clock: monotonic, in seconds.
            readers: know who has read the beginning of a prompt here; None if they are not to be asked.
        """
        super().__init__(_MAX_UNDER_WAY, clock)
        self._readers = readers
        self._peers = tuple(peers)
        self._client = client
        self._renewals = renewals
        self._blocks = blocks
        self._groups = groups
        self._hashes = hashes
        self._canaries = canaries
        self._held_in_host = held_in_host
        self._ranks = 0
        self._needed = NeededBlocks(groups, ())
        self._rate = rate
        self._pulling: dict[str, _Pulling] = {}  # by the id of the pull
        self._to_prove: dict[str, tuple[RemotePrefill, int]] = {}  # by request: an untried peer, and tokens held here
        self._reader: dict[str, Address | None] = {}  # who has read the beginning of a prompt here, by request
        self._unanswered: LastFew[Address, Future[Found]] = LastFew(_MOST_KNOWN)  # for which nobody waits any more
        self._silent_until: LastFew[Address, float] = LastFew(_MOST_KNOWN)
        self._peer_hash_tokens: LastFew[Address, int] = LastFew(_MOST_KNOWN)
        self._orders: list[PullOrder] = []
        self._warnings = ThrottledWarnings(logger, _LOG_INTERVAL_S)

    def set_workers(self, handshakes: Sequence[WorkerHandshake]) -> None:
        """Learn the number of ranks, and the names of layers."""
        self._ranks = len(handshakes)
        self._needed.set_layers(layers_by_group([handshake.geometry for handshake in handshakes]))

    def allocated(self, request: "Request", blocks: object, external_tokens: int) -> int:
        """Bring nothing. A request that is computed here may prove the peer that holds its prefix."""
        remote, computed = self._to_prove.pop(request.request_id, (None, 0))
        if remote is None:
            return 0
        is_canary = self._canaries.look(request, remote) is Standing.UNTRIED and self._canaries.begin(
            request, remote, computed, is_same_prompt=is_told_by_tokens(request), is_decode_leg=False
        )
        if not is_canary:
            self._renewals.cancel(remote)
        return 0

    def step_orders(self, scheduled: Mapping[str, int]) -> Orders:
        """Return the pulls since the last step."""
        orders, self._orders = tuple(self._orders), []
        return Orders(prefixes=orders)

    def settled(self, request_ids: set[str], failed: set[str], report: Report) -> None:
        """End the pulls that all ranks have reported."""
        for pulling in ended(self._pulling, report.prefixes, self._ranks, "the pull of prefix"):
            self._waiting.pop(pulling.request.request_id, None)
            self._queue.end(pulling)
            self._end(pulling)

    def finish(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> None:
        """Forget a request. A pull for it goes on: others may find the prefix."""
        super().finish(request, block_ids)
        self._reader.pop(request.request_id, None)
        if (untried := self._to_prove.pop(request.request_id, None)) is not None:
            self._renewals.cancel(untried[0])

    @property
    def wants_step(self) -> bool:
        """Whether the engine must step even without requests, to learn how pulls end."""
        return bool(self._pulling)

    def reset(self) -> bool:
        """Make what is being pulled impossible to find: it is no longer valid."""
        for pulling in self._pulling.values():
            pulling.is_wanted = False
        return True

    def close(self) -> None:
        """Stop asking. Leases of peers expire."""
        self._renewals.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books balance."""
        assert all(pulling.ends.ranks < self._ranks for pulling in self._pulling.values()), "one should have ended"
        taken = [block.block_id for pulling in self._pulling.values() for block in _blocks_of(pulling)]
        assert len(set(taken)) == len(taken), "two prefixes are pulled to one block"
        assert self._renewals.request_ids == self._pulling.keys(), "other leases are renewed than those of pulls"
        self._renewals.check_integrity()
        self._check_waits(self._pulling.values())

    # Asking

    def _rests(self) -> bool:
        return not self._ranks  # they are not known yet

    def _note_late(self, late: _Pulling) -> None:
        self.counts["prefixes", "late"] += 1
        self._leave_aside(late.peer)

    @cached_property
    def _unit(self) -> int:
        """Of how many tokens what is pulled is a multiple: it is found in whole blocks of all groups."""
        return math.lcm(self._blocks.hash_tokens, *(kept.block_tokens for kept in self._groups))

    def _begin(self, request: "Request", computed_tokens: int) -> bool:
        """Ask the peers for what a request lacks; return whether it is to wait."""
        params = request.kv_transfer_params
        missing = request.num_prompt_tokens - 1 - computed_tokens
        own_tokens = self._blocks.hash_tokens
        number = computed_tokens // own_tokens
        is_little = missing < self._rate.least_tokens or number >= request.num_prompt_tokens // own_tokens
        # Adapters of one name and path may differ between engines, and a canary tells only much of that.
        if is_little or request.lora_request or is_decode_leg(params) or computes_whole_prompt(request):
            return False
        peers = self._peers_for(request)
        in_host = self._held_in_host(request, computed_tokens) if peers else 0
        # What host memory holds is pulled, too: no more than is gained.
        least = computed_tokens + in_host + max(in_host, self._rate.least_tokens)
        if not peers or least >= request.num_prompt_tokens:
            self._queue.asked.add(request.request_id)
            return False
        key = bytes(request.block_hashes[number])
        give_up_at = self._rate.deadline_of(request.request_id, missing - in_host)
        same = self._queue.get(key, request.request_id)
        if same is not None or self._queue.is_full or self._clock() >= give_up_at:
            return self._queue.wait(request.request_id, give_up_at, same)
        self._queue.asked.add(request.request_id)
        asked: dict[Address, Future[Found]] = {}
        held = computed_tokens + in_host
        asking = _Asking(request, computed_tokens, key, give_up_at, asked.values(), held, least, asked)
        for peer in peers:
            self._ask(asking, peer, self._peer_hash_tokens.get(peer, own_tokens))
        self._asking[request.request_id] = asking
        self._queue.begin(asking)
        self.counts["prefixes", "asked"] += 1
        return True

    def _peers_for(self, request: "Request") -> list[Address]:
        """Return the peers to ask for a request: the one that it names alone, if any.

        Not those that have yet to answer, or have just not answered, or of which a pull is late: it still has its
        blocks.
        """
        try:
            named = prefixes_at(request.kv_transfer_params)
        except ParamsError as error:
            self._warnings.warn("hint", f"PDConnector: {error}. The prompt is computed here")
            return []
        self._note_late_answers()
        now = self._clock()
        reader = self._reader_of(request) if named is None else None
        peers = (named,) if named else dict.fromkeys((*([reader] if reader else []), *self._peers))
        late = {pulling.peer for pulling in self._pulling.values() if now >= pulling.give_up_at} | {*self._unanswered}
        return [peer for peer in peers if peer not in late and self._silent_until.get(peer, -math.inf) <= now]

    def _reader_of(self, request: "Request") -> Address | None:
        """Return who has read the beginning of a prompt here. To look takes long for a long one: once."""
        if self._readers is None:
            return None
        if request.request_id not in self._reader:
            self._reader[request.request_id] = self._readers.reader_of(request.block_hashes)
        return self._reader[request.request_id]

    def _ask(self, asking: _Asking, peer: Address, hash_tokens: int) -> None:
        if peer in self._silent_until:  # it did not answer the last time: one request finds out, for all others
            self._leave_aside(peer)
        if (hashes := asking.hashes.get(hash_tokens)) is None:
            made = self._hashes.of_prompt(asking.request, hash_tokens, self._blocks.hash_tokens)
            # One token at least is computed here, because its output is the next one.
            most = (asking.request.num_prompt_tokens - 1) // hash_tokens
            hashes = asking.hashes[hash_tokens] = tuple(map(bytes, made[:most]))
        find = Find("", uuid.uuid4().hex, self._hashes.hashing, hash_tokens, hashes, asking.least, self._unit)
        asking.hash_tokens[peer] = hash_tokens
        asking.asked[peer] = self._client.request(peer.host, peer.port, find, MESSAGE_S)

    def _take_answers(self, asking: _Asking) -> bool:
        """Go on with the best of the answers, which are all there or late; return whether the request is to wait."""
        is_late = self._clock() >= asking.give_up_at
        if not is_late and self._asks_again(asking):
            return True
        del self._asking[asking.request.request_id]
        self._queue.end(asking)
        offers = self._offers(asking)
        best = max(offers, key=lambda offer: offer.remote_num_tokens, default=None)
        for offer in offers:
            if offer is not best:
                self._renewals.cancel(offer)
        if is_late or best is None or best.remote_num_tokens <= asking.least:
            self.counts["prefixes", "late" if is_late else "nothing"] += 1
            if best is not None:
                self._renewals.cancel(best)
            return False
        return self._use(asking, best)

    def _asks_again(self, asking: _Asking) -> bool:
        """Ask those again that have blocks of another size, with hashes of these; return whether there are any."""
        others = {}
        for peer, answer in asking.asked.items():
            found = answer.result() if answer.exception() is None else None
            if found is None or peer in asking.again or found.hash_tokens in {0, asking.hash_tokens[peer]}:
                continue  # one that says now this, now that is asked twice
            asking.again.add(peer)
            others[peer] = found.hash_tokens
        for peer, hash_tokens in others.items():
            self._peer_hash_tokens[peer] = hash_tokens
            self._ask(asking, peer, hash_tokens)
        return bool(others)

    def _offers(self, asking: _Asking) -> list[RemotePrefill]:
        """Return what was answered that is of use, and note who has not answered."""
        offers = []
        for peer, answer in asking.asked.items():
            if not answer.done():
                answer.add_done_callback(partial(self._decline, peer))
                self._unanswered[peer] = answer
                continue
            try:
                found = answer.result()
                self._silent_until.pop(peer, None)
                if found.reason:
                    said = printable(found.reason)
                    self._warnings.warn("reason", f"PDConnector: engine at {peer} serves no prefix: {said}")
                if not found.lease_id:
                    continue
                offer = offered_prefix(found, peer, self._unit, asking.request.num_prompt_tokens - 1)
                if self._needed.lacking(offer, asking.first) is None:
                    offers.append(offer)
                else:  # a window here reaches back further, as blocks here are larger
                    self._renewals.cancel(offer)
            except TransferError as error:
                self._leave_aside(peer)
                self._warnings.warn("silent", f"PDConnector: engine at {peer} was asked for a prefix: {error}")
            except ParamsError as error:
                self._warnings.warn("invalid", f"PDConnector: engine at {peer} was asked for a prefix: {error}")
                self._decline(peer, answer)
        return offers

    def _note_late_answers(self) -> None:
        """Leave those aside that have not answered at all. One that answers late may be in time for a longer prompt."""
        for peer, answer in [each for each in self._unanswered.items() if each[1].done()]:
            del self._unanswered[peer]
            if answer.cancelled() or answer.exception() is not None:
                self._leave_aside(peer)
            else:
                self._silent_until.pop(peer, None)

    def _leave_aside(self, peer: Address) -> None:
        """Do not ask a peer for a while."""
        self._silent_until[peer] = self._clock() + _SILENCE_S

    def _abandon(self, asking: _Asking) -> None:
        """End the leases of what peers offer, or will offer, for a request that has left."""
        for peer, answer in asking.asked.items():
            answer.add_done_callback(partial(self._decline, peer))

    def _decline(self, peer: Address, answer: Future[Found]) -> None:
        """End the lease of an answer that nobody waits for. On any thread."""
        if answer.cancelled() or answer.exception() is not None:
            return
        found = answer.result()
        if found.lease_id:
            self._client.request(peer.host, peer.port, Cancel(found.engine_id, (found.lease_id,)), MESSAGE_S)

    # Pulling

    def _use(self, asking: _Asking, remote: RemotePrefill) -> bool:
        """Pull what a peer offers, if it is proven; return whether the request is to wait for that."""
        request = asking.request
        standing = self._canaries.look(request, remote)
        if standing is Standing.UNTRIED:
            self.counts["prefixes", "unproven"] += 1
            self._to_prove[request.request_id] = remote, asking.first
            return False
        end = remote.remote_num_tokens - 1
        tables = [kept.needed_blocks(asking.first, end) for kept in self._groups]
        number = sum(len(numbers) for numbers, _ in tables)
        table, _ = self._blocks.longest_prefix(request.block_hashes)
        before = tuple(block for group in table for block in group if not block.is_null)
        evictable = sum(not block.ref_cnt for block in before)
        # A pull that is late keeps its blocks until its reads have ended, and the request is computed beside them.
        beside = blocks_for(self._groups, request.num_tokens) - len(before)
        most = max((each.beside for each in self._pulling.values()), default=0)  # if these are late, too: in turn
        if standing is not Standing.PROVEN or not self._blocks.has_spare(number + evictable + max(beside, most)):
            self.counts["prefixes", "unproven" if standing is not Standing.PROVEN else "full"] += 1
            self._renewals.cancel(remote)
            return False
        self._blocks.pin(before)  # without it, what comes could not be found
        taken = self._blocks.take(number)
        blocks, block_ids, used = {}, [], 0
        for group, (numbers, _) in enumerate(tables):
            own = taken[used : used + len(numbers)]
            used += len(numbers)
            blocks[group] = (numbers.start, own)
            block_ids.append((*[0] * numbers.start, *(int(block.block_id) for block in own)))
        pull_id = uuid.uuid4().hex  # a lease id is a peer's word, and may come twice
        self._orders.append(PullOrder(pull_id, remote, tuple(block_ids), asking.first, end, pull_id))
        give_up_at = min(asking.give_up_at, self._clock() + self._rate.seconds_for(end - asking.held))
        self._renewals.keep(pull_id, remote)  # the pull may take longer than the lease lives
        self._renewals.start_reading(pull_id)
        pulling = _Pulling(
            request, asking.first, asking.key, give_up_at, pull_id, remote, end, blocks, before, beside, RankEnds(0)
        )
        self._pulling[pull_id] = self._waiting[request.request_id] = pulling
        self._queue.begin(pulling)
        return True

    def _end(self, pulling: _Pulling) -> None:
        """Let what has arrived be found, if it is all there, and give the blocks back."""
        self._renewals.drop(pulling.pull_id)
        if pulling.ends.failed or not pulling.is_wanted:
            self.counts["prefixes", "failed"] += not pulling.is_late
            if pulling.ends.failed:
                self._leave_aside(pulling.peer)
        else:
            for group, (first, blocks) in pulling.blocks.items():
                self._blocks.publish(pulling.request, group, first, blocks, self._groups[group].block_tokens)
            if not pulling.is_late:
                self.counts["prefixes", "pulled"] += 1
                self.counts["prefix_tokens", ""] += pulling.end - pulling.first
        self._blocks.give_back((*pulling.before, *_blocks_of(pulling)))


def _blocks_of(pulling: _Pulling) -> HeldBlocks:
    return tuple(block for _, blocks in pulling.blocks.values() for block in blocks)
