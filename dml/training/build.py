"""Builds all objects of a run from a composed configuration."""

from dataclasses import dataclass

import numpy as np
import PIL
import pytorch_lightning as pl
import torch
import torchvision
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from dml.configuration.components import Waits, instantiate, without
from dml.configuration.options import BACKBONE, OPTIMIZER, SCHEDULER, check
from dml.data.cache import ImageCache, build_cache
from dml.data.check import readable
from dml.data.datamodule import DataModule
from dml.data.dataset import open_dataset
from dml.data.features import KeptFeatures
from dml.data.images import VERSION
from dml.data.on_device import check_views
from dml.data.paths import NO_FILE
from dml.data.records import Records, renumbered
from dml.data.room import check_room
from dml.data.transforms import check_transform, transform_of
from dml.errors import UserError
from dml.evaluation.clustering import need_faiss
from dml.evaluation.protocol import Conventional
from dml.evaluation.splits import Split
from dml.losses import Loss
from dml.methods.base import Method, NewLoss
from dml.methods.recipe import Recipe
from dml.models.backbones.stages import Backbone
from dml.models.backbones.stem import Stem
from dml.models.backbones.trained import backbone_of
from dml.models.heads import Head
from dml.models.poolings.tokens import NO_CLASS_TOKEN, ClassToken
from dml.training.complexity import complexity


@dataclass
class Parts:
    """The objects that a run is made of."""

    records: Records
    split: Split
    protocol: Conventional
    data: DataModule
    method: Method
    complexity: dict[str, int]


def build(config: DictConfig) -> Parts:
    """Builds the data, and the model in the sizes that the data requires.

    Images are decoded for the check when the backbone stands, and for a cache at the very end, so that mistakes in
    options are told before long work. Data draw no random numbers of the process.

    Args:
        config: composed; `runtime` is filled in here.

    Raises:
        UserError: an option is wrong, or options do not go together; or as the components.
    """
    check(config)
    _check_sizes(config)
    if (layers := config.backbone.get("lora_layers")) is not None and config.backbone.train != "lora":
        raise UserError(f"backbone.lora_layers={list(layers)} is for backbone.train=lora: set both, or leave it out.")
    pl.seed_everything(config.seed, verbose=False)
    protocol: Conventional = instantiate(config.protocol)
    if protocol.clustering:
        need_faiss()  # checked now, and not at the end of the training
    if config.get("rerank"):
        protocol.rerank = instantiate(config.rerank)
        if not protocol.one_gallery:
            raise UserError(
                f"rerank re-ranks one gallery for all queries, but {type(protocol).__name__} has another gallery for "
                "each: leave rerank out."
            )
    records = open_dataset(config)
    backbone = backbone_of(config.backbone)
    records = readable(records, config.paths.cache_dir)
    split = protocol.split(records)
    data = _data(config, records, split, protocol.batch_size)
    OmegaConf.update(config, "runtime.train_classes", data.train_classes)
    if backbone.colours is not None:
        OmegaConf.update(config, "runtime.colours", list(backbone.colours), force_add=True)
    method = build_method(config, backbone=backbone)
    method.attach(data)
    for module in method.modules():
        if isinstance(module, Loss):
            module.check_memory(config.sampler.batch_size)
    if data.features is not None:
        Stem.of(method.normalize, method.openings())
        if config.trainer.compile:
            raise UserError(
                "dataset.cache=features begins in the middle of the network, but trainer.compile=true compiles all of "
                "it: leave one of them out."
            )
    _check_waits(method, config.trainer.max_steps, config.sampler.batch_size)
    method.configure_optimizers()  # so that options that torch refuses are told before anything is written
    parts = Parts(records, split, protocol, data, method, complexity(method, config.image_size, config.head.dim))
    data.train_cache, data.test_cache = _caches(config, records, data)
    return parts


def _check_waits(method: Method, steps: int, images: int) -> None:
    """Raises UserError for a part of the training that would begin after the last step."""
    for module in method.modules():
        for option, wait in module.waits(images).items() if isinstance(module, Waits) else ():
            if wait and wait >= steps:
                raise UserError(
                    f"{option} lasts {wait} of the {steps} steps: raise trainer.max_steps, or lower that option."
                )


def _check_sizes(config: DictConfig) -> None:
    """Raises UserError if the width of the embedding is not divisible by the number of slices."""
    if config.head.dim % config.protocol.slices:
        raise UserError(
            f"protocol.slices={config.protocol.slices} does not divide head.dim={config.head.dim}: change one of them."
        )


def _data(config: DictConfig, records: Records, split: Split, eval_batch_size: int) -> DataModule:
    """Raises UserError for a transform that cannot be applied, or features that cannot be kept."""
    if config.transform.copies is not None and config.dataset.cache != "features":
        raise UserError(
            f"transform.copies={config.transform.copies} is for features that are kept: set dataset.cache=features, or "
            "transform.copies=null."
        )
    train, test = transform_of(config.transform.train), transform_of(config.transform.test)
    draws = check_transform(train, config.image_size, "transform.train")
    check_transform(test, config.image_size, "transform.test", draws=False)
    train_labels = renumbered(records.labels[split.train])[1]
    sampler = instantiate(config.sampler, labels=train_labels, seed=config.seed)
    return DataModule(
        records,
        split.train,
        split.query,
        split.gallery,
        sampler,
        train,
        test,
        seed=config.seed,
        num_workers=config.trainer.num_workers,
        eval_batch_size=eval_batch_size,
        on_device=config.dataset.cache == "device",
        features=_features(config, records, draws) if config.dataset.cache == "features" else None,
    )


