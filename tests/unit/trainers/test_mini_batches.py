"""Mini-batches: whole prompt groups, every row once an epoch, shuffled by the seed alone."""

from hypothesis import given
from hypothesis import strategies as st

from hone.trainers.algorithm import mini_batches


def cut(groups: list[int], size: int, epochs: int, seed: int | None) -> list[list[tuple[str, int]]]:
    rows = [(f"g{group}", index) for group, count in enumerate(groups) for index in range(count)]
    return [[rows[row] for row in mini] for mini in mini_batches([uid for uid, _ in rows], size, epochs, seed)]


@given(
    groups=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    size=st.integers(1, 8),
    epochs=st.integers(1, 3),
    seed=st.none() | st.integers(0, 99),
)
def test_every_epoch_holds_every_group_whole_and_once(groups, size, epochs, seed):
    rows = [(f"g{group}", index) for group, count in enumerate(groups) for index in range(count)]
    minis = cut(groups, size, epochs, seed)
    per_epoch = -(-len(groups) // size)
    assert len(minis) == epochs * per_epoch
    for epoch in range(epochs):
        part = minis[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(row for mini in part for row in mini) == rows
        for mini in part:
            names = list(dict.fromkeys(uid for uid, _ in mini))
            assert len(names) <= size
            assert mini == [row for name in names for row in rows if row[0] == name], "groups stay together, in order"
    if seed is None:
        assert [row for mini in minis[:per_epoch] for row in mini] == rows
    assert minis == cut(groups, size, epochs, seed)


def test_epochs_and_seeds_shuffle_differently():
    def order(seed: int, epoch: int) -> list:
        return [row for mini in cut([1] * 20, 5, 2, seed)[epoch * 4 : epoch * 4 + 4] for row in mini]

    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)
