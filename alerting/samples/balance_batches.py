"""Give every rank the same work: deal sequences out by length instead of by chance."""

import random


def balanced(lengths: list[int], ranks: int) -> list[list[int]]:
    """Return sample indices per rank whose summed lengths are nearly equal: longest first."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        lightest = totals.index(min(totals))
        shares[lightest].append(index)
        totals[lightest] += lengths[index]
    return shares


lengths = [random.Random(0).randint(10, 2000) for _ in range(256)]
work = [sum(lengths[index] for index in share) for share in balanced(lengths, ranks=8)]
assert max(work) / min(work) < 1.02
