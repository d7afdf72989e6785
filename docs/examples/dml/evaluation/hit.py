"""A metric of queries: is anything of its class among the R nearest, where R is how many there are?

b queries, L items of the largest class.
"""

from torch import Tensor

from dml.evaluation.metric import Metric


def hit_at_r(ranks: Tensor, count: Tensor) -> Tensor:
    """Ranks `[b,L]` of the positives, the nearest first, and how many there are, `[b]`, R -> `[b]`, 0 or 1."""
    return (ranks[:, 0] <= count).double()


HIT = Metric("hit@r", "Hit@R", of_query=hit_at_r, tables=("run",), places={"test": "Hit@R"})
