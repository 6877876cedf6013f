"""Tickets: keys and values of prompts that are kept until another engine has fetched them (DistServe, 2024).

A request that computes a prompt for another engine leaves a lease of the prompt's full blocks, and a ticket for it: 256
random bits, good once, for the owner and the scope of the request. A lease ends when its blocks have been fetched, when
the connection of the other engine ends, after `lease_s` seconds, or when blocks or `MAX_BYTES` are short, the oldest
first. Any of these may come at any time, so a lease is looked at under the lock for each block that is copied out of
the cache.

Of a model with states the blocks end one token before the prompt at the latest, and a lease keeps the state behind
them, too (`quire.cache.states.States.keep`), in parts that are read as blocks. It ends when its state is given up.

The engine's thread makes and frees leases; threads of connections redeem tickets, copy blocks, and end leases, which
the engine's thread then frees.
"""

import hashlib
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.cache.prefix_tree import as_bytes, scope_text
from quire.core.kv_identity import NO_STATES, StateParts
from quire.core.sequence import KVTransfer, Request, Sequence
from quire.core.token_ids import TOKEN_BYTES

if TYPE_CHECKING:
    from quire.cache.manager import KVCacheManager

MAX_BYTES = 64 << 20   # of all tickets: a prefix that is found costs its request little, and each ticket its tokens
TICKET_BYTES = 1024    # of a ticket, beside its tokens and the numbers of its blocks


@dataclass(slots=True, eq=False)
class KVTicket:
    """A prompt that is kept: its full blocks and their tokens, with those of the state behind them, if it has one."""

    lease_id: int           # lease of the request that has computed it
    name: str
    binding: bytes          # digest of its owner and scope
    tokens: bytes           # packed, 4 bytes each: names of blocks, `quire.cache.stored_keys`
    blocks: list[int]       # and parts
    ends_s: float
    is_redeemed: bool = False
    is_over: bool = False   # its blocks may be others' now


