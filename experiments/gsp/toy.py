"""GSP's toy example (Fig. 2): the weights that two problems give to a map of red, blue and green cells.

    python experiments/gsp/toy.py --out runs/gsp_toy

Half of the 10 x 10 map is green background. The prototypes are red and blue, so the share of useful cells is 0.5. With
mu = 0.2 the linear program (P1), solved by SciPy, leaves some red and blue cells out. The smoothed problem (P2) reaches
more of them the more it is smoothed. The script writes toy.png, and metrics.json with the weights that each problem
gives to red and blue cells and to green cells.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy.optimize import linprog

from dml.bench.rows import make_folder, write_rows
from dml.files import atomic_path
from dml.models.transport import transport_plan

SIDE = 10
RED, BLUE, GREEN = (1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (0.0, 1.0, 0.0)
CASES = ((0.2, None), (0.2, 1.0), (0.2, 5.0), (0.2, 20.0), (0.5, None), (0.5, 5.0), (0.5, 20.0))  # mu, eps; None: P1


def toy_map() -> np.ndarray:
    """Makes the map `[10,10,3]`: a red and a blue square, a quarter of it each, on green, with a little noise."""
    cells = np.tile(np.array(GREEN), (SIDE, SIDE, 1))
    cells[:5, :5], cells[5:, 5:] = RED, BLUE
    return np.clip(cells + np.random.default_rng(0).normal(scale=0.05, size=cells.shape), 0, 1)


def linear_program(cost: np.ndarray, mu: float) -> np.ndarray:
    """Solves P1: costs `[m,n]` -> rho `[n]`."""
    m, n = cost.shape
    of_locations = np.tile(np.eye(n), m + 1)  # columns: rho, then the rows of the plan
    of_all = np.concatenate([np.zeros(n), np.ones(m * n)])
    solved = linprog(
        np.concatenate([np.zeros(n), cost.ravel()]),
        A_eq=np.vstack([of_locations, of_all]),
        b_eq=np.append(np.full(n, 1 / n), mu),
    )
    assert solved.success, solved.message
    return solved.x[:n]


def weights(cells: np.ndarray, mu: float, eps: float | None) -> np.ndarray:
    """Returns the weights of the cells, `[10,10]`, with mean 1; eps None solves P1."""
    points = cells.reshape(-1, 3)
    points = points / np.maximum(1, np.linalg.norm(points, axis=1, keepdims=True))
    cost = np.linalg.norm(np.array([RED, BLUE])[:, None] - points, axis=2)
    rho = linear_program(cost, mu) if eps is None else transport_plan(torch.as_tensor(cost), mu, eps)[0].numpy()
    return ((1 - len(points) * rho) / mu).reshape(SIDE, SIDE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gsp_toy"))
    folder = parser.parse_args().out
    make_folder(folder)
    cells = toy_map()
    wanted = np.zeros((SIDE, SIDE), bool)
    wanted[:5, :5] = wanted[5:, 5:] = True
    figure = Figure(figsize=(1.6 * (len(CASES) + 1) + 0.6, 2.0), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(CASES) + 1)
    axes[0].imshow(cells)
    axes[0].set_title("features", fontsize=8)
    told = {}
    for one, (mu, eps) in zip(axes[1:], CASES, strict=True):
        found = weights(cells, mu, eps)
        name = f"mu {mu}, {'linear program' if eps is None else f'eps {eps:g}'}"
        shown = one.imshow(found, cmap="Greys", vmin=0, vmax=1 / min(mu for mu, _ in CASES))
        one.set_title(name, fontsize=8)
        told[name] = {
            "weight/red_and_blue": float(found[wanted].mean()),
            "weight/green": float(found[~wanted].mean()),
            "weight/red_and_blue_unused": float((found[wanted] < 0.01).mean()),
        }
    figure.colorbar(shown, ax=axes, label="weight, mean 1", pad=0.01)
    for one in axes:
        one.set(xticks=[], yticks=[])
    with atomic_path(folder / "toy.png") as new:
        figure.savefig(new, format="png")
    write_rows(folder, told)
    for name, figures in told.items():
        print(name, ", ".join(f"{figure} {value:.3g}" for figure, value in figures.items()), sep=": ")
    print(folder / "toy.png")


if __name__ == "__main__":
    main()
