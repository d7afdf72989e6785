"""CIFAR Collage (GSP, section 2.2 and Fig. 11): an image of the target class beside three background images.

Built from CIFAR-100. Four of its 20 superclasses are backgrounds and 16 are targets. Within each superclass, in the
order of the official class numbers, the first three classes are for training (in the paper two train and one
validates) and the last two for the test; this holds for backgrounds too. The label is the superclass, and the test
images are of classes that were never seen in training.
"""

import hashlib
from typing import Literal

import numpy as np
from PIL import Image

from dml.configuration.ranges import Seed
from dml.data.cifar import SIDE, Cifar100, cifar100
from dml.data.paths import Paths
from dml.data.records import Records

BACKGROUNDS = ("large_man-made_outdoor_things", "large_natural_outdoor_scenes", "trees", "flowers")
TRAINING = 3  # training classes in each superclass; the other two are for the test
QUARTERS = 4


def cifar_collage(root: str, kind: Literal["collage", "distilled"] = "collage", seed: Seed = 0) -> Records:
    """Makes 28,800 training and 19,200 test images, one for each image of a target class.

    The result depends on `seed` alone. Training and test share no background. Validation classes are training classes
    that a protocol holds out, so they share backgrounds with the others; the paper keeps those of validation apart,
    too.

    A superclass appears as two classes of the records, such as `fish/train` and `fish/test`.

    Args:
        root: see `dml.data.cifar.cifar100`.
        kind: `collage`: 64x64 pixels of four images in random order, the target and three backgrounds of the same part
            (training or test). `distilled`: the target alone, 32x32.
        seed: fixes which backgrounds are drawn, and the place of each image.

    Raises:
        UserError: there is no CIFAR-100 in `root`.
    """
    cifar = cifar100(root)
    background = np.isin(cifar.superclasses, [cifar.superclass_names.index(name) for name in BACKGROUNDS])
    training = _training_classes(cifar)[cifar.classes]
    targets = np.flatnonzero(~background)
    targets = targets[np.lexsort((targets, cifar.classes[targets], ~training[targets]))]  # training first
    others = _others(targets, training, background, seed)  # [N,3]
    place = np.random.default_rng([seed, 1]).permuted(np.tile(np.arange(QUARTERS), (len(targets), 1)), axis=1)

    def collage(row: int) -> Image.Image:
        parts = cifar.images[[targets[row], *others[row]]]
        sheet = np.empty((2 * SIDE, 2 * SIDE, 3), np.uint8)
        for part, at in zip(parts, place[row], strict=True):
            y, x = divmod(int(at), 2)
            sheet[y * SIDE : (y + 1) * SIDE, x * SIDE : (x + 1) * SIDE] = part
        return Image.fromarray(sheet)

    def source() -> str:
        said = hashlib.sha256(kind.encode())
        for part in (cifar.images, targets, others, place):
            said.update(np.ascontiguousarray(part).data)
        return said.hexdigest()

    def distilled(row: int) -> Image.Image:
        return Image.fromarray(cifar.images[targets[row]])

    roles = np.where(training[targets], "train", "test")
    owners = np.unique(cifar.superclasses[targets])  # [16]
    labels = np.searchsorted(owners, cifar.superclasses[targets]) + np.where(training[targets], 0, len(owners))
    names = [cifar.superclass_names[owner] for owner in owners]
    return Records(
        name=f"cifar_{kind}",
        paths=Paths.of(f"{cifar.class_names[cifar.classes[row]]}/{row}" for row in targets),
        labels=labels.astype(np.int64),
        roles=roles,
        class_names=[f"{name}/train" for name in names] + [f"{name}/test" for name in names],
        open_image=collage if kind == "collage" else distilled,
        source=source,
    )


def _training_classes(cifar: Cifar100) -> np.ndarray:
    """Returns `[100]` bool: True for the first three classes of each superclass."""
    first = np.zeros(len(cifar.class_names), bool)
    for superclass in range(len(cifar.superclass_names)):
        first[np.flatnonzero(cifar.superclass_of == superclass)[:TRAINING]] = True
    return first


def _others(targets: np.ndarray, training: np.ndarray, background: np.ndarray, seed: int) -> np.ndarray:
    """Draws `[N,3]`: three different background images for each target, from its own part (training or test)."""
    rng = np.random.default_rng([seed, 0])
    drawn = np.empty((len(targets), QUARTERS - 1), np.int64)
    for part in (True, False):
        pool = np.flatnonzero(background & (training == part))
        mine = training[targets] == part
        picks = rng.integers(len(pool), size=(int(mine.sum()), QUARTERS - 1))
        while len(again := np.flatnonzero(np.diff(np.sort(picks, axis=1), axis=1).min(1) == 0)):
            picks[again] = rng.integers(len(pool), size=(len(again), QUARTERS - 1))
        drawn[mine] = pool[picks]
    return drawn
