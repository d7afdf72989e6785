"""What re-ranking gains on a run's test, and how sure that is."""

import logging

import numpy as np
from torch.nn.functional import normalize

from dml.analysis.comparison import over_classes
from dml.evaluation.evaluator import Embedded
from dml.evaluation.interval import ENDS
from dml.evaluation.layout import Layout
from dml.evaluation.metric import GAIN, METRICS
from dml.evaluation.metrics import Ranking, averages, rank_scores
from dml.evaluation.protocol import Conventional
from dml.evaluation.reranking import Reranker
from dml.evaluation.splits import Split

log = logging.getLogger("dml")


def reranked(protocol: Conventional, split: Split, embedded: Embedded) -> dict[str, float]:
    """Metrics of the concatenated embedding, ranked again by `protocol.rerank`.

    Returns:
        `rerank/...` as `test/...`; of metrics that runs are compared by `rerank_gain/...`, the mean over queries of
        what is gained over the plain ranking, and `rerank_gain/.../low` and `/high`, the ends of its 95 % interval by a
        paired bootstrap over classes. No gain where all queries are of one class.
    """
    assert protocol.rerank is not None
    plain, again = protocol.ranking(split, embedded), _again(split, embedded, protocol.rerank)
    assert plain is not None
    result = {f"rerank/{name}": value for name, value in averages(again, protocol.ks).items()}
    classes = embedded.take(split.query).labels.cpu().numpy()
    found = plain.positives > 0
    if len(set(classes[found].tolist())) < 2:
        return result
    for of in METRICS:
        if "compare" in of.tables:
            a, b = (_values(ranking, of.name)[found] for ranking in (plain, again))
            gain = over_classes(a, b, classes[found])
            name = f"{GAIN}/{of.name}"
            ends = (gain.low, gain.high)
            result |= {name: gain.estimate} | dict(zip((name + end for end in ENDS), ends, strict=True))
            log.info("re-ranked: %s %s over classes", of.title, of.change(gain.estimate, ends))
    return result


def _again(split: Split, embedded: Embedded, reranker: Reranker) -> Ranking:
    queries = embedded.take(split.query)
    gallery = None if split.gallery is None else embedded.take(split.gallery)
    layout = Layout.of(queries.labels, None if gallery is None else gallery.labels)
    items = None if gallery is None else normalize(gallery.embeddings.flatten(1))
    return rank_scores(reranker.scores(normalize(queries.embeddings.flatten(1)), items), layout)


def _values(ranking: Ranking, name: str) -> np.ndarray:
    return ranking.values[name] if name in ranking.values else (ranking.best_rank == 1).astype(float)
