"""PrefixTree: nodes by their tokens, siblings by age, roots by scope. Block size 4."""

import random

import pytest

from quire.cache.prefix_tree import MAX_CHILDREN_SEEN, NONE, PrefixTree

A, B, C = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]


@pytest.fixture
def tree() -> PrefixTree:
    return PrefixTree(num_blocks=32, block_size=4)


def insert(tree: PrefixTree, parent: int, token_ids: list[int], block: int) -> int:
    tree.insert(parent, tree.key(parent, token_ids), block)
    tree.check()
    return block


def insert_path(tree: PrefixTree, blocks: list[int], *token_ids: list[int], scope: object = None) -> None:
    parent = tree.open_root(scope)
    for block, tokens in zip(blocks, token_ids, strict=True):
        parent = insert(tree, parent, tokens, block)


def found(tree: PrefixTree, token_ids: list[int], scope: object = None) -> list[int]:
    return list(tree.walk(scope, token_ids, len(token_ids)))


class TestWalk:
    def test_empty_tree_has_nothing(self, tree: PrefixTree) -> None:
        assert (found(tree, A), len(tree), 3 in tree, tree.root(None)) == ([], 0, False, None)
        tree.check()

    def test_path_is_found_as_far_as_blocks_are_full_and_equal(self, tree: PrefixTree) -> None:
        insert_path(tree, [7, 3, 5], A, B, C)
        assert found(tree, A + B + C) == [7, 3, 5]
        assert found(tree, A + B + C[:3]) == [7, 3]
        assert found(tree, A + C) == [7]
        assert found(tree, A[:3]) == found(tree, B) == []
        assert (len(tree), 3 in tree, 4 in tree) == (3, True, False)

    def test_walk_ends_where_it_was_told_to(self, tree: PrefixTree) -> None:
        insert_path(tree, [7, 3, 5], A, B, C)
        assert [list(tree.walk(None, A + B + C, stop)) for stop in (3, 4, 11, 12)] == [[], [7], [7, 3], [7, 3, 5]]

    def test_same_tokens_below_another_parent_are_another_node(self, tree: PrefixTree) -> None:
        insert_path(tree, [0, 1], A, B)
        insert_path(tree, [2, 3], C, B)
        assert (found(tree, A + B), found(tree, C + B), found(tree, B)) == ([0, 1], [2, 3], [])

    def test_scopes_never_meet(self, tree: PrefixTree) -> None:
        insert_path(tree, [0], A)
        insert_path(tree, [1], A, scope="salt")
        insert_path(tree, [2], A, scope=("salt", "adapter"))
        assert [found(tree, A, scope) for scope in (None, "salt", ("salt", "adapter"), "pepper")] == [[0], [1], [2], []]

    def test_tokens_are_compared_whole(self, tree: PrefixTree) -> None:
        """Ids of up to 31 bits; the parent's number is part of the key and cannot be mistaken for tokens."""
        big = [2**31 - 1, 0, 2**16, 2**24]
        insert_path(tree, [0], big)
        assert found(tree, big) == [0]
        assert found(tree, [2**31 - 1, 0, 2**16, 2**24 + 1]) == []

    def test_pending_nodes_are_walked_over(self, tree: PrefixTree) -> None:
        insert_path(tree, [0, 1], A, B)
        tree.pending.add(1)
        assert found(tree, A + B) == [0, 1]
        tree.check()


class TestLife:
    def test_second_block_for_a_node_is_a_fault(self, tree: PrefixTree) -> None:
        insert_path(tree, [0], A)
        root = tree.open_root(None)
        with pytest.raises(AssertionError, match="a second block 1 for the node 0"):
            tree.insert(root, tree.key(root, A), 1)
        with pytest.raises(AssertionError, match="block 0 is in the tree already"):
            tree.insert(root, tree.key(root, B), 0)
        tree.check()

    def test_only_leaves_may_go(self, tree: PrefixTree) -> None:
        insert_path(tree, [0, 1], A, B)
        with pytest.raises(AssertionError, match="block 0 has children"):
            tree.remove(0)
        tree.remove(1)
        tree.remove(0)
        assert (len(tree), found(tree, A + B)) == (0, [])
        with pytest.raises(AssertionError, match="block 0 is not in the tree"):
            tree.remove(0)
        tree.check()

    def test_tells_who_has_children(self, tree: PrefixTree) -> None:
        insert_path(tree, [0, 1], A, B)
        assert [tree.has_children(block) for block in (0, 1)] == [True, False]
        tree.remove(1)
        assert not tree.has_children(0)

    def test_removed_node_is_not_pending_any_more(self, tree: PrefixTree) -> None:
        insert_path(tree, [0], A)
        tree.pending.add(0)
        tree.remove(0)
        assert not tree.pending

    def test_root_goes_with_its_last_child(self, tree: PrefixTree) -> None:
        """Salts come from clients: the tree must not remember those that have nothing."""
        for salt in range(100):
            insert_path(tree, [0, 1], A, B, scope=salt)
            first = tree.root(salt)
            tree.remove(1)
            assert tree.root(salt) == first
            tree.remove(0)
            assert tree.root(salt) is None
            tree.check()
        insert_path(tree, [2], A, scope=0)
        assert tree.root(0) != first, "a root's number is never used again"

    def test_everything_below_a_node_goes_with_it(self, tree: PrefixTree) -> None:
        insert_path(tree, [0, 1, 2], A, B, C)
        insert(tree, 0, C, 3)
        insert(tree, tree.open_root(None), B, 4)
        removed = tree.remove_all_below(0)
        assert (sorted(removed), removed[-1], len(tree)) == ([0, 1, 2, 3], 0, 1)
        assert found(tree, B) == [4]
        tree.check()