def _features(config: DictConfig, records: Records, draws: bool) -> KeptFeatures:
    """Says which features are to be kept.

    Raises:
        UserError: a random training transform (`draws`) has no copies to be kept, another one has, or nothing tells
            whether images changed.
    """
    copies = config.transform.copies
    if records.source is None and (records.paths.files.sizes == NO_FILE).any():
        raise UserError(
            f"The images of dataset {records.name} do not lie in files of their own, so a cache cannot tell whether "
            "they changed: set dataset.cache=none."
        )
    if draws and copies is None:
        raise UserError(
            "dataset.cache=features computes the features of an image once, and transform.train is random: set "
            "transform.copies=8, for example, to keep 8 augmented copies of each training image, or "
            "transform=unchanged."
        )
    if not draws and copies is not None:
        raise UserError(
            f"transform.copies={copies}: transform.train is not random, so all copies would be the same: set "
            "transform.copies=null."
        )
    said = {name: value for name, value in config.dataset.items() if name != "cache"}
    precision = {"precision": config.trainer.precision, "matmul": config.trainer.matmul}
    weights = ("weights", "weights_dir", *BACKBONE)  # the features' own fingerprint has the weights themselves
    network = {name: value for name, value in config.backbone.items() if name not in weights}
    common = {"dataset": said, "backbone": network, "image_size": config.image_size} | precision
    versions = f"Pillow {PIL.__version__}, torchvision {torchvision.__version__}, decoded as {VERSION}"

    def settings(steps: DictConfig) -> str:
        said = OmegaConf.create(common | {"transform": OmegaConf.to_container(steps, resolve=True)})
        return f"{OmegaConf.to_yaml(said, resolve=True)}\n{versions}"

    return KeptFeatures(
        copies, settings(config.transform.train), settings(config.transform.test), config.paths.cache_dir
    )


def _caches(config: DictConfig, records: Records, data: DataModule) -> tuple[ImageCache | None, ImageCache | None]:
    """Makes the caches for training and evaluation; they are the same object if both transforms begin alike."""
    train, test = data.train_transform, data.test_transform
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
        own = build_cache(records, data.kept_rows, train, settings, config.paths.cache_dir)
    if config.dataset.cache == "memory":
        needed = whole.size(everything) + (own.size(data.kept_rows) if own is not whole else 0)
        check_room(f"the images of {records.name}", needed, torch.device("cpu"), "memory", "disk")
        for one in {whole, own}:
            one.read()
    return own, whole


def build_method(config: DictConfig, loss: NewLoss | None = None, backbone: Backbone | None = None) -> Method:
    """Builds the method with its backbone, heads and losses.

    Args:
        config: with `runtime.train_classes` filled in; `runtime.embedding_dim` is set here. Without an optimizer the
            method can only embed.
        loss: makes a loss for some width; None: the configuration says which.
        backbone: of this configuration, if it is made already; it becomes a part of the method.

    Raises:
        UserError: a component refuses its options.
    """
    if backbone is None:
        backbone = backbone_of(config.backbone)
        if colours := config.runtime.get("colours"):  # of weights that a checkpoint has now
            backbone.normalize_by(colours)

    def head(dim: int) -> Head:
        made: Head = instantiate(config.head, in_channels=backbone.dim, dim=dim)
        if not backbone.class_token and any(isinstance(one, ClassToken) for one in made.modules()):
            raise UserError(NO_CLASS_TOKEN)
        return made

    def configured(dim: int) -> Loss:
        config.runtime.embedding_dim = dim
        made_by = get_object(config.loss._target_)
        if isinstance(made_by, type) and not issubclass(made_by, Loss):
            raise UserError(
                f"the file of this loss names {config.loss._target_}: put it under loss: of _target_: dml.losses.Loss, "
                "as in conf/loss/margin.yaml."
            )
        return instantiate(config.loss, miner=instantiate(config.miner) if config.get("miner") else None)

    method: Method = instantiate(
        config.method, backbone=backbone, head=head, loss=loss or configured, dim=config.head.dim
    )
    method.source = backbone.source
    method.recipe = recipe_of(config) if "optimizer" in config else None
    return method.to(memory_format=torch.channels_last)


def recipe_of(config: DictConfig) -> Recipe:
    """Makes the recipe: the optimizer, the scheduler and their options."""
    groups = ((config.optimizer, OPTIMIZER), (config.scheduler, SCHEDULER))
    own = {str(name): value for group, ours in groups for name, value in group.items() if name in ours}
    optimizer, scheduler = (instantiate(without(group, ours)) for group, ours in groups)
    return Recipe(optimizer, config.optimizer.lr, scheduler, **own)
