"""Approximate indexes beside exact search on clustered vectors: queries per second at a recall, build time, memory.

    python experiments/bench/indexes.py                    # 1,000,000 x 128 float32, hnsw and ivfpq at recall@10 0.99
    python experiments/bench/indexes.py --count 200000 --kinds hnsw

Each index is built and searched in a process of its own, so that the peak memory is that of this index; the vectors lie
in a file. They form clusters of 20 around random centres, like classes of 20 images. Neighbours beyond the cluster are
far away and at nearly equal distances, which is hard for any graph, as is a query's own neighbourhood at k = 10.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from dml.bench.memory import resident
from dml.bench.rows import make_folder, out_option, write_rows
from dml.configuration.command_line import ending
from dml.errors import UserError
from dml.inference.galleries import blocks
from dml.inference.index_files import FILE, write_index
from dml.inference.indexes import build, tune
from dml.inference.vectors import Vectors


def clustered(path: Path, count: int, width: int, dtype: str) -> None:
    """Writes vectors `[count,width]` of unit norm in random order, about 20 around each centre."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((max(1, count // 20), width), np.float32)
    of = random.integers(0, len(centres), count)
    file = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(count, width))
    for part in blocks(count):
        points = centres[of[part]] + 0.7 * random.standard_normal((part.stop - part.start, width), np.float32)
        file[part] = points / np.linalg.norm(points, axis=1, keepdims=True)
    file.flush()


def megabytes() -> float:
    """Returns the peak memory of this process in MiB."""
    return resident("VmHWM") * 1024


def measure(path: Path, kind: Any, k: int, least: float, folder: Path) -> dict[str, Any]:
    import faiss

    embeddings = np.load(path, mmap_mode="r")
    before, start = megabytes(), time.perf_counter()
    index = build(kind, embeddings)
    built = time.perf_counter() - start
    peak = megabytes()
    try:
        measured = tune(index, k, least)
    except UserError as error:
        return {"kind": kind, "build_seconds": built, "told": str(error)}
    write_index(folder, index, measured, least, path, Vectors(embeddings, [], "", "none"))
    return {
        "kind": kind,
        "build_seconds": built,
        "recall": measured.recall,
        "effort": measured.effort,
        "per_second": measured.per_second,
        "exact_per_second": measured.exact_per_second,
        "before_mb": before,
        "built_mb": peak,
        "searched_mb": megabytes(),
        "file_mb": (folder / FILE).stat().st_size / 2**20,
        "threads": faiss.omp_get_max_threads(),
    }


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    parser.add_argument("--kinds", nargs="+", choices=("hnsw", "ivfpq"), default=["hnsw", "ivfpq"])
    parser.add_argument("-k", type=int, default=10)
    parser.add_argument("--min-recall", type=float, default=0.99)
    out_option(parser)
    parser.add_argument("--of", type=Path, help=argparse.SUPPRESS)  # of vectors: a child measures one index of them
    options = parser.parse_args()
    make_folder(options.out)
    told = {}
    with tempfile.TemporaryDirectory() as place:
        if options.of is not None:
            print(json.dumps(measure(options.of, options.kinds[0], options.k, options.min_recall, Path(place))))
            return
        path = Path(place) / "vectors.npy"
        clustered(path, options.count, options.width, options.dtype)
        size = path.stat().st_size / 2**20
        print(f"{options.count:,} x {options.width} {options.dtype}, {size:,.0f} MiB, recall@{options.k}")
        for kind in options.kinds:
            command = [sys.executable, __file__, "--of", path, "--kinds", kind, "-k", options.k]
            command += ["--min-recall", options.min_recall]
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
            found = json.loads(done.stdout)
            if "told" in found:
                print(f"{kind}: built in {found['build_seconds']:.0f} s; {found['told']}")
                continue
            times = found["per_second"] / found["exact_per_second"]
            told[kind] = {
                "index/recall": found["recall"],
                "index/queries_a_second": found["per_second"],
                "index/exact_a_second": found["exact_per_second"],
                "index/over_exact": times,
                "index/build_seconds": found["build_seconds"],
                "index/mebibytes": found["file_mb"],
            }
            print(
                f"{kind}: built in {found['build_seconds']:.0f} s by {found['threads']} threads; recall "
                f"{found['recall']:.4f} at effort {found['effort']}: {found['per_second']:,.0f} queries a second, "
                f"exact search {found['exact_per_second']:,.0f} ({times:.1f} times); peak {found['built_mb']:,.0f} MB "
                f"building and {found['searched_mb']:,.0f} MB searching, pages of the file among them, "
                f"{found['before_mb']:,.0f} MB before; index.faiss {found['file_mb']:,.0f} MiB"
            )
    write_rows(options.out, told)


if __name__ == "__main__":
    main()
