"""dataset.cache=memory and device: the same run, carried out otherwise; refused where there is no room."""

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor

from dml.configuration.composition import composed
from dml.data import on_device, room
from dml.data.cache import ImageCache
from dml.data.datamodule import DataModule
from dml.data.room import check_room, free_memory
from dml.errors import UserError
from dml.evaluation.protocol import Conventional
from dml.evaluation.splits import Split
from dml.runs.folder import RunFolder
from dml.training.build import build
from dml.training.run import prepare_run, run
from tests.conftest import TINY
from tests.data.test_cache import photographs
from tests.test_resume import outcome

CPU = torch.device("cpu")
Configure = Callable[..., DictConfig]


@pytest.fixture
def photographs_options(tmp_path: Path) -> list[str]:
    photographs(tmp_path / "data", classes=8)
    tiny = [option for option in TINY if not option.startswith("dataset")]
    options = ["dataset=folder", f"dataset.root={tmp_path / 'data'}", "backbone=small", "transform=resized_crop"]
    return [*options, *tiny, "sampler.batch_size=8", "trainer.max_steps=4", "protocol.every=2"]


def attached(data: DataModule, rank: int = 0, world_size: int = 1, step: int = 0, device: torch.device = CPU) -> Any:
    strategy = SimpleNamespace(root_device=device)
    ranks = {"global_rank": rank, "world_size": world_size, "num_devices": 1}
    data.trainer = SimpleNamespace(**ranks, strategy=strategy, global_step=step, max_steps=100)
    return data


def images(data: DataModule, steps: int) -> Tensor:
    return torch.stack([batch["image"] for batch in islice(iter(data.train_dataloader()), steps)])


