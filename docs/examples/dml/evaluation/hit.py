"""A metric of queries: is an image of the query's class among the R nearest, where R is the number of such images?

b queries, L positives of the query that has the most.
"""

from torch import Tensor

from dml.evaluation.metric import Metric


def hit_at_r(ranks: Tensor, count: Tensor) -> Tensor:
    """Maps ranks of the positives `[b,L]`, the nearest first, and their number R `[b]` to `[b]`, 0 or 1."""
    return (ranks[:, 0] <= count).double()


HIT = Metric("hit@r", "Hit@R", of_query=hit_at_r, tables=("run",), places={"test": "Hit@R"})
