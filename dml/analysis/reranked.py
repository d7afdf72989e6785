"""The gain of re-ranking on a run's test, and how sure it is."""

import logging

from torch.nn.functional import normalize

from dml.analysis.comparison import over_classes
from dml.evaluation.evaluator import Embedded
from dml.evaluation.interval import ENDS, of_comparisons
from dml.evaluation.layout import Layout
from dml.evaluation.metric import GAIN, metric
from dml.evaluation.metrics import Ranking, averages, rank_scores
from dml.evaluation.protocol import Conventional
from dml.evaluation.reranking import Reranker
from dml.evaluation.splits import Split

log = logging.getLogger("dml")


def reranked(protocol: Conventional, split: Split, embedded: Embedded) -> dict[str, float]:
    """Ranks the test by the concatenated embedding and `protocol.rerank`, and compares that with the plain ranking.

    Args:
        protocol: which has a re-ranker.
        split: of the run.
        embedded: the test images.

    Returns:
        `rerank/...`, the metrics of the second ranking, named as those of `test/...`. For metrics by which runs are
        compared also `rerank_gain/...`, the mean gain over queries, and `rerank_gain/.../low` and `/high`, the ends of
        its 95 % interval by a paired bootstrap over classes. There is no gain if all queries are of one class.
    """
    assert protocol.rerank is not None
    plain, again = protocol.ranking(split, embedded), _again(split, embedded, protocol.rerank)
    assert plain is not None
    result = {f"rerank/{name}": value for name, value in averages(again, protocol.ks).items()}
    classes = embedded.take(split.query).labels.cpu().numpy()
    found = plain.positives > 0
    if len(set(classes[found].tolist())) < 2:
        return result
    of_plain, of_again = of_comparisons(plain), of_comparisons(again)
    for name, values in of_plain.items():
        gain, of = over_classes(values[found], of_again[name][found], classes[found]), metric(name)
        place, ends = f"{GAIN}/{name}", (gain.low, gain.high)
        result |= {place: gain.estimate} | dict(zip((place + end for end in ENDS), ends, strict=True))
        log.info("re-ranking changes %s by %s (interval over classes)", of.title, of.change(gain.estimate, ends))
    return result


def _again(split: Split, embedded: Embedded, reranker: Reranker) -> Ranking:
    queries = embedded.take(split.query)
    gallery = None if split.gallery is None else embedded.take(split.gallery)
    layout = Layout.of(queries.labels, None if gallery is None else gallery.labels)
    items = None if gallery is None else normalize(gallery.embeddings.flatten(1))
    return rank_scores(reranker.scores(normalize(queries.embeddings.flatten(1)), items), layout)
