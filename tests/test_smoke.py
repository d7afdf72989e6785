"""`python -m dml.smoke`: its parts are apart from one another, its figures are kept, its small check goes through."""

import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from omegaconf import DictConfig
from PIL import Image
from pytorch_lightning.accelerators import MPSAccelerator
from torch.nn import functional as F

from dml import smoke
from dml.bench import bare, check, kept, machine, page, running, tests, throughput
from dml.bench.results import FAILED, LEFT_OUT, Figure, Goal, Outcome, Remark
from dml.bench.sizes import CPU, GPU
from dml.configuration.composition import composed
from dml.configuration.defaults import SMOKE_PARTS
from dml.errors import MISTAKE, UserError
from dml.losses.functional import multi_similarity, multi_similarity_pairs
from dml.methods.base import Method
from dml.training.build import build_method
from dml.training.trainer import device_of, trainer_of

Configure = Callable[..., DictConfig]

SHORT = replace(CPU, goals=True, seconds={})
STAMP: dict[str, Any] = {
    "date": "2026-01-01",
    "commit": "abc",
    "hardware": {"name": "a GPU"},
    "versions": {"torch": "2"},
}


def stand_ins(*names: str) -> dict[str, str]:
    return {name: f"tests.smoke_parts:{name}" for name in names}


def outcomes(*names: str, seconds: float = 60, needed: dict[str, float] | None = None) -> dict[str, Outcome]:
    sizes = replace(SHORT, seconds=needed or {})
    return dict(running.carry_out(names, sizes, seconds, stand_ins(*names)))


def typed(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["dml.smoke", *words])
    smoke.main()


def test_a_part_that_fails_leaves_the_others_alone(capfd: pytest.CaptureFixture[str]) -> None:
    found = outcomes("raising", "dying", "good")
    assert found["raising"].remarks == [Remark(FAILED, "RuntimeError: broken")]
    assert found["dying"].remarks == [Remark(FAILED, "its process ended by SIGSEGV.")]
    assert found["raising"].figures == found["dying"].figures == [Figure("before", 1.0)]  # what came before is kept
    assert [one.met for one in found["good"].figures] == [True, False]
    assert not found["good"].failed
    said = capfd.readouterr().err
    assert "what it printed" in said
    assert "Traceback" in said


def test_a_piece_that_fails_leaves_the_others_alone() -> None:
    found = outcomes("in_pieces")["in_pieces"]
    assert [one.name for one in found.figures] == ["first", "third"]
    assert found.remarks[0] == Remark(FAILED, "bad: The second is a mistake.")
    assert found.remarks[1].kind == LEFT_OUT
    assert found.remarks[1].sentence.startswith("fourth: takes about 10000 s")


@pytest.mark.slow
def test_a_part_that_hangs_ends_with_all_its_processes() -> None:
    started = time.monotonic()
    found = outcomes("hanging", "good", needed={"hanging": 0.5})
    assert time.monotonic() - started < 40
    (child,) = found["hanging"].figures
    assert re.fullmatch(r"was not done after \d+ s and was stopped\.", found["hanging"].remarks[0].sentence)
    assert not found["good"].failed
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{child.value:.0f}") and time.monotonic() < deadline:
        if "Z" in Path(f"/proc/{child.value:.0f}/stat").read_text().split(") ")[1][:1]:
            return  # ended, and nobody's child any more
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{child.value:.0f}")


