"""Time of a training step of ABE-M or DeML(I,J) relative to the plain network, beside the ratio of their flops.

    python experiments/bench/attention.py                     # ABE-8 on GoogLeNet at 224, a few minutes on 2 cores
    python experiments/bench/attention.py --device cuda --precision bf16 --batch 64
    python experiments/bench/attention.py --method deml       # DeML(3,3), and the share of object attention

ABE-M is timed with its learners stacked, as dml has it, and in a loop over them. The bound: convolutions dominate a
step, so a step of ABE-M should take as many times a step of the 1-head model as the ratio of their multiply-adds (7.46
/ 1.58 = 4.7 for ABE-8 on GoogLeNet, tables 1 and 8). The masks add little. For each image, M x 480 x 14 x 14 numbers
are written and read about six times forward and backward (18 MB in float32 for M = 8). That is about 2 ms of a CPU's
memory bandwidth; the convolutions take about half a second. The aim is at most 1.1 times the flop ratio.

DeML's object attention computes the distances between 196 cells of 832 channels and between 49 cells of 1,024. These
are 0.034e9 multiply-adds for an image and scale; a scale of three learners takes 2.9e9 forward and twice that backward,
so the share is 0.4 % by flops. The random walk is less still, and components are found on the CPU. The share is
measured against the same step with the whole image as every box. The aim is at most 5 % of the step on a GPU and 10 %
on a CPU.

Contenders take turns, step by step, so that a machine that slows down slows all of them; ratios are medians of the
ratios within a round. Run it on idle cores.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from dml.bench.memory import resident
from dml.bench.rows import device_option
from dml.bench.timing import in_turns, ratio
from dml.configuration.command_line import ending
from dml.configuration.composition import composed
from dml.methods.abe import ABE
from dml.methods.base import Method, Output
from dml.methods.deml import DeML, Region
from dml.models.attention import crop_and_zoom
from dml.training.build import build_method
from dml.training.complexity import complexity

AIM = 1.1
OBJECT_AIM = {"cuda": 0.05, "cpu": 0.10}


class LoopedABE(ABE):
    """ABE with a pass of G for each learner in turn, in place of one for all."""

    def learners(self, images: Tensor) -> Output:
        spatial = self.spatial(images)
        masks = self.masks(spatial)
        layout = torch.channels_last
        inputs = [(spatial * masks[:, m]).contiguous(memory_format=layout) for m in range(self.M)]
        return Output(torch.stack([self.head(self.embedding(one)) for one in inputs], dim=1))


class BlindDeML(DeML):
    """DeML without object attention: every scale crops to the whole image, without walk and components."""

    def walk(self, images: Tensor) -> tuple[Tensor, list[Region], list[Tensor]]:
        whole = torch.tensor([[0, 0, images.shape[3], images.shape[2]]], device=images.device).expand(len(images), 4)
        outputs, branches = [], []
        for i, scale in enumerate(self.scales):
            of_scale, of_branches, _ = scale(images)
            outputs.append(of_scale)
            branches.append(of_branches)
            if i + 1 < self.I:
                images = crop_and_zoom(images, whole)
        return torch.cat(outputs, dim=1), [], branches


def method_of(*overrides: str) -> Method:
    config = composed("backbone.weights=none", "runtime.train_classes=2", *overrides)
    torch.manual_seed(0)
    return build_method(config)


def step_of(method: Method, images: Tensor, labels: Tensor, precision: str) -> Callable[[], None]:
    """Builds a training step: forward, losses, backward, optimizer."""
    optimizer = method.optimizer_alone()

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            terms = method.compute_terms({"image": images, "label": labels, "index": torch.arange(len(labels))})
        torch.stack(list(terms.values())).sum().backward()
        optimizer.step()

    return step


def peak(step: Callable[[], None], device: torch.device) -> float:
    """Takes a step. Returns its peak in GiB: of the GPU, or of this process beyond what it held before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) / 2**30
    now = resident("VmRSS")
    step()
    return resident("VmHWM") - now


def contenders(options: argparse.Namespace) -> dict[str, Callable[[], Method]]:
    """Returns the contenders: the plain network, the method, its variant, and the method with checkpointing."""
    common = [f"backbone={options.backbone}", f"image_size={options.size}", "head.dim=512"]
    changed: type[Method]
    if options.method == "deml":
        name, rival, changed = f"DeML({options.I},{options.J})", "whole images", BlindDeML
        chosen = [*common, "method=deml", f"method.I={options.I}", f"method.J={options.J}"]
    else:
        name, rival, changed = f"ABE-{options.M}", "looped", LoopedABE
        chosen = [*common, "method=abe", f"method.M={options.M}"]

    def other() -> Method:
        method = method_of(*chosen)
        method.__class__ = changed
        return method

    return {
        "1-head": lambda: method_of(*common, "method=baseline", "loss=abe_contrastive"),
        name: lambda: method_of(*chosen),
        f"{name}, {rival}": other,
        f"{name}, checkpointing": lambda: method_of(*chosen, "method.checkpointing=true"),
    }


@ending()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="googlenet_v1")
    parser.add_argument("--method", choices=("abe", "deml"), default="abe")
    parser.add_argument("--M", type=int, default=8)
    parser.add_argument("--I", type=int, default=3)
    parser.add_argument("--J", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224, help="of images, in pixels")
    parser.add_argument("--repeats", type=int, default=5)
    device_option(parser)
    parser.add_argument("--precision", choices=("32", "bf16"), default="32")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()

    images = torch.rand(options.batch, 3, options.size, options.size, device=options.device)
    labels = torch.arange(options.batch, device=options.device) // 2
    chosen = {name: make for name, make in contenders(options).items() if options.child in (None, name)}
    methods = {name: make().to(options.device) for name, make in chosen.items()}
    steps = {name: step_of(method, images, labels, options.precision) for name, method in methods.items()}
    if options.child:
        print(peak(steps[options.child], options.device))
        return
    flops = {name: complexity(method, options.size)["flops"] for name, method in methods.items()}
    times = in_turns(steps, options.repeats, options.device)
    # Each in a process of its own: memory that one step allocated would count for the next.
    child = [sys.executable, *sys.argv]
    memory = {
        name: float(subprocess.run([*child, "--child", name], check=True, capture_output=True, text=True).stdout)
        for name in steps
    }

    print(
        f"{options.backbone}, batch {options.batch} at {options.size}, {options.precision}, {options.device}, "
        f"{torch.get_num_threads()} threads, median of {options.repeats}"
    )
    own = list(times)[1]
    print(f"{'':24} {'step':>9} {'/ 1-head':>9} {'flops':>7} {'over flops':>11} {'/ ' + own:>12} {'peak':>9}")
    one = times["1-head"]
    for name, taken in times.items():
        over, to_own = ratio(taken, one), ratio(taken, times[own])
        bound = flops[name] / flops["1-head"]
        print(
            f"{name:24} {statistics.median(taken):7.3f} s {over:9.2f} {bound:7.2f} {over / bound:11.2f} "
            f"{to_own:12.2f} {memory[name]:5.2f} GiB"
        )
    print(f"aim: {own} at most {AIM} over flops")
    if options.method == "deml":
        blind = times[list(times)[2]]
        share = statistics.median(1 - b / a for a, b in zip(times[own], blind, strict=True))
        print(f"object attention's share of a step: {share:.1%} (aim: {OBJECT_AIM[options.device.type]:.0%} at most)")


if __name__ == "__main__":
    main()
