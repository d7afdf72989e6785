"""From a composed configuration to built objects: the only place that instantiates."""

from dataclasses import dataclass

import numpy as np
import PIL
import pytorch_lightning as pl
import torch
import torchvision
from omegaconf import DictConfig, OmegaConf

from dml.configuration.components import Waits, instantiate, without
from dml.configuration.options import OPTIMIZER, SCHEDULER, check
from dml.data.cache import ImageCache, build_cache
from dml.data.check import readable
from dml.data.datamodule import DataModule
from dml.data.dataset import open_dataset
from dml.data.features import KeptFeatures
from dml.data.images import VERSION
from dml.data.on_device import check_views
from dml.data.records import Records, renumbered
from dml.data.room import check_room
from dml.data.transforms import Transform, check_transform, transform_draws, transform_of
from dml.errors import UserError
from dml.evaluation.clustering import need_faiss
from dml.evaluation.protocol import Conventional
from dml.evaluation.splits import Split
from dml.losses import Loss
from dml.methods.base import Method, NewLoss
from dml.methods.recipe import Recipe
from dml.models.backbones.stem import Stem
from dml.models.backbones.trained import backbone_of
from dml.models.heads import Head
from dml.training.complexity import complexity


@dataclass
class Parts:
    """What a run is made of."""

    records: Records
    split: Split
    protocol: Conventional
    data: DataModule
    method: Method
    complexity: dict[str, int]


def build(config: DictConfig) -> Parts:
    """Data first, then the model in the sizes that the data asks for.

    Args:
        config: composed; `runtime` is filled in here.

    Raises:
        UserError: whatever the components say of their options.
    """
    check(config)
    _check_sizes(config)
    pl.seed_everything(config.seed, verbose=False)
    protocol: Conventional = instantiate(config.protocol)
    if protocol.clustering:
        need_faiss()  # told now, and not at the end of a training
    if config.get("rerank"):
        protocol.rerank = instantiate(config.rerank)
        if not protocol.one_gallery:
            raise UserError(
                f"rerank ranks one gallery again for all queries, and {type(protocol).__name__} has another for each: "
                "leave it out."
            )
    records = readable(open_dataset(config), config.paths.cache_dir)
    split = protocol.split(records)
    data = _data(config, records, split, protocol.batch_size)
    OmegaConf.update(config, "runtime.train_classes", data.train_classes)
    method = build_method(config)
    method.attach(data)
    if data.features is not None:
        Stem.of(method.normalize, method.openings())
        if config.trainer.compile:
            raise UserError(
                "dataset.cache=features begins in the middle of the network, and trainer.compile=true compiles the "
                "whole: leave one of them out."
            )
    _check_waits(method, config.trainer.max_steps)
    method.configure_optimizers()  # what torch does not take is told before anything is written
    return Parts(records, split, protocol, data, method, complexity(method, config.image_size))


def _check_waits(method: Method, steps: int) -> None:
    """Raises UserError for what would begin after the last step."""
    for module in method.modules():
        for option, wait in module.waits().items() if isinstance(module, Waits) else ():
            if wait and wait >= steps:
                raise UserError(f"{option} lasts {wait} of the {steps} steps: raise trainer.max_steps, or lower it.")


def _check_sizes(config: DictConfig) -> None:
    """Raises UserError for slices that do not fit the embedding."""
    if config.head.dim % config.protocol.slices:
        raise UserError(f"protocol.slices={config.protocol.slices} does not divide head.dim={config.head.dim}.")


def _data(config: DictConfig, records: Records, split: Split, eval_batch_size: int) -> DataModule:
    train, test = transforms(config)
    train_cache, test_cache = _caches(config, records, train, test)
    train_labels = renumbered(records.labels[split.train])[1]
    return DataModule(
        records,
        split.train,
        split.query,
        split.gallery,
        instantiate(config.sampler, labels=train_labels, seed=config.seed),
        train,
        test,
        seed=config.seed,
        num_workers=config.trainer.num_workers,
        eval_batch_size=eval_batch_size,
        train_cache=train_cache,
        test_cache=test_cache,
        on_device=config.dataset.cache == "device",
        features=_features(config, train) if config.dataset.cache == "features" else None,
    )


