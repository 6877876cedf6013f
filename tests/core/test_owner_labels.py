"""Labels of owners: the same for the same, none that tells a secret, and not more than there may be."""

import hashlib

from quire.core.owner_labels import MAX_LABELS, OTHER, UNLABELLED, OwnerLabels


def test_labels_tell_keys_and_salts_apart() -> None:
    labels = OwnerLabels()
    digest = hashlib.sha256(b"tenant").hexdigest()[:8]
    for _ in range(2):
        assert labels.label(0, None) == UNLABELLED
        assert labels.label(2, None) == "key-2"
        assert labels.label(0, "tenant") == f"salt-{digest}"
        assert labels.label(2, "tenant") == f"key-2 salt-{digest}"


def test_salts_beyond_the_limit_count_as_their_key_or_as_other() -> None:
    labels = OwnerLabels()
    known = {labels.label(1, f"salt {number}") for number in range(MAX_LABELS)}
    assert len(known) == MAX_LABELS
    assert labels.label(1, "one more") == "key-1"
    assert labels.label(0, "one more") == OTHER
    assert labels.label(1, "salt 0") in known


def test_keys_beyond_the_limit_are_other() -> None:
    labels = OwnerLabels(max_labels=5)
    assert labels.label(5, None) == "key-5"
    assert labels.label(6, None) == labels.label(6, "salt") == OTHER


def test_a_salt_of_any_characters_is_a_label_of_plain_ones() -> None:
    label = OwnerLabels().label(0, '<b onclick="x">é\n</b>')
    assert label.isascii()
    assert label.removeprefix("salt-").isalnum()
