"""How many processes a run is, as torchrun and srun say in the environment."""

import os

from dml.errors import UserError

NUMBERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("SLURM_NTASKS", "SLURM_NNODES", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "MASTER_PORT"),
    "JSM_NAMESPACE_RANK",
)
OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
OF_SLURM = ("SLURM_NNODES", "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")


def check_environment() -> None:
    """Before Lightning is imported, which reads some of these at once.

    Raises:
        UserError: a variable of torchrun or srun that is no whole number.
    """
    for name in NUMBERS:
        value = os.environ.get(name)
        if value is not None and not (value.isascii() and value.isdigit()):
            raise UserError(
                f"The environment variable {name}={value} has to be a whole number, as torchrun and srun set it: "
                f"unset it, or start the run with one of them."
            )


def processes() -> int:
    """How many were started together. Raises as `check_environment`."""
    check_environment()
    return max(int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "SLURM_NTASKS"))


def of_torchrun() -> tuple[int, int]:
    """Processes of a machine, and machines. Raises UserError where torchrun's variables are not all there."""
    check_environment()
    _need(OF_TORCHRUN, "torchrun", "TORCHELASTIC_RUN_ID")
    return int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])


def of_slurm() -> tuple[int, int]:
    """Tasks of a machine, and machines; a single task needs no more than its number.

    Raises:
        UserError: srun's variables are not all there, or machines have different numbers of tasks.
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


def _need(names: tuple[str, ...], launcher: str, sign: str) -> None:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise UserError(
            f"The environment has {sign} but not {', '.join(missing)}: start all processes with {launcher}, or unset "
            f"{sign.partition('=')[0]} for a run of its own."
        )