@pytest.mark.slow
def test_what_was_measured_is_kept_if_the_check_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    started = (
        "from pathlib import Path; from dml.bench.check import check; from tests.test_smoke import SHORT, stand_ins; "
        f"check(False, 1, [], Path({str(path)!r}), SHORT, stand_ins('good', 'hanging'))"
    )
    process = subprocess.Popen([sys.executable, "-c", started], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 100
        while "hanging" not in kept.read(path) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    found = kept.read(path)
    assert [one.name for one in kept.figures_of(found["good"])] == ["speed", "ratio"]
    assert found["good"]["remarks"] == [{"kind": LEFT_OUT, "sentence": "what is not here."}]
    assert [one.name for one in kept.figures_of(found["hanging"])] == ["child"]
    assert found["hanging"]["remarks"][0]["sentence"].startswith("what comes after this: it was not done")


def test_what_does_not_fit_is_said_to_be_left_out() -> None:
    found = outcomes("good", "raising", seconds=30, needed={"raising": 3600})
    assert found["good"].figures
    (remark,) = found["raising"].remarks
    assert remark.kind == LEFT_OUT
    assert re.fullmatch(r"raising: takes about 3600 s, and \d+ s are left of --minutes\.", remark.sentence)
    assert not found["raising"].failed


def test_all_parts_are_there_and_have_their_time() -> None:
    assert set(running.PARTS) == set(SMOKE_PARTS) == set(GPU.seconds) == set(CPU.seconds)
    for function in running.PARTS.values():
        assert running.resolve_name(function).__name__ == "measure"


def outcome(value: float, *remarks: Remark) -> Outcome:
    figures = [Figure("net, ours", 90, "images/s"), Figure("net, bare loop", 100, "images/s")]
    return Outcome([*figures, Figure("net, ours / bare loop", value, "", Goal(0.9))], list(remarks), 12.34)


def test_two_processes_keep_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "gpu.json", kept.read

    def slowly(path: Path) -> kept.Kept:
        found = read(path)
        time.sleep(0.2)
        return found

    monkeypatch.setattr(kept, "read", slowly)
    parts = ("evaluation", "throughput")
    both = [threading.Thread(target=kept.keep, args=(path, part, outcome(0.5), STAMP, SMOKE_PARTS)) for part in parts]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert set(read(path)) == set(parts)
    assert [file.name for file in tmp_path.iterdir()] == ["gpu.json"]


def test_a_figure_that_is_no_number_is_printed() -> None:
    assert [page.written(value, "ms") for value in (math.nan, math.inf, 0.5, 2.0, 12345.6)] == [
        *("nan ms", "inf ms", "0.5 ms", "2 ms", "12346 ms")
    ]


def test_figures_are_kept_part_by_part(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert kept.keep(path, "evaluation", outcome(0.5), STAMP, SMOKE_PARTS)
    assert kept.keep(path, "throughput", outcome(0.95, Remark(LEFT_OUT, "x.")), STAMP | {"commit": "def"}, SMOKE_PARTS)
    content = json.loads(path.read_text())
    assert list(content) == ["throughput", "evaluation"]  # in the order in which they run
    assert content["throughput"]["commit"] == "def"
    assert content["evaluation"] | STAMP == content["evaluation"]
    assert content["throughput"]["figures"][2] == {
        "name": "net, ours / bare loop",
        "value": 0.95,
        "unit": "",
        "goal": "at least 0.9",
        "met": True,
    }
    assert list(kept.figures_of(content["evaluation"])) == outcome(0.5).figures
    assert kept.keep(path, "throughput", outcome(0.8), STAMP, SMOKE_PARTS)
    assert [one.met for one in kept.figures_of(kept.read(path)["throughput"])][2] is False
    before = path.read_text()
    assert not kept.keep(path, "throughput", Outcome(remarks=[Remark(FAILED, "broken.")]), STAMP, SMOKE_PARTS)
    assert path.read_text() == before  # figures are not lost to a failure
    assert [one.name for one in tmp_path.iterdir()] == ["gpu.json"]


@pytest.mark.parametrize(
    "content",
    ["[]", '{"throughput": 1}', '{"throughput": {"figures": [{"name": "x"}]}}', "{", '{"a": {"figures": []}}'],
)
def test_a_file_of_something_else_stays(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"other\.json"):
        check.check(False, 1, [], path, SHORT, stand_ins("good"))
    assert path.read_text() == content


@pytest.mark.slow
def test_the_check_prints_a_table_and_draws_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    assert check.check(False, 1, ["good"], tmp_path / "x.json", SHORT, stand_ins("good", "raising"))
    said = capsys.readouterr().out
    assert re.search(r"\| good +\| speed +\| +950 images/s \| at least 900 +\| met +\|", said)
    assert re.search(r"\| good +\| ratio +\| +1\.25 \| at most 1\.1 +\| missed +\|", said)
    assert re.search(r"\| good +\| left out: what is not here\.", said)
    assert "raising" not in said
    assert f"torch {torch.__version__}" in said
    with Image.open(tmp_path / "x.png") as drawn:
        assert drawn.width > 500
    assert not check.check(False, 1, [], None, SHORT, stand_ins("raising"))
    assert "failed: RuntimeError: broken" in capsys.readouterr().out


def test_without_goals_nothing_is_met_or_drawn(tmp_path: Path) -> None:
    assert check.check(False, 1, [], tmp_path / "x.json", replace(SHORT, goals=False), stand_ins("good"))
    assert [one.met for one in kept.figures_of(kept.read(tmp_path / "x.json")["good"])] == [None, None]
    assert not (tmp_path / "x.png").exists()


def test_the_drawing_has_each_network_and_each_goal() -> None:
    parts = {"throughput": outcome(0.95), "evaluation": Outcome([Figure("search", 0.4, "s", Goal(1, at_most=True))])}
    content = {
        part: {**STAMP, "figures": [running.as_json(one) for one in found.figures]} for part, found in parts.items()
    }
    plot = page.drawing(content)
    assert plot is not None
    left, right = plot.figure.axes  # type: ignore[union-attr]
    assert [text.get_text() for text in left.get_yticklabels()] == ["net"]
    assert [text.get_text() for text in right.get_yticklabels()] == ["net, ours / bare loop", "search"]
    assert [bar.get_width() for bar in right.patches] == pytest.approx([0.95 / 0.9, 2.0])


def test_without_a_gpu_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as left:
        typed(monkeypatch, "--gpu", "-o", str(tmp_path / "gpu.json"))
    assert left.value.code == MISTAKE
    said = capsys.readouterr()
    assert re.fullmatch(r"dml: --gpu needs a CUDA device, and torch .+ finds none: .+\.\n", said.err)
    assert said.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--minutes", "0"], "--minutes 0 has to be more than 0"),
        (["--minutes", "nan"], "--minutes nan has to be more than 0"),
        (["--only", "speed"], "invalid choice: 'speed'"),
        (["-o", "x.txt"], "has to end in .json"),
        (["-o", "nowhere/x.json"], "nowhere is no folder"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    monkeypatch.setattr(running, "carry_out", lambda *_: pytest.fail("something was measured"))
    with pytest.raises(SystemExit) as left:
        typed(monkeypatch, *words)
    assert left.value.code == MISTAKE
    assert sentence in capsys.readouterr().err


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.about("cpu")["versions"]["torch"] == torch.__version__
    monkeypatch.setitem(machine.PACKAGES, "faiss", "no_such_module")
    assert machine.about("cpu")["versions"]["faiss"] == machine.MISSING


def test_pytest_is_counted(tmp_path: Path) -> None:
    told = tmp_path / "tests.xml"
    told.write_text(
        '<testsuites><testsuite><testcase classname="tests.test_a" name="one"/>'
        '<testcase classname="tests.test_a" name="two"><failure message="no"/></testcase>'
        '<testcase classname="tests.test_a" name="three"><error message="no"/></testcase>'
        '<testcase classname="tests.test_a" name="four"><skipped message="no GPU"/></testcase></testsuite></testsuites>'
    )
    assert list(tests.counted(told)) == [
        Figure("passed", 1, "tests"),
        Remark(FAILED, "tests/test_a::two."),
        Remark(FAILED, "tests/test_a::three."),
        Remark(LEFT_OUT, "tests/test_a::four: no GPU"),
    ]


def test_only_files_with_tests_for_a_gpu_are_collected(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "test_a.py").write_text("@pytest.mark.gpu")
    (tmp_path / "test_b.py").write_text("import what_is_not_there\n")
    assert tests.marked(tmp_path, "gpu") == [str(tmp_path / "deep" / "test_a.py")]
    found = [Path(path).name for path in tests.marked(Path(__file__).parent, "gpu")]
    assert {"test_devices.py", "test_precision.py"} <= set(found)
    assert GPU.tests == ("gpu",)


def test_a_wheel_has_no_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests, "CONF", tmp_path / "conf")
    (remark,) = tests.measure(running.Task(CPU, tmp_path, time.monotonic() + 60))
    assert isinstance(remark, Remark)
    assert remark.kind == LEFT_OUT


def test_the_bare_loss_is_ours() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        points = F.normalize(torch.randn(24, 6, generator=generator, dtype=torch.float64))
        labels = torch.randint(5, (24,), generator=generator)
        expected = multi_similarity(points, *multi_similarity_pairs(points, labels))
        assert float(bare.multi_similarity(points, labels)) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("name", ["resnet50", "googlenet", "small"])
def test_the_bare_network_is_ours(name: str, configure: Configure) -> None:
    """Both with their linear layer; each of its library."""
    network = bare.NETWORKS[name]
    options = ["backbone.weights=none", *throughput.PLAIN, "head.dim=16", "runtime.train_classes=2"]
    ours = build_method(configure(*network.options, *options))
    sizes = [sorted(p.numel() for p in model.parameters()) for model in (ours, network.make(16))]
    assert sizes[0] == sizes[1]


def test_windows_of_a_run_and_of_the_bare_loop_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step of the run takes 3 s and one of the bare loop 2 s: what either does before its window is not timed.

    The run's tensors take 100 bytes and 50 more in a step, the bare loop's 10, from its first step on 30, and 7 more.
    Others take 1000.
    """
    state = {"now": 0.0, "held": 1110, "peak": 0}

    def allocate(more: int) -> None:
        state["peak"] = max(state["peak"], state["held"] + more)

    def bare_steps(steps: int) -> None:
        state["now"] += 2 * steps
        state["held"] = 1130
        allocate(7)

    monkeypatch.setattr(throughput, "now", lambda _: state["now"])
    monkeypatch.setattr(throughput, "held", lambda _: state["held"])
    monkeypatch.setattr(throughput, "peak", lambda _: state["peak"])
    monkeypatch.setattr(throughput, "forget_peak", lambda _: state.update(peak=state["held"]))
    sizes = replace(CPU, warm_up=5, settle=3, window=4, rounds=3, batch=8)
    windows = throughput.Windows(sizes, bare_steps, 10, 1010)
    trainer: Any = SimpleNamespace(global_step=0, should_stop=False)
    while not trainer.should_stop:
        trainer.global_step += 1
        state["now"] += 3
        allocate(50)
        windows.on_train_batch_end(trainer, cast(Any, None), None, None, 0)
    assert trainer.global_step == 5 + 3 * (3 + 4)
    assert windows.ours == [12.0] * 3
    assert windows.bare == [8.0] * 3
    assert windows.ratio == pytest.approx(2 / 3)
    assert windows.speed(windows.ours) == pytest.approx(8 / 3)
    assert windows.peaks == (150, 37)


@pytest.mark.slow
def test_a_backbone_that_cannot_be_built_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hrnet = replace(bare.NETWORKS["vit_small"], options=("backbone=timm", "backbone.model_name=hrnet_w18_small"))
    monkeypatch.setitem(bare.NETWORKS, "hrnet", hrnet)
    found = list(throughput._network("hrnet", running.Task(GPU, tmp_path, time.monotonic() + 60), {}))
    assert [type(one) for one in found] == [Remark]
    assert found[0].kind == LEFT_OUT  # type: ignore[union-attr]


@pytest.mark.slow
def test_the_bare_transformer_is_the_one_of_the_run() -> None:
    network = bare.NETWORKS["vit_small"]
    config = composed(*network.options, *throughput.PLAIN, "backbone.weights=none", "runtime.train_classes=2")
    ours, theirs = build_method(config), network.make(config.head.dim)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("name", ["auto", "ddp"])
def test_more_ranks_than_gpus_are_one_sentence(
    name: str, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that says it has one."""
    monkeypatch.setattr("lightning_fabric.accelerators.cuda.num_cuda_devices", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = configure("trainer.accelerator=gpu", "trainer.devices=2", f"trainer.strategy={name}")
    config.runtime.update(train_classes=2)
    with pytest.raises(UserError, match=r"^Lightning refuses the options under 'trainer': .*\[0, 1\].*\[0\]"):
        trainer_of(config, build_method(config), [])


@pytest.mark.filterwarnings("ignore:GPU available but not used")
def test_an_apple_gpu_is_not_taken(
    configure: Configure, method_of: Callable[..., Method], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that says it has one."""
    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(trainer_of(configure("trainer.accelerator=auto"), method_of("method=baseline"), [])).type == "cpu"
    with pytest.raises(UserError, match=r"^Lightning refuses the options under 'trainer': .*CUDAAccelerator"):
        trainer_of(configure("trainer.accelerator=gpu"), method_of("method=baseline"), [])


@pytest.mark.exhaustive
def test_the_whole_check_goes_through_on_a_cpu(tmp_path: Path) -> None:
    """At the sizes of the command; a machine that others use may need more time."""
    sizes = replace(CPU, seconds=dict.fromkeys(CPU.seconds, 100))
    assert check.check(False, 20, [], tmp_path / "x.json", sizes)
    found = kept.read(tmp_path / "x.json")
    assert set(found) == set(SMOKE_PARTS)
    for name, part in found.items():
        assert len(part["figures"]) > 0, name
        assert all(remark["kind"] == LEFT_OUT for remark in part["remarks"]), name
    names = {one["name"] for part in found.values() for one in part["figures"]}
    assert {
        "small, ours / bare loop",
        "ABE-2, step over flops",
        "GSP's head / GAP's",
        "device, a step is busy",
    } <= names
    trained = {one["name"].split(",")[0] for one in found["methods"]["figures"]}
    assert trained == {path.stem for path in (check.CONF / "method").glob("*.yaml")}