class Tickets:
    """All tickets of an engine: those of some seconds, since several may share their blocks and state.

    `clock` returns seconds.
    """

    def __init__(
        self, cache: "KVCacheManager", lease_s: float, clock: Callable[[], float], parts: StateParts = NO_STATES
    ) -> None:
        assert cache.prefixes.can_be_found, "tickets without a prefix cache"
        assert cache.loads is not None, "tickets without loads"
        self._cache, self.lease_s, self._clock, self._parts = cache, lease_s, clock, parts
        self._names = cache.loads.stored_keys.names
        if cache.states is not None:
            cache.states.on_give_up = self._give_up
        self.lock = threading.Lock()
        self._tickets = OrderedDict[str, KVTicket]()   # the first to end first
        self._by_lease: dict[int, KVTicket] = {}
        self.num_blocks = 0     # and parts of states, of all leases; one of several leases counts several times
        self._ended = deque[KVTicket]()           # over, and to be freed by the engine's thread
        self.counts = Counter[str]()              # made, redeemed, refused, expired, given_back, stateless

    def __len__(self) -> int:
        """Count the leases."""
        return len(self._tickets)

    @property
    def num_left(self) -> int:
        """Number of operations left for an idle engine: leases that will end."""
        return len(self._tickets)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tickets, without what is in their blocks."""
        return len(self._tickets) * TICKET_BYTES + self.num_blocks * (TOKEN_BYTES * self._cache.block_size + 8)

    # --- the engine's thread --------------------------------------------------------------------------------------

    def keep(self, request: Request, sequence: Sequence) -> None:
        """Keep the full blocks of a request's prompt, of which a branch ends, under the request's ticket.

        Nothing is kept if there is no full block, `lease_computed` holds none, or the state behind them was evicted.
        """
        transfer, lease_id = request.transfer, request.request_id
        assert transfer is not None, "a request without a ticket"
        if transfer.ticket in self._tickets or lease_id in self._cache.leases:
            return
        size, num_parts = self._cache.block_size, self._parts.num_parts
        num_usable = sequence.num_prompt_tokens - (num_parts > 0)  # the last token is computed behind the state
        num_blocks = min(num_usable, sequence.num_computed_tokens) // size
        tokens = self._names(as_bytes(sequence.token_ids[: num_blocks * size]))
        num_blocks = len(tokens) // (TOKEN_BYTES * size)
        blocks = self._cache.lease_computed(lease_id, sequence.seq_id, num_blocks) if num_blocks else None
        if blocks is None:
            return
        ends_s = self._clock() + self.lease_s
        if num_parts:
            slot = self._cache.keep_state(lease_id, sequence.seq_id)
            if slot is None:
                self.counts["stateless"] += len(request.live) == 1  # once: a later branch may have the state
                self._cache.end_lease(lease_id)
                return
            blocks, tokens = blocks + self._parts.numbers(slot), tokens + self._parts.tokens(size)
        ticket = KVTicket(lease_id, transfer.ticket, binding(transfer, request.scope), tokens, blocks, ends_s)
        self.num_blocks += len(blocks)
        while self.num_bytes + TICKET_BYTES > MAX_BYTES and self.give_back():
            pass
        with self.lock:
            self._tickets[transfer.ticket] = self._by_lease[lease_id] = ticket
            self.counts["made"] += 1

    def step(self) -> None:
        """Free what has been fetched, and what is past its time. For between two steps."""
        if not self._tickets:
            return
        now_s = self._clock()
        with self.lock:
            for ticket in self._tickets.values():
                if ticket.ends_s > now_s:
                    break
                self._end(ticket, "expired")
        self._free()

    def give_back(self) -> bool:
        """End the lease that would end first, for want of room; return whether there was one. Its blocks are cached."""
        with self.lock:
            ticket = next((each for each in self._tickets.values() if not each.is_over), None)
            if ticket is not None:
                self._end(ticket, "given_back")
        return self._free()

    def _give_up(self, lease_id: int) -> None:
        """End the lease with a state in a slot that is to be another's; it is freed after the step."""
        with self.lock:
            if (ticket := self._by_lease.get(lease_id)) is not None:
                self._end(ticket, "given_back")

    def clear(self) -> None:
        """End all leases."""
        with self.lock:
            for ticket in self._tickets.values():
                self._end(ticket, "given_back")
        self._free()

    def _free(self) -> bool:
        """Free the leases that are over; return whether there were any."""
        is_any = bool(self._ended)
        while self._ended:
            ticket = self._ended.popleft()
            del self._tickets[ticket.name], self._by_lease[ticket.lease_id]
            self.num_blocks -= len(ticket.blocks)
            self._cache.end_lease(ticket.lease_id)
        return is_any

    # --- threads of connections -----------------------------------------------------------------------------------

    def redeem(self, name: str, binding: bytes) -> KVTicket | None:
        """Return the ticket of a name, once; None: there is none for this owner and scope, or not any more."""
        with self.lock:
            ticket = self._tickets.get(name)
            if ticket is None or ticket.is_over or ticket.is_redeemed or ticket.binding != binding:
                self.counts["refused"] += 1
                return None
            ticket.is_redeemed, ticket.ends_s = True, self._clock() + self.lease_s
            self._tickets.move_to_end(name)
            self.counts["redeemed"] += 1
            return ticket

    def end(self, ticket: KVTicket) -> None:
        """End a lease: its blocks have been fetched, or are not wanted."""
        with self.lock:
            self._end(ticket, None)

    def _end(self, ticket: KVTicket, reason: str | None) -> None:
        if not ticket.is_over:
            ticket.is_over = True
            self._ended.append(ticket)
            if reason is not None:
                self.counts[reason] += 1

    # --- checks ---------------------------------------------------------------------------------------------------

    @property
    def lease_ids(self) -> set[int]:
        """The leases of tickets."""
        return set(self._by_lease)

    def checking(self) -> Iterator[None]:
        """Assert, in slices, that each ticket has its blocks."""
        tickets = list(self._tickets.values())      # a thread of a connection may redeem one meanwhile
        assert self.num_blocks == sum(len(ticket.blocks) for ticket in tickets)
        for ticket in tickets:
            held = self._cache.leased_blocks(ticket.lease_id, 0, len(ticket.blocks))
            if self._cache.states is not None and (slot := self._cache.states.kept(ticket.lease_id)) is not None:
                held += self._parts.numbers(slot)
            num_parts = len(ticket.blocks) - len(held)
            assert not num_parts or (ticket.is_over and num_parts == self._parts.num_parts), f"no state of {ticket}"
            assert held == ticket.blocks[: len(held)], f"lease {ticket.lease_id} of {held}, not {ticket.blocks}"
        yield


def binding(transfer: KVTransfer, scope: Hashable) -> bytes:
    """Return what binds a ticket to its owner and to the scope of its request, 32 bytes."""
    return hashlib.sha256(scope_text((transfer.owner, scope_text(scope)))).digest()
