"""Order and shares of a scheduler with limits on clients."""

from quire.cache.manager import KVCacheManager
from quire.core.sequence import Request
from quire.scheduling.admission import AdmissionControl
from quire.scheduling.fair_share import FairShare
from quire.scheduling.kv_shares import KVShares
from quire.scheduling.policies import ByPriority


def fair_order() -> ByPriority:
    """Return the order of admission by the service that each client has had."""
    return FairShare()


def block_shares(
    max_kv_share: float, cache: KVCacheManager, running: list[Request], admission: AdmissionControl
) -> KVShares:
    """Return the limits on the blocks of the running requests of one client, `max_kv_share` of all blocks."""
    return KVShares(int(max_kv_share * cache.num_blocks), running, admission.known_blocks, admission.head_room)
