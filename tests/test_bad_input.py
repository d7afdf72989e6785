"""A user's mistake: one sentence, exit code 2, no traceback, the folder left as it was."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from dml.errors import UserError
from dml.runs.folder import RunFolder
from dml.training.run import run
from tests.conftest import TINY
from tests.runs import photographs

Configure = Callable[..., DictConfig]


def command(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "dml.run", *options], capture_output=True, text=True, check=False)


V2 = "torchvision.transforms.v2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["method=xyz"], ["dml: method=xyz is unknown: choose abe, baseline, "]),
        (["trainer.nonsense=1"], ["dml: trainer.nonsense is no option: choose among "]),
        (["dataset=folder", "dataset.root=/nowhere"], ["dml: ", "/nowhere"]),
    ],
)
def test_the_command_exits_with_2(tmp_path: Path, options: list[str], said: list[str]) -> None:
    folder = tmp_path / "run"
    done = command(*options, f"paths.output_dir={folder}")
    assert done.returncode == 2
    assert all(words in done.stderr for words in said)
    assert "Traceback" not in done.stderr
    assert not folder.exists()


@pytest.mark.slow
def test_help_names_the_groups_without_heavy_imports() -> None:
    options = [sys.executable, "-X", "importtime", "-m", "dml.run", "--help"]
    done = subprocess.run(options, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    for group in ("method", "backbone", "head", "loss", "sampler", "dataset", "protocol", "trainer", "logger"):
        assert f"\n{group}:" in done.stdout
    assert done.stdout.count("python -m dml.run") >= 5
    assert not {"torch", "pytorch_lightning", "numpy"} & {
        line.split("|")[-1].strip() for line in done.stderr.split("\n")
    }


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["sampler.batch_size=64"], "classes"),
        (["head.dim=15", "method=abe"], r"head\.dim=15"),
        (["backbone.weights=/nowhere.pth"], r"/nowhere\.pth"),
        (["backbone=googlenet_v1", "backbone.weights=imagenet"], "weights"),
        (["protocol.ks=[]"], r"protocol\.ks"),
        (["protocol.ks=[2,4]"], "has to hold 1"),
        (["protocol.unit=hours"], "'steps' or 'epochs'"),
        (["protocol.every=0"], r"protocol\.every=0"),
        (["lr=fast"], "lr"),
        (["trainer.max_steps=0"], r"trainer\.max_steps"),
        (["seed=-1"], "seed"),
        (["image_size=4"], r"image_size=4 .* larger"),
        (["method=abe", "method.M=0"], r"method\.M=0"),
        (["method=abe", "method.branch=pool3"], "pool3.*block1, block2, block3"),
        (["method=abe", "method.attention_depth=9"], "choose a depth of 1 to 2"),
        (["method=diablo", "method.N=7"], r"head\.dim=16 .* 7 learners"),
        (["method=abe", "loss.loss.pairs=explicit"], "sampler=abe_pairs"),
        (["sampler=abe_pairs", "sampler.batch_size=18"], r"sampler\.batch_size=18 is not divisible by 4"),
        (["seed=abc"], "seed=abc"),
        (["loss=xbm", "loss.memory_from=10"], r"loss\.memory_from=10 lasts 10 of the 10 steps"),
        (["method.warm_up=3"], r"method\.warm_up=3 .* lasts 12 of the 10 steps"),
        (["head=gsp", "head.init=kcenter", "head.init_steps=99"], r"head\.init_steps=99 lasts 99"),
        (["scheduler=step", "+scheduler.base_lr=0.1"], r"scheduler\.base_lr cannot be set by hand"),
        (["head=gsp", "head.init=kcenter"], r"head\.init=kcenter \(1024 images\) lasts \d+ of the 10 steps"),
        (
            ["method=mtails", "method.M=2", "backbone.train=none"],
            r"backbone\.train freezes these stages, so all learners",
        ),
        (["scheduler.warm_up=10"], r"scheduler\.warm_up=10 \(steps\) lasts 10 of the 10 steps"),
        (["scheduler=plateau", "scheduler.warm_up=3"], r"scheduler\.warm_up=3 \(epochs\) lasts 12 of the 10 steps"),
        (["scheduler=cosine", "scheduler.length=4", "scheduler.warm_up=4"], r"takes 4 of the 4 steps"),
        (["scheduler=plateau", "scheduler.factor=1"], r"scheduler: Factor should be < 1"),
        (
            ["optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=true"],
            r"optimizer: Nesterov momentum requires",
        ),
        (
            ["+callbacks.a._target_=pytorch_lightning.callbacks.ModelCheckpoint"],
            "ModelCheckpoint cannot be used: a run wr",
        ),
        (
            ["+callbacks.a={_target_:pytorch_lightning.callbacks.EarlyStopping,monitor:x}"],
            "EarlyStopping cannot be used: a run ends",
        ),
        (["+callbacks.a._target_=builtins.dict"], "makes a dict, which is no callback of Lightning: remove"),
        (["callbacks=[ema,swa]"], r"callbacks\.ema and callbacks\.swa both say which weights are evaluated"),
        (["scheduler._target_=builtins.repr", "~scheduler.factor"], "which is no scheduler of torch: choose"),
        (["optimizer._target_=torch.optim.lr_scheduler.ExponentialLR"], r"optimizer\.lr is no option of ExponentialLR"),
        (["method=dces", "method.K=2", "head=vlad"], "one vector per prototype"),
        (["loss=gsp/c2"], "experiment=gsp_cub"),
        (["loss=arcface", "miner=semihard"], "miner=TripletMarginMiner .* loss=ArcFaceLoss takes none"),
        (["loss=xbm", "miner=multi_similarity"], "miner=MultiSimilarityMiner .* a memory"),
        (["transform.copies=8"], r"transform\.copies=8 is for features that are kept: set dataset\.cache=features"),
        (["transform.train.crop.size=20"], r"transform\.train makes .* \[3, 20, 20\]"),
        ([f"+transform.test.flip._target_={V2}.RandomHorizontalFlip"], r"transform\.test is random"),
        ([f"+transform.train.erase={{_target_: {V2}.RandomErasing, p: 2}}"], r"transform\.train\.erase\.p=2 has to be"),
        ([f"+transform.train.tensor._target_={V2}.Erasing"], r"transform\.train\.tensor\._target_=\S+ names nothing"),
        (["transform=strong", "transform.train.colour.hue=0.7"], r"transform\.train\.colour\.hue=0\.7 has to be"),
        (["transform=strong", "transform.train.augment.fill=[1,2]"], r"transform\.train\.augment\.fill"),
        (["head=gem", "head.pooling.p=-1"], r"head\.pooling\.p=-1"),
        (["sampler.m=0"], r"sampler\.m=0"),
        (["sampler.batch_size=0"], r"sampler\.batch_size=0"),
        (["trainer.log_every=0"], r"trainer\.log_every=0"),
        (["trainer.num_workers=-1"], r"trainer\.num_workers=-1"),
        (["head.dim=many"], r"head\.dim=many"),
        (["trainer.precision=7"], "precision"),
        (["trainer.precision=16-mixed"], r"16-mixed is for GPUs: on a CPU choose bf16-mixed or 32-true"),
        (
            ["trainer.precision=bf16-mixed", "+trainer.gradient_clip_val=1", "+optimizer.fused=true"],
            r"optimizer\.fused=true cannot be used with trainer\.precision=bf16-mixed and trainer\.gradient_clip_val",
        ),
        (["+trainer.gradient_clip_algorithm=value"], r"clips nothing without a limit: set trainer\.gradient_clip_val"),
        (["+logger.wandb.artifacts=true"], r"logger\.wandb\.artifacts=true is no component"),
        (["trainer.accelerator=mps"], r"trainer\.accelerator=mps .* 'cpu'"),
        (["trainer.strategy=ddp_spawn"], r"trainer\.strategy=ddp_spawn .* 'ddp'"),
        (
            ["trainer.precision=transformer-engine"],
            "Lightning refuses the options under 'trainer': .*transformer_engine",
        ),
        (["optimizer._target_=torch.optim.SparseAdam", "~optimizer.weight_decay"], "takes sparse gradients only"),
        (
            [
                *("method=deml", "method.I=1", "method.channel_attention=false", "method.shared_head=false"),
                "backbone.train=none",
            ],
            "leave method.adversary=grl nothing to keep apart",
        ),
    ],
)
def test_one_sentence_and_nothing_written(
    configure: Configure, tmp_path: Path, options: list[str], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        run(configure(*TINY, *options), options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("wrong", "sentence", "decoded"),
    [
        (["backbone.weights=/nowhere.pth"], r"/nowhere\.pth", []),
        (["method=abe", "method.M=3"], "all 3 learners", ["unreadable"]),
        (["method=dces", "method.K=32", "head.dim=32"], r"more than the 16 training images", ["unreadable"]),
    ],
)
def test_a_mistake_is_told_before_images_are_decoded(
    configure: Configure, tmp_path: Path, wrong: list[str], sentence: str, decoded: list[str]
) -> None:
    """At most for the check, whose findings are kept, and never for the cache."""
    photographs(tmp_path / "photos", classes=8)
    few = [option for option in TINY if not option.startswith(("dataset", "sampler"))]
    options = [f"dataset.root={tmp_path / 'photos'}", "dataset.cache=disk", "sampler.batch_size=4"]
    with pytest.raises(UserError, match=sentence):
        run(configure("dataset=folder", "backbone=small", *few, *options, *wrong), [])
    assert [path.name.partition("-")[0] for path in (tmp_path / "cache").glob("*.json")] == decoded
    assert not list(tmp_path.glob("cache/images-*"))


@pytest.mark.slow
def test_a_folder_of_another_configuration_is_left_alone(configure: Configure, tmp_path: Path) -> None:
    run(configure(*TINY, "trainer.max_steps=2"), [])
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(
        UserError, match=r"another configuration \(lr was 0.001, is 0.5; optimizer.lr was 0.001, is 0.5\)"
    ):
        run(configure(*TINY, "trainer.max_steps=2", "lr=0.5"), [])
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_how_a_run_is_carried_out_may_change(configure: Configure) -> None:
    run(configure(*TINY, "trainer.max_steps=2"), [])
    changed = ["trainer.num_workers=1", "trainer.log_every=7", "logger=tensorboard", "paths.data_dir=/elsewhere"]
    assert run(configure(*TINY, "trainer.max_steps=4", *changed), [])["run/steps"] == 4


@pytest.mark.slow
def test_a_first_attempt_may_be_corrected(configure: Configure) -> None:
    with pytest.raises(UserError, match=r"memory_size to the size of several batches"):
        run(configure(*TINY, "loss=xbm", "loss.loss.memory_size=8"), [])
    run(configure(*TINY, "loss=xbm", "loss.loss.memory_size=32", "trainer.max_steps=2"), [])


def test_a_folder_in_use_is_left_alone(configure: Configure, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.open(configure(*TINY, "runtime.embedding_dim=1", "runtime.train_classes=1"), [])
    with folder.locked(), pytest.raises(UserError, match="being trained by another process"):
        run(configure(*TINY), [])


def test_a_config_of_something_else(configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("site_name: mine\n")
    with pytest.raises(UserError, match="holds no run"):
        run(configure(*TINY), [])


@pytest.mark.slow
def test_a_folder_killed_while_it_was_made_is_taken_up(configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.yaml.1").write_text("half of it")
    assert run(configure(*TINY, "trainer.max_steps=2"), [])["run/steps"] == 2


@pytest.mark.slow
def test_a_finished_run_without_its_metrics(configure: Configure, tmp_path: Path) -> None:
    run(configure(*TINY, "trainer.max_steps=2"), [])
    (tmp_path / "run" / "metrics.json").unlink()
    with pytest.raises(UserError, match=r"lost its metrics\.json"):
        run(configure(*TINY, "trainer.max_steps=2"), [])


def test_a_folder_that_is_no_run_is_left_alone(configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="holds no run"):
        run(configure(*TINY), [])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_a_file_in_the_place_of_the_folder(configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UserError, match="no folder that can be written"):
        run(configure(*TINY), [])


def test_an_option_without_a_default(configure: Configure) -> None:
    with pytest.raises(UserError, match=r"dataset\.root has no value: give it with dataset\.root=VALUE"):
        run(configure("dataset=folder"), [])


def test_a_folder_that_cannot_be_made(configure: Configure) -> None:
    with pytest.raises(UserError, match=r"/proc/run .*paths\.output_dir"):
        run(configure(*TINY, "paths.output_dir=/proc/run"), [])


@pytest.mark.slow
def test_a_checkpoint_cut_short_is_told(configure: Configure, tmp_path: Path) -> None:
    run(configure(*TINY, "trainer.max_steps=2"), [])
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"No checkpoint in .*checkpoints is whole .*put back a copy"):
        run(configure(*TINY, "trainer.max_steps=2"), [])