def test_a_protocol_may_train_on_rows_of_its_own(
    configure: Configure, photographs_options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose training images are cached too."""
    monkeypatch.setattr(Conventional, "parted", lambda _, records: Split(records.query_rows, records.train_rows, None))
    options = [*photographs_options, "transform=multires_crop"]
    none, disk = (build(configure(*options, f"dataset.cache={name}")) for name in ("none", "disk"))
    assert disk.data.train_cache is not disk.data.test_cache
    assert torch.equal(images(attached(none.data), 3), images(attached(disk.data), 3))


@pytest.mark.slow
def test_a_run_has_the_figures_of_decoding_anew_also_where_it_changes_on_the_way(
    configure: Configure, tmp_path: Path, photographs_options: list[str]
) -> None:
    def train(name: str, *options: str) -> Path:
        folder = tmp_path / name
        run(configure(*photographs_options, *options, f"paths.output_dir={folder}"), options)
        return folder

    metrics, records, tensors = outcome(train("none"))
    train("changed", "trainer.max_steps=2", "dataset.cache=memory")
    again = outcome(train("changed", "dataset.cache=device"))
    assert again[0] == metrics
    assert again[1] == records
    assert all(torch.equal(again[2][name], value) for name, value in tensors.items())


def test_a_place_in_the_global_batch_has_its_view_on_any_rank_after_any_resume(
    configure: Configure, photographs_options: list[str]
) -> None:
    data = build(configure(*photographs_options, "dataset.cache=device")).data
    whole = images(attached(data), 5)
    halves = [images(attached(data, rank, 2), 5) for rank in range(2)]
    assert torch.equal(torch.cat(halves, 1), whole)
    assert torch.equal(images(attached(data, step=3), 2), whole[3:])
    assert len({tuple(image.flatten().tolist()) for image in whole.flatten(0, 1)}) == 40


@pytest.mark.slow
def test_draws_of_the_strongest_are_of_seed_step_and_place(
    configure: Configure, photographs_options: list[str]
) -> None:
    def data(*options: str) -> DataModule:
        return build(configure(*photographs_options, "transform=strong", *options)).data

    whole = images(attached(data()), 4)
    assert torch.equal(images(attached(data("dataset.cache=disk", "trainer.num_workers=2")), 4), whole)
    halves = [images(attached(data("dataset.cache=memory"), rank, 2), 4) for rank in range(2)]
    assert torch.equal(torch.cat(halves, 1), whole)
    assert torch.equal(images(attached(data(), step=3), 1), whole[3:])
    assert not torch.equal(images(attached(data("seed=1")), 4), whole)
    with pytest.raises(UserError, match=r"dataset\.cache=device cannot do TrivialAugmentWide of the transform"):
        data("dataset.cache=device")


def test_loaders_hand_on_numbers_alone(
    configure: Configure, photographs_options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the images lie on the device no picture is opened, and what a batch is made of is small."""
    data = attached(build(configure(*photographs_options, "dataset.cache=device")).data)
    seen: list[dict[str, Tensor]] = []
    finish = type(data.train_dataloader().dataset).finish
    monkeypatch.setattr(ImageCache, "image", lambda *_: 1 / 0)

    def watched(dataset: Any, batch: dict[str, Tensor]) -> Any:
        seen.append(dict(batch))
        return finish(dataset, batch)

    monkeypatch.setattr("dml.data.loading.Images.finish", watched)
    assert images(data, 1).shape == (1, 8, 3, 32, 32)
    (evaluated,) = data.eval_dataloader(data.eval_rows)
    assert evaluated["image"].shape == (24, 3, 32, 32)
    assert [{name: tuple(value.shape) for name, value in batch.items()} for batch in seen] == [
        {"view": (count, 13), "label": (count,), "index": (count,)} for count in (8, 24)
    ]


def test_evaluation_reads_its_images_where_training_leaves_no_room(
    configure: Configure, photographs_options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(*photographs_options, "dataset.cache=device", "trainer.num_workers=1")
    expected = next(iter(attached(build(config).data).eval_dataloader([40, 2])))
    data = build(config).data
    for module in (on_device, room):
        monkeypatch.setattr(module, "free_memory", lambda device: data.train_cache.size(data.train_rows))
    loader = attached(data).eval_dataloader([40, 2])
    assert loader.num_workers == 1
    found = next(iter(loader))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert images(data, 1).shape == (1, 8, 3, 32, 32)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("memory", r"dataset\.cache=memory needs [\d.]+ MB for the images of folder, but 0\.100 MB of memory are free"),
        ("device", r"dataset\.cache=device needs [\d.]+ MB for the 24 training images, but 0\.100 MB of memory are"),
    ],
)
def test_too_little_memory_is_told_before_anything_is_written(
    configure: Configure,
    tmp_path: Path,
    photographs_options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    word: str,
    sentence: str,
) -> None:
    monkeypatch.setattr(room, "free_memory", lambda device: 100_000)
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(UserError, match=sentence):
        prepare_run(configure(*photographs_options, "image_size=64", f"dataset.cache={word}"), folder)
    assert not folder.path.exists()


def test_a_gpu_is_named() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 10**9, 8 * 10**9))
        with pytest.raises(UserError, match=r"needs 4\.00 GB for these, but 3\.00 GB on cuda:1 are free: set"):
            check_room("these", 4 * 10**9, torch.device("cuda:1"), "device", "disk")
        check_room("these", 3 * 10**9, torch.device("cuda:1"), "device", "disk")
        patch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * 10**9)  # by torch, half of it in use
        patch.setattr(torch.cuda, "memory_allocated", lambda device: 10**9)
        check_room("these", 4 * 10**9, torch.device("cuda:1"), "device", "disk")