class TestChildren:
    def test_youngest_comes_first(self, tree: PrefixTree) -> None:
        root = tree.open_root(None)
        for block, tokens in enumerate((A, B, C)):
            insert(tree, root, tokens, block)
        assert list(tree.children(root)) == [2, 1, 0]
        assert list(tree.children(0)) == []

    @pytest.mark.parametrize("gone", [0, 1, 2])
    def test_siblings_close_the_gap(self, tree: PrefixTree, gone: int) -> None:
        root = tree.open_root(None)
        for block, tokens in enumerate((A, B, C)):
            insert(tree, root, tokens, block)
        tree.remove(gone)
        tree.check()
        assert list(tree.children(root)) == [block for block in (2, 1, 0) if block != gone]

    @pytest.mark.parametrize("num_common", range(5))
    def test_match_inside_counts_common_first_tokens(self, tree: PrefixTree, num_common: int) -> None:
        insert_path(tree, [0, 1], A, B)
        tokens = B[:num_common] + [99] * (4 - num_common)
        expected = (1, num_common) if num_common else (NONE, 0)
        assert tree.longest_match_inside(0, tokens) == expected
        assert tree.longest_match_inside(0, tokens[:2]) == ((1, min(num_common, 2)) if num_common else (NONE, 0))

    def test_match_inside_takes_the_longest(self, tree: PrefixTree) -> None:
        root = tree.open_root(None)
        for block, tokens in enumerate(([1, 2, 9, 9], [1, 2, 3, 9], [1, 9, 9, 9])):
            insert(tree, root, tokens, block)
        assert tree.longest_match_inside(root, A) == (1, 3)

    def test_match_inside_looks_at_no_pending_node_and_at_the_youngest_only(self, tree: PrefixTree) -> None:
        root = tree.open_root(None)
        insert(tree, root, A, 0)
        for block in range(1, MAX_CHILDREN_SEEN):
            insert(tree, root, [1, 2, 50 + block, 0], block)
        assert tree.longest_match_inside(root, A) == (0, 4)
        tree.pending.add(0)
        assert tree.longest_match_inside(root, A) == (MAX_CHILDREN_SEEN - 1, 2)
        tree.pending.clear()
        insert(tree, root, [1, 0, 0, 0], MAX_CHILDREN_SEEN)
        assert tree.longest_match_inside(root, A)[1] == 2, "the eldest is one too many"


@pytest.mark.parametrize("seed", range(20))
def test_random_life_equals_a_dict_of_paths(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 3)
    tree, paths = PrefixTree(40, size), dict[tuple[object, tuple[int, ...]], int]()
    free = list(range(40))
    for _ in range(300):
        scope = rng.choice([None, "a", "b"])
        if free and rng.random() < 0.6:
            known = [tokens for owner, tokens in paths if owner == scope]
            above = rng.choice([(), *known])
            path = above + tuple(rng.randrange(2) for _ in range(size))
            if (scope, path) not in paths:
                block = free.pop(rng.randrange(len(free)))
                parent = paths[scope, above] if above else tree.open_root(scope)
                tree.insert(parent, tree.key(parent, path[-size:]), block)
                paths[scope, path] = block
        leaves = [b for b in paths.values() if not list(tree.children(b))]
        if leaves and rng.random() < 0.4:
            leaf = rng.choice(leaves)
            tree.remove(leaf)
            free.append(leaf)
            paths = {path: block for path, block in paths.items() if block != leaf}
        tree.check()
        wanted = [rng.randrange(2) for _ in range(8)]
        steps = [(scope, tuple(wanted[:stop])) for stop in range(size, 9, size)]
        expected = []
        for step in steps:
            if step not in paths:
                break
            expected.append(paths[step])
        assert list(tree.walk(scope, wanted, 8)) == expected
