"""`python -m dml.dashboard --project P`: a W&B workspace with panels that compare methods, and a report of them.

Runs are shown by group: runs that differ only in their repetition are one line with its standard deviation. Without a
W&B key, or with --print, nothing is sent: both are built and checked, and their definitions are printed.

    python -m dml.dashboard --project P --sweep-file sweep.yaml method=abe method.M=1,2,4 seed=0,1

writes a sweep as a file for `wandb sweep`; with --print it is printed instead. The options are those that would follow
`python -m dml.run -m`. It needs no key.
"""

from pathlib import Path

from dml.configuration.command_line import ending
from dml.errors import UserError
from dml.launch.arguments import Arguments


@ending()
def main() -> None:
    parser = Arguments(prog="python -m dml.dashboard", description=__doc__)
    parser.add_argument("--project", required=True, help="W&B project, as in logger.wandb.project")
    parser.add_argument("--entity", help="W&B user or team (default: yours)")
    parser.add_argument("--name", default="Methods compared", help="name of the workspace and the report")
    parser.add_argument("--print", action="store_true", dest="only_print", help="print the definition, send nothing")
    parser.add_argument("--sweep-file", type=Path, metavar="FILE", help="write a sweep to this file instead")
    parser.add_argument("overrides", nargs="*", metavar="OPTION=VALUE,VALUE", help="options of the sweep")
    options = parser.parse_intermixed_args()
    for option in ("project", "name"):
        if not getattr(options, option).strip():
            raise UserError(f"--{option} is empty: give a name.")
    if wrong := set(options.project) & set("/\\#?%:"):
        raise UserError(
            f"--project {options.project} holds {' '.join(sorted(wrong))}, which W&B does not allow in the name of a "
            "project: leave it out."
        )
    if options.sweep_file is not None:
        from dml.launch.wandb_sweep import write_sweep

        write_sweep(
            None if options.only_print else options.sweep_file, options.project, options.entity, options.overrides
        )
        return
    if options.overrides:
        raise UserError(f"{options.overrides[0]} is an option of a sweep: add --sweep-file FILE, or leave it out.")
    from dml.reporting.dashboard import send

    send(options.project, options.entity, options.name, options.only_print)


if __name__ == "__main__":
    main()