def _features(config: DictConfig, train: Transform) -> KeptFeatures:
    """Raises UserError for a training transform that draws, where no copies are to be kept."""
    copies, draws = config.transform.copies, transform_draws(train, config.image_size)
    if draws and copies is None:
        raise UserError(
            "dataset.cache=features computes the features of an image once, and transform.train is random: set "
            "transform.copies=8, say, to keep so many augmented copies of each training image, or transform=unchanged."
        )
    if not draws and copies is not None:
        raise UserError(f"transform.copies={copies}: transform.train is not random, and all copies would be the same.")
    said = {name: value for name, value in config.dataset.items() if name != "cache"}
    common = {"dataset": said, "image_size": config.image_size, "precision": config.trainer.precision}
    versions = f"Pillow {PIL.__version__}, torchvision {torchvision.__version__}, decoded as {VERSION}"

    def settings(steps: DictConfig) -> str:
        said = OmegaConf.create(common | {"transform": OmegaConf.to_container(steps, resolve=True)})
        return f"{OmegaConf.to_yaml(said, resolve=True)}\n{versions}"

    return KeptFeatures(
        copies, settings(config.transform.train), settings(config.transform.test), config.paths.cache_dir
    )


def transforms(config: DictConfig) -> tuple[Transform, Transform]:
    """For training and evaluation. Raises UserError for what cannot be carried out."""
    train, test = transform_of(config.transform.train), transform_of(config.transform.test)
    check_transform(train, config.image_size, "transform.train")
    check_transform(test, config.image_size, "transform.test", draws=False)
    return train, test


def _caches(
    config: DictConfig, records: Records, train: Transform, test: Transform
) -> tuple[ImageCache | None, ImageCache | None]:
    """For training and evaluation; one for both where they begin alike."""
    if config.dataset.cache in ("none", "features"):
        return None, None
    if config.dataset.cache == "device":
        for transform in (train, test):
            check_views(transform, config.image_size)
    said = {name: value for name, value in config.dataset.items() if name != "cache"}
    settings = OmegaConf.to_yaml(OmegaConf.create(said))
    everything = np.arange(len(records))
    whole = build_cache(records, everything, test, settings, config.paths.cache_dir)
    own = whole
    if repr(train.first) != repr(test.first):
        own = build_cache(records, records.train_rows, train, settings, config.paths.cache_dir)
    if config.dataset.cache == "memory":
        needed = whole.size(everything) + (own.size(records.train_rows) if own is not whole else 0)
        check_room(f"the images of {records.name}", needed, torch.device("cpu"), "memory", "disk")
        for one in {whole, own}:
            one.read()
    return own, whole


def build_method(config: DictConfig, loss: NewLoss | None = None) -> Method:
    """The backbone, and what makes heads and losses, put into the method.

    Args:
        config: with `runtime.train_classes` filled in; `runtime.embedding_dim` is set here. Without an optimizer the
            method is to embed only.
        loss: what makes a loss of some width, in place of what the configuration says.

    Raises:
        UserError: whatever the components say of their options.
    """
    backbone = backbone_of(config.backbone)

    def head(dim: int) -> Head:
        return instantiate(config.head, in_channels=backbone.dim, dim=dim)

    def configured(dim: int) -> Loss:
        config.runtime.embedding_dim = dim
        return instantiate(config.loss, miner=instantiate(config.miner) if config.get("miner") else None)

    method: Method = instantiate(
        config.method, backbone=backbone, head=head, loss=loss or configured, dim=config.head.dim
    )
    method.source = backbone.source
    method.recipe = recipe_of(config) if "optimizer" in config else None
    return method.to(memory_format=torch.channels_last)


def recipe_of(config: DictConfig) -> Recipe:
    """The optimizer and the scheduler, with what both are told."""
    groups = ((config.optimizer, OPTIMIZER), (config.scheduler, SCHEDULER))
    own = {str(name): value for group, ours in groups for name, value in group.items() if name in ours}
    optimizer, scheduler = (instantiate(without(group, ours)) for group, ours in groups)
    return Recipe(optimizer, config.optimizer.lr, scheduler, **own)