@pytest.mark.parametrize("version", [1, 2])
def test_what_a_scheduler_allows_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """Of the job, whose pages of files count as free, and of all that it is part of."""
    line = "0::/slurm/job" if version == 2 else "4:memory:/slurm/job"
    monkeypatch.setattr(Path, "read_text", lambda path, *a: line if path == Path("/proc/self/cgroup") else _read(path))
    monkeypatch.setattr(room, "CGROUPS", tmp_path)
    limit, used, (active, inactive) = room.KINDS[version == 1]
    job = tmp_path / ("memory" if version == 1 else "") / "slurm" / "job"
    job.mkdir(parents=True)
    alone = free_memory(CPU)
    assert alone > 10**8
    for folder, most in ((job, 50_000_000), (job.parent, 90_000_000)):
        (folder / limit).write_text(f"{most}\n")
        (folder / used).write_text("30000000\n")
        (folder / "memory.stat").write_text(f"anon 7\n{active} 1000\n{inactive} 200\n")
    assert free_memory(CPU) == 20_001_200
    (job / limit).write_text("max\n" if version == 2 else f"{2**63 - 4096}\n")
    assert free_memory(CPU) == 60_001_200


def _read(path: Path) -> str:
    with path.open() as file:
        return file.read()


@pytest.mark.parametrize("accelerated", [False, True])
def test_batches_are_pinned_for_a_gpu_alone(
    configure: Configure, photographs_options: list[str], accelerated: bool
) -> None:
    data = build(configure(*photographs_options)).data
    attached(data, device=torch.device("cuda:0" if accelerated else "cpu"))
    for loader in (data.train_dataloader(), data.eval_dataloader(data.eval_rows)):
        assert loader.pin_memory is accelerated


def _on_rank(options: list[str]) -> Tensor:
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return images(attached(build(composed(*options)).data, rank, world_size), 4)


@pytest.mark.exhaustive
def test_two_processes_have_the_batches_of_one(
    on_ranks: Callable[..., list[Any]], tmp_path: Path, photographs_options: list[str]
) -> None:
    options = [*photographs_options, f"paths.cache_dir={tmp_path / 'cache'}"]
    halves = on_ranks(2, _on_rank, [*options, "dataset.cache=device"])
    alone = images(attached(build(composed(*options, "dataset.cache=none")).data), 4)
    assert torch.equal(torch.cat(halves, 1), alone)


@pytest.mark.exhaustive
def test_a_run_on_two_processes_is_the_run_on_one(
    configure: Configure, tmp_path: Path, photographs_options: list[str]
) -> None:
    options = [*photographs_options, f"paths.cache_dir={tmp_path / 'cache'}", "backbone.batch_norm=running"]
    run(configure(*options, f"paths.output_dir={tmp_path / 'alone'}"), options)
    two = ["trainer=ddp", "trainer.devices=2", "trainer.sync_batchnorm=false", "dataset.cache=device"]
    two += [f"paths.output_dir={tmp_path / 'two'}"]
    subprocess.run([sys.executable, "-m", "dml.run", *two, *options], check=True, capture_output=True)
    alone, together = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("alone", "two"))
    assert together["test/recall@1"] == pytest.approx(alone["test/recall@1"], abs=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("transform", ["resized_crop", "multires_crop", "shorter_crop", "pad_crop"])
def test_batches_of_a_gpu_are_those_of_the_cpu_to_the_last_bit(
    configure: Configure, photographs_options: list[str], transform: str
) -> None:
    config = configure(*photographs_options, "dataset.cache=device", f"transform={transform}")
    found, expected = (attached(build(config).data, device=torch.device(name)) for name in ("cuda:0", "cpu"))
    assert torch.equal(images(found, 4).cpu(), images(expected, 4))
    for one, other in zip(*(data.eval_dataloader(data.eval_rows) for data in (found, expected)), strict=True):
        assert one["image"].is_cuda
        assert torch.equal(one["image"].cpu(), other["image"])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode", "ignore:Warning. Profiler clears")
def test_no_image_is_copied_to_a_gpu_and_no_batch_is_waited_for(
    configure: Configure, tmp_path: Path, photographs_options: list[str]
) -> None:
    config = configure(*photographs_options, "dataset.cache=device", "image_size=128")
    batches = iter(attached(build(config).data, device=torch.device("cuda:0")).train_dataloader())
    next(batches)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            image = next(batches)["image"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    copied = [event["args"]["bytes"] for event in events if "Memcpy HtoD" in event.get("name", "")]
    assert copied
    assert sum(copied) < 16 * 1024 < image[0].numel()
