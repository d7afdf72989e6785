"""How many processes were started together, by the environment variables of torchrun, of srun, or set by hand."""

import os

from dml.errors import UserError

NUMBERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("SLURM_NTASKS", "SLURM_NNODES", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "MASTER_PORT"),
    "JSM_NAMESPACE_RANK",
)

OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")

# A batch script has all but the last, which srun alone sets.
OF_SLURM = ("SLURM_NNODES", "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID")

OF_HAND = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")  # on each of several machines without torchrun and srun


def check_environment() -> None:
    """Checks the environment variables of torchrun and srun. It has to be called before Lightning is imported, which
    reads some of them at once.

    Raises:
        UserError: a variable is not a whole number.
    """
    for name in NUMBERS:
        value = os.environ.get(name)
        if value is not None and not (value.isascii() and value.isdigit()):
            raise UserError(
                f"The environment variable {name}={value} has to be a whole number, as torchrun and srun set it: "
                f"unset it, or start the run with one of them."
            )


def processes() -> int:
    """Returns how many processes were started together. Raises UserError as `check_environment`."""
    check_environment()
    interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")  # a shell, whose tasks do not run yet
    names = ("WORLD_SIZE",) if interactive else ("WORLD_SIZE", "SLURM_NTASKS")
    return max(int(os.environ.get(name, "1")) for name in names)


def of_torchrun() -> tuple[int, int]:
    """Returns the number of processes on each machine, and of machines, as torchrun says. Raises UserError if a
    variable of torchrun is missing."""
    check_environment()
    _need(OF_TORCHRUN, "torchrun", "TORCHELASTIC_RUN_ID")
    return int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])


def of_slurm() -> tuple[int, int]:
    """Returns the number of tasks on each machine, and of machines, as srun says. For a single task, SLURM_NTASKS is
    enough.

    Raises:
        UserError: a variable of srun is missing, or machines have different numbers of tasks.
    """
    check_environment()
    tasks = int(os.environ["SLURM_NTASKS"])
    if tasks == 1:
        return 1, 1
    _need(OF_SLURM, "srun", f"SLURM_NTASKS={tasks}")
    nodes = int(os.environ["SLURM_NNODES"])
    if not nodes or not tasks or tasks % nodes:
        raise UserError(
            f"SLURM_NTASKS={tasks} and SLURM_NNODES={nodes} do not give every machine the same number of tasks: "
            "set --ntasks-per-node."
        )
    return tasks // nodes, nodes


def of_hand(nodes: int) -> None:
    """Checks the environment of a run that neither torchrun nor srun started.

    Args:
        nodes: number of machines that the run's options ask for.

    Raises:
        UserError: the environment has a rank of something else, as which this process would train alone beside the
            others; or it does not say where the other machines are, for which it would wait without end.
    """
    check_environment()
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"The environment has RANK and WORLD_SIZE={os.environ['WORLD_SIZE']}, but not from torchrun: start the "
            "processes with torchrun, or unset both for a run of its own."
        )
    if nodes > 1 and (missing := [name for name in OF_HAND if name not in os.environ]):
        raise UserError(
            f"trainer.num_nodes={nodes} needs {', '.join(missing)} in the environment of each machine: start the run "
            "with torchrun or srun, which say how many there are, or set them."
        )


def _need(names: tuple[str, ...], launcher: str, sign: str) -> None:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise UserError(
            f"The environment has {sign} but not {', '.join(missing)}: start all processes with {launcher}, or unset "
            f"{sign.partition('=')[0]} for a run of its own."
        )
